"""The drafts that a distillation trains: initial parameters and loss."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, hosts, sharding, types
from specdec_jax.distill import eagle_loss, lm_loss, settings, teacher
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.drafters import eagle_file, layers_file
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import export, tokenizer
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, eagle, lm
from specdec_jax.models import work as work_lib
from specdec_jax.train import lm_loss as text_loss
from specdec_jax.train import step as step_lib


class Student(NamedTuple):
  """A draft to train."""

  params: types.Params  # trained, float32 or wider
  loss: step_lib.Loss
  frozen: Any  # further parameters of the loss
  weights: Callable[[types.Params], types.Params]  # -> weights.draft
  drafter: types.Drafter  # of the judge's gamma
  model: types.Model  # its q, which reads weights.draft
  flops: float  # of one row of a batch, forward and backward
  # (folder, params, about) -> the path of the finished draft.
  write: Callable[[pathlib.Path, types.Params, dict[str, Any]], pathlib.Path]


class Start(NamedTuple):
  """The draft of student.path, if there is one.

  draft: an eagle_file.Saved or a build.LanguageModel.
  ids: its vocabulary, None if it proposes all.
  """

  draft: Any = None
  ids: np.ndarray | None = None


def begin(s: settings.Student, target: build.LanguageModel) -> Start:
  """Reads the draft at s.path.

  Raises:
    ValueError: it does not match this teacher or these settings.
  """
  if s.size:
    size = model_config.sized(s.size)
    _check_encoder(f'student.size={s.size!r}', size, target)
    export.settings(_sized(s, target))  # raises now for what cannot be saved
  if not s.path:
    return Start()
  if s.kind == 'eagle':
    draft = eagle_file.read(s.path)
    eagle_file.fit(draft, s.path, target)
    if (taps_of(s, target), s.vocabulary) != (draft.taps, len(draft.ids)):
      raise ValueError(
        f'student.path={s.path}: reads layers {draft.taps} and proposes '
        f'{len(draft.ids)} ids; set student.taps and student.vocabulary'
      )
    return Start(draft, draft.ids)
  loaded = build.load(s.path, scan_layers=False, kernels='xla')
  _check_encoder(f'student.path={s.path}', loaded.config, target)
  tokenizer.check_same(target.tokenizer, loaded.tokenizer)
  if not loaded.draft_ids:
    return Start(loaded)
  if len(loaded.draft_ids) != s.vocabulary:
    raise ValueError(
      f'student.path={s.path}: proposes {len(loaded.draft_ids)} ids; set '
      'student.vocabulary to these'
    )
  return Start(loaded, np.array(loaded.as_draft[0].proposes))


def _check_encoder(
  what: str, config: model_config.LMConfig, target: build.LanguageModel
) -> None:
  """Raises ValueError if only one of student and teacher has an encoder."""
  has = lambda c: 'has no encoder' if c.encoder is None else 'has one'
  if has(config) != has(target.config):
    raise ValueError(
      f'{what} {has(config)}, teacher {target.label} {has(target.config)}; an '
      'encoder: both need one, or neither'
    )


def taps_of(
  s: settings.Student, target: build.LanguageModel
) -> tuple[int, ...]:
  """The teacher's layers that an eagle reads.

  Raises:
    ValueError: they are none of this teacher, or not in order.
  """
  taps = s.taps or (target.config.depth - 1,)
  return eagle.settings(target.config, taps).taps


def vocabulary(
  s: settings.Student, ids: int, start: Start, answers: teacher.Answers | None
) -> np.ndarray:
  """The ids that the student can propose, ascending.

  Those of the draft that it begins with, all, or the most frequent ones of the
  completions; of equally frequent ones the smaller.

  Args:
    s, start: settings, and the draft to begin with.
    ids: how many the teacher has.
    answers: the completions, None if there are none before training.

  Raises:
    ValueError: no completions to count.
  """
  if start.ids is not None:
    return start.ids
  if not s.vocabulary:
    return np.arange(ids)
  if answers is None:
    raise ValueError(
      f'student.vocabulary={s.vocabulary}: the completions of a student cannot '
      "be counted before training; give data.completions='mixed', or 0 for all "
      'ids'
    )
  rows = teacher.rows(answers)
  counts = np.bincount(rows['tokens'][rows['counted']], minlength=ids)[:ids]
  most = np.argsort(-counts, kind='stable')[: s.vocabulary]
  return np.sort(most).astype(np.int32)


def make(
  s: settings.Settings,
  target: build.LanguageModel,
  start: Start,
  ids: np.ndarray,
) -> Student:
  """The student of the settings.

  Args:
    s: settings; run.seed is that of random weights.
    target: the teacher.
    start: the draft that it begins with, copied.
    ids: its vocabulary.
  """
  return {'eagle': _eagle, 'lm': _lm}[s.student.kind](s, target, start, ids)


def _eagle(s: settings.Settings, target, start: Start, ids) -> Student:
  """An EAGLE draft, which computes in the dtype of its teacher."""
  taps, model = taps_of(s.student, target), target.model
  config = eagle.settings(target.config, taps)
  masters = eagle.settings(target.config, taps, dtype=_wide(target.config))
  layout = layout_of(s, target, start)
  gather = text_loss.gatherer(layout)
  read = eagle.weights({}, ids, target.params)
  if layout is not None:
    whole = layout.sharding()
    read |= {n: hosts.put(read[n], whole) for n in ('head', 'ids')}
  wanted = eagle.shapes(masters)
  layer = start.draft.layer if start.draft else eagle.init(masters, s.run.seed)
  layer = {n: jnp.array(x, wanted[n].dtype) for n, x in layer.items()}
  size = sum(x.size for x in layer.values())

  def write(folder, params, about):
    # float16 halves the file; bfloat16 has fewer digits, and no parameter needs
    # its range.
    flat = hosts.fetch(lm.flatten(params))
    layer = {n: np.asarray(x, np.float16) for n, x in flat.items()}
    path, saved = folder / 'draft.safetensors', (taps, layer, ids, about)
    hosts.from_first(lambda: eagle_file.write(path, eagle_file.Saved(*saved)))
    return path

  return Student(
    params=_put(layout, lm.nest(layer)),
    loss=eagle_loss.loss(config, model, s.loss, gather),
    frozen={n: read[n] for n in ('target', 'head')},
    weights=lambda params: read | {'layer': eagle.cast(config, gather(params))},
    drafter=eagle_drafter.make(
      config, model, gamma=s.judge.gamma, constrain=layout and layout.constrain
    ),
    model=eagle_drafter.view(config, model),
    # Every step of the chain; the frozen head has no gradient of its own.
    flops=s.data.length
    * s.loss.unroll
    * (6.0 * size + 4.0 * read['head'].size),
    write=write,
  )


def _lm(s: settings.Settings, target, start: Start, ids) -> Student:
  """A language model of its own; its teacher reads batches without features."""
  config, params = _initial(s.student, target, s.run.seed, start)
  export.settings(config)  # raises now for what cannot be saved at the end
  full_DV = None
  if s.student.vocabulary:
    # A copy: training donates its arrays.
    full_DV = np.array(hosts.fetch(params['head']))
    config, params = convert.reduce(config, params, ids.tolist())
  layout = layout_of(s, target, start)
  gather = text_loss.gatherer(layout)
  trained, shared = split_shared(_put(layout, params), s.student.share)
  own, given = target.config, target.params
  # Without the mass, p is normalised over all ids, so all columns are needed.
  if s.data.keep and config.proposes and (s.loss.temperature or 1) == 1:
    own, given = convert.reduce(own, given, config.proposes)
  whole, split = (x and x.constrain for x in (layout, target.layout))
  every, vocab = target.ids, target.model.vocab
  model = lm.make(config, ids=every, vocab=vocab, constrain=whole)

  def in_loss(config, **more):
    # Logits of other ids, all -inf, would cost more than the student does.
    few = len(config.proposes)
    return lm.make(config, ids=few or every, vocab=few or vocab, **more)

  read = {'head': given['head']} if s.data.keep else given
  lengths = s.data.length, s.data.source_length
  work = lambda params: work_lib.row_products(params, *lengths)
  # No gradient passes a shared encoder; one passes a shared head.
  forward = {n: x for n, x in shared.items() if n == 'encoder'}
  return Student(
    params=trained,
    loss=lm_loss.distilled(
      in_loss(config.running(dtype=s.student.dtype), constrain=whole),
      s.student.dtype,
      in_loss(own, constrain=split),
      s.loss,
      remat=s.student.remat,
      ids=config.proposes,
      gather=gather,
    ),
    frozen={'teacher': given, 'shared': shared},
    weights=lambda params: gather(params | shared),
    drafter=lm_drafter.make(model, gamma=s.judge.gamma),
    model=model,
    flops=6.0 * work(trained | shared) - 4.0 * work(forward) + 2.0 * work(read),
    write=_exporter(s.student, target, config, shared, full_DV),
  )


def _exporter(
  s: settings.Student,
  target,
  config,
  shared: types.Params,
  full_DV: np.ndarray | None,
):
  """Student.write of a language model: a folder, and if all but its layers is
  the teacher's, a file of those.

  transformers needs a head for all ids: those that the student does not propose
  keep their columns of full_DV, None if it proposes all.
  """

  def write(folder, params, about):
    path, whole = folder / 'draft', config
    params = hosts.fetch(params | shared)
    if s.layers and s.share:
      file, saved = folder / 'draft.safetensors', (config, params, about)
      hosts.from_first(lambda: layers_file.write(file, *saved))
    if full_DV is not None:
      head_DV = full_DV.copy()
      head_DV[:, list(config.proposes)] = params['head']
      params |= {'head': head_DV}
      whole = dataclasses.replace(config, proposes=(), tied=False)
    rest = whole, params, target.tokenizer
    more = dict(made_by=about, draft_ids=config.proposes)
    hosts.from_first(lambda: export.save(path, *rest, **more))
    return path

  return write


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
  kept = {str(n): params['layers'][str(i)] for n, i in enumerate(layers)}
  return config.of_layers(layers), params | {'layers': kept}


def split_shared(params: types.Params, share: bool) -> tuple[Any, Any]:
  """Splits a student's parameters into (trained, frozen)."""
  frozen = {
    n: x for n, x in params.items() if share and n in layers_file.SHARED
  }
  return {n: x for n, x in params.items() if n not in frozen}, frozen


