"""The metrics and their definitions; nowhere else is any of them computed.

Names are the field's; where it has several meanings for one name, the formula
is spelled out here. Prefill is never a target call. All counts are exact.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import types
from specdec_jax.models import lm


def rows(info: types.Info, pick=slice(None)) -> types.Info:
  """Info of some rows, on the host; batch-wide counters are kept whole."""
  host = lambda x: None if x is None else np.asarray(x)
  some = lambda x: None if x is None else np.asarray(x)[pick]
  return types.Info(
    **{
      name: host(x) if name in ('wide', 'calls') else some(x)
      for name, x in info._asdict().items()
    }
  )


def concat(infos: Sequence[types.Info]) -> types.Info:
  """Several runs as one: rows side by side, batch-wide counters added."""
  host = [rows(info) for info in infos]
  out = {}
  for name in types.Info._fields:
    parts = [getattr(info, name) for info in host]
    if name in ('wide', 'calls'):
      out[name] = np.sum(parts)
    else:
      out[name] = None if parts[0] is None else np.concatenate(parts)
  return types.Info(**out)


def summary(info: types.Info) -> dict[str, Any]:
  """Counts and ratios over the rows of an Info.

  emitted_tokens: tokens after the prompts. target_calls: windows verified, over
    rows. drafted_tokens, accepted_tokens: proposals, and those emitted.
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
  accepted_histogram, uncut_histogram: windows by drafts accepted, of all and
    of those that nothing cut.
  proposed, tried, accepted_per_position: windows that proposed offset k, that
    did and accepted every offset before, and that accepted it.

  Ratios without a denominator are None.
  """
  counts = lambda x_BK: [int(n) for n in np.asarray(x_BK, np.int64).sum(0)]
  return _summary(
    int((np.asarray(info.origin_BL) != types.PROMPT).sum()),
    int(np.asarray(info.calls_B, np.int64).sum()),
    {
      'accepted_histogram': counts(info.hist_BN),
      'uncut_histogram': counts(info.whole_BN),
      'proposed_per_position': counts(info.proposed_BK),
      'tried_per_position': counts(info.tried_BK),
      'accepted_per_position': counts(info.accepted_BK),
    },
  )


def total(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """The summary of several requests: their counts added, ratios from those.

  Without requests every count is 0. A shorter window's lists are taken as
  having zeros at the end.
  """
  added = lambda name: [
    sum(column)
    for column in itertools.zip_longest(
      *(s[name] for s in summaries), fillvalue=0
    )
  ]
  return _summary(
    sum(s['emitted_tokens'] for s in summaries),
    sum(s['target_calls'] for s in summaries),
    {name: added(name) for name in _LISTS},
  )


_LISTS = (
  'accepted_histogram',
  'uncut_histogram',
  'proposed_per_position',
  'tried_per_position',
  'accepted_per_position',
)


def _summary(emitted: int, calls: int, lists: dict[str, list[int]]):
  """The dict of summary from its counts; lists: _LISTS."""
  proposed_K = lists['proposed_per_position']
  tried_K = lists['tried_per_position']
  accepted_K = lists['accepted_per_position']
  uncut_N = lists['uncut_histogram']
  drafted, accepted = sum(proposed_K), sum(accepted_K)
  return {
    'emitted_tokens': emitted,
    'target_calls': calls,
    'drafted_tokens': drafted,
    'accepted_tokens': accepted,
    'block_efficiency': ratio(emitted, calls),
    'block_efficiency_uncut': ratio(
      sum((k + 1) * n for k, n in enumerate(uncut_N)), sum(uncut_N)
    ),
    'draft_acceptance_rate': ratio(accepted, drafted),
    'acceptance_per_position': list(map(ratio, accepted_K, proposed_K)),
    'conditional_acceptance_per_position': list(
      map(ratio, accepted_K, tried_K)
    ),
    'proposal_rate': ratio(proposed_K[0] if proposed_K else 0, calls),
    **lists,
  }


def ratio(numerator: float, denominator: float) -> float | None:
  return numerator / denominator if denominator else None


def repeated_ngrams(tokens, n: int = 8) -> float | None:
  """Share of a text's n-grams that occurred in it before; looping text."""
  grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
  return ratio(len(grams) - len(set(grams)), len(grams))


# --- time ------------------------------------------------------------------


def spread(values: Sequence[float | None]) -> dict[str, Any]:
  """Median, extremes and interquartile range of repeated measurements.

  too_short: how many are None (tokens_per_second); the rest of the dict is of
  the others, and None where there are none.
  """
  kept = [x for x in values if x is not None]
  out: dict[str, Any] = dict.fromkeys(('median', 'min', 'max', 'iqr'))
  if kept:
    low, median, high = map(float, np.percentile(kept, (25, 50, 75)))
    out = {'median': median, 'min': min(kept), 'max': max(kept)}
    out['iqr'] = high - low
  return out | {'too_short': len(values) - len(kept)}


def tokens_per_second(
  emitted: int, total: float, prefill: float, noise: float = 0.0
) -> float | None:
  """Emitted tokens over decode time: the whole call less its prefill.

  None, too short to measure, unless that time is above the noise.
  """
  return emitted / (total - prefill) if total - prefill > noise else None


def walltime_improvement(
  method: Sequence[float | None], plain: Sequence[float | None]
) -> dict[str, Any]:
  """tokens_per_second over the autoregressive arm's, repeat by repeat."""
  return spread([m and p and m / p for m, p in zip(method, plain, strict=True)])


