"""What a folder claims about its draft, and what else it may mean."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]
# How a draft is read: for each question that its format leaves open an answer,
# or '', which is what its folder claims.
Reading = tuple[str, ...]


class Claim(NamedTuple):
  """What a folder says about its draft.

  layers: a config.json for its decoder layers. settings: for EagleConfig.
  taps: as in types.Model.apply. more: layer ids in its config.json less taps.
  """

  layers: dict[str, Any]
  taps: tuple[int, ...]
  settings: dict[str, Any]
  more: int = 0


Change = Callable[[Claim, Arrays], tuple[Claim, Arrays]]


def questions(claim: Claim, depth: int) -> list[dict[str, Change]]:
  """Returns, for each question, {answer unlike the claim: its change}."""
  own, reads = claim.settings, claim.settings['reads']
  turn = lambda x: np.roll(x, x.shape[1] // 2, 1)
  beside = r'layers\.0\.self_attn\.[qkv]_proj' if reads == 'beside' else 'fc'
  # What reads [embedding, feature] is stored for [feature, embedding].
  order = {
    'the feature before the embedding': _each(rf'{beside}\.weight', turn)
  }
  less = _each(r'.*norm(\.\d+)?\.weight', lambda x: x + 1)
  norms = {'norms stored less 1': less}
  if reads in ('bare', 'joined'):
    normed = dict(last_norm='target') if reads == 'bare' else {}
    raw = _set((depth - 1,), **normed)
    return [order, norms, {"features before the target's norm": raw}]
  moved = {
    f'taps one layer {name}': tuple(i + by for i in claim.taps)
    for name, by in (('lower', -1), ('higher', 1))
  }
  inside = lambda taps: min(taps) >= -1 and max(taps) <= depth
  around = {name: _set(taps) for name, taps in moved.items() if inside(taps)}
  if reads == 'context':
    return [norms, around, {'a norm of each tap': _set(tap_norm='unit')}]
  fed, normed = own['last_norm'] == 'fed', own['normed_residual']
  residual = f'a {"raw" if normed else "normed"} residual stream'
  feedback = f'{"raw" if fed else "normed"} feedback'
  return [
    order,
    norms,
    around,
    {residual: _set(normed_residual=not normed)},
    {feedback: _set(last_norm='head' if fed else 'fed')},
  ]


def read_as(
  claim: Claim, arrays: Arrays, depth: int, reading: Reading
) -> tuple[Claim, Arrays]:
  """Changes the claim and the arrays to these answers; (): to none."""
  for changes, answer in zip(questions(claim, depth), reading, strict=False):
    if answer:
      claim, arrays = changes[answer](claim, arrays)
  return claim, arrays


def _set(taps: tuple[int, ...] = (), **settings) -> Change:
  return lambda claim, arrays: (
    claim._replace(taps=taps or claim.taps, settings=claim.settings | settings),
    arrays,
  )


def _each(pattern: str, change: Callable[[Any], Any]) -> Change:
  """Changes the arrays whose names match."""
  matches = re.compile(pattern).fullmatch
  return lambda claim, arrays: (
    claim,
    {n: change(x) if matches(n) else x for n, x in arrays.items()},
  )