def _initial(
  s: settings.Student, target: build.LanguageModel, seed: int, start: Start
):
  """(config, params) that an lm student begins with; a copy."""
  if s.size:
    config = _sized(s, target)
    params = lm.init(config, seed)
    params |= {
      n: target.params[n] for n in layers_file.SHARED if s.share and n in params
    }
  elif start.draft is not None:
    config, params = start.draft.config, start.draft.params
  else:
    config, params = pruned(target.config, target.params, s.layers)
    # Fused on a mesh too, unlike the teacher: the same student on any devices.
    # A copy of the containers: fusing modifies them.
    config, params = convert.fuse(config, jax.tree.map(lambda x: x, params))
  config = config.running(dtype=_wide(config))
  wanted = lm.nest(lm.shapes(config))
  # Copies: the first step donates them, and the teacher still needs its own.
  return config, jax.tree.map(
    lambda x, s: jnp.array(x, s.dtype), params, wanted
  )


def _sized(
  s: settings.Student, target: build.LanguageModel
) -> model_config.LMConfig:
  """The settings of a student of s.size."""
  theirs = target.config
  own = model_config.sized(s.size, vocab=theirs.vocab)
  own = dataclasses.replace(own, start=theirs.start)
  if not s.share:
    return own
  if own.width != theirs.width:
    raise ValueError(
      f'student.share: size {s.size} has width {own.width}, {target.label} '
      f'{theirs.width}; give share=False'
    )
  return dataclasses.replace(
    own, tied=theirs.tied, head_scale=theirs.head_scale, encoder=theirs.encoder
  )


def _wide(config: model_config.LMConfig) -> str:
  """The dtype of trained parameters."""
  return 'float64' if config.dtype == 'float64' else 'float32'


def layout_of(
  s: settings.Settings, target: build.LanguageModel, start: Start
) -> sharding.Layout | None:
  """The layout of a student on the teacher's mesh: every device computes with
  all of it.

  Raises:
    ValueError: mesh.fsdp, and the devices do not divide its width.
  """
  if target.layout is None:
    return None
  config = target.config
  if s.student.size:
    config = model_config.sized(s.student.size)
  elif s.student.kind == 'lm' and start.draft is not None:
    config = start.draft.config
  return sharding.lay_out(
    target.layout.mesh, config, tensor_parallel=1, fsdp=s.mesh.fsdp
  )


def _put(layout: sharding.Layout | None, params: types.Params) -> types.Params:
  if layout is None:
    return params
  flat = lm.flatten(params)
  return lm.nest({name: layout.put(name, x) for name, x in flat.items()})
