"""Compares every method's texts with plain decoding's; runs the audit."""

import functools
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import rich.markup
from scipy import special

from specdec_jax import hosts, machine, metrics, printing, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import audit, records, tables, verdict
from specdec_jax.bench import plan as plan_lib


def promise(rule: types.Rule, sampling) -> records.Promised:
  """Says what a rule reproduces from plain decoding."""
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


def compare(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  answers: Mapping[str, records.Answers],
) -> dict[str, records.Audit]:
  """Audits every arm but plain decoding, arms[0], where all have answers."""
  plain, out = answers[arms[0].name], {}
  both = sorted(set.intersection(*map(set, answers.values())))
  for arm in arms[1:]:
    promised = promise(arm.engine.rule, plan.sampling)
    out[arm.name] = records.Audit(promised, len(both))
    if promised != 'tokens':
      continue
    pairs = [(plain[at], answers[arm.name][at]) for at in both]
    pairs = printing.track(pairs, f'audit of {arm.name}')
    target, chunk = arm.engine.target, arm.engine.options.chunk
    ran = plan.sampling, arm.gamma, chunk, plan.buffer, plan.bench.batch_size
    passes = audit.Passes(*ran)
    out[arm.name] = audit.compare(target.model, target.params, pairs, passes)
  return out


def failures(answers: Mapping[str, records.Answers]) -> list[records.Failure]:
  """Lists requests cut short by non-finite logits: no figure is then valid."""
  return [
    records.Failure(name, x.item.id, len(x.tokens))
    for name, found in answers.items()
    for x in found.values()
    if x.broken
  ]


# --- the audit program -------------------------------------------------------


def run(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  config: Any,
  folder: pathlib.Path | None,
) -> bool:
  """Runs every arm once on all prompts, compares, and prints, the JSON last;
  returns whether nothing is wrong. folder: for audit.json; None saves nothing.
  Raises ValueError unless there is more than arms[0], plain decoding."""
  if len(arms) < 2:
    raise ValueError(
      'decode.methods and decode.gammas name nothing to compare with plain '
      'decoding: want a method and a gamma of 1 or more'
    )
  groups = plan_lib.groups(arms, plan, plan.test + plan.calibration)
  outputs = {}
  for arm in arms:
    run = functools.partial(arm.engine.programs.generate, arm.engine.weights)
    outputs[arm.name] = [
      hosts.fetch(run(plan_lib.capped(arm, x.full)))
      for x in printing.track(groups, f'decoding with {arm.name}')
    ]
  answers = {x: plan_lib.answers(groups, y) for x, y in outputs.items()}
  audits = compare(arms, plan, answers)
  rows = [
    records.Row(
      *(arm.name, arm.drafter, arm.gamma),
      metrics.summary(metrics.join(outputs[arm.name])),
      audit=audits[arm.name],
    )
    for arm in arms[1:]
  ]
  plain = answers[arms[0].name].values()
  counts = total([*audits.values()], plain)
  about, failed = machine.describe(), failures(answers)
  setting, console = plan_lib.setting(arms, plan), printing.console()
  sentences = verdict.audit_sentences(counts, failed)
  tables.machine(about, console)
  tables.setting(setting, console)
  console.print()
  _print(rows, console)
  out = dict(config=config, machine=about, setting=setting, rows=rows)
  out |= dict(total=counts, failed=failed, verdict=sentences)
  tables.close(sentences, out, console, folder and folder / 'audit.json')
  return not failed and not counts.bugs


_TEXTS: list[tables.Column] = [
  ('method', 'name', '{}'),
  ('texts', 'audit.requests', '{}'),
  ('tokens', 'audit.tokens', '{}'),
  ('drafts accepted', 'counts', '{0.accepted_tokens} of {0.drafted_tokens}'),
  ('identical', 'audit.identical', '{}'),
  ('tie', 'audit.ties', '{}'),
  ('BUG', 'audit.bugs', '{}'),
]
# Of (name of the method, Finding).
_FINDINGS: list[tables.Column] = [
  ('prompt', '1.id', lambda x: rich.markup.escape(x[:20])),
  ('method', '0', '{}'),
  ('at', '1.position', '{}'),
  ('plain', '1.plain', '{}'),
  ('other', '1.other', '{}'),
  ('gap', '1.gap', '{:.2g}'),
  ('noise', '1.noise', '{:.2g}'),
  ('rounding', '1.rounding', '{:.2g}'),
  ('verdict', '1.verdict', '{}'),
  ('reason', '1.reason', '{}'),
]


def _print(rows: Sequence[records.Row], console: tables.Console) -> None:
  console.print(tables.table('Texts against plain decoding', rows, _TEXTS))
  audits = [(r.name, r.audit) for r in rows if r.audit]
  found = [(name, x) for name, y in audits for x in y.findings]
  if not found:
    return
  console.print(tables.table('First divergences', found, _FINDINGS))
  console.print(
    f'A tie: the gap is at most {audit.FACTOR} times the noise, and the '
    'noise what rounding explains. Gap: what logits must move by for either '
    'token to win. Noise: what they move by between passes of one token and '
    'of a window. Rounding: what they move by in passes of one token, where '
    'each weight moves by up to one rounding.'
  )


def total(
  audits: Sequence[records.Audit], plain: Collection[records.Answer]
) -> records.Total:
  """Adds up audits of the same requests; where prompt (or source) and plain
  decoding's answer are equal, positions count once."""
  every = records.together(audits)
  assert every
  longest: dict[object, int] = {}
  for one in audits:
    for x, tokens in zip(plain, one.compared, strict=True):
      text = tuple(map(tuple, (x.item.tokens, x.item.source, x.tokens)))
      longest[text] = max(longest.get(text, 0), tokens)
  positions = sum(longest.values())
  wrong = {(x.id, x.position) for x in every.findings if x.verdict == 'BUG'}
  good = positions - len(wrong)
  # If every position is a bug, no rate below 1 is ruled out.
  most = special.betaincinv(len(wrong) + 1, good, 0.95) if good > 0 else 1.0
  return records.Total(
    texts=every.requests,
    tokens=every.tokens,
    positions=positions,
    identical=every.identical,
    ties=every.ties,
    bugs=every.bugs,
    bugs_at_most=1000 * float(most),
  )
