"""Medusa: drafts with heads on the target's last state, one a token ahead.

Medusa-1 of Cai et al. 2024 (https://arxiv.org/abs/2401.10774). Head i reads a
token's state and predicts the token i + 2 places after it.
"""

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, method, readings
from specdec_jax.io import load
from specdec_jax.io.published import medusa_heads
from specdec_jax.models import weights


@dataclasses.dataclass(frozen=True)
class Settings(method.Branching, method.Published):
  source: str | os.PathLike = fields.setting('', needed=medusa_heads.FORM)


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with the heads in a file."""
  model, params = method.published(FORM, target, settings)
  most = len(params['heads'])
  tree = branch.settings_of(settings.tree)
  needed = len(tree['levels']) or gamma
  if needed > most:
    what = f'tree={settings.tree}' if tree['levels'] else f'gamma={gamma}'
    raise ValueError(
      f'medusa {settings.source}: has {most} heads, and {what} needs {needed}; '
      f'give gamma={most}, a tree of {most} levels, tree=best:{most}, or less'
    )
  made = make(model, gamma=gamma, **tree)
  q = make(model, gamma=1) if made.tree else None
  return method.Method(made, params, q)


def fit(source, target: load.LanguageModel, reading: readings.Reading = ()):
  """Returns (Heads, weights.draft); any answer means states are not normed."""
  heads, c = medusa_heads.fit(source, target), target.config
  tap = c.depth - any(reading)
  model = Heads(target.model, target.ids, tap, c.width, c.activations)
  return model, {'heads': heads, 'target': target.params}


class Heads(NamedTuple):
  """The heads, without their parameters.

  target: whose states they read, and whose head those without one use.
  ids: how many ids are real.
  tap: the states, as types.Model.apply numbers them, of this width and dtype.
  """

  target: types.Model
  ids: int
  tap: int
  width: int
  dtype: str

  def logits(self, params, number: int, x_BTD: types.Array) -> types.Array:
    """Computes draft logits, [B, T, V] float32 or wider. params is {'heads':
    {'0': {'layers': {'0': {'kernel': [D, D], 'bias': [D]}}, 'head': [D, V]}},
    'target': the target's}; a head without 'head' has the target's."""
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
  model: Heads, *, gamma: int, levels: tuple[int, ...] = (), best: int = 0
) -> types.Drafter:
  """Drafts a window's k-th token with head k.

  The target has read all committed tokens but the last, so what is known is the
  state of the one before it: two places before the window's first draft. A
  prompt with one token has none, and its first window no draft. q at a position
  does not depend on the drafts before it.

  model: gamma heads or more. levels, best: as in branch.draft; a head a level.
  """
  gamma = best or sum(levels) or gamma
  how = dict(gamma=gamma, levels=levels, best=best)

  def init(weights, context, features_BLD):
    at_B11 = jnp.maximum(context.lengths_B - 2, 0)[:, None, None]
    state_B1D = jnp.take_along_axis(features_BLD, at_B11, 1)
    return state_B1D.astype(model.dtype)  # a prefill has a wider one

  def commit(state_B1D, context, outcome, features_BND):
    # The last token that was emitted has not been read.
    at_B11 = jnp.maximum(outcome.emitted_B - 1, 0)[:, None, None]
    new_B1D = jnp.take_along_axis(features_BND, at_B11, 1)
    kept_B11 = (outcome.emitted_B == 0)[:, None, None]
    return jnp.where(kept_B11, state_B1D, new_B1D.astype(model.dtype))

  return types.Drafter(
    'medusa',
    gamma,
    init,
    functools.partial(_propose, model, how),
    commit,
    taps=(model.tap,),
    tree=levels,
  )


def _propose(model, how, weights, state_B1D, context, noise, target_cache):
  # Of a prompt of one token there is no state.
  some_B = jnp.where(context.lengths_B > 1, context.gamma_B, 0)
  context = context._replace(gamma_B=some_B)
  head = lambda k: model.logits(weights.draft, k, state_B1D)

  def every(_):
    """Lets all heads' logits stand for each draft's state in a chain."""
    made = []
    for k in range(how['gamma']):
      turn = lambda _, k=k: head(k)
      wants_B = context.live_B & (k < context.gamma_B)
      blank_B1V = forward.blank(turn, None)
      made.append(forward.once(jnp.any(wants_B), turn, blank_B1V))
    return jnp.concatenate(made, 1), ()

  def level(x_BXD, depth):
    logits_B1V = head(depth)
    shape = *x_BXD.shape[:2], logits_B1V.shape[-1]
    return jnp.broadcast_to(logits_B1V, shape)

  first = every
  logits = lambda x_BKV, k: jax.lax.dynamic_slice_in_dim(x_BKV, k, 1, 1)
  if how['levels']:
    first, logits = lambda _: (state_B1D, ()), level
  # Heads read no drafts: all nodes have the state of the root.
  read = lambda cache, tokens_BX, x_BXD, start_B, **tree: (x_BXD, cache)
  draft, _ = branch.draft(context, noise, (), first, read, logits, **how)
  return draft, state_B1D, target_cache


FORM = readings.Form(
  'medusa',
  medusa_heads.find,
  lambda source, target: [["states before the target's norm"]],
  fit,
  lambda model, params, _: make(
    model, gamma=min(readings.DRAFTS, len(params['heads']))
  ),
)


def recipe(world, gamma: int):
  """Makes a drafter for the certificate: random heads on the target's first
  layer, which never draft the last id of three or more."""
  model, params = random_heads(world, gamma)
  return make(model, gamma=gamma), params


def random_heads(world, count: int) -> tuple[Heads, Any]:
  """Draws (Heads, weights.draft) for the certificate's drafter."""
  target, at = world.target, jax.ShapeDtypeStruct((1, 1), np.int32)
  x_BTD = jax.eval_shape(target.embed, world.weights.target, at, at)
  ids, width = max(2, world.vocab - 1), x_BTD.shape[-1]
  model = Heads(target, ids, 0, width, x_BTD.dtype.name)
  D, rng = model.width, np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / D, model.dtype)
  layers = lambda: {'0': {'kernel': draw(D, D), 'bias': draw(D)}}
  heads = {
    str(i): {'layers': layers(), 'head': draw(D, target.vocab)}
    for i in range(count)
  }
  return model, {'heads': heads, 'target': world.weights.target}
