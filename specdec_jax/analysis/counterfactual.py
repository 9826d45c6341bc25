"""How much a rule would accept at a gamma that was not run, from one plain run.

Needs only the ratio r = q(x) / p(x) of every token x of the target's text. The
text of an exact rule is the target's whatever was drafted, so, given the text,
what a window accepts has an exact law: the joint mass of drafting, accepting
and emitting these tokens, over the target's probability of them. From the laws
of all windows follow the expected windows of a whole run. NumPy, float64.

    B  texts    T  tokens of a text    K  offsets looked at    N  K + 1
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def reject(log_ratio_XK: np.ndarray) -> np.ndarray:
  """log P(the first k drafts are the text's and are kept | text), k = 1 to K.

  A draft x is kept with joint mass min(p, q): the product of min(1, r).
  Leviathan et al. 2023, Algorithm 1 (https://arxiv.org/abs/2211.17192).
  """
  return np.cumsum(np.minimum(log_ratio_XK, 0), -1)


def block(log_ratio_XK: np.ndarray) -> np.ndarray:
  """The same for block verification: the least of 1, R_1, ..., R_k.

  R_k = r_1 ... r_k. Sun et al. 2024, Algorithm 2 (2403.10444) keeps at least k
  drafts with joint mass q(x_1..x_k) w_k, w_k = min(w_{k-1} p / q, 1); over
  p(x_1..x_k) that is R_k w_k = min(R_{k-1} w_{k-1}, R_k).
  """
  total_XK = np.cumsum(log_ratio_XK, -1)
  return np.minimum.accumulate(np.minimum(total_XK, 0), -1)


RULES = {'reject': reject, 'block': block}
LIMIT = 256


class Counts(NamedTuple):
  """Expected windows of each text, by gamma 0 to the limit.

  calls_BG: target calls. windows_BGN: windows by accepted drafts that were
  emitted, as types.Info.hist_BN counts them.
  """

  tokens_B: np.ndarray
  calls_BG: np.ndarray
  windows_BGN: np.ndarray


def count(
  ratios: list[np.ndarray],
  rule: Callable[[np.ndarray], np.ndarray],
  limit: int,
) -> Counts:
  """Expected counts of texts, each given by its tokens' ratios.

  Raises:
    ValueError: limit outside 0 to LIMIT, or a ratio that is negative or not
      finite.
  """
  if not 0 <= limit <= LIMIT:
    raise ValueError(f'limit={limit}: the largest gamma is in 0 to {LIMIT}')
  tokens_B = np.array([len(r) for r in ratios], int)
  ratio_BT = np.zeros((len(ratios), max(tokens_B, default=0)))
  for row, ratio in zip(ratio_BT, ratios, strict=True):
    row[: len(ratio)] = ratio
  if not (np.isfinite(ratio_BT) & (ratio_BT >= 0)).all():
    raise ValueError('a ratio q / p is negative or not finite')
  kept_BTN = at_least(ratio_BT, rule, limit)
  found = [walk(kept_BTN, tokens_B, gamma) for gamma in range(limit + 1)]
  calls, windows = zip(*found, strict=True)
  return Counts(tokens_B, np.stack(calls, 1), np.stack(windows, 1))


def at_least(ratio_BT, rule, limit: int) -> np.ndarray:
  """P(a window that starts at t keeps at least n drafts | text): [B, T, N].

  At offset 0 that is 1. The same for every gamma >= n. Past the text's end
  ratios are 0, so that what is kept never exceeds what is emitted.
  """
  B, T = ratio_BT.shape
  padded_BP = np.pad(ratio_BT, ((0, 0), (0, limit)))
  with np.errstate(divide='ignore'):
    log_BTK = np.log(padded_BP[:, np.arange(T)[:, None] + np.arange(limit)])
  ones_BT1 = np.ones((B, T, 1))
  return np.concatenate([ones_BT1, np.exp(rule(log_BTK))], -1)


def accepted_law(kept_BTN, gamma: int) -> np.ndarray:
  """P(exactly n of gamma drafts are kept | text): [B, T, gamma + 1]."""
  kept = kept_BTN[..., : gamma + 1]
  return kept - np.pad(kept[..., 1:], ((0, 0), (0, 0), (0, 1)))


def walk(kept_BTN, tokens_B, gamma: int) -> tuple[np.ndarray, np.ndarray]:
  """(calls_B, windows_BN): the walk of window starts along each text.

  A window that starts at t and keeps n drafts emits n + 1 tokens, so the next
  one starts at t + n + 1, unless the text ends before.

  Worked example, gamma 1, two tokens, the first kept half of the time: the
  first window emits both or one, and half of the time a second is needed; 1.5
  calls.
  """
  law_BTN = accepted_law(kept_BTN, gamma)
  B, T, N = law_BTN.shape
  out = np.zeros((B, T, N))
  starts_BP = np.zeros((B, T + N + 1))
  starts_BP[:, 0] = 1
  for t in range(T):
    here_B = starts_BP[:, t] * (t < tokens_B)
    out[:, t] = here_B[:, None] * law_BTN[:, t]
    starts_BP[:, t + 1 : t + 1 + N] += out[:, t]
  windows_BN = np.pad(out.sum(1), ((0, 0), (0, kept_BTN.shape[-1] - N)))
  return out.sum((1, 2)), windows_BN
