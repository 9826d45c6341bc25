"""The metrics and their definitions; nowhere else is any of them computed.

Names are the field's; where it has several meanings for one name, the formula
is spelled out here. Prefill is never a target call. All counts are exact.
"""

import numpy as np

from specdec_jax import types


def rows(info: types.Info, pick=slice(None)) -> types.Info:
  """Info of some rows, on the host; batch-wide counters are kept whole."""
  host = lambda x: None if x is None else np.asarray(x)
  some = lambda x: None if x is None else host(x)[pick]
  return types.Info(
    **{
      name: host(x) if name in ('wide', 'calls') else some(x)
      for name, x in info._asdict().items()
    }
  )


def summary(info: types.Info) -> dict[str, float | int | list[float] | None]:
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

  Ratios without a denominator are None.
  """
  hist_N = np.asarray(info.hist_BN, np.int64).sum(0)
  proposed_K = np.asarray(info.proposed_BK, np.int64).sum(0)
  tried_K = np.asarray(info.tried_BK, np.int64).sum(0)
  accepted_K = np.asarray(info.accepted_BK, np.int64).sum(0)
  whole_N = np.asarray(info.whole_BN, np.int64).sum(0)
  calls = int(np.asarray(info.calls_B, np.int64).sum())
  emitted = int((np.asarray(info.origin_BL) != types.PROMPT).sum())
  drafted, accepted = int(proposed_K.sum()), int(accepted_K.sum())
  K = len(proposed_K)
  return {
    'emitted_tokens': emitted,
    'target_calls': calls,
    'drafted_tokens': drafted,
    'accepted_tokens': accepted,
    'block_efficiency': ratio(emitted, calls),
    'block_efficiency_uncut': ratio(
      int((whole_N * np.arange(1, K + 2)).sum()), int(whole_N.sum())
    ),
    'draft_acceptance_rate': ratio(accepted, drafted),
    'acceptance_per_position': [
      ratio(int(a), int(p)) for a, p in zip(accepted_K, proposed_K, strict=True)
    ],
    'conditional_acceptance_per_position': [
      ratio(int(a), int(t)) for a, t in zip(accepted_K, tried_K, strict=True)
    ],
    'proposal_rate': ratio(int(proposed_K[0]) if K else 0, calls),
    'accepted_histogram': [int(x) for x in hist_N],
  }


def ratio(numerator: float, denominator: float) -> float | None:
  return numerator / denominator if denominator else None


def repeated_ngrams(tokens, n: int = 8) -> float | None:
  """Share of a text's n-grams that occurred in it before; looping text."""
  grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
  return ratio(len(grams) - len(set(grams)), len(grams))
