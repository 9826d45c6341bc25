"""Defines the records that the documents of a benchmark and an audit hold;
tables show their properties, which documents leave out."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from specdec_jax import metrics, requests
from specdec_jax.bench import intervals
from specdec_jax.costs import calibration as calibration_lib
from specdec_jax.costs import distance as distance_lib

FEWEST = 4  # batches of calibration prompts of a prediction
READ = 8  # batches of test prompts on whose texts alpha is measured, at most
AGREE = 0.85, 1.2  # measured over explained, where the parts bear a result out

# What a rule reproduces of plain decoding.
Promised = Literal['tokens', 'distribution', 'nothing']


class Setting(NamedTuple):
  """Models, sampling and sizes of a run.

  draft: from the first method that has a draft model.
  weights: bytes, the target's and each drafter's own.
  buffer: token slots of a row.
  judged_prompts, other_prompts: test prompts, calibration prompts.
  not_judged: categories with calibration prompts alone.
  codes: how the target's matrices are quantised; '': not at all.
  categories: how many the test prompts have.
  """

  target: str
  draft: str | None
  dtype: str
  rule: str
  lossless: bool
  weights: dict[str, int]
  sampling: dict[str, Any]
  batch_size: int
  max_new_tokens: int
  buffer: int
  repeats: int
  judged_prompts: int
  other_prompts: int
  not_judged: tuple[str, ...]
  codes: str = ''
  categories: int = 0


class Ceiling(NamedTuple):
  """Memory bandwidth, and the speed that it allows.

  gb_s: by dtype, see timing.bandwidth; measured before anything else ran.
  tok_s: bounds plain decoding: the bytes that it reads at the sustained
    bandwidth; once the test prompts have run, at `between`.
  between: GB/s, a median; each is the fastest of some reads in a row between
    two test prompts.
  """

  gb_s: dict[str, dict[str, float]]
  tok_s: float
  between: float | None = None

  def beside(self, dtype: str, gb_s: Sequence[float]) -> 'Ceiling':
    """Returns the ceiling by reads in this dtype while the prompts ran."""
    between = statistics.median(gb_s)
    tok_s = self.tok_s * between / self.gb_s[dtype]['sustained']
    return self._replace(tok_s=tok_s, between=between)


# --- acceptance and its worth ------------------------------------------------


class Alpha(NamedTuple):
  """Acceptance of a drafter, teacher-forced; means over a text's positions.

  None: unknown, as a lossy rule need not say what it keeps or emits.

  alpha: sum_x of types.Rule.kept; 0 where nothing is proposed.
  total_variation: between p and the distribution that the rule emits.
  """

  alpha: float | None
  total_variation: float | None

  @property
  def away(self) -> str:
    """Writes the total variation for a sentence or a cell."""
    x = self.total_variation
    return 'unknown' if x is None else f'{x:.2g}'


class Prediction(NamedTuple):
  """Improvement over plain decoding by the cost model.

  tokens: a window's, over those of a plain window in the batch.
  window_cost: in plain steps.
  improvement: tokens / window_cost.
  low, high: 90 % interval for other prompts, None if unknown; where these
    prompts are explained, the least and the most by the calibration's repeats.
  by_size: improvement of this window and, estimated, smaller ones, by a chain's
    gamma, the nodes of a tree's levels, or 'best:N'.
  """

  tokens: float
  window_cost: float
  improvement: float
  low: float | None
  high: float | None
  by_size: dict[str, float] = {}

  @property
  def vague(self) -> str:
    """Says why this is none: low and high are more than a factor of two away;
    else ''."""
    if self.high is None or self.high <= 2 * self.improvement:
      return ''
    return f'not predicted: the interval is {self.low:.2f} to {self.high:.2f}'


# --- texts -------------------------------------------------------------------


class Answer(NamedTuple):
  """A prompt and its answer; broken: ended by logits that are not finite."""

  item: requests.Item
  tokens: Sequence[int]
  broken: bool = False


# By (batch, index in the batch).
Answers = Mapping[tuple[int, int], Answer]


class Finding(NamedTuple):
  """How two texts of one request compare.

  position: index of the first differing token among the emitted ones.
  plain, other: those tokens, None where a text has ended.
  gap: least change of the logits that lets either token win.
  noise: largest difference of a logit between passes of width 1 and gamma + 1,
    at any offset of a window, and between equal rows of a batch; at least one
    rounding of the largest logit.
  rounding: largest change of a logit at width 1 where each weight moves by up
    to one rounding; at least as above.
  reason: why it is a bug.
  """

  verdict: Literal['identical', 'tie', 'BUG']
  position: int | None = None
  plain: int | None = None
  other: int | None = None
  gap: float | None = None
  noise: float | None = None
  rounding: float | None = None
  reason: str = ''
  id: str = ''


class Audit(NamedTuple):
  """A method's texts against plain decoding's.

  promised: unless it is 'tokens', nothing is compared.
  requests: number of texts.
  compared: tokens by text, the first that differs included.
  findings: for the texts that are not identical.
  """

  promised: Promised
  requests: int
  compared: tuple[int, ...] = ()
  findings: tuple[Finding, ...] = ()

  @property
  def tokens(self) -> int:
    return sum(self.compared)

  @property
  def identical(self) -> int:
    return self.requests - len(self.findings)

  @property
  def ties(self) -> int:
    return sum(x.verdict == 'tie' for x in self.findings)

  @property
  def bugs(self) -> int:
    return sum(x.verdict == 'BUG' for x in self.findings)


def together(audits: Iterable[Audit | None]) -> Audit | None:
  """Joins audits under one rule; None among them is plain decoding's."""
  known = [x for x in audits if x]
  if not known:
    return None
  return Audit(
    known[0].promised,
    sum(x.requests for x in known),
    tuple(n for x in known for n in x.compared),
    tuple(y for x in known for y in x.findings),
  )


