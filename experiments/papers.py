"""The numbers that papers print, the only place for them.

First Leviathan et al. 2023, https://arxiv.org/abs/2211.17192. Its figures print
no numbers: values were read off the curves. Then Sun et al. 2024,
https://arxiv.org/abs/2403.10444; Chen et al. 2023,
https://arxiv.org/abs/2302.01318; Zhou et al. 2024,
https://arxiv.org/abs/2310.08461.
"""

import fractions
import math
from typing import NamedTuple


def printed(value: float, digits: int) -> tuple[float, float]:
  """Returns the ends of what rounds to a printed number."""
  half = 0.5 * 10**-digits
  return value - half, value + half


# --- table 1 ------------------------------------------------------------------

# alpha, gamma, OPERATIONS, SPEED, as printed (2 decimals); c = c^ = 0.
TABLE1 = (
  (0.6, 2, 1.53, 1.96),
  (0.7, 3, 1.58, 2.53),
  (0.8, 2, 1.23, 2.44),
  (0.8, 5, 1.63, 3.69),
  (0.9, 2, 1.11, 2.71),
  (0.9, 10, 1.60, 6.86),
)

# --- figures 2, 3 and 4 -------------------------------------------------------

FIRST, LAST = 0.5, 0.899  # the ends of the x axis of the figures

# gamma -> the curve at alpha FIRST (3 decimals) and at LAST (2 decimals).
FIG2 = {
  1: (1.5, 1.90),
  3: (1.875, 3.43),
  5: (1.969, 4.67),
  7: (1.992, 5.68),
  math.inf: (2.0, 9.90),
}

# c -> best gamma at FIRST and at LAST, and the alphas at which it grows by one.
# fmt: off
FIG3 = {
  0.01: (5, 24, (
    .518, .580, .629, .670, .705, .733, .758, .779, .797, .813, .827, .839,
    .850, .860, .869, .877, .884, .891, .897)),
  0.02: (4, 19, (
    .517, .591, .649, .695, .732, .763, .788, .810, .828, .843, .857, .869,
    .879, .888, .896)),
  0.05: (3, 13, (
    .543, .634, .700, .750, .788, .818, .842, .862, .878, .891)),
  0.1: (2, 10, (.533, .652, .732, .788, .828, .857, .880, .898)),
}
# fmt: on

# gamma -> operations at alpha FIRST and LAST (3 decimals); c = c^ = 0.
FIG4 = {
  1: (1.333, 1.053),
  3: (2.133, 1.165),
  5: (3.048, 1.284),
  7: (4.016, 1.409),
  10: (5.503, 1.610),
}

# --- tables 2 and 4 -----------------------------------------------------------


class Row(NamedTuple):
  """A row of table 4: exp is theorem 3.8 (1 decimal), emp what table 2 calls
  SPEED. The target is T5-XXL."""

  task: str
  draft: str
  temperature: int
  gamma: int
  alpha: float
  c: float
  exp: float
  emp: float


TABLE4 = (
  Row('EnDe', 'T5-small', 0, 7, 0.75, 0.02, 3.2, 3.4),
  Row('EnDe', 'T5-base', 0, 7, 0.80, 0.04, 3.3, 2.8),
  Row('EnDe', 'T5-large', 0, 7, 0.82, 0.11, 2.5, 1.7),
  Row('EnDe', 'T5-small', 1, 7, 0.62, 0.02, 2.3, 2.6),
  Row('EnDe', 'T5-base', 1, 5, 0.68, 0.04, 2.4, 2.4),
  Row('EnDe', 'T5-large', 1, 3, 0.71, 0.11, 2.0, 1.4),
  Row('CNNDM', 'T5-small', 0, 5, 0.65, 0.02, 2.4, 3.1),
  Row('CNNDM', 'T5-base', 0, 5, 0.73, 0.04, 2.6, 3.0),
  Row('CNNDM', 'T5-large', 0, 3, 0.74, 0.11, 2.0, 2.2),
  Row('CNNDM', 'T5-small', 1, 5, 0.53, 0.02, 1.9, 2.3),
  Row('CNNDM', 'T5-base', 1, 3, 0.55, 0.04, 1.8, 2.2),
  Row('CNNDM', 'T5-large', 1, 3, 0.56, 0.11, 1.6, 1.7),
)

# --- table 3 ------------------------------------------------------------------


class Alpha(NamedTuple):
  """A row of table 3: alpha at temperature 0 and at 1."""

  target: str
  draft: str
  greedy: float
  sampled: float


