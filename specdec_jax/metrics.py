"""Defines and computes all metrics, here only.

Names are the field's; where a name has several meanings there, the formula is
spelled out. Prefill is never a target call. All counts are exact.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import types


def rows(info: types.Info, pick=slice(None)) -> types.Info:
  """Picks the Info of some rows, on the host."""
  return jax.tree.map(lambda x: np.asarray(x)[pick], info)


def join(outputs: Sequence[Any]) -> types.Info:
  """Joins several decode.Output, or requests.Ended: rows side by side."""
  host = [rows(output.info) for output in outputs]
  return jax.tree.map(lambda *x: np.concatenate(x), *host)


def windows(info: types.Info) -> tuple[np.ndarray, np.ndarray]:
  """Returns (widths_N, second_N): windows of a batch that began together."""
  row = np.argmax(info.calls_B)
  return np.asarray(info.widths_BN)[row], np.asarray(info.second_BN)[row]


# --- counts ----------------------------------------------------------------


class Summary(NamedTuple):
  """Counts and ratios over requests. A ratio without a denominator is None.

  emitted_tokens: tokens after the prompts.
  target_calls: windows verified, added over rows.
  drafted_tokens, accepted_tokens: draft tokens proposed, in a tree one for each
    level, and those emitted.
  block_efficiency: emitted_tokens / target_calls; includes the recovered or
    bonus token, and windows cut by EOS or length (= mean acceptance length of
    vLLM, tau of EAGLE, accept length of SGLang).
  draft_acceptance_rate: accepted / drafted, drafts after a rejection included,
    so it falls with gamma (vLLM's definition).
  acceptance_per_position: share of windows proposing offset k that accepted it
    (unconditional on the offsets before).
  conditional_acceptance_per_position: the same among windows that accepted
    every offset before k.
  proposal_rate: share of windows that proposed anything.
  accepted_histogram: windows by drafts accepted.
  proposed_per_position: windows that proposed offset k. tried_per_position: ...
    and accepted every offset before k. accepted_per_position: ... and k too.
  accepted_by_width: for trees, accepted_per_position without nodes behind the
    first, the first two, ... in each level; of the likeliest nodes, among all.
  sourced_tokens, accepted_sourced_tokens: drafted_tokens and accepted_tokens in
    windows that lookup found in a source or a prediction.
  """

  emitted_tokens: int
  target_calls: int
  drafted_tokens: int
  accepted_tokens: int
  block_efficiency: float | None
  draft_acceptance_rate: float | None
  acceptance_per_position: list[float | None]
  conditional_acceptance_per_position: list[float | None]
  proposal_rate: float | None
  accepted_histogram: list[int]
  proposed_per_position: list[int]
  tried_per_position: list[int]
  accepted_per_position: list[int]
  accepted_by_width: list[list[int]] = []
  sourced_tokens: int = 0
  accepted_sourced_tokens: int = 0


def emitted(info: types.Info) -> int:
  """Counts tokens after the prompts, over all rows."""
  return int((np.asarray(info.origin_BL) != types.PROMPT).sum())


def summary(info: types.Info) -> Summary:
  """Summarises all rows of an Info."""
  counts = lambda x_BK: [int(n) for n in np.asarray(x_BK, np.int64).sum(0)]
  tokens = emitted(info)
  calls = int(np.asarray(info.calls_B, np.int64).sum())
  proposed_K, tried_K = counts(info.proposed_BK), counts(info.tried_BK)
  accepted_K = counts(info.accepted_BK)
  drafted, accepted = sum(proposed_K), sum(accepted_K)
  places_BKK = (
    np.zeros((1, 0, 0)) if info.places_BKK is None else info.places_BKK
  )
  widths_KK = np.asarray(places_BKK, np.int64).sum(0).cumsum(1)
  sourced = [0, 0] if info.sourced_B2 is None else counts(info.sourced_B2)
  return Summary(
    emitted_tokens=tokens,
    target_calls=calls,
    drafted_tokens=drafted,
    accepted_tokens=accepted,
    block_efficiency=ratio(tokens, calls),
    draft_acceptance_rate=ratio(accepted, drafted),
    acceptance_per_position=list(map(ratio, accepted_K, proposed_K)),
    conditional_acceptance_per_position=list(map(ratio, accepted_K, tried_K)),
    proposal_rate=ratio(proposed_K[0] if proposed_K else 0, calls),
    accepted_histogram=counts(info.hist_BN),
    proposed_per_position=proposed_K,
    tried_per_position=tried_K,
    accepted_per_position=accepted_K,
    accepted_by_width=[x.tolist() for x in widths_KK if x.any()],
    sourced_tokens=sourced[0],
    accepted_sourced_tokens=sourced[1],
  )


def ratio(numerator: float, denominator: float) -> float | None:
  return numerator / denominator if denominator else None


def repeated_ngrams(texts: Sequence[Sequence[int]], n: int = 8) -> float | None:
  """Computes the share of n-grams seen before in their text; high in loops."""
  found = repeated = 0
  for text in texts:
    grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    found += len(grams)
    repeated += len(grams) - len(set(grams))
  return ratio(repeated, found)
