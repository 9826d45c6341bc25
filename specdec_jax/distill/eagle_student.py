"""An EAGLE draft as a student, and its loss over several draft steps.

It computes in the dtype of its teacher. In decoding only the first token of a
window is drafted from the target's features; later ones are drafted from the
draft's own hidden states. Training does the same: step s reads the hidden
states of step s - 1, one token later, and attends to the keys that its chain of
steps would have written (EAGLE-3's training-time test,
https://arxiv.org/abs/2503.01840, section 3.2).
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, hosts, types
from specdec_jax.distill import sections, students
from specdec_jax.drafters import draft_file
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io import export, files
from specdec_jax.io.published import eagle_export
from specdec_jax.models import attention, eagle, lm
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss

Array = jax.Array


def digest(source: str) -> str:
  """SHA-256 of the draft at student.source."""
  return files.sha256(draft_file.find(draft_file.EAGLE, source))


def begin(
  student: sections.Student,
  target: build.LanguageModel,
  *,
  seed: int,
  fsdp: bool,
) -> students.Start:
  """Reads the draft at student.source, or draws random weights.

  Refuses a teacher and a draft that do not match, or not these settings.
  """
  last = target.config.depth - 1
  layout, ids = students.layout_of(target, target.config, fsdp), None
  if student.kind == 'eagle3':
    config = _eagle3(student.taps, target.config)
    export.settings(config.block)  # raises for what cannot be saved at the end
    params = eagle.init(_masters(config), seed)
    read = config.taps + (last,) * (last not in config.taps)
    return students.Start(config, params, ids, read, layout)
  taps = student.taps or (last,)
  config = eagle.settings(target.config, taps)
  if not student.source:
    params = eagle.init(_masters(config), seed)
  else:
    draft = draft_file.read_eagle(student.source)
    draft_file.fit_eagle(draft, student.source, target)
    if (taps, student.vocabulary) != (draft.taps, len(draft.ids)):
      raise ValueError(
        f'student.source={student.source}: reads layers {draft.taps} and '
        f'proposes {len(draft.ids)} ids; set student.taps and '
        'student.vocabulary'
      )
    params, ids = draft.layer, draft.ids
  return students.Start(config, params, ids, taps, layout)


def _eagle3(
  taps: tuple[int, ...], c: model_config.LMConfig
) -> eagle.EagleConfig:
  """EAGLE-3.1, by default of the three taps that are usual.

  The taps are recorded divided by their root mean square, so that each has a
  norm of its own, which undoes nothing.

  Raises:
    ValueError: taps that are no layers of the teacher, in increasing order.
  """
  taps = taps or (1, c.depth // 2 - 1, c.depth - 4)
  if sorted({*taps} & {*range(c.depth)}) != list(taps):
    raise ValueError(
      f'student.taps={taps}: needs layers of the teacher, 0 to {c.depth - 1}, '
      'in increasing order'
    )
  block = dataclasses.replace(
    c,
    depth=1,
    windows=(0,),
    rotated=(True,),
    tied=False,
    run=model_config.Execution(),
  )
  return eagle.EagleConfig(
    block,
    taps,
    tap_width=c.width,
    tap_norm='each',
    reads='beside',
    last_norm='fed',
    reads_first=False,
  )


def make(
  student: sections.Student,
  start: students.Start,
  target: build.LanguageModel,
  ids: np.ndarray,
  loss: sections.Loss,
  data: sections.Data,
) -> students.Student:
  """Makes the student that proposes `ids`."""
  config, layout, model = start.config, start.layout, target.model
  gather = text_loss.gatherer(layout)
  given = eagle.weights({}, ids, target.params)
  if layout is not None:
    whole = layout.sharding()
    given |= {n: hosts.put(given[n], whole) for n in ('head', 'ids')}
  shapes = eagle.shapes(_masters(config))
  trained = lm.nest(students.copied(start.params, shapes))
  if own := student.kind == 'eagle3':
    trained['head'] = jnp.array(given['head'], students.wide(target.config))
  size = sum(x.size for x in jax.tree.leaves(trained))
  constrain = layout and layout.constrain

  def write(folder: pathlib.Path, params: types.Params, about: dict[str, Any]):
    half = students.halved(params)
    path = folder / ('draft' if own else 'draft.safetensors')
    saved = draft_file.Eagle(config.taps, half, ids, about)

    def save():
      if own:
        eagle_export.save(path, config, lm.nest(half), ids, about)
      else:
        draft_file.write_eagle(path, saved)

    hosts.from_first(save)
    return path

  return students.Student(
    params=students.put(layout, trained),
    loss=unrolled(config, model, loss, gather),
    frozen={n: given[n] for n in ('target', 'head')},
    weights=lambda params: given | _drafting(config, params, gather),
    drafter=lambda gamma: eagle_drafter.make(
      config, model, gamma=gamma, constrain=constrain
    ),
    model=eagle_drafter.view(config, model),
    # Every step of the chain; the frozen head has no gradient of its own.
    flops=data.length * loss.unroll * (6.0 * size + 4.0 * given['head'].size),
    write=write,
  )


def _masters(config: eagle.EagleConfig) -> eagle.EagleConfig:
  """The config of trained parameters, float32 or wider."""
  block = dataclasses.replace(config.block, dtype=students.wide(config.block))
  return dataclasses.replace(config, block=block)


def _drafting(config: eagle.EagleConfig, params, gather) -> dict[str, Any]:
  """What is trained in the dtype that computes: 'layer' and perhaps 'head'."""
  layer = {n: x for n, x in params.items() if n != 'head'}
  own = {n: params[n].astype(config.block.dtype) for n in {*params} - {*layer}}
  return gather(own) | {'layer': gather(eagle.cast(config, layer))}


# --- loss ---------------------------------------------------------------------


def unrolled(
  config: eagle.EagleConfig,
  target: types.Model,
  settings: sections.Loss,
  gather: Callable[[Any], Any] = lambda params: params,
) -> step_lib.Loss:
  """Makes the mean divergence from the teacher over the steps of a chain.

  Args:
    config: of the draft.
    target: the teacher; only its embedding is run.
    settings: the divergence and the weights of the steps.
    gather: of the draft's parameters; see train.text_loss.gatherer.

  Returns:
    loss(params, frozen, batch, key). frozen: {'target': the teacher's
    parameters, 'head': its columns for the draft's vocabulary}. batch: of
    teacher.rows, with the features of config.taps and of the last layer.
  """
  embed = target.embed
  assert embed is not None
  temperature = settings.temperature or 1.0

  def value(params, frozen, batch, key):
    weights = frozen | _drafting(config, params, gather)
    tokens_BT = batch['tokens']
    features_BTE = students.features(batch, settings.noise, key)
    positions_BT = jnp.broadcast_to(
      jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape
    )
    tokens_BTD = embed(frozen['target'], tokens_BT, positions_BT)
    log_p_BTR = teacher_log_p(config, frozen, batch, temperature)
    read_BTE = features_BTE[..., : config.features]
    # Index t predicts the token at t + 1.
    each = (
      eagle.reduced(config, weights, hidden_BTD[:, :-1])
      for hidden_BTD in steps(
        config, weights['layer'], tokens_BTD, read_BTE, settings.unroll
      )
    )
    counted_BT = batch['counted'][:, 1:]
    return students.over_steps(settings, log_p_BTR, each, counted_BT)

  return value


def teacher_log_p(
  config: eagle.EagleConfig, frozen, batch, temperature: float
) -> Array:
  """log p of the draft's vocabulary after each token but the last: [B, t, R].

  The recorded mass belongs to temperature 1. At another one p is normalised
  over the draft's vocabulary instead.
  """
  head = {'layer': {'norm': frozen['target']['norm']}, 'head': frozen['head']}
  last_BTD = batch['features'][:, :-1, -config.features // len(config.taps) :]
  teacher = dataclasses.replace(config, last_norm='head')
  logits_BTR = eagle.reduced(teacher, head, last_BTD.astype(jnp.float32))
  if temperature != 1:
    return jax.nn.log_softmax(logits_BTR / temperature, -1)
  return logits_BTR - batch['mass'][:, :-1, None]


def steps(
  config: eagle.EagleConfig,
  layer: types.Params,
  tokens_BTD: Array,
  features_BTE: Array,
  count: int,
) -> list[Array]:
  """Computes the draft's hidden states at each of `count` steps: [B, T, D].

  layer: the draft's parameters. tokens_BTD, features_BTE: the target's
  embedding and features of every token.

  Worked example, step 1 (the second token of a window) at index 5: it reads
  token 5 and step 0's hidden state of index 4, and attends to step 0's keys of
  indices 0 to 4 and to its own key of index 5.
  """
  module = eagle.merge(config, layer)
  B, T, _ = tokens_BTD.shape
  positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  shift = lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :T]
  feature_BTD, out = module.fused(shift(features_BTE)), []
  writes = [_Keys([]) for _ in range(config.block.depth)]
  for step in range(count):
    mask_TS = _mask(T, step, 0 if config.reads_first else 1)
    mask_BTS = jnp.broadcast_to(mask_TS[None], (B, *mask_TS.shape))
    views = attention.views(config.block, positions_BT, mask_BTS)
    hidden_BTD, _ = module(tokens_BTD, feature_BTD, views, writes)
    out.append(hidden_BTD)
    feature_BTD = shift(hidden_BTD)
  return out


class _Keys(NamedTuple):
  """What a layer attends to: the keys and values of every step so far."""

  each: list[tuple[Array, Array]]

  def __call__(self, k_BTGC: Array, v_BTGC: Array):
    self.each.append((k_BTGC, v_BTGC))
    k, v = (jnp.concatenate(x, 1) for x in zip(*self.each, strict=True))
    return None, kv.KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))


def _mask(T: int, step: int, first: int) -> Array:
  """[T, T * (step + 1)]: the keys of each step that an index attends to.

  first: the first index that others attend to.
  """
  query_T1, key_1T = jnp.arange(T)[:, None], jnp.arange(T)[None]
  visible = [
    (key_1T <= query_T1 - step) & (key_1T >= jnp.minimum(first, query_T1))
  ]
  visible += [key_1T == query_T1 - step + back for back in range(1, step + 1)]
  return jnp.concatenate(visible, 1)
