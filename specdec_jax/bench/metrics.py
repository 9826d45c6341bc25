"""All metrics: definitions and computation, here only.

Names are the field's; where a name has several meanings there, the formula is
spelled out. Prefill is never a target call. All counts are exact.
"""

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

# A paired bootstrap of ratios of sums. The unit is a prompt with all its
# repeats: the same prompts are drawn for both sides, so that what makes a
# prompt long or the machine slow cancels. Percentiles of a bootstrap are too
# narrow for few prompts (50 % at 2 and 88 % at 7 instead of 95 %), so an
# interval is the value's logarithm plus and minus Student's t with n - 1
# degrees of freedom times the bootstrap's standard deviation times
# sqrt(n / (n - 1)): 93 % to 97 % in simulations of 2 to 14 prompts and 1 to 3
# repeats (tests/bench/intervals_test.py).

RESAMPLES = 2000


class Interval(NamedTuple):
  """A value and the ends of its interval; None where they are not known.

  A value of None was too short to measure; ends of None come from one prompt.
  """

  value: float | None = None
  low: float | None = None
  high: float | None = None

  @property
  def outcome(self) -> str:
    """Of an improvement: win, loss, unclear, one prompt or too short."""
    if self.value is None:
      return 'too short'
    if self.low is None or self.high is None:
      return 'one prompt'
    if self.low > 1:
      return 'win'
    return 'loss' if self.high < 1 else 'unclear'

  def more(self, spent: float) -> float:
    """By which time this interval would exclude 1, beyond `spent` of it.

    The width falls with the square root of the time; inf at a value of 1.
    """
    assert self.value and self.low and self.high
    away = abs(np.log(self.value))
    half = np.log(self.high / self.low) / 2
    return spent * max((half / away) ** 2 - 1, 0) if away else np.inf


def resamples(prompts: int) -> np.ndarray:
  """How often each prompt is drawn in each resample: [RESAMPLES, prompts]."""
  rng = np.random.default_rng(0)
  even = np.full(prompts, 1 / prompts)
  return rng.multinomial(prompts, even, size=RESAMPLES)


def draws(prompts: int) -> np.ndarray:
  """Each prompt once, then `resamples`, if there are two: [1 + R, prompts]."""
  once = np.ones((1, prompts), int)
  return once if prompts < 2 else np.concatenate([once, resamples(prompts)])


def percentiles(value_R) -> Interval:
  """The first value with the 95 % percentile interval of those after it.

  For the rows of `draws`, of what may be negative and so has no logarithm.
  """
  ends = np.percentile(value_R[1:], (2.5, 97.5)) if len(value_R) > 1 else ()
  return Interval(*map(float, (value_R[0], *ends)))


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


def speedup(tokens_AG, seconds_AG) -> Interval:
  """Tokens over seconds of the first arm A, over the second's.

  Args:
    tokens_AG: by arm and prompt G.
    seconds_AG: the same; means over repeats, above 0.
  """
  sums = lambda times_SG: (
    np.log(times_SG @ np.asarray(tokens_AG, float).T)
    - np.log(times_SG @ np.asarray(seconds_AG, float).T)
  )
  prompts = np.shape(tokens_AG)[1]
  whole_A, every_SA = sums(np.ones(prompts)), sums(resamples(prompts))
  sd = float(np.std(every_SA[:, 0] - every_SA[:, 1]))
  return around(float(np.exp(whole_A[0] - whole_A[1])), sd, prompts)
