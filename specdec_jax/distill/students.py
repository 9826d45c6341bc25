"""What a distillation trains: each student with its loss and its drafter."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, sharding, types
from specdec_jax.bench import metrics
from specdec_jax.distill import divergences, heads, lm_loss
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import eagles, export, tokenizer
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.train import step as step_lib


@dataclasses.dataclass(frozen=True)
class Settings:
  """kind: a name of STUDENTS.

  eagle: taps, the teacher's layers that it reads; () is the last one. path: a
  draft to begin with, of the same taps and vocabulary.
  lm: size, a row of models.config.SIZES, from random; or layers of the teacher
  to begin with. share: take the teacher's embedding and head, frozen. path: a
  model to begin with; one that proposes some ids goes on with the same.
  vocabulary: how many ids it can propose, the commonest; 0 is all. dtype: of
  the forward pass.
  """

  kind: str
  taps: tuple[int, ...]
  size: str
  layers: tuple[int, ...]
  path: str
  share: bool
  vocabulary: int
  dtype: str
  remat: bool

  def __post_init__(self):
    if self.kind not in STUDENTS:
      raise ValueError(
        f'kind={self.kind!r}: allowed are {", ".join(sorted(STUDENTS))}'
      )
    given = [x for x in ('size', 'layers', 'path') if getattr(self, x)]
    if self.kind == 'lm' and len(given) != 1:
      raise ValueError(
        f'{" and ".join(given) or "nothing"} given for an lm: say one of size '
        '(from random), layers (of the teacher), path (a model)'
      )
    if self.kind == 'lm' and self.path and self.share:
      raise ValueError(
        'share=True: a student of a path has an embedding and a head of its '
        'own; take share=False'
      )
    if self.kind == 'eagle' and (self.size or self.layers):
      raise ValueError(
        'size or layers given for an eagle: it is one layer like its '
        "teacher's, from random or from a path"
      )
    if self.kind == 'lm' and self.taps:
      raise ValueError(f'taps={self.taps} given for an lm, which reads none')
    if self.kind == 'eagle' and self.remat:
      raise ValueError('remat=True: the one layer of an eagle needs none')
    if self.vocabulary < 0:
      raise ValueError(f'vocabulary={self.vocabulary}: must be 0 (all) or more')

  def read(self, last: int) -> tuple[int, ...]:
    """The layers that an eagle reads, of a teacher with that last one."""
    return self.taps or (last,)


class Student(NamedTuple):
  """params: what is trained, float32. loss, frozen: see step.Loss.

  weights(params) -> weights.draft of its drafter. drafter(gamma). model: its q,
  for alpha. flops: of one token of a batch, forward and backward.
  write(folder, params, about) -> the path of the finished draft.
  """

  params: types.Params
  loss: step_lib.Loss
  frozen: Any
  weights: Callable[[types.Params], types.Params]
  drafter: Callable[[int], types.Drafter]
  model: types.Model
  flops: float
  write: Callable[[pathlib.Path, types.Params, dict[str, Any]], pathlib.Path]


def make_eagle(
  s: Settings,
  loss: heads.Loss,
  target: build.LanguageModel,
  kept: tuple[int, ...],
  ids: np.ndarray,
  seed: int,
  begun: eagles.Draft | None,
) -> Student:
  """An EAGLE draft. kept: layers whose features the data has. begun: the draft
  that it goes on from.

  It computes in the dtype of its teacher, whose features and head it reads;
  what is trained is float32 or wider.
  """
  taps = s.read(target.config.depth - 1)
  config = eagle.settings(target.config, taps)
  masters = eagle.settings(target.config, taps, dtype=_wide(target.config))
  model = build.target_model(target)
  whole = _whole(target, target.config)
  read = eagles.weights({}, ids, target.params)
  read |= {n: _put(whole, read[n]) for n in ('head', 'ids')}
  frozen = {n: read[n] for n in ('target', 'head')}

  def write(folder, params, about):
    # Half the bytes; bfloat16 would keep fewer digits, and range none needs.
    layer = {
      n: np.asarray(x, np.float16) for n, x in lm.flatten(params).items()
    }
    path = folder / 'draft.safetensors'
    eagles.write(path, eagles.Draft(taps, layer, ids, eagles.describe(about)))
    return path

  layer = begun.layer if begun else eagle.init(masters, seed)
  wanted = eagle.shapes(masters)
  layer = {n: jnp.array(x, wanted[n].dtype) for n, x in layer.items()}
  return Student(
    _put(whole, lm.nest(layer)),
    heads.loss(config, model, loss, kept),
    frozen,
    lambda params: read | {'layer': eagle.cast(config, params)},
    lambda gamma: eagle_drafter.make(
      config, model, gamma=gamma, constrain=whole and whole.constrain
    ),
    eagle_drafter.view(config, model),
    # Every step of the chain; the frozen head has no gradient of its own.
    loss.unroll
    * (6.0 * _size(eagle.shapes(config)) + 4.0 * frozen['head'].size),
    write,
  )


class Begun(NamedTuple):
  """What a student goes on from. ids: those that it proposes, None if all."""

  draft: Any
  ids: np.ndarray | None


def begin(s: Settings, target: build.LanguageModel) -> Begun:
  """The student of s.path; nothing where there is none.

  Raises:
    ValueError: it does not fit this teacher or these settings.
  """
  if not s.path:
    return Begun(None, None)
  return (_begin_eagle if s.kind == 'eagle' else _begin_lm)(s, target)


def _begin_eagle(s: Settings, target: build.LanguageModel) -> Begun:
  draft = eagles.read(s.path)
  eagles.fit(draft, s.path, target.config, target.params, target.tokenizer)
  taps = s.read(target.config.depth - 1)
  if (taps, s.vocabulary) != (draft.taps, len(draft.ids)):
    raise ValueError(
      f'student.path={s.path}: reads layers {draft.taps} and proposes '
      f'{len(draft.ids)} ids; set student.taps and student.vocabulary to these'
    )
  return Begun(draft, draft.ids)


def _begin_lm(s: Settings, target: build.LanguageModel) -> Begun:
  loaded = build.load(s.path, scan_layers=False)
  tokenizer.check_same(target.tokenizer, loaded.tokenizer)
  if not loaded.draft_ids:
    return Begun(loaded, None)
  if len(loaded.draft_ids) != s.vocabulary:
    raise ValueError(
      f'student.path={s.path}: proposes {len(loaded.draft_ids)} ids; set '
      'student.vocabulary to these'
    )
  few, _ = loaded.as_draft
  return Begun(loaded, np.array(few.proposes))


def make_lm(
  s: Settings,
  loss: heads.Loss,
  target: build.LanguageModel,
  kept: tuple[int, ...],
  ids: np.ndarray,
  seed: int,
  begun: build.LanguageModel | None,
) -> Student:
  """A language model of its own; loss.unroll, decay and noise are not its.

  kept, begun: as for make_eagle; its teacher reads every batch anew if kept is
  ().
  """
  config, params = _first(s, target, seed, begun)
  export.settings(config)  # refuses now what could not be saved at the end
  expand = lambda params: (config, params)
  if s.vocabulary:
    config, params, expand = _reduced(config, params, ids.tolist())
  vocab = build.target_model(target).vocab
  whole = _whole(target, config)
  params = _put(whole, params)

  def of(c, layout=whole):
    constrain = layout and layout.constrain
    return lm.make(c, ids=target.ids, vocab=vocab, constrain=constrain)

  law, given = target.config, target.params
  if kept and config.proposes and (loss.temperature or 1) == 1:
    law, given = lm.reduce(law, given, config.proposes)
  if kept:  # What is read of it: the last norm and the head.
    given = {n: x for n, x in given.items() if n != 'layers'}
    given |= {n: x[:1] for n, x in given.items() if n == 'embed'}
  model, computed = of(config), of(dataclasses.replace(config, dtype=s.dtype))
  trained, shared = lm_loss.shared(params, s.share)

  def write(folder, params, about):
    path = folder / 'draft'
    export.save(
      path,
      *expand(params | shared),
      target.tokenizer,
      made_by=about,
      draft_ids=config.proposes,
      overwrite=True,
    )
    return path

  return Student(
    trained,
    lm_loss.distilled(
      computed,
      s.dtype,
      of(law, target.layout),
      divergences.divergence_of(loss.divergence),
      temperature=loss.temperature,
      remat=s.remat,
      ids=config.proposes,
    ),
    {'teacher': given, 'shared': shared},
    lambda params: params | shared,
    lambda gamma: lm_drafter.make(model, gamma=gamma),
    model,
    6.0 * metrics.step_parameters(trained | shared)
    + 2.0 * (given['head'].size if kept else metrics.step_parameters(given)),
    write,
  )


def _reduced(config, params: types.Params, ids: Sequence[int]):
  """(config, params, expand) of a student that proposes these ids only.

  expand(params) -> (config, params) with a head for all: the others keep the
  columns that they began with, which only transformers will ever propose.
  """
  head_DV = np.array(params['head'])  # a copy: what is trained is donated
  few, own = lm.reduce(config, params, ids)

  def expand(params):
    head = head_DV.copy()
    head[:, ids] = params['head']
    return dataclasses.replace(config, tied=False), params | {'head': head}

  return few, own, expand


def _whole(
  target: build.LanguageModel, config: model_config.LMConfig
) -> sharding.Layout | None:
  """A student's, of which every device of the teacher's mesh has all."""
  if target.layout is None:
    return None
  return sharding.lay_out(target.layout.mesh, config, replicated=True)


def _put(whole: sharding.Layout | None, tree):
  return tree if whole is None else jax.device_put(tree, whole.sharding())


def _size(tree: Any) -> int:
  return sum(x.size for x in jax.tree.leaves(tree))


def _wide(config: model_config.LMConfig) -> str:
  """What parameters are trained in."""
  return 'float64' if config.dtype == 'float64' else 'float32'


def _first(s: Settings, target: build.LanguageModel, seed: int, begun):
  """(settings, parameters) that an lm student begins with, its own."""
  config, params = _source(s, target, seed, begun)
  config = dataclasses.replace(config, dtype=_wide(config))
  wanted = lm.nest(lm.shapes(config))
  # Copies: the first step is donated them, and the teacher keeps its own.
  return config, jax.tree.map(
    lambda x, s: jnp.array(x, s.dtype), params, wanted
  )


def _source(s: Settings, target: build.LanguageModel, seed: int, begun):
  if s.size:
    config = dataclasses.replace(
      model_config.sized(s.size), vocab=target.config.vocab
    )
    if s.share and config.width != target.config.width:
      raise ValueError(
        f'student.share: size {s.size} has width {config.width}, '
        f'{target.label} {target.config.width}; take share=False'
      )
    if s.share:
      config = dataclasses.replace(config, tied=target.config.tied)
    params = lm.init(config, seed)
    if s.share:
      params |= {n: target.params[n] for n in lm_loss.SHARED if n in params}
    return config, params
  if begun is not None:
    return begun.config, begun.params
  config, params = lm_loss.pruned(target.config, target.params, s.layers)
  # Alike on any mesh; a copy, as fusing takes a layer apart.
  return lm.fuse(config, jax.tree.map(lambda x: x, params))


STUDENTS = {'eagle': make_eagle, 'lm': make_lm}
