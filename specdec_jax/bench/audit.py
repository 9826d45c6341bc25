"""Decides whether two texts' first different token is a tie or a bug.

A verify pass over gamma + 1 tokens sums in another order than a pass over one,
so a near-tie may fall the other way. The audit measures that rounding noise
where two texts diverge; a larger difference is a bug. So is noise that rounding
does not explain, such as a wrong mask's. What rounding explains is measured
without a verify pass: how much logits change in a pass over one token where
every weight moves by up to one rounding.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import forward, hosts, requests, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import records
from specdec_jax.models import weights

# A choice may differ by both tokens' noise, in both methods.
FACTOR = 4
# Noise above this share of the largest logit is itself a bug. In bfloat16
# random models of 2 and 12 layers are off their float32 logits by 0.01 of the
# largest (0.04 at most), and 2 layers of weights 1.5 times as large by 0.02
# (0.1). Of larger weights rounding decides the text: no verdict means anything.
NOISE_LIMITS = {
  'float64': 1e-12,
  'float32': 1e-3,
  'float16': 0.15 / 8,  # a rounding is an eighth of bfloat16's
  'bfloat16': 0.15,
}
# How many times what rounding the weights changes noise may be: 2 were seen in
# float32, in random models of 2 to 8 layers. Sums of thousands of products in
# their own dtype are off by more; those of 16-bit numbers are made in float32.
TIMES = {'float64': 20, 'float32': 20, 'float16': 4, 'bfloat16': 4}


class Passes(NamedTuple):
  """How both methods ran: sampling, and what the order of sums depends on.

  gamma: the other method's; its verify passes had gamma + 1 tokens, or 1.
  chunk: the prefill's. length: the token buffer's.
  rows: batch size; a kernel may be chosen by it.
  """

  sampling: sampling_lib.Sampling
  gamma: int
  chunk: int
  length: int
  rows: int = 1


def compare(
  model: types.Model,
  params: types.Params,
  pairs: Iterable[Sequence[records.Answer]],
  passes: Passes,
) -> records.Audit:
  """Audits pairs of answers, by plain decoding and by another method, which
  promises the same tokens."""
  compared, findings = [], []
  for plain, other in pairs:
    found = audit(model, params, plain, other, passes)
    if found.position is None:
      compared.append(min(len(plain.tokens), len(other.tokens)))
    else:  # Nothing is compared after a first divergence.
      compared.append(found.position + 1)
      findings.append(found)
  return records.Audit(
    'tokens', len(compared), tuple(compared), tuple(findings)
  )


def audit(
  model: types.Model,
  params: types.Params,
  plain: records.Answer,
  other: records.Answer,
  passes: Passes,
) -> records.Finding:
  """Compares the two answers to one request (greedy, or coupled); a text cut
  short by broken logits, a failure reported elsewhere, as far as both go."""
  item, both = plain.item, list(zip(plain.tokens, other.tokens, strict=False))
  same = next((i for i, (a, b) in enumerate(both) if a != b), len(both))
  bug = records.Finding('BUG', same, id=item.id)
  if same == len(both):
    alike = len(plain.tokens) == len(other.tokens)
    if alike or plain.broken or other.broken:
      return records.Finding('identical', id=item.id)
    return bug._replace(reason='one text ends where the other goes on')
  bug = bug._replace(plain=both[same][0], other=both[same][1])
  text = [*item.tokens, *plain.tokens[:same]]
  tokens_BL = np.zeros((passes.rows, passes.length), np.int32)
  tokens_BL[:, : len(text)] = text
  one_BV, shaken_BV, *wide = _logits(
    model, params, item, tokens_BL, len(text), passes
  )
  one_V = one_BV[0]
  real = ~np.isneginf(one_V)  # -inf is for padded ids, in every pass.
  passes_BV = np.concatenate([one_BV, *wide])[:, real]
  every_BV = np.concatenate([passes_BV, shaken_BV[:, real]])
  if not real.any() or not np.isfinite(every_BV).all():
    return bug._replace(reason='logits are not finite')
  largest, dtype = float(np.abs(one_V[real]).max()), weights.coarsest(params)
  # What one rounding changes. The methods' programs are compiled apart and
  # round apart even where these passes agree to the bit: bfloat16 SmolLM2 on
  # CPU, by 2e-3 where the widths differ by 0.
  least = float(jnp.finfo(dtype).eps) / 2 * largest
  moved_V = np.abs(shaken_BV[0] - one_V)[real]
  s, at = passes.sampling, (item.number, len(text), len(one_V))
  arrival_V = arrivals(s.seed, *at)
  gap = max(needed(one_V, x, s, arrival_V) for x in both[same])
  noise = max(float(np.ptp(passes_BV, 0).max()), least)
  rounding = max(float(moved_V.max()), least)
  limit = largest * NOISE_LIMITS.get(dtype, max(NOISE_LIMITS.values()))
  times = TIMES.get(dtype, min(TIMES.values()))
  why = ''
  if noise > limit:
    why = f'noise {noise:.2g} is over its limit of {limit:.2g}'
  elif noise > times * rounding:
    why = f'noise is {noise / rounding:.2g} times what rounding changes'
  elif gap > FACTOR * noise:
    why = f'the gap is more than {FACTOR} times the noise'
  return bug._replace(
    verdict='BUG' if why else 'tie',
    gap=gap,
    noise=noise,
    rounding=rounding,
    reason=why,
  )


def _logits(
  model, params, item: requests.Item, tokens_BL, end: int, passes: Passes
) -> list[np.ndarray]:
  """Reads logits_BV after `end` tokens: one by one, the same with _shaken
  parameters, and gamma + 1 at a time, with the last at each offset of a window
  in turn."""
  start, last, wide = len(item.tokens) - 1, end - 1, passes.gamma + 1
  source = np.tile(np.array(item.source, np.int32), (len(tokens_BL), 1))
  score = lambda start, **way: _score(
    *(params, tokens_BL, source, np.int32(start), np.int32(last)),
    model=model,
    chunk=passes.chunk,
    **way,
  )
  # A window may start before its text: nothing is written there.
  starts = [start - (offset - last + start) % wide for offset in range(wide)]
  found = [score(start, width=1), score(start, width=1, shake=True)]
  found += [score(x, width=wide) for x in starts]
  return [np.asarray(x, np.float64) for x in hosts.fetch(found)]


def needed(
  logits_V: np.ndarray,
  token: int,
  s: sampling_lib.Sampling,
  arrival_V: np.ndarray,
) -> float:
  """Returns the least gap, in logits, that makes the sampler emit `token`.

  Greedy: its distance to the largest logit. Sampled: plain decoding emits the
  largest log p - log E among tokens that top-k and top-p keep, E being a
  token's exponential draw (`arrivals`). Tokens ahead of `token` in that order
  or in p move down by half the gap, all others up; bisection finds the least
  gap that emits it.
  """
  if s.temperature < sampling_lib.GREEDY_BELOW:
    return float(logits_V.max() - logits_V[token])
  if not np.isfinite(logits_V[token]):
    return float('inf')
  race_V = logits_V / s.temperature - np.log(arrival_V)
  ahead_V = (race_V > race_V[token]) | (logits_V > logits_V[token])
  move_V = np.where(ahead_V, -0.5, 0.5)
  sampling = sampling_lib.of([s])

  def emitted(gap):
    p_V = _probabilities(logits_V + gap * move_V, sampling)
    return int(np.argmax(np.asarray(p_V) / arrival_V)) == token

  if emitted(0.0):
    return 0.0
  # At this gap `token` has the largest logit and the largest log p - log E.
  high = max(
    logits_V.max() - logits_V[token],
    s.temperature * (race_V.max() - race_V[token]),
  )
  low = 0.0
  for _ in range(40):
    middle = (low + high) / 2
    low, high = (low, middle) if emitted(middle) else (middle, high)
  return float(high)


@jax.jit
def _probabilities(logits_V, sampling):
  return sampling_lib.probabilities(logits_V[None, None], sampling)[0, 0]


def arrivals(seed: int, number: int, position: int, size: int) -> np.ndarray:
  """Draws an exponential for every id, at a request's position."""
  asked = (jnp.array([x], jnp.uint32) for x in (seed, number, position))
  (key,) = sampling_lib.next_keys(*asked)
  found_V = sampling_lib.exponential(key, size, jnp.result_type(float))
  return np.asarray(found_V, np.float64)


