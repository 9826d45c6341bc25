"""Compares every text of every arm with plain decoding's.

Here: which settings promise equal tokens, the comparison, and the run of the
audit program. audit.py explains a difference.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from scipy import special

from specdec_jax import decode, hosts, machine, metrics, printing, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import audit, tables, verdict
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
  if promise(rule, sampling) != 'tokens':
    raise ValueError(
      f'rule={rule.name} at temperature={sampling.temperature} does not promise'
      " plain decoding's tokens, so there is nothing to audit: set --config."
      'decode.rule=coupled, or --config.sampling.temperature=0 and a rule that '
      'is not lossy'
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
  """The Audit of every arm but arms[0], plain decoding.

  Args:
    arms: plain decoding and the methods.
    plan: of the benchmark.
    groups: batches of prompts.
    outputs: by arm, one for each group.
    track: shows progress.
  """
  plain = plan_lib.answers(groups, outputs[arms[0].name])
  out = {}
  for arm in arms[1:]:
    promised = promise(arm.engine.rule, plan.sampling)
    out[arm.name] = Audit(promised, len(plain))
    if promised != 'tokens':
      continue
    compared, findings = [], []
    other = plan_lib.answers(groups, outputs[arm.name])
    pairs = list(zip(plain, other, strict=True))
    for one, two in track(pairs, f'audit of {arm.name}'):
      found = _compared(arm, plan, one, two, groups[0].host)
      if found.position is None:
        compared.append(min(len(one.tokens), len(two.tokens)))
      else:
        compared.append(found.position + 1)
        findings.append(found)
    out[arm.name] = Audit(
      promised, len(plain), tuple(compared), tuple(findings)
    )
  return out


def _compared(
  arm,
  plan: plan_lib.Plan,
  plain: plan_lib.Answer,
  other: plan_lib.Answer,
  host: decode.Request,
) -> audit.Finding:
  s, target = plan.sampling, arm.engine.target
  # A text that ended on broken logits is reported as a failure; only the
  # tokens that both arms emitted are compared.
  broken = plain.broken or other.broken
  end = min(len(plain.tokens), len(other.tokens)) if broken else None
  rows, length = host.tokens_BL.shape
  case = audit.Case(
    plain.item.tokens,
    plain.tokens[:end],
    other.tokens[:end],
    s.temperature,
    s.top_k,
    s.top_p,
    s.seed,
    plain.item.number,
    plain.item.source,
  )
  found = audit.audit(
    target.model,
    target.params,
    case,
    gamma=arm.gamma,
    chunk=arm.engine.options.chunk,
    length=length,
    rows=rows,
  )
  text = lambda token: (
    None if token is None else target.tokenizer.decode([token])
  )
  return found._replace(
    id=plain.item.id,
    plain_text=text(found.plain),
    other_text=text(found.other),
  )


def failures(
  groups: Sequence[plan_lib.Group], outputs: dict[str, list[decode.Output]]
) -> list[Failure]:
  """The requests that ended on logits that are not finite.

  Their texts are cut short, so no figure would be valid.
  """
  return [
    Failure(name, x.item.id, len(x.tokens))
    for name, found in outputs.items()
    for x in plan_lib.answers(groups, found)
    if x.broken
  ]


# --- the audit program -------------------------------------------------------


class Row(NamedTuple):
  """An arm of the audit program."""

  name: str
  counts: metrics.Summary
  audit: Audit


class Total(NamedTuple):
  """Counts over all arms.

  texts, tokens: how many were compared.
  positions: distinct ones among the tokens; arms repeat each other's.
  identical, ties, bugs: texts, by verdict.
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
  groups = plan_lib.groups(arms, plan, plan.test + plan.calibration)
  outputs = {
    arm.name: [
      hosts.fetch(
        arm.engine.programs.generate(
          arm.engine.weights, plan_lib.capped(arm, x.full)
        )
      )
      for x in track(groups, f'decoding with {arm.name}')
    ]
    for arm in arms
  }
  audits = compare(arms, plan, groups, outputs, track)
  summary = lambda name: metrics.summary(metrics.join(outputs[name]))
  # The same prompt with the same answer is read at the same positions.
  texts = [
    (tuple(x.item.tokens), tuple(x.tokens))
    for x in plan_lib.answers(groups, outputs[arms[0].name])
  ]
  return Report(
    machine.describe(),
    plan_lib.setting(arms, plan),
    [Row(name, summary(name), found) for name, found in audits.items()],
    total(list(audits.values()), texts),
    failures(groups, outputs),
  )


def finish(report: Report, config: Any, folder: pathlib.Path | None) -> bool:
  """Prints everything, the JSON last; true if nothing is wrong.

  config: part of the document.
  folder: for audit.json; None saves nothing.
  """
  sentences = verdict.audit_sentences(report)
  out = {'config': config, **report._asdict(), 'verdict': sentences}
  console = printing.console()
  tables.machine(report.machine, console)
  tables.setting(report.setting, console)
  console.print()
  tables.audit(report, console)
  tables.close(sentences, out, console)
  if folder and hosts.is_first():
    files.write(folder / 'audit.json', printing.compact(out))
  return not report.failed and not report.total.bugs


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
  differing = sum(len(a.findings) for a in audits)
  requests_ = sum(a.requests for a in audits)
  return Total(
    texts=requests_,
    tokens=sum(a.tokens for a in audits),
    positions=positions,
    identical=requests_ - differing,
    ties=sum(a.ties for a in audits),
    bugs=sum(a.bugs for a in audits),
    bugs_at_most=1000 * float(most),
  )
