"""Prompt lookup: proposes the tokens after an earlier match in the row."""

import dataclasses
import functools

import jax.numpy as jnp

from specdec_jax import fields, types


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked):
  min_match: int = fields.setting(2, low=1, help='shortest match, in tokens')
  max_match: int = fields.setting(
    4, low=1, high=256, help='longest match, in tokens'
  )

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
  return make(gamma=gamma, **dataclasses.asdict(settings))


def recipe(world, gamma: int):
  return make(gamma=gamma), ()


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def make(
  *,
  gamma: int,
  min_match: int = Settings.min_match,
  max_match: int = Settings.max_match,
) -> types.Drafter:
  """Continues the longest earlier match of the row's last tokens.

  Searches the row's committed tokens, prompt and output, and its source (an
  encoder's or a prediction) for the row's suffix. Takes the longest match, and
  the latest among equals, the source being earlier than the whole row; none
  goes from the source into the row. Proposes the gamma tokens that follow it
  deterministically (q is None): in the row over and over to its end, in the
  source no further than that, and nothing without a match. Saxena 2023, prompt
  lookup decoding; the idea, for a source too, is in Leviathan et al. 2023,
  section 3.6.

  For example, with min_match=1 and gamma 2, after [5 6 7 8 9 5 6] the suffix
  [5 6] matches at the start, and [7 8] is proposed; after [5 6 5 6], [5 6].
  """
  return types.Drafter(
    'lookup',
    gamma,
    lambda *_: (),
    functools.partial(_propose, gamma, min_match, max_match),
    lambda state, *_: state,
  )


def _propose(
  gamma, min_match, max_match, weights, state, context, noise, target_cache
):
  tokens_BL, lengths_B = context.tokens_BL, context.lengths_B
  texts = [(tokens_BL, lengths_B)]
  if context.source is not None:
    texts = [context.source, *texts]
  # All texts side by side; a candidate match ends before a place of them.
  join = functools.partial(jnp.concatenate, axis=1)
  tokens_BP = join([x_BL for x_BL, _ in texts])
  at_1P = join([jnp.arange(x_BL.shape[1])[None] for x_BL, _ in texts])
  # Tokens from each place to the end of its text.
  left_BP = join(
    [n_B[:, None] - jnp.arange(x_BL.shape[1])[None] for x_BL, n_B in texts]
  )
  # run_BP: how many tokens before each place equal the row's last ones.
  run_BP, alive_BP = jnp.zeros(tokens_BP.shape, jnp.int32), left_BP > 0
  for back in range(1, max_match + 1):
    last_B1 = jnp.take_along_axis(
      tokens_BL, jnp.maximum(lengths_B[:, None] - back, 0), 1
    )
    alive_BP &= (jnp.roll(tokens_BP, back, 1) == last_B1) & (at_1P >= back)
    alive_BP &= lengths_B[:, None] >= back
    run_BP += alive_BP
  # Longest first, then latest; both in one integer.
  P = tokens_BP.shape[1]
  place_1P = jnp.arange(P)[None]
  best_B = jnp.max(jnp.where(run_BP >= min_match, run_BP * P + place_1P, -1), 1)
  start_B1 = jnp.where(best_B >= 0, best_B % P, 0)[:, None]
  left_B1 = jnp.take_along_axis(left_BP, start_B1, 1)
  at_BK = start_B1 + jnp.arange(gamma)[None] % jnp.maximum(left_B1, 1)
  tokens_BK = jnp.take_along_axis(tokens_BP, at_BK, 1)
  count_B = jnp.where(best_B >= 0, gamma, 0)
  draft = types.Draft(tokens_BK, None, count_B)
  if context.source is not None:
    sourced_B = start_B1[:, 0] < context.source.tokens_BI.shape[1]
    count_B = jnp.where(sourced_B, jnp.minimum(count_B, left_B1[:, 0]), count_B)
    draft = draft._replace(count_B=count_B, marks={'sourced_B': sourced_B})
  return draft, state, target_cache
