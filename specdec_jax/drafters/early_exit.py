"""Drafts in the target's own cache: by its first layers, or all rounded."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specdec_jax import fields, forward, types
from specdec_jax.drafters import branch, method
from specdec_jax.io import load, plan
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
  """Drafts with the first settings.exit layers of the target."""
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
def make(target: types.Model, *, gamma: int, exit: int = 0) -> types.Drafter:
  """Drafts gamma tokens a window from the hidden state after `exit` layers.

  It has neither parameters nor a cache: drafting runs the first layers over the
  window's gamma + 1 tokens and writes to the target's cache; verification
  continues from their residual stream with the other layers only. The last
  draft token skips the head. LayerSkip (Elhoushi et al. 2024,
  https://arxiv.org/abs/2404.16710) for any model; one that was not trained for
  early exit drafts badly.

  target: supports early exit (types.Model.apply, `layers`). exit: layers that
  draft, fewer than the target has; 0: all those of a model whose parameters are
  weights.draft, and which may share the target's cache.
  """
  name, model = ('early_exit', view(target, exit)) if exit else ('self', target)
  propose = functools.partial(_propose, model, gamma, exit)
  same = lambda state, *_: state
  return types.Drafter(name, gamma, lambda *_: (), propose, same, exit=exit)


def _propose(model, gamma, exit, weights, state, context, noise, cache):
  params = weights.target if exit else weights.draft
  start_B, row_B = context.lengths_B - 1, jnp.arange(len(context.lengths_B))

  def alone(cache, tokens_B1, at_B):
    # Verification overwrites these slots: the last committed token's too.
    hidden_B1D, _, cache = forward.read(
      model,
      params,
      tokens_B1,
      at_B,
      cache,
      slots=context.tokens_BL.shape[1],
      keep_BT=context.live_B[:, None],
    )
    return hidden_B1D, cache

  def read(memory, tokens_B1, _, at_B):
    cache, residual_BND = memory
    hidden_B1D, cache = alone(cache, tokens_B1, at_B)
    at = row_B, at_B - start_B
    return hidden_B1D, (cache, residual_BND.at[at].set(hidden_B1D[:, 0]))

  last_B1 = jnp.take_along_axis(context.tokens_BL, start_B[:, None], 1)
  blank_B1D, _ = forward.blank(alone, cache, last_B1, start_B)
  draft, memory = branch.draft(
    context,
    noise,
    (cache, jnp.tile(blank_B1D, (1, gamma + 1, 1))),
    lambda memory: read(memory, last_B1, None, start_B),
    read,
    lambda x_B1D, _: model.head(params, x_B1D),
    gamma=gamma,
  )
  if not exit:
    return draft, state, memory[0]
  most = jnp.max(jnp.where(context.live_B, context.gamma_B, 0))
  tokens_BN = jnp.concatenate([last_B1, draft.tokens_BK], 1)
  last_B1 = jax.lax.dynamic_slice_in_dim(tokens_BN, most, 1, 1)
  _, (cache, residual_BND) = read(memory, last_B1, None, start_B + most)
  return draft._replace(marks={'residual_BND': residual_BND}), state, cache


@functools.lru_cache(maxsize=64)
def view(target: types.Model, exit: int) -> types.Model:
  """Returns the draft as a separate model, to measure alpha teacher-forced."""

  def apply(*args, taps=()):
    return target.apply(*args, taps=taps, layers=(0, exit))

  return target._replace(apply=apply)


# --- the row `self` of drafters.table ----------------------------------------


class Itself:
  """Drafts with the target's own weights, its matrices in integers.

  Drafting runs all layers of the rounded copy and writes to the target's cache,
  over which verification writes its own: there is no second cache or prefill,
  and committed tokens are read as the target read them. Not a source of `lm`,
  which has a cache to itself: a benchmark can compare the two.
  """

  @dataclasses.dataclass(frozen=True)
  class Settings(fields.Checked):
    dtype: str = fields.setting(
      'int4', allowed=weights_lib.INTEGERS, help='as target.dtype'
    )

  @staticmethod
  def for_target(
    target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
  ) -> method.Method:
    """Drafts with a copy of the target, read again from its source. Its q is no
    model's: it depends on the keys that the target has written."""
    rounded = lambda: _rounded(target, settings.dtype)
    copy = target.once(('self', settings.dtype), rounded)
    return method.Method(make(copy.model, gamma=gamma), copy.params, draft=copy)

  @staticmethod
  def recipe(world, gamma: int):
    floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # codes stay
    coarse = lambda x: jnp.round(4 * x) / 4 if floats(x) else x
    own = jax.tree.map(coarse, world.weights.target)
    return make(world.target, gamma=gamma), own


def _rounded(target: load.LanguageModel, dtype: str) -> load.LanguageModel:
  """Rounds a copy of a target whose cache it can share; drops the encoder."""
  own, source = target.config, target.source
  opened = method.opened(target, source)
  kernels = 'auto' if own.run.packed else 'xla'
  copied = plan.make(opened, dtype, kernels=kernels)
  given = f"draft='self': {target.label} rounded to {dtype}"
  if (c := copied.step_bytes() / work.step_bytes(target.params)) > MOST:
    raise ValueError(
      f'{given} would draft a token at c={c:.2f} of a plain step, by the bytes '
      f'that they read; at most {MOST} can pay: give a smaller draft'
    )
  if own.activations != (computed := plan.activations()):
    raise ValueError(
      f'{given} computes in {computed}, which the cache of a target in '
      f"{own.activations} does not hold; load that with dtype='{computed}'"
    )
  copy = method.load_beside(target, opened, dtype)
  assert copy.config.run == own.run, (copy.config.run, own.run)
  params = {name: x for name, x in copy.params.items() if name != 'encoder'}
  return dataclasses.replace(copy, params=params)
