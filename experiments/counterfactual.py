"""Acceptance of a rule at any gamma, computed from one run of plain decoding.

Needs only the ratio r = q(x) / p(x) of every token x of the target's text. A
lossless rule emits the target's distribution whatever was drafted. So, given
the text, the number of drafts that a window accepts has a known distribution:
the joint probability of drafting, accepting and emitting these tokens, divided
by the target's probability of them. The distributions of all windows give the
expected number of windows. NumPy, float64.

    B  texts    T  tokens of a text    K  offsets looked at    N  K + 1
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments import trace
from specdec_jax.bench import intervals, tables
from specdec_jax.costs import cost


def reject(log_ratio_XK: np.ndarray) -> np.ndarray:
  """log P(k drafts equal the text and are accepted | text), k = 1 to K.

  A draft x is drawn and accepted with probability min(p, q); over p: min(1, r).
  Leviathan et al. 2023, Algorithm 1 (https://arxiv.org/abs/2211.17192).
  """
  return np.cumsum(np.minimum(log_ratio_XK, 0), -1)


def block(log_ratio_XK: np.ndarray) -> np.ndarray:
  """The same for block verification: the least of 1, R_1, ..., R_k.

  R_k = r_1 ... r_k. Sun et al. 2024, Algorithm 2 (2403.10444) draws x_1..x_k
  and keeps them with probability q(x_1..x_k) w_k, w_k = min(w_{k-1} p / q, 1);
  over p(x_1..x_k) that is R_k w_k = min(R_{k-1} w_{k-1}, R_k).
  """
  total_XK = np.cumsum(log_ratio_XK, -1)
  return np.minimum.accumulate(np.minimum(total_XK, 0), -1)


RULES = {'reject': reject, 'block': block}
LIMIT = 256


def count(
  ratios: list[np.ndarray],
  rule: Callable[[np.ndarray], np.ndarray],
  limit: int,
) -> np.ndarray:
  """Expected windows of each text by accepted drafts: [B, 1 + limit, N].

  [:, gamma] is for gamma 0 to the limit, and counts the accepted drafts that
  were emitted, as types.Info.hist_BN does.

  Args:
    ratios: of the tokens of each text.
    rule: a function of RULES.
    limit: the largest gamma.

  Raises:
    ValueError: limit outside 0 to LIMIT.
  """
  if not 0 <= limit <= LIMIT:
    raise ValueError(f'limit={limit}: the largest gamma is in 0 to {LIMIT}')
  tokens_B = np.array([len(r) for r in ratios], int)
  ratio_BT = np.zeros((len(ratios), max(tokens_B, default=0)))
  for row, ratio in zip(ratio_BT, ratios, strict=True):
    row[: len(ratio)] = ratio
  kept_BTN = at_least(ratio_BT, rule, limit)
  windows_BGN = np.zeros((len(ratios), limit + 1, limit + 1))
  for gamma in range(limit + 1):
    found_BN = walk(accepted(kept_BTN, gamma), tokens_B)
    windows_BGN[:, gamma, : gamma + 1] = found_BN
  return windows_BGN


def at_least(ratio_BT, rule, limit: int) -> np.ndarray:
  """P(a window from t accepts at least n drafts | text): [B, T, N].

  1 for n = 0; the same for every gamma >= n. Past the text's end ratios are 0,
  so that no accepted draft lies beyond the emitted tokens.
  """
  T = ratio_BT.shape[1]
  padded_BP = np.pad(ratio_BT, ((0, 0), (0, limit)))
  with np.errstate(divide='ignore'):
    log_BTK = np.log(padded_BP[:, np.arange(T)[:, None] + np.arange(limit)])
  kept_BTK = np.exp(rule(log_BTK))
  return np.pad(kept_BTK, ((0, 0), (0, 0), (1, 0)), constant_values=1)


def accepted(kept_BTN, gamma: int) -> np.ndarray:
  """P(exactly n of gamma drafts are accepted | text): [B, T, gamma + 1]."""
  kept = kept_BTN[..., : gamma + 1]
  return kept - np.pad(kept[..., 1:], ((0, 0), (0, 0), (0, 1)))


def walk(accepted_BTN, tokens_B) -> np.ndarray:
  """Expected windows by accepted drafts [B, N], over every way to cut a text.

  A window that starts at t and accepts n drafts emits n + 1 tokens, so the next
  one starts at t + n + 1, unless the text ends before.

  Worked example: gamma 1, two tokens, the first draft accepted with probability
  1/2. The first window emits two tokens or one, and in half of the cases a
  second window is needed: 1.5 windows.
  """
  B, T, N = accepted_BTN.shape
  windows_BN = np.zeros((B, N))
  starts_BP = np.zeros((B, T + N + 1))  # P(a window starts at each index)
  starts_BP[:, 0] = 1
  for t in range(T):
    here_B = starts_BP[:, t] * (t < tokens_B)
    here_BN = here_B[:, None] * accepted_BTN[:, t]
    starts_BP[:, t + 1 : t + 1 + N] += here_BN
    windows_BN += here_BN
  return windows_BN


# --- of a trace ---------------------------------------------------------------


class Row(NamedTuple):
  """Block efficiency at one gamma.

  reject, block: under each rule.
  gain: block minus reject, paired.
  independent: Leviathan's equation 1 at alpha, which takes positions to be
    independent and texts to be endless.
  """

  gamma: int
  reject: intervals.Interval
  block: intervals.Interval
  gain: intervals.Interval
  independent: float


class Analysis(NamedTuple):
  """Results computed from a trace, with 95 % intervals over requests.

  header: of the trace.
  requests, texts, tokens: counts.
  rounded: tokens whose p was 0 when both models read the text; see ratios.
  alpha: mean of sum min(p, q).
  rows: for gamma 0 to the limit.
  windows: by rule, expected windows by accepted drafts at the largest gamma.
  """

  header: dict[str, Any]
  requests: int
  texts: int
  tokens: int
  rounded: int
  alpha: intervals.Interval
  rows: list[Row]
  windows: dict[str, list[float]]


def analyse(found: trace.Trace, *, limit: int) -> Analysis:
  """Block efficiency at every gamma from a trace; see Analysis.

  The bootstrap is over requests: the texts of one prompt stay together.

  Args:
    found: the trace.
    limit: the largest gamma.

  Raises:
    ValueError: limit outside 0 to LIMIT.
  """
  ids = list(dict.fromkeys(text.id for text in found.texts))
  of_request_BX = np.equal.outer(ids, [text.id for text in found.texts])
  times_RB = intervals.draws(len(ids))
  # Values of texts, added over the texts of each request, in every resample.
  sums = lambda values: times_RB @ (of_request_BX @ np.asarray(values, float))
  tokens_R = sums([len(text.tokens) for text in found.texts])
  alpha_R = sums([np.sum(text.overlap) for text in found.texts]) / tokens_R
  each = [ratios(text) for text in found.texts]
  windows = {name: count(each, rule, limit) for name, rule in RULES.items()}
  rows = []
  for gamma in range(limit + 1):
    values = {
      name: tokens_R / sums(x_BGN[:, gamma].sum(-1))
      for name, x_BGN in windows.items()
    }
    values['gain'] = values['block'] - values['reject']
    # Sums of float32 may end a rounding above 1.
    expected = cost.expected_tokens(min(alpha_R[0], 1.0), gamma)
    shown = {
      name: intervals.interval(x, len(ids)) for name, x in values.items()
    }
    rows.append(Row(gamma, **shown, independent=expected))
  return Analysis(
    header=found.header,
    requests=len(ids),
    texts=len(found.texts),
    tokens=sum(len(text.tokens) for text in found.texts),
    rounded=int(sum(np.sum(np.equal(t.p, 0)) for t in found.texts)),
    alpha=intervals.interval(alpha_R, len(ids)),
    rows=rows,
    windows={n: x[:, limit].sum(0).tolist() for n, x in windows.items()},
  )


def show(found: Analysis, console) -> None:
  """Prints an Analysis as two tables on a rich console."""
  (target, _), (draft, _) = found.header['models']
  sampling = ', '.join(f'{k} {v}' for k, v in found.header['sampling'].items())
  console.print(
    f'target {target}, draft {draft}; {sampling}\nalpha {_shown(found.alpha)} '
    f'over {found.tokens} tokens of {found.texts} texts, {found.requests} '
    f'requests; {found.rounded} tokens had no p when read again\n'
  )
  efficiency = {
    'gamma': lambda x: str(x.gamma),
    'reject': lambda x: _shown(x.reject),
    'block': lambda x: _shown(x.block),
    'block - reject': lambda x: _shown(x.gain),
    'eq. 1 at alpha': lambda x: f'{x.independent:.3f}',
  }
  title = 'Block efficiency from one plain run (95 % over requests)'
  console.print(tables.table(title, found.rows, efficiency))
  limit = found.rows[-1].gamma
  share = lambda windows: lambda n: f'{windows[n] / sum(windows):.1%}'
  accepted = {f'accepted of {limit}': str} | {
    rule: share(windows) for rule, windows in found.windows.items()
  }
  title = 'Windows by accepted drafts'
  console.print(tables.table(title, range(limit + 1), accepted))


def _shown(x: intervals.Interval) -> str:
  ends = '' if x.low is None else f' ({x.low:.3f} to {x.high:.3f})'
  return f'{x.value:.3f}{ends}'


def ratios(text: trace.Text) -> np.ndarray:
  """q / p of each token.

  Two programs round differently, so an emitted token can have p = 0 here, at
  the edge of a top-k or at a greedy tie. p is set to 1 there, as plain decoding
  chose the token: exact when greedy, else a lower bound.
  """
  p_T, q_T = np.asarray(text.p), np.asarray(text.q)
  return q_T / np.where(p_T > 0, p_T, 1)
