"""Drafting in the target's own cache: by its first layers, or all rounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specdec_jax import fields, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.drafters import lm, method
from specdec_jax.io import load, memory
from specdec_jax.models import weights as weights_lib
from specdec_jax.models import work

# A drafted token that costs more of a plain step cannot pay: if 9 of 10 drafts
# are accepted, gamma 1 gains 1.9 / 1.8 at most.
MOST = 0.8


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  exit: int = fields.setting(
    1, low=1, help="how many of the target's layers draft"
  )


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with the first settings.exit layers of the target.

  Raises:
    ValueError: the target has no layer after them.
  """
  del chunk
  exit, depth = settings.exit, target.config.depth
  if exit >= depth:
    raise ValueError(
      f'exit={exit}: {target.label} has {depth} layers; allowed are 1 to '
      f'{depth - 1}'
    )
  drafter = make(target.model, gamma=gamma, exit=exit)
  return method.Method(drafter, target.params, view(target.model, exit))


def recipe(world, gamma: int):
  return make(world.target, gamma=gamma, exit=1), ()


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(target: types.Model, *, gamma: int, exit: int) -> types.Drafter:
  """Drafts gamma tokens a window from the hidden state after `exit` layers.

  It has neither parameters nor a cache: drafting runs the first layers
  over the window's gamma + 1 tokens and writes their keys and values to the
  target's cache; verification continues from their residual stream with the
  other layers only. The head is not applied to the last draft token. LayerSkip
  (Elhoushi et al. 2024, https://arxiv.org/abs/2404.16710) for any model; one
  that was not trained for early exit drafts badly.

  Args:
    target: a model that supports early exit (types.Model.apply, `layers`).
    gamma: draft tokens in a window, at least 1.
    exit: layers that draft, at least 1 and fewer than the target has.
  """
  return types.Drafter(
    'early_exit',
    gamma,
    lambda *_: (),
    functools.partial(_propose, target, gamma, exit),
    lambda state, *_: state,
    exit=exit,
  )


def _propose(target, gamma, exit, weights, state, context, noise, cache):
  def read(cache, token_B, offset):
    hidden_B1D, _, cache = forward.read(
      target,
      weights.target,
      token_B[:, None],
      context.lengths_B - 1 + offset,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=context.live_B[:, None],
      layers=(0, exit),
    )
    return hidden_B1D, cache

  def extend(cache, token_B, offset):
    hidden_B1D, cache = read(cache, token_B, offset)
    logits_B1V = target.head(weights.target, hidden_B1D)
    q_BV = sampling_lib.probabilities(logits_B1V, context.sampling)[:, 0]
    token_B = noise.draft(offset, q_BV)
    return cache, (token_B, q_BV, hidden_B1D[:, 0])

  def body(carry):
    offset, cache, token_B, made = carry
    cache, new = extend(cache, token_B, offset)
    put = lambda old_NBX, new_BX: old_NBX.at[offset].set(new_BX)
    return offset + 1, cache, new[0], jax.tree.map(put, made, new)

  last_B1 = jnp.take_along_axis(
    context.tokens_BL, context.lengths_B[:, None] - 1, 1
  )
  token_B = last_B1[:, 0]
  _, made = forward.blank(extend, cache, token_B, 0)
  made = jax.tree.map(lambda x: jnp.stack([x] * (gamma + 1)), made)
  most = jnp.max(jnp.where(context.live_B, context.gamma_B, 0))
  # A loop: compile time does not grow with gamma.
  _, cache, token_B, (tokens_NB, q_NBV, hidden_NBD) = jax.lax.while_loop(
    lambda carry: carry[0] < most, body, (jnp.int32(0), cache, token_B, made)
  )
  hidden_B1D, cache = read(cache, token_B, most)
  hidden_NBD = hidden_NBD.at[most].set(hidden_B1D[:, 0])
  draft = types.Draft(
    tokens_NB[:gamma].T,
    jnp.moveaxis(q_NBV[:gamma], 0, 1),
    context.gamma_B,
    jnp.moveaxis(hidden_NBD, 0, 1),
  )
  return draft, state, cache