TABLE3 = (
  Alpha('GPT-like (97M)', 'Unigram', 0.03, 0.03),
  Alpha('GPT-like (97M)', 'Bigram', 0.05, 0.05),
  Alpha('GPT-like (97M)', 'GPT-like (6M)', 0.88, 0.89),
  Alpha('T5-XXL (EnDe)', 'Unigram', 0.08, 0.07),
  Alpha('T5-XXL (EnDe)', 'Bigram', 0.20, 0.19),
  Alpha('T5-XXL (EnDe)', 'T5-small', 0.75, 0.62),
  Alpha('T5-XXL (EnDe)', 'T5-base', 0.80, 0.68),
  Alpha('T5-XXL (EnDe)', 'T5-large', 0.82, 0.71),
  Alpha('T5-XXL (CNNDM)', 'Unigram', 0.13, 0.08),
  Alpha('T5-XXL (CNNDM)', 'Bigram', 0.23, 0.16),
  Alpha('T5-XXL (CNNDM)', 'T5-small', 0.65, 0.53),
  Alpha('T5-XXL (CNNDM)', 'T5-base', 0.73, 0.55),
  Alpha('T5-XXL (CNNDM)', 'T5-large', 0.74, 0.56),
  Alpha('LaMDA (137B)', 'LaMDA (100M)', 0.61, 0.57),
  Alpha('LaMDA (137B)', 'LaMDA (2B)', 0.71, 0.71),
  Alpha('LaMDA (137B)', 'LaMDA (8B)', 0.75, 0.74),
)

# --- table 5, and appendix A.5 ------------------------------------------------

LENIENCE = (1.0, 0.5, 0.3, 0.1)
# Table 5: alpha by lenience at temperature 1; T5-XXL on EnDe.
TABLE5 = {
  'Unigram': (0.07, 0.1, 0.11, 0.16),
  'Bigram': (0.19, 0.23, 0.25, 0.32),
  'T5-small': (0.62, 0.71, 0.76, 0.84),
  'T5-base': (0.68, 0.8, 0.83, 0.90),
}
# A.5: T5-small drafting for T5-XXL on EnDe: temperature -> (alpha, speed) by
# lenience. The last speed is printed as "5X", read as 5.0.
A5 = {
  0: ((0.75, 3.3), (0.75, 3.3), (0.8, 3.9), (0.87, 4.9)),
  1: ((0.62, 2.5), (0.71, 3.1), (0.76, 3.6), (0.84, 5.0)),
}

# --- block verification (Sun et al.), table 1 and the example of lemma 1 ------


class Block(NamedTuple):
  """A row of table 1 (PaLM-2-S with PaLM-2-XXS, gamma 8): tokens a window of
  token and of block verification."""

  text: str
  reject: float
  block: float


BLOCK = (
  Block('LM1B', 3.21, 3.49),
  Block('GPT Prompt', 3.41, 3.76),
  Block('WebQA', 3.44, 3.70),
  Block('PIQA', 3.40, 3.68),
  Block('ShareGPT', 3.34, 3.62),
  Block('XSum', 3.49, 3.76),
  Block('GSM8K', 3.81, 4.15),
  Block('WMT-DeEn', 3.19, 3.41),
  Block('average', 3.41, 3.70),
)
# gamma -> the averages of tokens a window.
BLOCK_GAMMAS = {4: (2.89, 2.99), 6: (3.23, 3.43), 8: (3.41, 3.70)}
# Two models of two tokens each, independent of what came before; gamma ->
# accepted drafts of token verification, of block verification, and the most
# that is possible where the target's next tokens are known.
TOY_TARGET = {'a': fractions.Fraction(1, 3), 'b': fractions.Fraction(2, 3)}
TOY_DRAFT = {'a': fractions.Fraction(2, 3), 'b': fractions.Fraction(1, 3)}
TOY = {
  1: ('2/3', '2/3', '2/3'),
  2: ('10/9', '11/9', '12/9'),
  3: ('38/27', '5/3', '50/27'),
}

# --- speculative sampling (Chen et al.), table 1 ------------------------------


class Chen(NamedTuple):
  """Two rows of table 1, without and with speculation: results, ms a token.

  Chinchilla of 70B, a draft of 4B, K = 4. speed is as printed: 14.1 / 7.52 is
  1.88, not 1.92.
  """

  sampling: str
  text: str
  plain: float
  speculated: float
  plain_ms: float
  ms: float
  speed: float


CHEN_K = 4
CHEN = (
  Chen('nucleus', 'XSum (ROUGE-2)', 0.112, 0.114, 14.1, 7.52, 1.92),
  Chen('greedy', 'XSum (ROUGE-2)', 0.157, 0.156, 14.1, 7.00, 2.01),
  Chen('nucleus', 'HumanEval (100 shot)', 0.451, 0.470, 14.1, 5.73, 2.46),
)

# --- Spec-Bench ---------------------------------------------------------------

# Its leaderboard: Vicuna-7B on one RTX 3090, over all questions; a draft model
# of 68M, and prompt lookup.
SPEC_BENCH = {'SpS': 1.79, 'PLD': 1.64}

# --- DistillSpec (Zhou et al.) ------------------------------------------------

# What distillation gains in speed over a draft after cross-entropy.
DISTILLSPEC = (0.10, 0.45)
