"""Compares every text of every arm with plain decoding's.

Here: which settings promise equal tokens, the comparison, and the run of the
audit program. audit.py explains a difference.
"""

import io
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import rich.box
import rich.console
from scipy import special

from specdec_jax import decode, requests, runtime, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import audit, machine, metrics, tables, timing, verdict
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files


def promise(rule: types.Rule, sampling) -> str:
  """Reproduced of plain decoding: 'tokens', 'distribution' or 'nothing'."""
  if not rule.lossless:
    return 'nothing'
  greedy = sampling.temperature < sampling_lib.GREEDY_BELOW
  return 'tokens' if greedy or rule.coupled else 'distribution'


def check_promise(rule: types.Rule, sampling) -> None:
  """Raises ValueError where texts need not equal plain decoding's."""
  kept = promise(rule, sampling)
  if kept == 'nothing':
    raise ValueError(
      f'rule={rule.name} is lossy and promises neither tokens nor their '
      'distribution, so there is nothing to audit: set --config.decode.rule to '
      'reject, block or coupled'
    )
  if kept == 'distribution':
    raise ValueError(
      f'rule={rule.name} at temperature={sampling.temperature} promises plain '
      "decoding's distribution, not its tokens, so there is nothing to audit: "
      'set --config.sampling.temperature=0 or --config.decode.rule=coupled'
    )


class Audit(NamedTuple):
  """The texts of an arm against plain decoding's.

  promised: see promise; unless it is 'tokens', nothing is compared.
  requests: number of texts.
  compared: by text, tokens compared: up to and with the first that differs.
  findings: of the texts that are not identical.
  """

  promised: str
  requests: int
  compared: tuple[int, ...] = ()
  findings: tuple[audit.Finding, ...] = ()

  @property
  def tokens(self) -> int:
    return sum(self.compared)

  @property
  def ties(self) -> int:
    return sum(x.verdict == 'tie' for x in self.findings)

  @property
  def bugs(self) -> int:
    return sum(x.verdict == 'BUG' for x in self.findings)


class Failure(NamedTuple):
  """A request that ended on logits that are not finite, after `tokens`."""

  method: str
  id: str
  tokens: int


def compare(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  groups: Sequence[plan_lib.Group],
  outputs: dict[str, list[decode.Output]],
  track: plan_lib.Track,
) -> dict[str, Audit]:
  """Compares each arm's texts with plain decoding's, where that is promised.

  Args:
    arms: plain decoding first.
    plan: for the sampling settings.
    groups: the requests.
    outputs: by arm, one for each group.
    track: a progress bar.

  Returns:
    An Audit by arm.
  """
  items = [item for group in groups for item in group.items]
  read = lambda arm: zip(
    timing.texts(groups, outputs[arm.name]),
    _broken_rows(groups, outputs[arm.name]),
    strict=True,
  )
  out = {}
  for arm in arms[1:]:
    promised = promise(arm.engine.rule, plan.sampling)
    out[arm.name] = Audit(promised, len(items))
    if promised != 'tokens':
      continue
    compared, findings = [], []
    rows = list(zip(items, read(arms[0]), read(arm), strict=True))
    for item, (plain, ended), (other, broken) in track(
      rows, f'audit of {arm.name}'
    ):
      # A text that ended on broken logits is reported as a failure; only the
      # tokens that both arms emitted are compared.
      end = min(len(plain), len(other)) if ended or broken else None
      found = _finding(
        arm, plan, item, plain[:end], other[:end], groups[0].host
      )
      same = found.position
      compared.append(len(plain[:end]) if same is None else same + 1)
      findings += [] if same is None else [found]
    out[arm.name] = Audit(
      promised, len(items), tuple(compared), tuple(findings)
    )
  return out


def _finding(
  arm, plan, item: requests.Item, plain, other, host: decode.Request
) -> audit.Finding:
  s, target = plan.sampling, arm.engine.target
  rows, length = host.tokens_BL.shape
  case = audit.Case(
    item.tokens,
    plain,
    other,
    s.temperature,
    s.top_k,
    s.top_p,
    s.seed,
    item.number,
  )
  found = audit.audit(
    arm.model,
    target.params,
    case,
    gamma=arm.gamma,
    chunk=arm.engine.options.chunk,
    length=length,
    rows=rows,
    relative_limit=audit.NOISE_LIMIT if target.dtype == 'float32' else None,
  )
  text = lambda token: (
    None if token is None else target.tokenizer.decode([token])
  )
  return found._replace(
    id=item.id, plain_text=text(found.plain), other_text=text(found.other)
  )


def broken(name: str, groups, outputs) -> list[Failure]:
  """The requests of an arm that ended on logits that are not finite."""
  items = [item for group in groups for item in group.items]
  rows, texts = _broken_rows(groups, outputs), timing.texts(groups, outputs)
  return [
    Failure(name, item.id, len(text))
    for item, text, bad in zip(items, texts, rows, strict=True)
    if bad
  ]