def _shaken(params: types.Params) -> types.Params:
  """Moves every parameter by up to one rounding, at random, except those with
  fewer digits than are computed with."""
  leaves, tree = jax.tree.flatten(params)
  least = jnp.finfo(weights.coarsest(params)).eps

  def moved(i: int, x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    if jnp.finfo(x.dtype).eps > least:
      return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    eps = float(jnp.finfo(x.dtype).eps)
    key = jax.random.fold_in(jax.random.key(0), i)
    change = jax.random.uniform(key, x.shape, wide, -eps, eps)
    return (x.astype(wide) * (1 + change)).astype(x.dtype)

  return tree.unflatten([moved(i, x) for i, x in enumerate(leaves)])


@functools.partial(
  jax.jit, static_argnames=('model', 'width', 'chunk', 'shake')
)
def _score(
  params, tokens_BL, source_BI, start, last, *, model, width, chunk, shake=False
):
  """Reads logits_BV after token `last`, `width` at a time from `start` on; all
  rows hold the same tokens and source. shake: with _shaken parameters."""
  params = _shaken(params) if shake else params
  B, L = tokens_BL.shape
  lengths_B = jnp.full((B,), source_BI.shape[1], jnp.int32)
  source = types.Source(source_BI, lengths_B)
  each = lambda at: jnp.full((B,), at)
  cache = forward.open_cache(model, params, B, L, source)
  cache = forward.prefill(
    model, params, tokens_BL, each(start), cache, chunk=chunk
  )

  def window(at, cache):
    tokens_BT = forward.at(tokens_BL, at + jnp.arange(width))
    hidden_BTD, _, cache = forward.read(
      model, params, tokens_BT, each(at), cache, slots=L
    )
    return at + width, cache, hidden_BTD

  # The first window outside the loop, for the shape of its hidden states.
  end, _, hidden_BTD = jax.lax.while_loop(
    lambda carry: carry[0] <= last,
    lambda carry: window(*carry[:2]),
    window(start, cache),
  )
  # The head sees all rows of the window, as in a verify pass.
  logits_BTV = model.head(params, hidden_BTD)
  return jnp.take(logits_BTV, width - end + last, 1)
