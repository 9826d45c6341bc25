"""The drafts that a distillation trains: initial parameters and loss."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, fields, sharding, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import metrics
from specdec_jax.distill import divergences, eagle_loss, lm_loss
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.drafters import eagle_file
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import export, tokenizer
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.train import step as step_lib

# Parameters that a student may share with its teacher, frozen.
SHARED = ('embed', 'head')


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  """The student: an eagle has taps and path, an lm size, layers or path."""

  kind: str = fields.setting(allowed=('eagle', 'lm'))
  # Teacher layers whose hidden states an eagle reads; () is the last one.
  taps: tuple[int, ...] = fields.setting(low=0)
  size: str = fields.setting(help='of models.config.SIZES, random weights')
  # Teacher layers that an lm begins with.
  layers: tuple[int, ...] = fields.setting(low=0)
  path: str = fields.setting(help='a draft of the same kind to begin with')
  share: bool = fields.setting(help="freeze the teacher's embedding and head")
  # Number of ids that it can propose, the most frequent ones; 0 is all.
  vocabulary: int = fields.setting(low=0)
  dtype: str = fields.setting(allowed=settings_lib.DTYPES)  # forward pass
  remat: bool = fields.setting(help='compute layers twice, to save memory')

  def __post_init__(self):
    super().__post_init__()
    given = [x for x in ('size', 'layers', 'path') if getattr(self, x)]
    if self.kind == 'eagle':
      for name in ('size', 'layers', 'remat'):
        if value := getattr(self, name):
          raise ValueError(
            f"{name}={value!r}: an eagle is one layer like its teacher's; "
            'leave it empty'
          )
    elif len(given) != 1:
      raise ValueError(
        f'{" and ".join(given) or "nothing"} given for an lm: give one of size '
        '(from random weights), layers (of the teacher), path (a model)'
      )
    elif self.path and self.share:
      raise ValueError(
        'share=True: a student of a path has its own embedding and head; give '
        'share=False'
      )
    elif self.taps:
      raise ValueError(f'taps={self.taps}: an lm reads none; give ()')


class Student(NamedTuple):
  """A draft to train."""

  params: types.Params  # trained, float32 or wider
  loss: step_lib.Loss
  frozen: Any  # further parameters of the loss
  weights: Callable[[types.Params], types.Params]  # -> weights.draft
  drafter: Callable[[int], types.Drafter]  # gamma -> its drafter
  model: types.Model  # its q, which reads weights.draft
  flops: float  # of one token of a batch, forward and backward
  # (folder, params, about) -> the path of the finished draft.
  write: Callable[[pathlib.Path, types.Params, dict[str, Any]], pathlib.Path]


class Start(NamedTuple):
  """The draft of student.path, if there is one.

  draft: an eagle_file.Saved or a build.LanguageModel.
  ids: its vocabulary, None if it proposes all.
  """

  draft: Any = None
  ids: np.ndarray | None = None


def begin(s: Settings, target: build.LanguageModel) -> Start:
  """Reads the draft at s.path.

  Raises:
    ValueError: it does not match this teacher or these settings.
  """
  if not s.path:
    return Start()
  if s.kind == 'eagle':
    draft = eagle_file.read(s.path)
    eagle_file.fit(draft, s.path, target)
    taps = s.taps or (target.config.depth - 1,)
    if (taps, s.vocabulary) != (draft.taps, len(draft.ids)):
      raise ValueError(
        f'student.path={s.path}: reads layers {draft.taps} and proposes '
        f'{len(draft.ids)} ids; set student.taps and student.vocabulary'
      )
    return Start(draft, draft.ids)
  loaded = build.load(s.path, scan_layers=False)
  tokenizer.check_same(target.tokenizer, loaded.tokenizer)
  if not loaded.draft_ids:
    return Start(loaded)
  if len(loaded.draft_ids) != s.vocabulary:
    raise ValueError(
      f'student.path={s.path}: proposes {len(loaded.draft_ids)} ids; set '
      'student.vocabulary to these'
    )
  return Start(loaded, np.array(loaded.as_draft[0].proposes))


def most_frequent(rows: dict[str, np.ndarray], size: int, ids: int):
  """The `size` most frequent of `ids` ids among the counted tokens, ascending.

  Of equally frequent ids the smaller comes first. rows: 'tokens' and 'counted',
  [n, L].
  """
  counts = np.bincount(rows['tokens'][rows['counted']], minlength=ids)[:ids]
  most = np.argsort(-counts, kind='stable')[:size]
  return np.sort(most).astype(np.int32)


def make_eagle(
  s: Settings,
  loss: divergences.Loss,
  target: build.LanguageModel,
  recorded: tuple[int, ...],
  ids: np.ndarray,
  seed: int,
  start: Start,
) -> Student:
  """An EAGLE draft, which computes in the dtype of its teacher.

  Args:
    s, loss: settings.
    target: the teacher.
    recorded: teacher layers whose features are in the training data.
    ids: vocabulary of the draft.
    seed: of its random weights.
    start: the draft that it begins with instead.
  """
  taps = s.taps or (target.config.depth - 1,)
  config = eagle.settings(target.config, taps)
  masters = eagle.settings(target.config, taps, dtype=_wide(target.config))
  model = target.model
  layout = _replicated(target, target.config)
  read = eagle.weights({}, ids, target.params)
  read |= {n: _put(layout, read[n]) for n in ('head', 'ids')}
  layer = start.draft.layer if start.draft else eagle.init(masters, seed)
  wanted = eagle.shapes(masters)
  layer = {n: jnp.array(x, wanted[n].dtype) for n, x in layer.items()}
  size = sum(x.size for x in eagle.shapes(config).values())

  def write(folder, params, about):
    # float16 halves the file; bfloat16 has fewer digits, and no parameter needs
    # its range.
    layer = {
      n: np.asarray(x, np.float16) for n, x in lm.flatten(params).items()
    }
    path = folder / 'draft.safetensors'
    eagle_file.write(path, eagle_file.Saved(taps, layer, ids, about))
    return path

  return Student(
    params=_put(layout, lm.nest(layer)),
    loss=eagle_loss.loss(config, model, loss, recorded),
    frozen={n: read[n] for n in ('target', 'head')},
    weights=lambda params: read | {'layer': eagle.cast(config, params)},
    drafter=lambda gamma: eagle_drafter.make(
      config, model, gamma=gamma, constrain=layout and layout.constrain
    ),
    model=eagle_drafter.view(config, model),
    # Every step of the chain; the frozen head has no gradient of its own.
    flops=loss.unroll * (6.0 * size + 4.0 * read['head'].size),
    write=write,
  )


def make_lm(
  s: Settings,
  loss: divergences.Loss,
  target: build.LanguageModel,
  recorded: tuple[int, ...],
  ids: np.ndarray,
  seed: int,
  start: Start,
) -> Student:
  """A separate language model. Without features its teacher reads every batch.

  Args:
    s, loss, target, recorded, ids, seed, start: as for make_eagle.
  """
  config, params = _initial(s, target, seed, start)
  export.settings(config)  # raises now for what cannot be saved at the end
  if s.vocabulary:
    full_DV = np.array(params['head'])  # a copy: training donates its arrays
    config, params = lm.reduce(config, params, ids.tolist())
  layout = _replicated(target, config)
  trained, shared = split_shared(_put(layout, params), s.share)
  teacher_config, teacher_params = _teacher(target, recorded, loss, config)
  make = functools.partial(lm.make, ids=target.ids, vocab=target.model.vocab)
  whole, split = (x and x.constrain for x in (layout, target.layout))
  model = make(config, constrain=whole)

  def write(folder, params, about):
    path, saved = folder / 'draft', (config, params | shared)
    if s.vocabulary:
      saved = _all_columns(*saved, full_DV)
    export.save(
      path,
      *saved,
      target.tokenizer,
      made_by=about,
      draft_ids=config.proposes,
    )
    return path

  reads = metrics.step_parameters(teacher_params)
  return Student(
    params=trained,
    loss=lm_loss.distilled(
      make(dataclasses.replace(config, dtype=s.dtype), constrain=whole),
      s.dtype,
      make(teacher_config, constrain=split),
      loss,
      remat=s.remat,
      ids=config.proposes,
    ),
    frozen={'teacher': teacher_params, 'shared': shared},
    weights=lambda params: params | shared,
    drafter=lambda gamma: lm_drafter.make(model, gamma=gamma),
    model=model,
    flops=6.0 * metrics.step_parameters(trained | shared) + 2.0 * reads,
    write=write,
  )


STUDENTS = {'eagle': make_eagle, 'lm': make_lm}


def _all_columns(config, params: types.Params, full_DV: np.ndarray):
  """(config, params) with a head for all ids, as transformers needs it.

  Ids that the student does not propose keep their columns of full_DV.
  """
  head_DV = full_DV.copy()
  head_DV[:, list(config.proposes)] = params['head']
  config = dataclasses.replace(config, proposes=(), tied=False)
  return config, params | {'head': head_DV}


def pruned(
  config: model_config.LMConfig, params: types.Params, layers: Sequence[int]
) -> tuple[model_config.LMConfig, types.Params]:
  """(config, params) of some layers of a model with unstacked layers.

  Raises:
    ValueError: layers that the model does not have.
  """
  assert not config.scan_layers, 'load it with scan_layers=False'
  if not set(layers) <= set(range(config.depth)):
    raise ValueError(
      f'student.layers={tuple(layers)}: allowed are those of the teacher, 0 to '
      f'{config.depth - 1}'
    )
  windows = tuple(config.windows[i % len(config.windows)] for i in layers)
  if len(set(windows)) == 1:
    windows = windows[:1]
  kept = {str(n): params['layers'][str(i)] for n, i in enumerate(layers)}
  own = dataclasses.replace(config, depth=len(layers), windows=windows)
  return own, params | {'layers': kept}


def split_shared(params: types.Params, share: bool) -> tuple[Any, Any]:
  """Splits a student's parameters into (trained, frozen)."""
  frozen = {n: x for n, x in params.items() if share and n in SHARED}
  return {n: x for n, x in params.items() if n not in frozen}, frozen