def outcome(improvement: dict[str, Any]) -> str:
  """'win', 'loss' or 'draw' of walltime_improvement, or 'too short'.

  A draw where the repeats lie on both sides of 1, or the median is within 2%.
  """
  if improvement['median'] is None:
    return 'too short'
  if improvement['min'] > 1 and improvement['median'] > 1.02:
    return 'win'
  if improvement['max'] < 1 and improvement['median'] < 0.98:
    return 'loss'
  return 'draw'


def inter_token(stamps: Sequence[Sequence[float]]) -> dict[str, float | None]:
  """Median and 95th percentile of the gaps between tokens as they come out.

  stamps: when each token of each request was there. Tokens of one window come
  together, so speculation has gaps of 0 and, between windows, longer ones.
  """
  gaps = np.concatenate([np.diff(s) for s in stamps] or [[]])
  if not gaps.size:
    return {'p50': None, 'p95': None}
  return {
    'p50': float(np.percentile(gaps, 50)),
    'p95': float(np.percentile(gaps, 95)),
  }


# --- work ------------------------------------------------------------------


def tree_bytes(tree: Any) -> int:
  """Bytes of all arrays, over all devices, each shard counted once."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def step_parameters(params: types.Params) -> int:
  """Parameters that one forward pass reads, the head included.

  Not those of the tables of tokens, where it is not the head, and of positions:
  of these a pass reads a few rows.
  """
  return sum(x.size for x in _read_whole(params))


def step_bytes(params: types.Params) -> int:
  """Bytes of step_parameters."""
  return tree_bytes(_read_whole(params))


def _read_whole(params: types.Params) -> list[jax.Array]:
  flat = lm.flatten(params)
  return [x for name, x in flat.items() if name not in ('embed', 'positions')]


def own_bytes(params: types.Params, target: types.Params) -> int:
  """Bytes of the arrays that are not the target's, which is held anyway."""
  own = {id(x): x for x in jax.tree.leaves(params)}
  for x in jax.tree.leaves(target):
    own.pop(id(x), None)
  return tree_bytes(list(own.values()))


def layers_share(params: types.Params, count: int) -> float:
  """Bytes of the first `count` layers over step_bytes: about their time."""
  if not count:
    return 0.0
  total = 0.0
  for name, x in lm.flatten(params).items():
    group, _, rest = name.partition('/')
    if group == 'layers' and rest[0].isdecimal():
      total += x.nbytes * (int(rest.partition('/')[0]) < count)
    elif group == 'layers':  # scanned: depth is the first axis
      total += x.nbytes * count / x.shape[0]
  return total / step_bytes(params)


def ceiling_tokens_per_second(
  bandwidth: float, weight_bytes: int, cache_bytes: float
) -> float:
  """Autoregressive ceiling: bytes a second over bytes read per token."""
  return bandwidth / (weight_bytes + cache_bytes)


def target_passes(info: types.Info, *, narrow: bool) -> tuple[int, int, int]:
  """(windows, wide windows, tokens a row that the target read in them)."""
  gamma = np.shape(info.hist_BN)[1] - 1
  calls = int(info.calls)
  wide = int(info.wide) if narrow else calls
  return calls, wide, calls + wide * gamma


def arithmetic_factor(
  info: types.Info,
  plain: types.Info,
  *,
  narrow: bool,
  target: int,
  drafting: int,
) -> float | None:
  """Operations of a method over plain decoding's, per emitted token.

  Theorem 3.11 of Leviathan et al. 2023 with measured counts. A pass costs
  2 x parameters a token (attention scores left out); target: step_parameters;
  drafting: what a window multiplies by beyond the target's pass. Both runs have
  the same rows a batch.
  """
  calls, _, read = target_passes(info, narrow=narrow)
  spent = read * target + calls * drafting
  own = ratio(spent, summary(info)['emitted_tokens'])
  base = ratio(int(plain.calls) * target, summary(plain)['emitted_tokens'])
  return ratio(own, base) if own is not None and base is not None else None


def bytes_per_token(
  info: types.Info,
  *,
  target: int,
  target_cache: int,
  drafting: int,
) -> float | None:
  """Bytes read per emitted token, each array once a pass.

  A window is one target pass, which reads its step_bytes and its whole cache,
  masked slots included, and what drafting reads besides.
  """
  window = target + target_cache + drafting
  return ratio(int(info.calls) * window, summary(info)['emitted_tokens'])


def draft_passes(info: types.Info) -> float:
  """Passes in a window of a draft model that stops where it is not sure.

  The first, and one after every draft that was proposed but the last one: that
  a draft is not proposed shows in a pass too. The mean over rows, exact for one
  row a batch; of more, each waits for those that go on.
  """
  found = summary(info)
  proposed_K = found['proposed_per_position']
  return 1 + sum(proposed_K[:-1]) / max(found['target_calls'], 1)


def alpha(overlap_BL, where_BL) -> float | None:
  """Mean of sum min(p, q) over the positions chosen."""
  where_BL = np.asarray(where_BL)
  return ratio(
    float(np.asarray(overlap_BL, np.float64)[where_BL].sum()),
    int(where_BL.sum()),
  )


def tokens_per_window(info: types.Info) -> float:
  """Emitted tokens of all rows over windows of the batch."""
  return summary(info)['emitted_tokens'] / max(int(info.calls), 1)


def wide_share(info: types.Info) -> float:
  """Share of the batch's windows in which any row proposed anything."""
  return int(info.wide) / max(int(info.calls), 1)


def repeated_share(texts: Sequence[Sequence[int]], n: int = 8) -> float | None:
  """repeated_ngrams over several texts, each n-gram counted once."""
  sizes = [max(len(text) - n + 1, 0) for text in texts]
  found = sum(
    (repeated_ngrams(text, n) or 0) * size
    for text, size in zip(texts, sizes, strict=True)
  )
  return ratio(found, sum(sizes))