@functools.lru_cache(maxsize=64)
def view(target: types.Model, exit: int) -> types.Model:
  """The draft as a separate model, to measure alpha teacher-forced."""

  def apply(*args, taps=()):
    return target.apply(*args, taps=taps, layers=(0, exit))

  return target._replace(apply=apply)


# --- the row `self` of drafters.table ----------------------------------------


class Itself:
  """The target's own weights as its draft, with matrices of integers.

  Drafting runs all layers of the rounded copy and writes their keys and values
  to the target's cache, over which verification writes its own: there is no
  second cache and no second prefill, and what has been committed is read as the
  target read it. Not a source of `lm`, which has a cache of its own: a
  benchmark can compare the two.
  """

  @dataclasses.dataclass(frozen=True)
  class Settings(method.Stopping, method.Rows):
    dtype: str = fields.setting(
      'int4', allowed=weights_lib.INTEGERS, help='as target.dtype'
    )

  @staticmethod
  def for_target(
    target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
  ) -> method.Method:
    """Drafts with a copy of the target, read again from its source.

    Its q is no model's: it depends on the keys that the target has written.

    Raises:
      ValueError: a copy that would cost nearly what the target does, or
        activations of another dtype.
    """
    del chunk
    how = settings.dtype, settings.kernels
    copy = target.once(('self', *how), lambda: _rounded(target, *how))
    drafter = make_whole(
      copy.model, gamma=gamma, min_confidence=settings.min_confidence
    )
    return method.Method(drafter, copy.params, draft=copy)

  @staticmethod
  def recipe(world, gamma: int):
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # codes stay
    coarse = lambda x: jnp.round(4 * x) / 4 if floats(x) else x
    own = jax.tree.map(coarse, world.weights.target)
    return make_whole(world.target, gamma=gamma), own


def _rounded(
  target: load.LanguageModel, dtype: str, kernels: str
) -> load.LanguageModel:
  """A copy whose decoder can share the target's cache; it has no encoder."""
  own, source = target.config, target.source
  opened = method.opened(target, source)
  copied = memory.Model(opened, dtype, packs=own.run.packed)
  given = f"draft='self': {target.label} rounded to {dtype}"
  if (c := copied.step_bytes() / work.step_bytes(target.params)) > MOST:
    raise ValueError(
      f'{given} would draft a token at c={c:.2f} of a plain step, by the bytes '
      f'that they read; at most {MOST} can pay: give a smaller draft'
    )
  if own.activations != (computed := memory.activations()):
    raise ValueError(
      f'{given} computes in {computed}, which the cache of a target in '
      f"{own.activations} does not hold; load that with dtype='{computed}'"
    )
  copy = method.load_beside(target, opened, dtype, kernels)
  assert copy.config.run == own.run, (copy.config.run, own.run)
  params = {name: x for name, x in copy.params.items() if name != 'encoder'}
  return dataclasses.replace(copy, params=params)


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make_whole(
  model: types.Model, *, gamma: int, min_confidence: float = 0.0
) -> types.Drafter:
  """Drafts gamma tokens a window with a model that shares the target's cache.

  weights.draft holds its parameters. It has no state.

  Args:
    model: with the cache and the number of logits of the target.
    gamma: draft tokens in a window, at least 1.
    min_confidence: as in drafters.lm.make.
  """
  return types.Drafter(
    'self',
    gamma,
    lambda *_: (),
    functools.partial(_propose_whole, model, gamma, min_confidence),
    lambda state, *_: state,
    stops=min_confidence > 0,
  )


def _propose_whole(
  model, gamma, min_confidence, weights, state, context, noise, cache
):
  start_B = context.lengths_B - 1

  def extend(cache, tokens_B1, at_B, offset, going_B):
    # Verification overwrites these slots: the last committed token's too.
    hidden_B1D, _, cache = forward.read(
      model,
      weights.draft,
      tokens_B1,
      at_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=context.live_B[:, None],
    )
    logits_B1V = model.head(weights.draft, hidden_B1D)
    return cache, *lm.draw(
      noise, context, min_confidence, logits_B1V, offset, going_B
    )

  last_B1 = jnp.take_along_axis(context.tokens_BL, start_B[:, None], 1)
  first = lambda cache, going_B: extend(cache, last_B1, start_B, 0, going_B)
  cache, draft = lm.chain(first, extend, cache, context, gamma)
  return draft, state, cache