def _teacher(target, recorded, loss: divergences.Loss, config):
  """(config, params) of the part of the teacher that the loss reads."""
  own, params = target.config, target.params
  if not recorded:
    return own, params
  # Without the mass, p is normalised over all ids, so all columns are needed.
  if config.proposes and (loss.temperature or 1) == 1:
    own, params = lm.reduce(own, params, config.proposes)
  params = {n: x for n, x in params.items() if n != 'layers'}
  # Its embedding is not read; one row is enough.
  return own, params | {n: x[:1] for n, x in params.items() if n == 'embed'}


def _initial(s: Settings, target: build.LanguageModel, seed: int, start: Start):
  """(config, params) that an lm student begins with; a copy."""
  if s.size:
    config, params = _random(s, target, seed)
  elif start.draft is not None:
    config, params = start.draft.config, start.draft.params
  else:
    config, params = pruned(target.config, target.params, s.layers)
    # Fused on a mesh too, unlike the teacher: the same student on any devices.
    # A copy of the containers: fusing modifies them.
    config, params = lm.fuse(config, jax.tree.map(lambda x: x, params))
  config = dataclasses.replace(config, dtype=_wide(config))
  wanted = lm.nest(lm.shapes(config))
  # Copies: the first step donates them, and the teacher still needs its own.
  return config, jax.tree.map(
    lambda x, s: jnp.array(x, s.dtype), params, wanted
  )


def _random(s: Settings, target: build.LanguageModel, seed: int):
  config = dataclasses.replace(
    model_config.sized(s.size), vocab=target.config.vocab
  )
  if not s.share:
    return config, lm.init(config, seed)
  if config.width != target.config.width:
    raise ValueError(
      f'student.share: size {s.size} has width {config.width}, '
      f'{target.label} {target.config.width}; give share=False'
    )
  config = dataclasses.replace(config, tied=target.config.tied)
  params = lm.init(config, seed)
  return config, params | {n: target.params[n] for n in SHARED if n in params}


def _wide(config: model_config.LMConfig) -> str:
  """The dtype of trained parameters."""
  return 'float64' if config.dtype == 'float64' else 'float32'


def _replicated(
  target: build.LanguageModel, config: model_config.LMConfig
) -> sharding.Layout | None:
  """The layout of a student: replicated on the teacher's mesh."""
  if target.layout is None:
    return None
  return sharding.lay_out(target.layout.mesh, config, replicated=True)


def _put(layout: sharding.Layout | None, tree):
  return tree if layout is None else jax.device_put(tree, layout.sharding())