class Failure(NamedTuple):
  """A request that ended after `tokens`, on logits that are not finite."""

  method: str
  id: str
  tokens: int


# --- the benchmark -----------------------------------------------------------


class Row(NamedTuple):
  """A method on some prompts; None was not measured.

  name, drafter, gamma: as in plan.Arm.
  category, prompts: the prompts' category and number; '' and None: all.
  tok_s: tokens per second of decoding.
  improvement: tok_s over plain decoding's; see timing.improvements.
  whole: the same for whole requests, with both models' prefill.
  time_to_first_token: seconds, a median.
  alpha: teacher-forced on plain decoding's text; None as in predict.alphas.
  predicted: from the calibration prompts, before these ran.
  explained: the cost model at the acceptance measured here.
  """

  name: str
  drafter: str
  gamma: int
  counts: metrics.Summary
  category: str = ''
  prompts: int | None = None
  tok_s: float | None = None
  improvement: intervals.Interval = intervals.Interval()
  whole: intervals.Interval = intervals.Interval()
  time_to_first_token: float | None = None
  alpha: Alpha | None = None
  predicted: Prediction | None = None
  explained: Prediction | None = None
  audit: Audit | None = None

  @property
  def by_position(self) -> list[float | None]:
    return self.counts.acceptance_per_position[: self.gamma]


class Batch(NamedTuple):
  """All methods in a full pool; the intervals of all sizes hold at once.

  batch_size: rows of the pool.
  rows: speed and improvement by sets of prompts, with the prompts that are read
    meanwhile; counts and audit cover the requests that ended.
  """

  batch_size: int
  rows: list[Row]
  failed: list[Failure]


class Document(NamedTuple):
  """All that a benchmark found; where a request failed, up to that point.

  costs: what adaptive chose by; given as adaptive.costs it chooses the same.
  predicted: by method. measured: seconds that the test prompts took.
  left_out: methods not run, as they could not win, and why.
  categories: rows by category; all their intervals hold at once.
  distance: the target's, from a reference that was asked for.
  """

  machine: dict[str, Any]
  ceiling: Ceiling
  setting: Setting
  calibration: calibration_lib.Calibration
  costs: Mapping[str, Any] = {}
  predicted: dict[str, Prediction] = {}
  measured: float = 0.0
  left_out: dict[str, str] = {}
  rows: Sequence[Row] = ()
  categories: Sequence[Row] = ()
  repeated_8grams: float | None = None
  crossover: Sequence[Batch] = ()
  failed: Sequence[Failure] = ()
  distance: distance_lib.Distance | None = None


# --- the audit program -------------------------------------------------------


class Total(NamedTuple):
  """Counts over all methods.

  texts, tokens: compared. identical, ties, bugs: texts, by verdict.
  positions: distinct ones among the tokens; methods repeat each other's.
  bugs_at_most: upper 95 % bound on bugs per 1,000 positions, exact
    (Clopper-Pearson) if positions are independent.
  """

  texts: int
  tokens: int
  positions: int
  identical: int
  ties: int
  bugs: int
  bugs_at_most: float
