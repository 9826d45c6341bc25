"""What a folder claims of its draft, and what else may be meant."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.io.published import readings

Arrays = dict[str, np.ndarray]


class Claim(NamedTuple):
  """What a folder says of its draft.

  layers: a config.json of its decoder layers.
  taps: as types.Model.apply has them.
  settings: of EagleConfig.
  """

  layers: dict[str, Any]
  taps: tuple[int, ...]
  settings: dict[str, Any]


Change = Callable[[Claim, Arrays], tuple[Claim, Arrays]]


def questions(claim: Claim, depth: int) -> list[dict[str, Change]]:
  """{an answer that is not the claim's: what it changes} of each question."""
  own = claim.settings
  order: Any = {'the feature before the embedding': _swapped}
  norms: Any = {'norms stored less 1': _one_more}
  raw = "features before the target's norm"
  if own['reads'] == 'bare':
    return [order, norms, {raw: _set((depth - 1,), last_norm='target')}]
  if own['reads'] == 'joined':
    return [order, norms, {raw: _set((depth - 1,))}]
  moved = {
    f'taps one layer {name}': tuple(i + by for i in claim.taps)
    for name, by in (('lower', -1), ('higher', 1))
  }
  inside = lambda taps: min(taps) >= -1 and max(taps) <= depth
  around = {name: _set(taps) for name, taps in moved.items() if inside(taps)}
  if own['reads'] == 'context':
    return [norms, around, {'a norm of each tap': _set(tap_norm='unit')}]
  fed, normed = own['last_norm'] == 'fed', own['normed_residual']
  return [
    order,
    norms,
    around,
    {
      f'a {"raw" if normed else "normed"} residual stream': _set(
        normed_residual=not normed
      )
    },
    {
      f'{"raw" if fed else "normed"} feedback': _set(
        last_norm='head' if fed else 'fed'
      )
    },
  ]


def changes(
  claim: Claim, depth: int, reading: readings.Reading
) -> list[Change]:
  asked = zip(questions(claim, depth), reading, strict=False)
  return [answers[answer] for answers, answer in asked if answer]


def _set(taps: tuple[int, ...] = (), **settings) -> Change:
  return lambda claim, arrays: (
    Claim(claim.layers, taps or claim.taps, claim.settings | settings),
    arrays,
  )


def _swapped(claim: Claim, arrays: Arrays) -> tuple[Claim, Arrays]:
  """What reads [embedding, feature] is stored for [feature, embedding]."""
  beside = claim.settings['reads'] == 'beside'
  read = r'layers\.0\.self_attn\.[qkv]_proj' if beside else 'fc'
  turn = lambda x: np.roll(x, x.shape[1] // 2, 1)
  return claim, _each(rf'{read}\.weight', turn, arrays)


def _one_more(claim: Claim, arrays: Arrays) -> tuple[Claim, Arrays]:
  return claim, _each(r'.*norm(\.\d+)?\.weight', lambda x: x + 1, arrays)


def _each(pattern: str, change: Callable[[Any], Any], arrays: Arrays) -> Arrays:
  """The arrays, changed where their names match."""
  matches = re.compile(pattern).fullmatch
  return {n: change(x) if matches(n) else x for n, x in arrays.items()}
