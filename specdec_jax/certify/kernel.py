"""The promise about two windows in a row, many times."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specdec_jax import sampling, types
from specdec_jax.certify import base, enumerate_window, pairs, statistics


def kernel_law(subject: base.Subject, amount: int) -> base.Figure:
  """Two windows in a row on peaked laws: every draw, and their independence."""
  gamma, V = 4, 16
  rng = np.random.default_rng(subject.seed)
  z = 2 * rng.normal(size=(gamma + 1, V, V))
  p_NVV = pairs.normal(np.exp(z))
  q_KVV = pairs.normal(np.exp(z + rng.normal(size=z.shape)))[:gamma]
  size = min(amount // 2, 2**16)
  tests: dict[str, statistics.Test | float] = {}
  for rule in subject.lossless():
    run = functools.partial(
      _two_windows,
      rule,
      p_NVV.astype(np.float32),
      q_KVV.astype(np.float32),
      np.uint32(subject.seed),
    )
    total = None
    for i in range(amount // (2 * size)):
      one = jax.device_get(run(np.arange(size, dtype=np.uint32) + i * size))
      wide = jax.tree.map(lambda x: x.astype(np.float64), one)
      total = wide if total is None else jax.tree.map(np.add, total, wide)
    tests |= _marginals(rule.name, total, p_NVV)
    # Of a rule that draws for itself these draws depend on its accept tests.
    if not enumerate_window.draws(rule):
      tests |= _next_tokens(rule.name, total, p_NVV, q_KVV)
    tests |= _independence(rule.name, total, p_NVV[0, 0])
  singles, both = (
    statistics.detectable(amount // 2, cells, len(tests)) for cells in (16, 256)
  )
  return statistics.judge(
    tests,
    f'{", ".join(rule.name for rule in subject.lossless())}: '
    f'{statistics.amount_of(amount)} windows each, V {V}, gamma {gamma}',
    f'; detects TV {singles:.1e} in single tokens, {both:.1e} in pairs',
  )


@functools.partial(jax.jit, static_argnums=0)
def _two_windows(rule, p_NVV, q_KVV, seed, request_B):
  """Counts of two consecutive windows of each request, from the same state."""
  N, V, _ = p_NVV.shape
  lengths_B = jnp.full(request_B.shape[0], 9, jnp.int32)
  count = lambda x, y: jnp.zeros((V, V), jnp.int32).at[x, y].add(1)
  out, firsts, accepted = [], [], []
  for number in range(2):
    said, found = _window(
      rule, p_NVV, q_KVV, seed, number, request_B, lengths_B
    )
    a_B, prev_B, next_B, law_BV = found
    zeros = lambda t: jnp.zeros((N, V, V), t)
    out.append(
      dict(
        pairs=jnp.stack([count(x, y) for x, y in itertools.pairwise(said)]),
        last=zeros(jnp.int32).at[a_B, prev_B, next_B].add(1),
        law=zeros(jnp.float32).at[a_B, prev_B].add(law_BV),
      )
    )
    firsts.append(said[0])
    accepted.append(a_B)
    lengths_B += a_B + 1
  return jax.tree.map(jnp.add, *out) | dict(
    rows=count(firsts[0][:-1:2], firsts[0][1::2]),
    windows=count(*firsts),
    lengths=jnp.zeros((N, N), jnp.int32).at[accepted[0], accepted[1]].add(1),
  )


def _window(rule, p_NVV, q_KVV, seed, number, request_B, lengths_B):
  """-> (N tokens, (accepted, token before, next token, its law))."""
  N, B = len(p_NVV), request_B.shape[0]
  warm = sampling.settings(B, 1.0)
  noise_of = lambda seed, gamma, coupled: sampling.noise(
    jnp.full(B, seed),
    request_B,
    lengths_B,
    warm,
    gamma=gamma,
    coupled=coupled,
  )
  noise = noise_of(seed, N - 1, rule.coupled)
  last_B, tokens, rows = jnp.zeros(B, jnp.int32), [], []
  for k in range(N - 1):
    rows.append(q_KVV[k, last_B])
    last_B = noise.draft(k, rows[-1])
    tokens.append(last_B)
  tokens_BK = jnp.stack(tokens, 1)
  before_BN = jnp.pad(tokens_BK, ((0, 0), (1, 0)))
  draft = types.Draft(
    tokens_BK, jnp.stack(rows, 1), jnp.full(B, N - 1, jnp.int32)
  )
  verdict = rule.verify(noise, draft, p_NVV[jnp.arange(N), before_BN])
  a_B, weights_BV = verdict
  next_B = noise.next(a_B, weights_BV)
  # The rest of the window by the target itself, with noise of its own.
  rest = noise_of(seed + 1 + number, 0, False)
  said, last_B = [], jnp.zeros(B, jnp.int32)
  for k in range(N):
    drawn_B = rest.next(jnp.full(B, k, jnp.int32), p_NVV[k, last_B])
    mine_B = jnp.where(k == a_B, next_B, drawn_B)
    last_B = jnp.where(k < a_B, before_BN[:, min(k + 1, N - 1)], mine_B)
    said.append(last_B)
  prev_B = jnp.take_along_axis(before_BN, a_B[:, None], 1)[:, 0]
  law_BV = weights_BV / jnp.sum(weights_BV, -1, keepdims=True)
  return said, (a_B, prev_B, next_B, law_BV)


def _marginals(name: str, seen, p_NVV) -> dict[str, statistics.Test]:
  """Single tokens and pairs against the target's own law."""
  law_V = p_NVV[0, 0]
  tests = {f'{name}: token 1': statistics.Test(seen['pairs'][0].sum(1), law_V)}
  for k, counts in enumerate(seen['pairs'], 1):
    pair = law_V[:, None] * p_NVV[k]
    law_V = pair.sum(0)
    tests[f'{name}: token {k + 1}'] = statistics.Test(counts.sum(0), law_V)
    tests[f'{name}: tokens {k} and {k + 1}'] = statistics.Test(counts, pair)
  return tests


