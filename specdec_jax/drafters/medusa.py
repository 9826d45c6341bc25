"""Medusa: heads on the target's last hidden state, one for each token ahead.

Medusa-1 of Cai et al. 2024 (https://arxiv.org/abs/2401.10774). Head i reads the
state of a token and predicts the one i + 2 places after it.
"""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, method
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import files, load
from specdec_jax.io.published import medusa_heads, readings
from specdec_jax.models import weights


@dataclasses.dataclass(frozen=True)
class Settings(method.Branching, method.Published):
  source: str | os.PathLike = fields.setting('', needed=medusa_heads.FORM)


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with the heads of a file.

  Raises:
    ValueError: a file that does not fit the target, or has too few heads.
  """
  del chunk
  source = settings.source
  found = check(target, source) if settings.check == 'auto' else None
  reading = readings.judge(f'medusa {source}', target, found)
  model, params = _read_as(reading, target, source)
  most = len(params['heads'])
  tree = branch.settings_of(settings.tree)
  needed = len(tree['levels']) or gamma
  if needed > most:
    what, less = f'gamma={gamma}', f'give gamma={most}'
    if tree['levels']:
      what, less = f'tree={settings.tree}', f'give a tree of {most} levels'
    if tree['best']:
      less = f'give tree=best:{most}'
    raise ValueError(
      f'medusa {source}: has {most} heads, and {what} needs {needed}; {less} '
      'or less'
    )
  least = settings.min_confidence
  drafter = make(model, gamma=gamma, min_confidence=least, **tree)
  return method.Method(drafter, params, view(model))


def check(
  target: load.LanguageModel, source: str | os.PathLike
) -> readings.Result:
  """How the heads of a source agree with a target."""
  paths, heads = medusa_heads.find(source), medusa_heads.fit(source, target)
  gamma = min(readings.DRAFTS, len(heads))

  def drafter(reading: readings.Reading):
    model, params = _read_as(reading, target, source)
    return make(model, gamma=gamma), params

  return readings.find(
    target,
    ('medusa', *files.stamp(paths)),
    lambda: files.digest(paths),
    lambda: [["states before the target's norm"]],
    drafter,
  )


def _read_as(reading: readings.Reading, target: load.LanguageModel, source):
  """(Heads, weights.draft); any answer is that states are not normed."""
  heads, c = medusa_heads.fit(source, target), target.config
  tap = c.depth - any(reading)
  model = Heads(target.model, target.ids, tap, c.width, c.activations)
  return model, {'heads': heads, 'target': target.params}


class Heads(NamedTuple):
  """The heads, without their parameters.

  target: whose states they read, and whose head those without one use.
  ids: how many ids are real.
  tap: the states, as types.Model.apply numbers them.
  width, dtype: of a state.
  """

  target: types.Model
  ids: int
  tap: int
  width: int
  dtype: str

  def logits(self, params, number: int, x_BTD: types.Array) -> types.Array:
    """Those of a window's draft, [B, T, V] float32 or wider, of these states.

    params: weights.draft, {'heads': {'0': {'layers': {'0': {'kernel': [D, D],
      'bias': [D]}}, 'head': [D, V]}}, 'target': the target's}; a head without
      'head' has the target's.
    """
    head = params['heads'][str(number)]
    for layer in head['layers'].values():
      y_BTD = weights.of(layer['kernel']).linear(x_BTD, layer['bias'])
      x_BTD = x_BTD + jax.nn.silu(y_BTD)
    if 'head' not in head:
      assert self.target.project is not None
      return self.target.project(params['target'], x_BTD)
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
    logits_BTV = weights.of(head['head']).linear(x_BTD).astype(wide)
    real_11V = jnp.arange(self.target.vocab)[None, None] < self.ids
    return jnp.where(real_11V, logits_BTV, -jnp.inf)


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  model: Heads,
  *,
  gamma: int,
  min_confidence: float = 0.0,
  levels: tuple[int, ...] = (),
  best: int = 0,
) -> types.Drafter:
  """Drafts the k-th token of a window with head k.

  The target has read all committed tokens but the last, so what is known is the
  state of the one before it: two places before the window's first draft. A
  prompt of one token has none, and its first window no draft. Laws do not
  depend on the window's drafts: all is exact that is for a drafter of any kind.

  Args:
    model: of the heads, gamma or more.
    gamma, min_confidence: as in drafters.lm.make.
    levels, best: as in drafters.eagle.make; a level has a head.
  """
  gamma = best or sum(levels) or gamma

  def init(weights, context, features_BLD):
    at_B11 = jnp.maximum(context.lengths_B - 2, 0)[:, None, None]
    state_B1D = jnp.take_along_axis(features_BLD, at_B11, 1)
    return state_B1D.astype(model.dtype)  # a prefill has a wider one

  def propose(weights, state_B1D, context, noise, target_cache):
    def draw(k, going_B):
      logits_B1V = model.logits(weights.draft, k, state_B1D)
      return lm_drafter.draw(
        noise, context, min_confidence, logits_B1V, k, going_B
      )

    going_B = context.live_B & (context.lengths_B > 1)
    draft = each(draw, going_B, context.gamma_B, gamma)
    return draft, state_B1D, target_cache

  def commit(state_B1D, context, outcome, features_BND):
    del context
    # The last token that was emitted has not been read.
    at_B11 = jnp.maximum(outcome.emitted_B - 1, 0)[:, None, None]
    new_B1D = jnp.take_along_axis(features_BND, at_B11, 1)
    kept_B11 = (outcome.emitted_B == 0)[:, None, None]
    return jnp.where(kept_B11, state_B1D, new_B1D.astype(model.dtype))

  return types.Drafter(
    'medusa',
    gamma,
    init,
    functools.partial(_branch, model, levels, best) if levels else propose,
    commit,
    taps=(model.tap,),
    stops=min_confidence > 0,
    tree=levels,
  )


def _branch(
  model, levels, best, weights, state_B1D, context, noise, target_cache
):
  """Drafts a tree, each level of it with a head; see drafters.branch."""

  def logits(x_BXD, depth):
    logits_B1V = model.logits(weights.draft, depth, x_BXD[:, :1])
    shape = *x_BXD.shape[:2], logits_B1V.shape[-1]
    return jnp.broadcast_to(logits_B1V, shape)

  # Of a prompt of one token there is no state.
  some_B = jnp.where(context.lengths_B > 1, context.gamma_B, 0)
  context = context._replace(gamma_B=some_B)
  # Heads read no drafts: all nodes have the state of the root.
  read = lambda cache, tokens_BX, x_BXD, tree, begin: (x_BXD, cache)
  first = lambda cache: (state_B1D[:, 0], cache)
  draw = branch.Draw(levels, read, logits, best)
  draft, _ = branch.draft(draw, context, noise, (), first)
  return draft, state_B1D, target_cache


def each(draw, going_B, gamma_B, gamma: int) -> types.Draft:
  """The drafts of a window whose laws do not depend on one another.

  Args:
    draw: (k, going_B) -> (token_B, q_BV, going_B), as drafters.lm.draw.
    going_B: the rows that draft.
    gamma_B, gamma: as in types.Context and types.Drafter.
  """
  count_B, tokens, laws = jnp.zeros_like(gamma_B), [], []
  for k in range(gamma):
    turn = lambda made, k=k: draw(k, made[-1])
    going_B &= k < gamma_B
    made = (*forward.blank(turn, (going_B,))[:2], going_B)
    token_B, q_BV, going_B = forward.once(jnp.any(going_B), turn, made)
    tokens.append(token_B)
    laws.append(q_BV)
    count_B += going_B
  laws_BKV = None if laws[0] is None else jnp.stack(laws, 1)
  return types.Draft(jnp.stack(tokens, 1), laws_BKV, count_B)


@functools.cache
def view(model: Heads) -> types.Model:
  """Head 0 as a model, to measure alpha teacher-forced.

  At each token it reads the state of the one before. Its parameters are
  weights.draft, its cache (that of the target, the states [B, S, D] by slot).
  """
  target = model.target

  def init_cache(rows: int, slots: int):
    states_BSD = jnp.zeros((rows, slots, model.width), model.dtype)
    return target.init_cache(rows, slots), states_BSD

  def apply(
    params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, *, taps=()
  ):
    theirs, states_BSD = cache
    _, (state_BTD,), theirs = target.apply(
      params['target'],
      *(tokens_BT, slots_BT, positions_BT, mask_BTS, theirs),
      taps=(model.tap,),
    )
    row_B1 = jnp.arange(len(tokens_BT))[:, None]
    states_BSD = states_BSD.at[row_B1, slots_BT].set(
      state_BTD.astype(model.dtype), mode='drop'
    )
    before_BTD = states_BSD[row_B1, jnp.maximum(positions_BT - 1, 0)]
    return before_BTD, (), (theirs, states_BSD)

  def head(params, hidden):
    return model.logits(params, 0, hidden)

  return types.Model(apply, head, init_cache, target.vocab, target.context)


def recipe(world, gamma: int):
  """A drafter for the certificate: random heads on the target's first layer,
  which never draft the last id."""
  model, params = random_heads(world, gamma)
  return make(model, gamma=gamma), params


def random_heads(world, count: int) -> tuple[Heads, Any]:
  """(Heads, weights.draft) of the certificate's drafter."""
  target, at = world.target, jax.ShapeDtypeStruct((1, 1), np.int32)
  x_BTD = jax.eval_shape(target.embed, world.weights.target, at, at)
  model = Heads(target, world.vocab - 1, 0, x_BTD.shape[-1], x_BTD.dtype.name)
  D, rng = model.width, np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / D, model.dtype)
  layers = lambda: {'0': {'kernel': draw(D, D), 'bias': draw(D)}}
  heads = {
    str(i): {'layers': layers(), 'head': draw(D, target.vocab)}
    for i in range(count)
  }
  return model, {'heads': heads, 'target': world.weights.target}
