"""Promises about text distributions, by counting production samples."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from specdec_jax import forward, types
from specdec_jax.certify import base, table_model

# --- counts against probabilities ---------------------------------------------

# Chance of any false alarm in one promise.
ALPHA = 1e-9


class Test(NamedTuple):
  """Counts of outcomes and, of the same shape, their expected probabilities."""

  counts: np.ndarray
  p: np.ndarray


def chi_square(counts, p, *, least: float = 10.0) -> float:
  """Computes counts' p-value; pools cells that expect fewer than `least`."""
  counts = np.asarray(counts, np.float64).ravel()
  expected = np.asarray(p, np.float64).ravel() * counts.sum()
  if counts[expected == 0].any() or not np.isfinite(expected).all():
    return 0.0
  big = expected >= least
  pool = lambda x: np.append(x[big], x[~big].sum())
  counts, expected = pool(counts), pool(expected)
  if expected[-1] < least and len(counts) > 1:
    counts[-2] += counts[-1]
    expected[-2] += expected[-1]
    counts, expected = counts[:-1], expected[:-1]
  if len(counts) < 2:
    return 1.0
  score = ((counts - expected) ** 2 / expected).sum()
  return float(stats.chi2.sf(score, len(counts) - 1))


def judge(tests: Mapping[str, Test], size: str, extra: str = '') -> base.Figure:
  """Runs chi-square tests with Bonferroni's correction, short texts first."""
  bound, least = ALPHA / len(tests), 1.0
  for name, test in tests.items():
    p = chi_square(*test)
    if not p > bound:
      expected = test.p * test.counts.sum()
      off = np.abs(test.counts - expected) / np.sqrt(np.maximum(expected, 1e-9))
      at = np.unravel_index(np.argmax(off), test.p.shape)
      raise base.Broken(
        f'{name}: the counts do not follow the target, p = {p:.1e} in '
        f'{len(tests)} tests, allowed {bound:.0e}; worst at '
        f'{" ".join(map(str, at))}: {test.counts[at]:.0f} seen, '
        f'{expected[at]:.1f} expected; {size}'
      )
    least = min(least, p)
  return base.Figure(
    f'p >= {least:.2g} in {len(tests)} tests{extra}',
    f'p > {bound:.0e} each',
    size,
  )


def detectable(n: int, cells: int, tests: int, power: float = 0.999) -> float:
  """Finds the least total variation that n draws detect with this power."""
  limit = stats.chi2.isf(ALPHA / tests, cells - 1)
  missed = lambda shift: stats.ncx2.sf(limit, cells - 1, shift) - power
  found = optimize.root_scalar(missed, bracket=(1, 1e4))
  return math.sqrt(found.root / (4 * n))