def _next_tokens(name: str, seen, p_NVV, q_KVV) -> dict[str, statistics.Test]:
  """Recovered and bonus tokens, by the token before them.

  For `reject` against the residual of Leviathan et al. 2023; for another rule
  against the weights that it named.
  """
  tests, K = {}, len(q_KVV)
  for a, counts in enumerate(seen['last']):
    kind = 'bonus' if a == K else f'recovered after {a} drafts'
    law = seen['law'][a]
    if name == 'reject':
      q_VV = q_KVV[a] if a < K else 0
      law = pairs.normal(np.maximum(p_NVV[a] - q_VV, 0))
      law = law * counts.sum(1, keepdims=True)
    if counts.sum():
      tests[f'{name}: {kind}'] = statistics.Test(counts, law / law.sum())
  return tests


def _independence(name: str, seen, law_V) -> dict[str, statistics.Test | float]:
  both = np.outer(law_V, law_V)
  tests: dict[str, statistics.Test | float] = {
    f'{name}: rows are independent': statistics.Test(seen['rows'], both),
    f'{name}: windows are independent': statistics.Test(seen['windows'], both),
  }
  lengths, n = seen['lengths'], seen['lengths'].sum()
  # Rare lengths together: the test wants ten or so in every cell.
  rare = np.minimum(lengths.sum(0), lengths.sum(1)) ** 2 < 10 * n
  merge = lambda x: np.vstack([x[~rare], x[rare].sum(0)]) if rare.any() else x
  lengths = merge(merge(lengths).T)
  keep = lambda x: x[x.sum(1) ** 2 >= 10 * n]
  lengths = keep(keep(lengths).T)
  if min(lengths.shape) > 1:
    _, p, *_ = stats.chi2_contingency(lengths)
    name = f'{name}: accepted lengths are independent'
    tests[name] = np.asarray(p).item()
  return tests
