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

from specdec_jax import sampling as sampling_lib
from specdec_jax import types, windows

# A choice may differ by both tokens' noise, in both arms.
FACTOR = 4
# float32 noise above this share of the largest logit is itself a bug.
NOISE_LIMIT = 1e-3


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
  difference of a logit between passes of width 1 and gamma + 1.
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
  relative_limit: float | None = NOISE_LIMIT,
) -> Finding:
  """Compares two arms that promise the same tokens (greedy, or coupled).

  Args:
    model: the target.
    params: its parameters.
    case: the two outputs.
    gamma: the other arm's; its verify passes had gamma + 1 tokens.
    chunk: of the prefill, as both arms ran it.
    length: token buffer length, as both arms ran it.
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
  tokens = [*case.prompt, *plain[:same]]
  scored = functools.partial(
    _last_logits,
    model,
    params,
    tokens,
    len(case.prompt),
    chunk=chunk,
    length=length,
  )
  one_V, wide_V = scored(width=1), scored(width=gamma + 1)
  finite = np.isfinite(one_V)
  noise = float(np.abs(one_V - wide_V)[finite].max())
  found = functools.partial(
    Finding, position=same, plain=plain[same], other=other[same], noise=noise
  )
  if not np.isfinite(wide_V[finite]).all():
    return found('BUG', reason='logits are not finite')
  relative = noise / float(np.abs(one_V[finite]).max())
  if relative_limit is not None and relative > relative_limit:
    return found('BUG', reason=f'relative noise {relative:.1e}')
  position = len(case.prompt) + same
  gap = max(
    needed(one_V, token, case, position) for token in (plain[same], other[same])
  )
  if gap <= FACTOR * noise:
    return found('tie', gap=gap)
  return found('BUG', gap=gap, reason='the gap is more than 4 times the noise')


def needed(
  logits_V: np.ndarray, token: int, case: Case, position: int
) -> float:
  """By how much logits must move for `token` to be the one emitted.

  Greedy: the distance to the largest logit. Sampled with plain decoding's own
  draws: the token emitted is the largest log p - log E among those that top-k
  and top-p keep, E its exponential; log p moves with the logits over the
  temperature. A token outside the kept set must also get in, and a better one
  may drop out.
  """
  if case.temperature < sampling_lib.GREEDY_BELOW:
    return float(logits_V.max() - logits_V[token])
  scaled_V = logits_V.astype(np.float64) / case.temperature
  arrival_V = np.asarray(_arrivals(case, position, len(logits_V)), np.float64)
  score_V = scaled_V - np.log(arrival_V)
  with np.errstate(invalid='ignore'):  # -inf less -inf, for padded ids
    margin_V = _margins(scaled_V, case.top_k, case.top_p)
  beats_V = score_V > score_V[token]
  # A rival is overcome by passing it, or by its dropping out of the kept set.
  rivals_V = np.minimum(score_V - score_V[token], np.maximum(margin_V, 0))
  passing = rivals_V[beats_V].max(initial=0.0)
  entering = max(0.0, -margin_V[token])
  return float(max(passing, entering)) * case.temperature


def _margins(scaled_V: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
  """How far each token is inside (+) or outside (-) the kept set, in log p.

  The distance to the first token on the other side of a cut, or, for top-p, the
  change of log p that moves the mass above the token across top_p; the smaller.
  """
  order = np.argsort(-scaled_V, kind='stable')
  z = scaled_V[order]
  rank = np.arange(len(z))
  margin = np.full(len(z), np.inf)
  kept = np.ones(len(z), bool)
  if 0 < top_k < len(z):
    kept = z >= z[top_k - 1]
    outside = z[~kept].max(initial=-np.inf)
    margin = np.where(kept, z - outside, z - z[top_k - 1])
  if top_p < 1:
    p = np.where(kept, np.exp(z - z[0]), 0)
    p /= p.sum()
    above = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    last = int(np.searchsorted(np.cumsum(p), top_p))
    last = min(last, int(kept.sum()) - 1)
    inside = rank <= last
    # Noise n in log p changes a mass m by at most about 2 n m (1 - m).
    slack = np.maximum(2 * above * (1 - above), 1e-12)
    mass = np.abs(above - top_p) / slack
    edge = np.where(inside, z - z[min(last + 1, len(z) - 1)], z[last] - z)
    nucleus = np.where(inside, 1, -1) * np.minimum(mass, np.abs(edge))
    # The best token is always kept.
    nucleus[0] = np.inf
    margin = np.minimum(margin, nucleus)
  out = np.empty(len(z))
  out[order] = margin
  return out


def _arrivals(case: Case, position: int, size: int):
  one = lambda x: jnp.array([x], jnp.uint32)
  (key,) = sampling_lib.next_keys(
    one(case.seed), one(case.request), one(position)
  )
  return sampling_lib.exponential(key, size, jnp.result_type(float))


def _last_logits(
  model, params, tokens, prompt: int, *, width: int, chunk: int, length: int
) -> np.ndarray:
  """Logits after the last token, the text read `width` tokens at a time."""
  tokens_1L = np.zeros((1, length), np.int32)
  tokens_1L[0, : len(tokens)] = tokens
  return np.asarray(
    _score(
      params,
      tokens_1L,
      np.array([prompt - 1], np.int32),
      np.array([len(tokens) - 1], np.int32),
      model=model,
      width=width,
      chunk=chunk,
    ),
    np.float64,
  )


@functools.partial(jax.jit, static_argnames=('model', 'width', 'chunk'))
def _score(params, tokens_1L, start_1, last_1, *, model, width, chunk):
  L = tokens_1L.shape[1]
  cache, _ = windows.prefill(
    model, params, tokens_1L, start_1, model.init_cache(1, L), chunk=chunk
  )
  hidden = jax.eval_shape(
    lambda: windows.read(
      model, params, tokens_1L[:, :width], start_1, cache, slots=L
    )[0]
  )

  def body(carry):
    at_1, cache, _ = carry
    index_T = at_1[0] + jnp.arange(width)
    tokens_1T = tokens_1L.at[:, index_T].get(mode='clip')
    hidden_1TD, _, cache = windows.read(
      model, params, tokens_1T, at_1, cache, slots=L
    )
    return at_1 + width, cache, hidden_1TD

  at_1, _, hidden_1TD = jax.lax.while_loop(
    lambda carry: carry[0][0] <= last_1[0],
    body,
    (start_1, cache, jnp.zeros(hidden.shape, hidden.dtype)),
  )
  # The head sees all rows of the window, as in a verify pass.
  logits_1TV = model.head(params, hidden_1TD)
  return jnp.take(logits_1TV[0], width - at_1[0] + last_1[0], 0)