def _tests(
  world: base.World, pair: base.Pair, name, prompts, exact, texts, rows, **asked
) -> dict[str, Test]:
  """Counts so many texts, of all prompts together; each prompt has its Tests.

  For every m one counts the first m tokens, and one the last three. Tokens
  after a stop id count as that id.

  exact: (prompt, n) -> the joint distribution of n tokens, [V] * n.
  rows: in a batch, which is decoded again and again with other request numbers.
  asked: as base.request_of takes it.
  """
  gamma = pair.drafter.gamma
  new = _length(gamma, world.vocab)
  # Made once: checking 16,384 prompts takes an eighth of the time of a batch.
  request = base.make_request(
    world, prompts * (rows // len(prompts)), new, gamma=gamma, **asked
  )
  counts = {len(x): np.zeros((world.vocab,) * new, np.int64) for x in prompts}
  stop = request.stop_BX[0, 0]  # -1 without stop ids
  for start in range(0, texts, rows):
    numbers = np.arange(rows, dtype=request.request_B.dtype) + start
    out = base.run(world, pair, request._replace(request_B=numbers))
    for n, count in counts.items():
      mine_B = request.lengths_B == n
      tokens = out.tokens_BL[mine_B, n : n + new]
      ended = np.arange(new) >= (out.lengths_B[mine_B] - n)[:, None]
      if ended[:, 0].any() or (tokens[~ended[:, -1]][:, :-1] == stop).any():
        raise base.Broken('a text is empty, or goes on after its end')
      tokens[ended] = stop
      np.add.at(count, tuple(tokens.T), 1)
  tests: dict[str, Test] = {}
  for prompt in prompts:
    count, p = counts[len(prompt)], exact(prompt, new)
    others = {f'first {m}': range(m, new) for m in range(1, new + 1)}
    for words, axes in (others | {'last 3': range(new - 3)}).items():
      both = Test(count.sum(tuple(axes)), p.sum(tuple(axes)))
      tests[f'{name}, prompt of {len(prompt)}: {words} tokens'] = both
  return tests


def _length(gamma: int, vocab: int) -> int:
  """Sets a text's tokens: above two windows, if V ** length stays small."""
  return min(max(2 * gamma + 3, 7), {2: 19, 3: 9, 4: 9}[vocab])


# --- table models -------------------------------------------------------------

QUICK_TABLES = 2**16
# Windows of these gammas are counted at V 2, trees at V 4, after prompts that
# go over one and over two edges of prefill's chunks, each in half of the texts.
LONG_GAMMAS = (4, 8, 5, 6, 7)
LONG_PROMPTS = [
  np.random.default_rng(n).integers(0, 2, n).tolist() for n in (10, 21)
]
_WARM: dict[str, Any] = dict(temperature=0.9, top_p=0.95)


def tables(subject: base.Subject, amount: int) -> base.Figure:
  """Counts table models' texts of more than two windows."""
  tests, done = {}, {}
  full = amount > QUICK_TABLES
  for rule, label, most, vocab, prompts in _cells(subject, full=full):
    # Of the full tier's nine cells five are long, and dear.
    texts = amount // 8 if full and prompts else amount
    world = subject.tables(vocab)
    pair = subject.pair(world, most, rule, label)
    gamma = pair.drafter.gamma
    if (len(pair.drafter.tree) or gamma) > 3 and vocab > 2:
      # A drafter may fix its gamma; a long window needs a smaller vocabulary.
      world = subject.tables(2)
      pair = subject.pair(world, most, rule, label)
    name = f'{rule.name}, {label}, gamma {gamma}, V {world.vocab}'
    # A name has one short window, and one after long prompts.
    if (cell := (name, bool(prompts))) in done:
      continue
    done[cell] = f'{rule.name} {label} {gamma}: {texts:,}'
    prompts = prompts or [table_model.PROMPT[world.vocab]]
    exact = functools.partial(base.joint, world, **_WARM)
    rows = min(texts, 2**14)
    asked = dict(_WARM, seed=subject.seed, drafts=_caps(rows, gamma))
    tests |= _tests(world, pair, name, prompts, exact, texts, rows, **asked)
  return judge(
    tests,
    f'{len(done)} cells; rule, drafter, gamma: texts: '
    + ', '.join(sorted(set(done.values()))),
  )


def _caps(rows: int, gamma: int) -> np.ndarray:
  """Caps rows' drafts: at gamma, and at 0 to gamma - 1 in a quarter."""
  at_B = np.arange(rows) // 2  # prompts take turns
  return np.where(at_B % 4 == 3, at_B // 4 % max(gamma, 1), gamma)


def _cells(subject: base.Subject, *, full: bool):
  """Yields (rule, drafter, gamma, V, prompts) to count; None: usual prompts."""
  grid = [(3, 3), (2, 4), (3, 4), (2, 3)]
  for i, (rule, name) in enumerate(subject.pairs()):
    for gamma, vocab in grid if full else [grid[i % len(grid)]]:
      yield rule, name, gamma, vocab, None
    gammas = LONG_GAMMAS if full else [LONG_GAMMAS[i % len(LONG_GAMMAS)]]
    for gamma in gammas:
      # Siblings of two ids would be all there are.
      yield rule, name, gamma, 4 if name == base.TREE else 2, LONG_PROMPTS


# --- a transformer ------------------------------------------------------------

EOS, VOCAB, TEMPERATURE, ROWS = 3, 4, 0.8, 256
# Each in half of the rows of a batch.
PROMPTS = ([2, 0], [2, 0, 0, 1, 2, 1, 0, 2, 1, 1, 0])


def transformer(subject: base.Subject, amount: int) -> base.Figure:
  """Counts a transformer's first tokens: ragged batches, EOS inside windows."""
  # Not scaled up: a T5 would draw one text only.
  world = subject.transformers(VOCAB, scale=1, width=8, head_dim=4, mlp=16)
  tests: dict[str, Test] = {}
  label = next(iter(subject.drafters))
  # One compiled program a rule.
  cells = list(zip(subject.apart(), itertools.cycle((4, 2, 3)), strict=False))
  each = amount // len(cells) // ROWS * ROWS
  exact = functools.partial(_autoregressive, world)
  asked = dict(temperature=TEMPERATURE, stop_ids=[EOS], seed=subject.seed)
  for rule, gamma in cells:
    pair = subject.pair(world, gamma, rule)
    name = f'{rule.name}, {label}, gamma {pair.drafter.gamma}'
    tests |= _tests(world, pair, name, PROMPTS, exact, each, ROWS, **asked)
  least = detectable(each // 2, VOCAB, len(tests))
  names = ', '.join(f'{rule.name} {label}' for rule, _ in cells)
  return judge(
    tests,
    f'{each:,} texts in each of {len(cells)} cells, batches of {ROWS}: {names}',
    f'; detects TV {least:.1e} in single tokens',
  )


def _autoregressive(world: base.World, prompt, new: int) -> np.ndarray:
  """Computes the exact joint p of `new` tokens: every text, teacher-forced."""
  texts_XN = np.indices((VOCAB,) * new, np.int32).reshape(new, -1).T
  over_XN = np.cumsum(texts_XN == EOS, 1) - (texts_XN == EOS) > 0
  kept_X = ((texts_XN == EOS) | ~over_XN).all(1)
  texts_XN, over_XN = texts_XN[kept_X], over_XN[kept_X]
  # As long for every prompt: one program reads them all.
  start, length = len(prompt), max(map(len, PROMPTS)) + new
  tokens_XL = np.zeros((len(texts_XN), length), np.int32)
  tokens_XL[:, :start] = prompt
  tokens_XL[:, start : start + new] = texts_XN
  source = base.make_request(world, [prompt], 1).source
  source = jax.tree.map(lambda x: x.repeat(len(tokens_XL), 0), source)
  p_XL = _probabilities(world.target, world.weights.target, tokens_XL, source)
  p_XN = np.asarray(p_XL[:, start - 1 :][:, :new], np.float64)
  p_XN = np.where(over_XN, 1, p_XN)
  out = np.zeros((VOCAB,) * new)
  out[tuple(texts_XN.T)] = p_XN.prod(1)
  return out / out.sum()


@functools.partial(jax.jit, static_argnums=0)
def _probabilities(model: types.Model, params, tokens_BL, source):
  """Computes p of each token but the first at TEMPERATURE: [B, L - 1]."""
  hidden_BLD = forward.hidden(model, params, tokens_BL, source)
  p_BLV = jax.nn.softmax(model.head(params, hidden_BLD) / TEMPERATURE, -1)
  return jnp.take_along_axis(p_BLV[:, :-1], tokens_BL[:, 1:, None], -1)[..., 0]
