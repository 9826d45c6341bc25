"""Is a different token a tie or a bug? Every first divergence is explained.

A verify pass of gamma + 1 tokens sums in another order than a pass of one, so
in float32 a near-tie may fall the other way. The audit measures that noise
where two outputs part, and calls anything it does not cover a bug.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from specdec_jax import forward, types
from specdec_jax import sampling as sampling_lib

# A choice may differ by both tokens' noise, in both arms.
FACTOR = 4
# float32 noise above this share of the largest logit is itself a bug.
NOISE_LIMIT = 1e-3
# Of float32 sums over a vocabulary, which top-p compares.
ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Case:
  """One request that two arms ran: the prompt, what each emitted, its draws."""

  prompt: Sequence[int]
  plain: Sequence[int]
  other: Sequence[int]
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  request: int = 0


@dataclasses.dataclass(frozen=True)
class Finding:
  """verdict: 'identical', 'tie' or 'BUG'.

  position: index of the first differing token among the emitted ones. gap: what
  the noise must bridge for either token to win, in logits. noise: largest
  difference of a logit between passes of width 1 and gamma + 1, and between
  the rows of a batch that all hold the text; at least one rounding of the
  largest logit.
  """

  verdict: str
  position: int | None = None
  plain: int | None = None
  other: int | None = None
  gap: float | None = None
  noise: float | None = None
  reason: str = ''


def audit(
  model: types.Model,
  params,
  case: Case,
  *,
  gamma: int,
  chunk: int,
  length: int,
  rows: int = 1,
  relative_limit: float | None = NOISE_LIMIT,
) -> Finding:
  """Compares two arms that promise the same tokens (greedy, or coupled).

  Args:
    model: the target.
    params: its parameters.
    case: the two outputs.
    gamma: the other arm's; its verify passes had gamma + 1 tokens, or 1.
    chunk: of the prefill, as both arms ran it.
    length: token buffer length, as both arms ran it.
    rows: batch size, as both arms ran it; a kernel may be chosen by it.
    relative_limit: noise over the largest logit above which the noise is the
      bug; None (bfloat16) sets no limit.
  """
  plain, other = list(case.plain), list(case.other)
  if plain == other:
    return Finding('identical')
  shorter = min(len(plain), len(other))
  same = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
  if same == shorter:
    return Finding('BUG', same, reason='one text ends where the other goes on')
  text = [*case.prompt, *plain[:same]]
  tokens_BL = np.zeros((rows, length), np.int32)
  tokens_BL[:, : len(text)] = text
  start, last = np.int32(len(case.prompt) - 1), np.int32(len(text) - 1)
  passes_BV = np.concatenate(
    [
      _score(params, tokens_BL, start, last, model=model, width=n, chunk=chunk)
      for n in (1, gamma + 1)
    ]
  )
  found = Finding('BUG', same, plain[same], other[same])
  unit = max(float(jnp.finfo(x.dtype).eps) / 2 for x in jax.tree.leaves(params))
  passes_BV = passes_BV.astype(np.float64)
  return _judged(found, passes_BV, unit, case, relative_limit)


def _judged(
  found: Finding, passes_BV, unit: float, case: Case, limit: float | None
) -> Finding:
  """The finding with its verdict; passes_BV are readings of the same text.

  unit: what one rounding changes, relatively. The arms' programs are compiled
  apart and round apart even where these passes agree to the bit: bfloat16
  SmolLM2 on CPU, by 2e-3 where the widths differ by 0.
  """
  assert found.position is not None
  one_V = passes_BV[0]
  # -inf is for padded ids, in every pass.
  finite = np.isfinite(one_V)
  if not finite.any() or not np.isfinite(passes_BV[:, finite]).all():
    return dataclasses.replace(found, reason='logits are not finite')
  largest = float(np.abs(one_V[finite]).max())
  noise = max(float(np.ptp(passes_BV[:, finite], 0).max()), unit * largest)
  at = len(case.prompt) + found.position
  gap = max(
    needed(one_V, token, case, at)
    for token in (found.plain, found.other)
    if token is not None
  )
  verdict, reason = 'BUG', f'the gap is more than {FACTOR} times the noise'
  relative = noise / largest
  if limit is not None and relative > limit:
    reason = f'relative noise {relative:.1e}'
  elif gap <= FACTOR * noise:
    verdict, reason = 'tie', ''
  return dataclasses.replace(
    found, verdict=verdict, gap=gap, noise=noise, reason=reason
  )


def needed(
  logits_V: np.ndarray, token: int, case: Case, position: int
) -> float:
  """By how much logits must move for `token` to be the one emitted.

  More exactly, how far two logits must move against each other, each half of
  it: never more than that, so noise within it is never called a bug.

  Greedy: the distance to the largest logit. Sampled with plain decoding's own
  draws: the token emitted is the largest log p - log E among those that top-k
  and top-p keep, E its exponential; log p moves with the logits over the
  temperature. The token must be kept, and each rival passed or dropped.
  """
  if case.temperature < sampling_lib.GREEDY_BELOW:
    return float(logits_V.max() - logits_V[token])
  z_V = logits_V.astype(np.float64) / case.temperature
  if not np.isfinite(z_V[token]):
    return float('inf')
  arrival_V = np.asarray(_arrivals(case, position, len(logits_V)), np.float64)
  ahead_V = z_V - np.log(arrival_V)
  ahead_V -= ahead_V[token]

  def enough(gap):
    if not _may_enter(z_V, token, gap, case.top_k, case.top_p):
      return False
    rivals = np.flatnonzero(ahead_V > gap)
    if not rivals.size:
      return True
    # Where the largest of them can drop out, so can the others.
    largest = rivals[np.argmax(z_V[rivals])]
    return _may_drop(z_V, largest, gap, case.top_k, case.top_p)

  # The largest logit and the first arrival: nothing is left to overcome.
  high = max(ahead_V.max(), z_V.max() - z_V[token])
  return _least(enough, float(high)) * case.temperature


def _least(enough, high: float) -> float:
  """The smallest gap that is enough, a monotone predicate, true at `high`."""
  if enough(0.0):
    return 0.0
  low = 0.0
  for _ in range(50):
    middle = (low + high) / 2
    low, high = (low, middle) if enough(middle) else (middle, high)
  return high


def _may_enter(z_V, token: int, gap: float, top_k: int, top_p: float) -> bool:
  """Can moves of gap / 2 keep the token? True whenever they can.

  What stays above it must be fewer than top_k, of less mass than top_p.
  """
  above_V = z_V > z_V[token] + gap
  if 0 < top_k <= above_V.sum():
    return False
  if top_p >= 1 or not above_V.any():
    return True
  # The more tokens share the mass, the less of it is above.
  below_V = ~above_V & (z_V >= _kth(z_V, top_k) - gap)
  return _log_odds(z_V, above_V, below_V) - gap < _logit(top_p + ROUNDING)


def _may_drop(z_V, token: int, gap: float, top_k: int, top_p: float) -> bool:
  """Can moves of gap / 2 cut the token out? True whenever they can."""
  above_V = z_V >= z_V[token] - gap
  above_V[token] = False
  if 0 < top_k <= above_V.sum():
    return True
  if top_p >= 1 or not above_V.any():
    return False
  below_V = ~above_V & (z_V >= _kth(z_V, top_k) + gap)
  below_V[token] = True
  return _log_odds(z_V, above_V, below_V) + gap > _logit(top_p - ROUNDING)


def _kth(z_V, top_k: int) -> float:
  off = not 0 < top_k < len(z_V)
  return -np.inf if off else np.partition(z_V, -top_k)[-top_k]


def _log_odds(z_V, above_V, below_V) -> float:
  """Moves of gap / 2 change it by at most gap."""
  mass = lambda some_V: np.exp(z_V[some_V] - z_V.max()).sum()
  with np.errstate(divide='ignore'):
    return float(np.log(mass(above_V)) - np.log(mass(below_V)))


def _logit(p: float) -> float:
  return float(special.logit(np.clip(p, 0, 1)))


def _arrivals(case: Case, position: int, size: int):
  one = lambda x: jnp.array([x], jnp.uint32)
  (key,) = sampling_lib.next_keys(
    one(case.seed), one(case.request), one(position)
  )
  return sampling_lib.exponential(key, size, jnp.result_type(float))


@functools.partial(jax.jit, static_argnames=('model', 'width', 'chunk'))
def _score(params, tokens_BL, start, last, *, model, width, chunk):
  """Logits_BV after token `last`, read `width` at a time from `start` on.

  All rows hold the same tokens.
  """
  B, L = tokens_BL.shape
  each = lambda at: jnp.full((B,), at)
  cache, _ = forward.prefill(
    model, params, tokens_BL, each(start), model.init_cache(B, L), chunk=chunk
  )
  hidden = jax.eval_shape(
    lambda: forward.read(
      model, params, tokens_BL[:, :width], each(start), cache, slots=L
    )[0]
  )

  def body(carry):
    at, cache, _ = carry
    tokens_BT = tokens_BL.at[:, at + jnp.arange(width)].get(mode='clip')
    hidden_BTD, _, cache = forward.read(
      model, params, tokens_BT, each(at), cache, slots=L
    )
    return at + width, cache, hidden_BTD

  end, _, hidden_BTD = jax.lax.while_loop(
    lambda carry: carry[0] <= last,
    body,
    (start, cache, jnp.zeros(hidden.shape, hidden.dtype)),
  )
  # The head sees all rows of the window, as in a verify pass.
  logits_BTV = model.head(params, hidden_BTD)
  return jnp.take(logits_BTV, width - end + last, 1)
