"""All metrics: definitions and computation, here only.

Names are the field's; where a name has several meanings there, the formula is
spelled out. Prefill is never a target call. All counts are exact.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from specdec_jax import decode, types
from specdec_jax.models import lm

# Counters of the batch, not of its rows.
_BATCH = 'widths_N', 'calls'


def rows(info: types.Info, pick=slice(None)) -> types.Info:
  """Info of some rows, on the host; counters of the batch are unchanged."""
  some = lambda name, x: np.asarray(x)[() if name in _BATCH else pick]
  return types.Info(
    **{n: None if x is None else some(n, x) for n, x in info._asdict().items()}
  )


def join(outputs: Sequence[decode.Output]) -> types.Info:
  """Several runs as one: rows side by side, counters of the batches added."""
  host, out = [rows(output.info) for output in outputs], {}
  for name in types.Info._fields:
    parts = [getattr(info, name) for info in host]
    if name in _BATCH:
      out[name] = np.sum(parts, 0)
    else:
      out[name] = None if parts[0] is None else np.concatenate(parts)
  return types.Info(**out)


# --- counts ----------------------------------------------------------------


class Summary(NamedTuple):
  """Counts and ratios over requests. A ratio without a denominator is None.

  emitted_tokens: tokens after the prompts.
  target_calls: windows verified, added over rows.
  drafted_tokens, accepted_tokens: draft tokens proposed, and those emitted.
  block_efficiency: emitted_tokens / target_calls; includes the recovered or
    bonus token, and windows cut by EOS or length (= mean acceptance length of
    vLLM, tau of EAGLE, accept length of SGLang).
  block_efficiency_uncut: the same over windows that nothing cut.
  draft_acceptance_rate: accepted / drafted, drafts after a rejection included,
    so it falls with gamma (vLLM's definition).
  acceptance_per_position: share of windows proposing offset k that accepted it
    (unconditional on the offsets before).
  conditional_acceptance_per_position: the same among windows that accepted
    every offset before k.
  proposal_rate: share of windows that proposed anything.
  accepted_histogram, uncut_histogram: windows by drafts accepted: all; uncut.
  proposed_per_position: windows that proposed offset k.
  tried_per_position: those of them that accepted every offset before k.
  accepted_per_position: those of them that accepted offset k too.
  """

  emitted_tokens: int
  target_calls: int
  drafted_tokens: int
  accepted_tokens: int
  block_efficiency: float | None
  block_efficiency_uncut: float | None
  draft_acceptance_rate: float | None
  acceptance_per_position: list[float | None]
  conditional_acceptance_per_position: list[float | None]
  proposal_rate: float | None
  accepted_histogram: list[int]
  uncut_histogram: list[int]
  proposed_per_position: list[int]
  tried_per_position: list[int]
  accepted_per_position: list[int]


def summary(info: types.Info) -> Summary:
  """The Summary of all rows of an Info."""
  counts = lambda x_BK: [int(n) for n in np.asarray(x_BK, np.int64).sum(0)]
  emitted = int((np.asarray(info.origin_BL) != types.PROMPT).sum())
  calls = int(np.asarray(info.calls_B, np.int64).sum())
  uncut_N = counts(info.whole_BN)
  proposed_K, tried_K = counts(info.proposed_BK), counts(info.tried_BK)
  accepted_K = counts(info.accepted_BK)
  drafted, accepted = sum(proposed_K), sum(accepted_K)
  uncut = sum((k + 1) * n for k, n in enumerate(uncut_N))
  return Summary(
    emitted_tokens=emitted,
    target_calls=calls,
    drafted_tokens=drafted,
    accepted_tokens=accepted,
    block_efficiency=ratio(emitted, calls),
    block_efficiency_uncut=ratio(uncut, sum(uncut_N)),
    draft_acceptance_rate=ratio(accepted, drafted),
    acceptance_per_position=list(map(ratio, accepted_K, proposed_K)),
    conditional_acceptance_per_position=list(map(ratio, accepted_K, tried_K)),
    proposal_rate=ratio(proposed_K[0] if proposed_K else 0, calls),
    accepted_histogram=counts(info.hist_BN),
    uncut_histogram=uncut_N,
    proposed_per_position=proposed_K,
    tried_per_position=tried_K,
    accepted_per_position=accepted_K,
  )


def ratio(numerator: float, denominator: float) -> float | None:
  return numerator / denominator if denominator else None


def repeated_ngrams(texts: Sequence[Sequence[int]], n: int = 8) -> float | None:
  """Share of n-grams that occurred before in the same text; high in loops."""
  found = repeated = 0
  for text in texts:
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    found += len(grams)
    repeated += len(grams) - len(set(grams))
  return ratio(repeated, found)


# --- memory ----------------------------------------------------------------


def tree_bytes(tree: Any) -> int:
  """Bytes of all arrays, over all devices, each shard counted once."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def step_parameters(params: types.Params) -> int:
  """Parameters that one forward pass reads, the head included.

  Without the position table and an untied embedding, of which it reads few
  rows, and without what reads a source, once a request.
  """
  return sum(x.size for _, x in _read_whole(params))


def row_products(params: types.Params, length: int, source: int) -> float:
  """Parameters times the tokens of a row of training that pass each of them.

  length: tokens of the row. source: those that its encoder reads, if any does.
  """
  encoder = jax.tree.leaves(params.get('encoder', {}))
  passed = step_parameters(params) * length
  return float(passed + sum(x.size for x in encoder) * source)


def step_bytes(params: types.Params) -> int:
  """Bytes of step_parameters."""
  return tree_bytes(dict(_read_whole(params)))


def slot_bytes(model: types.Model, rows: int) -> float:
  """Bytes of a cache for each of its slots, in all rows together."""
  many = 1024  # a cache may round slots up to whole panels
  cache = jax.eval_shape(lambda: model.init_cache(rows, many))
  return tree_bytes(cache) / many


def source_bytes(model: types.Model, params: types.Params, rows: int) -> float:
  """Bytes that an encoder leaves of each token of a source; 0 without one."""
  many, encode = 1024, model.encode
  if encode is None:
    return 0.0
  source = types.Source(np.zeros((rows, many), int), np.zeros(rows, int))
  left = lambda: encode(params, source, model.init_cache(rows, 0))
  return tree_bytes(jax.eval_shape(left)) / many


def _read_whole(params: types.Params) -> list[tuple[str, jax.Array]]:
  """The parameters of a pass, by flat name, of a tree of any kind."""
  named, _ = jax.tree_util.tree_flatten_with_path(params)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  flat = [(name(path), x) for path, x in named]
  return [x for x in flat if lm.every_pass(x[0])]


def own_bytes(params: types.Params, target: types.Params) -> int:
  """Bytes of the arrays that are not shared with the target."""
  own = {id(x): x for x in jax.tree.leaves(params)}
  for x in jax.tree.leaves(target):
    own.pop(id(x), None)
  return tree_bytes(list(own.values()))


def layers_share(params: types.Params, count: int) -> float:
  """Bytes of the first `count` layers over step_bytes, an estimate of time."""
  if not count:
    return 0.0
  total = 0.0
  for name, x in _read_whole(params):
    group, _, rest = name.partition('/')
    if group == 'layers' and rest[0].isdecimal():
      total += x.nbytes * (int(rest.partition('/')[0]) < count)
    elif group == 'layers':  # scanned: depth is the first axis
      total += x.nbytes * count / x.shape[0]
  return total / step_bytes(params)


# --- intervals -------------------------------------------------------------

# Prompts are the sample, never their repeats: what makes a prompt long or the
# machine slow is in both arms, and cancels. An improvement is a ratio of sums;
# its standard error is the jackknife's, leaving out one prompt at a time. (Of
# its logarithm, arms that are not faster would win twice as often as lose.) Few
# long prompts hold most of the time, so Student's t has one degree of freedom
# less than the prompts count for, (sum s)^2 / sum s^2 of their seconds (Kish
# 1965): with n - 1 of them, intervals of six prompts whose lengths vary much
# would hold the truth 90 times in 100. tests/bench/simulation.py counts.

RESAMPLES = 2000
FEWEST = 6  # prompts of an interval


class Interval(NamedTuple):
  """A value and the ends of its interval; None where they are not known.

  A value of None was too short to measure; ends of None come from fewer than
  FEWEST prompts, or from one batch.
  """

  value: float | None = None
  low: float | None = None
  high: float | None = None

  @property
  def outcome(self) -> str:
    """Of an improvement: win, loss, unclear, too few or too short."""
    if self.value is None:
      return 'too short'
    if self.low is None or self.high is None:
      return 'too few'
    if self.low > 1:
      return 'win'
    return 'loss' if self.high < 1 else 'unclear'

  @property
  def width(self) -> float | None:
    """Half of it, from the value to its upper end, as a share of the value."""
    if not self.value or self.high is None:
      return None
    return self.high / self.value - 1

  def enough(self, prompts: int) -> float:
    """How many prompts would exclude 1, if the value stays.

    prompts: of this interval; its width falls with their square root. inf at a
    value of 1.
    """
    assert self.value and self.high
    away = abs(self.value - 1)
    return prompts * ((self.high - self.value) / away) ** 2 if away else np.inf


def resamples(prompts: int) -> np.ndarray:
  """How often each prompt is drawn in each resample: [RESAMPLES, prompts]."""
  rng = np.random.default_rng(0)
  even = np.full(prompts, 1 / prompts)
  return rng.multinomial(prompts, even, size=RESAMPLES)


def draws(prompts: int) -> np.ndarray:
  """Each prompt once, then `resamples`, if FEWEST or more: [1 + R, prompts]."""
  once = np.ones((1, prompts), int)
  few = prompts < FEWEST
  return once if few else np.concatenate([once, resamples(prompts)])


def interval(value_R, prompts: int) -> Interval:
  """The first value with its 95 % interval, by how far those after it spread.

  For the rows of `draws(prompts)`. Their percentiles would be too narrow for
  few prompts: 88 % of seven instead of 95 %.
  """
  value = float(value_R[0])
  if len(value_R) == 1:
    return Interval(value)
  t = stats.t.ppf(0.975, prompts - 1)
  half = t * np.std(value_R[1:]) * np.sqrt(prompts / (prompts - 1))
  return Interval(value, float(value - half), float(value + half))


def one_of(x: Interval, many: int) -> Interval:
  """The interval of one of `many`, whichever of them is looked at: wider.

  x: a 95 % interval of a sample that is large enough to be normal.
  """
  if x.value is None or x.low is None or x.high is None:
    return x
  times = stats.norm.ppf(1 - 0.025 / many) / stats.norm.ppf(0.975)
  end = lambda y: float(x.value + (y - x.value) * times)
  return Interval(x.value, end(x.low), end(x.high))


def around(
  value: float, log_sd: float, prompts: int, level: float = 0.95
) -> Interval:
  """The Interval of a value from a bootstrap's standard deviation of its log.

  prompts: how many were resampled; one gives no ends.
  """
  if prompts < 2:
    return Interval(value)
  t = stats.t.ppf((1 + level) / 2, prompts - 1)
  factor = np.exp(t * log_sd * np.sqrt(prompts / (prompts - 1)))
  return Interval(value, float(value / factor), float(value * factor))


def speedups(tokens_AG, seconds_AG, level: float = 0.95) -> list[Interval]:
  """Tokens over seconds of every arm A but the first, over the first's.

  The intervals hold all at once: whichever arm is chosen afterwards, by these
  numbers too, its interval has paid for the choice.

  Args:
    tokens_AG: by arm and unit G, a prompt or a batch of them.
    seconds_AG: the same; means over repeats, above 0.
    level: how often all of them hold. One unit gives no ends.
  """
  tokens_AG, seconds_AG = (
    np.asarray(x, float) for x in (tokens_AG, seconds_AG)
  )
  sums = lambda x_AG: x_AG.sum(1, keepdims=True)
  over = lambda tokens, seconds: (tokens / seconds)[1:] / (tokens / seconds)[:1]
  value_A = over(sums(tokens_AG), sums(seconds_AG))[:, 0]
  units = tokens_AG.shape[1]
  if units < 2:
    return [Interval(float(x)) for x in value_A]
  left_AG = over(sums(tokens_AG) - tokens_AG, sums(seconds_AG) - seconds_AG)
  left_AG -= left_AG.mean(1, keepdims=True)
  error_A = np.sqrt((units - 1) / units * (left_AG**2).sum(1))
  weight_G = (seconds_AG / sums(seconds_AG)).mean(0)
  freedom = max(1 / (weight_G**2).sum() - 1, 1.0)
  t = stats.t.ppf(1 - _each(left_AG, 1 - level) / 2, freedom)
  return [
    Interval(float(x), float(max(x - y, 0)), float(x + y))
    for x, y in zip(value_A, t * error_A, strict=True)
  ]


def _each(errors_AG: np.ndarray, chance: float) -> float:
  """The chance of error of one interval, for `chance` of any error in all.

  Bonferroni's chance / A at least, and more where arms err together: of normal
  errors correlated as these are, the largest passes the normal quantile of what
  is returned with that chance (the max-t test: Hothorn, Bretz and Westfall
  2008, https://doi.org/10.1002/bimj.200810425).
  """
  arms, units = errors_AG.shape
  size_A1 = np.sqrt((errors_AG**2).sum(1, keepdims=True))
  if arms == 1 or not size_A1.any():
    return chance
  # Few units overstate how alike arms are: one of them counts as unshared.
  own = np.sqrt(1 / units)
  unit_AG = np.sqrt(1 - own**2) * errors_AG / np.where(size_A1, size_A1, 1)
  normal_RX = _normals(RESAMPLES, units + arms)
  alone_RA = own * normal_RX[:, units:]
  largest_R = np.abs(normal_RX[:, :units] @ unit_AG.T + alone_RA).max(1)
  found = 2 * stats.norm.sf(np.quantile(largest_R, 1 - chance))
  return float(np.clip(found, chance / arms, chance))


@functools.cache
def _normals(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).normal(size=shape)