def _broken_rows(groups, outputs) -> list[bool]:
  return [
    bool(out.info.broken_B[row])
    for group, out in zip(groups, outputs, strict=True)
    for row in range(len(group.items))
  ]


# --- the audit program -------------------------------------------------------


class Row(NamedTuple):
  """An arm of the audit program; audit is None for plain decoding."""

  name: str
  gamma: int
  counts: metrics.Summary
  audit: Audit | None


class Total(NamedTuple):
  """Counts over all arms.

  texts, tokens: how many were compared.
  positions: distinct ones among the tokens; arms repeat each other's.
  identical, ties, bugs: texts, by verdict.
  per_1000_tokens: first divergences per 1,000 tokens.
  bugs_at_most: upper 95 % bound on bugs per 1,000 positions, exact
    (Clopper-Pearson) if positions are independent.
  """

  texts: int
  tokens: int
  positions: int
  identical: int
  ties: int
  bugs: int
  per_1000_tokens: float | None
  bugs_at_most: float


class Report(NamedTuple):
  """The document of the audit program."""

  machine: dict[str, Any]
  setting: plan_lib.Setting
  rows: list[Row]
  total: Total
  failed: list[Failure]


def run(
  arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan, track: plan_lib.Track
) -> Report:
  """Runs every arm once on all prompts and compares; arms[0] is plain.

  Raises:
    ValueError: no arm but plain decoding.
  """
  if len(arms) < 2:
    raise ValueError(
      'decode.methods and decode.gammas name nothing to compare with plain '
      'decoding: want a method and a gamma of 1 or more'
    )
  groups = plan_lib.groups(arms, plan, plan.judged + plan.others)
  outputs = {
    arm.name: [
      jax.device_get(arm.engine.programs.generate(arm.engine.weights, x.full))
      for x in track(groups, f'decoding with {arm.name}')
    ]
    for arm in arms
  }
  audits = compare(arms, plan, groups, outputs, track)
  rows, failed = [], []
  for arm in arms:
    counts = metrics.summary(metrics.join(outputs[arm.name]))
    rows.append(Row(arm.name, arm.gamma, counts, audits.get(arm.name)))
    failed += broken(arm.name, groups, outputs[arm.name])
  items = [item for group in groups for item in group.items]
  # The same prompt with the same answer is read at the same positions.
  texts = timing.texts(groups, outputs[arms[0].name])
  keys = [
    (tuple(item.tokens), *text) for item, text in zip(items, texts, strict=True)
  ]
  return Report(
    machine.describe(),
    plan_lib.setting(arms, plan),
    rows,
    total(list(audits.values()), keys),
    failed,
  )


def finish(report: Report, config: Any, folder: pathlib.Path | None) -> bool:
  """Prints everything, the JSON last; true if nothing is wrong.

  config: part of the document.
  folder: for audit.json and audit.md; None saves nothing.
  """
  sentences = verdict.audit_sentences(report)
  out = {'config': config, **report._asdict(), 'verdict': sentences}
  console = runtime.console()
  tables.machine(report.machine, console)
  tables.setting(report.setting, console)
  console.print()
  tables.audit(report, console)
  tables.close(sentences, out, console)
  if folder:
    files.write(folder / 'audit.json', runtime.compact(out))
    files.write(folder / 'audit.md', _markdown(report, sentences))
  return not report.failed and not report.total.bugs


def _markdown(report: Report, sentences: Sequence[str]) -> str:
  """The tables and the verdict without colours."""
  file = io.StringIO()
  console = rich.console.Console(file=file, width=400, color_system=None)
  console.print('# Audit against plain decoding\n\n```')
  tables.machine(report.machine, console)
  tables.setting(report.setting, console)
  console.print('```\n')
  tables.audit(report, console, rich.box.MARKDOWN)
  console.print('\n' + '\n\n'.join(sentences), highlight=False)
  return '\n'.join(line.rstrip() for line in file.getvalue().splitlines())


def total(audits: Sequence[Audit], texts: Sequence[object]) -> Total:
  """The Total of several audits of the same requests.

  texts: by request, a value that is equal where prompt and answer are equal.
  """
  longest: dict[object, int] = {}
  for one in audits:
    for text, tokens in zip(texts, one.compared, strict=True):
      longest[text] = max(longest.get(text, 0), tokens)
  positions = sum(longest.values())
  wrong = {
    (x.id, x.position) for a in audits for x in a.findings if x.verdict == 'BUG'
  }
  good = positions - len(wrong)
  # If every position is a bug, no rate below 1 is ruled out.
  most = special.betaincinv(len(wrong) + 1, good, 0.95) if good > 0 else 1.0
  tokens = sum(a.tokens for a in audits)
  differing = sum(len(a.findings) for a in audits)
  requests_ = sum(a.requests for a in audits)
  return Total(
    texts=requests_,
    tokens=tokens,
    positions=positions,
    identical=requests_ - differing,
    ties=sum(a.ties for a in audits),
    bugs=sum(a.bugs for a in audits),
    per_1000_tokens=metrics.ratio(1000 * differing, tokens),
    bugs_at_most=1000 * float(most),
  )
