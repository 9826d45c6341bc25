"""Bad indices, NaNs and broken contracts, window by window."""

import pathlib
import traceback
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from specdec_jax import decode, types
from specdec_jax.debug import watch

# Folders whose frames tell a reader nothing.
_NOBODYS = tuple(str(pathlib.Path(x).parent) for x in (__file__, jax.__file__))


def check(
  target: types.Model,
  drafter: types.Drafter,
  rule: types.Rule,
  weights: types.Weights,
  request: decode.Request,
  options: decode.Options | None = None,
) -> None:
  """Decodes under checkify's index and NaN checks, and checks the contracts.

  An index out of bounds and a NaN are found wherever they arise in a live row,
  masked later or not. Two things are allowed, because the library means them: a
  write out of bounds, which writes nowhere, and a read with mode='clip'.

  Of live rows: count_B is 0 to gamma; proposed ids are in the vocabulary; their
  q is a distribution that could have drawn them; accepted_B is 0 to the count;
  weights_BV are finite and not negative.

  Arguments as check_cache.

  Raises:
    BadValue: the first value that is wrong.
    ValueError: a Draft of the wrong shape.
  """
  run = watch.programs(target, drafter, rule, options or decode.Options())
  error, (state, info) = run.checked_start(weights, request)
  if error.get() is not None:
    lengths_B = np.asarray(request.lengths_B)
    _blame(
      lambda rows: run.checked_start(weights, watch.take(request, rows))[0],
      (error, request, lengths_B < np.asarray(request.limit_B)),
      watch.PREFILL,
      np.maximum(lengths_B - 2, 0),
    )
  axes = watch.axes_of(run.start, weights, request)
  while np.asarray(state.live_B).any():
    error, (new, new_info, seen) = run.checked_step(
      weights, request, state, info
    )
    window = int(info.calls)
    for row, slot, what in _breaches(target, drafter, state, seen):
      number, said = watch.number(request, row), error.get()
      what += '' if said is None else f'; {_sentence(error)}'
      raise watch.BadValue(row, number, window, slot, what)
    if error.get() is not None:
      again = lambda rows, state=state, info=info: run.checked_step(
        weights, watch.take(request, rows), watch.take(state, rows, axes), info
      )[0]
      live_B = np.asarray(state.live_B)
      slot_B = np.asarray(state.lengths_B) - 1
      _blame(again, (error, request, live_B), window, slot_B)
    state, info = new, new_info


def _breaches(target, drafter, state, seen: watch.Seen) -> Iterator[tuple]:
  """(row, slot, what) of what one window said against the contracts."""
  draft, outcome = jax.device_get(seen)
  L = state.tokens_BL.shape[1]
  for row in np.flatnonzero(np.asarray(state.live_B)):
    row, n = int(row), int(state.lengths_B[row])
    of = lambda name: f'drafter {drafter.name!r}: {name}'
    count, K = int(draft.count_B[row]), drafter.gamma
    if not 0 <= count <= K:
      yield row, n, of(f'count_B is {count}, allowed are 0 to {K}')
    for k in range(min(count, K)):
      token = int(draft.tokens_BK[row, k])
      if not 0 <= token < target.vocab:
        allowed = f'allowed are 0 to {target.vocab - 1}'
        yield row, n + k, of(f'draft {k} is token id {token}, {allowed}')
      elif draft.q_BKV is not None:
        what = _bad_q(draft.q_BKV[row, k], token)
        if what:
          yield row, n + k, of(f'q of draft {k} {what}')
    accepted = int(outcome.accepted_B[row])
    count = max(0, min(count, K, L - n - 1))  # as the loop cuts it
    if not 0 <= accepted <= count:
      what = f'accepted_B is {accepted}, allowed are 0 to {count}'
      yield row, n + min(max(accepted, 0), K), f'the rule: {what}'


def _bad_mass(x_V: np.ndarray) -> str | None:
  bad = ~(np.isfinite(x_V) & (x_V >= 0))
  if not bad.any():
    return None
  return f'is {x_V[bad][0]:.3g} for id {np.flatnonzero(bad)[0]}'


def _bad_q(q_V: np.ndarray, token: int) -> str | None:
  what, total = _bad_mass(q_V), float(q_V.astype(float).sum())
  if what:
    return what
  if not abs(total - 1) <= float(jnp.finfo(q_V.dtype).eps) ** 0.5:
    return f'sums to {total:.6g}'
  return None if q_V[token] > 0 else f'gives its own token {token} no chance'


def _blame(again: Callable, failed, window: int, slot_B):
  """Raises BadValue for the first row of which a whole batch fails alike.

  again(rows) -> Error runs the same program on copies of one row. failed:
  (Error, request, live_B). What only a finished row does is thrown away by the
  loop, and here.
  """
  error, request, live_B = failed
  B = len(live_B)
  for row in map(int, np.argsort(~live_B, kind='stable')):
    alone = again(np.full(B, row))
    if alone.get() is not None:
      if live_B[row]:
        number, slot = watch.number(request, row), int(slot_B[row])
        raise watch.BadValue(row, number, window, slot, _sentence(alone))
      return
  slot = int(np.min(slot_B[live_B])) if live_B.any() else 0
  raise watch.BadValue(None, None, window, slot, _sentence(error))


def _sentence(error: checkify.Error) -> str:
  """The error and the last places on the way to it."""
  try:
    error.throw()
  except checkify.JaxRuntimeError as raised:
    cause = raised.__cause__
    frames = traceback.extract_tb(cause.__traceback__ if cause else None)
    names = [
      f'{x.name} ({pathlib.Path(x.filename).name}:{x.lineno})'
      for x in frames
      if not x.filename.startswith(_NOBODYS)
    ][-3:]
    said = str(raised).removesuffix('(`check` failed)').strip(' .')
    return f'{said}, in {" > ".join(names)}'
  return ''
