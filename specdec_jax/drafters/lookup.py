"""Prompt lookup: propose the tokens after an earlier match in the row."""

import dataclasses
import functools

import jax.numpy as jnp

from specdec_jax import fields, types


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  min_match: int = fields.setting(2, low=1, help='shortest match, in tokens')
  max_match: int = fields.setting(4, low=1, help='longest match, in tokens')

  def __post_init__(self):
    super().__post_init__()
    if self.min_match > self.max_match:
      raise ValueError(
        f'min_match={self.min_match}: must be at most max_match, '
        f'{self.max_match}'
      )


def for_target(
  target, settings: Settings, *, gamma: int, chunk: int
) -> types.Drafter:
  del target, chunk
  return make(gamma=gamma, **dataclasses.asdict(settings))


def recipe(world, gamma: int):
  del world
  return make(gamma=gamma), ()


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  *,
  gamma: int,
  min_match: int = Settings.min_match,
  max_match: int = Settings.max_match,
) -> types.Drafter:
  """Continues the longest earlier match of the row's last tokens.

  Searches the row's committed tokens, prompt and output, for its suffix. Of the
  matches the longest counts, and the latest among equally long ones. Up to
  gamma tokens that follow it are proposed deterministically (q is None);
  nothing is proposed without a match. Saxena 2023, prompt lookup decoding; the
  idea is in Leviathan et al. 2023, section 3.6.

  For example, with min_match=1 and gamma 2, after [5 6 7 8 9 5 6] the suffix
  [5 6] matches at the start, and [7 8] is proposed.

  Args:
    gamma: draft tokens in a window.
    min_match, max_match: shortest and longest match, in tokens.

  Raises:
    ValueError: not 1 <= min_match <= max_match.
  """
  Settings(min_match, max_match)

  def propose(weights, state, context, noise, target_cache):
    del weights, noise
    tokens_BL, lengths_B = context.tokens_BL, context.lengths_B
    L = tokens_BL.shape[1]
    end_1L = jnp.arange(L)[None]  # a candidate match ends before this index
    # run_BL: how many tokens before each index equal the row's last ones.
    run_BL = jnp.zeros(tokens_BL.shape, jnp.int32)
    alive_BL = (end_1L >= 1) & (end_1L < lengths_B[:, None])
    for back in range(1, max_match + 1):
      last_B1 = jnp.take_along_axis(
        tokens_BL, jnp.maximum(lengths_B[:, None] - back, 0), 1
      )
      alive_BL &= (jnp.roll(tokens_BL, back, 1) == last_B1) & (end_1L >= back)
      alive_BL &= lengths_B[:, None] >= back
      run_BL += alive_BL
    # Longest first, then latest; both in one integer.
    score_BL = jnp.where(run_BL >= min_match, run_BL * L + end_1L, -1)
    best_B = jnp.max(score_BL, 1)
    found_B = best_B >= 0
    start_B = jnp.where(found_B, best_B % L, 0)
    at_BK = start_B[:, None] + jnp.arange(gamma)[None]
    tokens_BK = jnp.take_along_axis(tokens_BL, jnp.minimum(at_BK, L - 1), 1)
    count_B = jnp.where(found_B, jnp.minimum(gamma, lengths_B - start_B), 0)
    return types.Draft(tokens_BK, None, count_B), state, target_cache

  return types.Drafter(
    'lookup', gamma, lambda *_: (), propose, lambda state, *_: state
  )
