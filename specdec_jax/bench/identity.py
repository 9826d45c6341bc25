"""Does every arm emit plain decoding's tokens? Every text is compared.

Which settings promise that, the comparison, and the audit program's run. Why
two texts part is audit's question.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from scipy import special

from specdec_jax import decode, requests, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import audit, machine, metrics, timing


def promise(rule: types.Rule, sampling) -> str:
  """What a rule keeps of plain decoding: 'tokens', 'in law' or 'nothing'."""
  if not rule.lossless:
    return 'nothing'
  greedy = sampling.temperature < sampling_lib.GREEDY_BELOW
  return 'tokens' if greedy or rule.coupled else 'in law'


def check_promise(rule: types.Rule, sampling) -> None:
  """Raises ValueError where texts need not equal plain decoding's."""
  kept = promise(rule, sampling)
  if kept == 'nothing':
    raise ValueError(
      f'rule={rule.name} is lossy and promises neither tokens nor law, so '
      'there is nothing to audit: set --config.decode.rule to reject, block or '
      'coupled'
    )
  if kept == 'in law':
    raise ValueError(
      f'rule={rule.name} at temperature={sampling.temperature} promises plain '
      "decoding's law, not its tokens, so there is nothing to audit: set "
      '--config.sampling.temperature=0 or --config.decode.rule=coupled'
    )


def compare(
  arms: Sequence[timing.Arm],
  plan: timing.Plan,
  groups: Sequence[timing.Group],
  outputs: dict[str, list[decode.Output]],
  track: timing.Track,
) -> dict[str, dict[str, Any]]:
  """By arm: its texts against plain decoding's (arms[0]), where promised.

  outputs: by arm, one for each group. tokens: how many were compared, up to and
  with the first that differs. findings: what is not identical.
  """
  items = [item for group in groups for item in group.items]
  plain = timing.texts(groups, outputs[arms[0].name])
  ended = _broken_rows(groups, outputs[arms[0].name])
  out = {}
  for arm in arms[1:]:
    kept = promise(arm.engine.rule, plan.sampling)
    if kept != 'tokens':
      out[arm.name] = {'promised': kept, 'requests': len(items)}
      continue
    other = timing.texts(groups, outputs[arm.name])
    either = [
      x or y
      for x, y in zip(
        ended, _broken_rows(groups, outputs[arm.name]), strict=True
      )
    ]
    found, tokens = [], 0
    rows = list(zip(items, plain, other, either, strict=True))
    for item, mine, theirs, broken in track(rows, f'audit of {arm.name}'):
      # What ended on broken logits is a failure of its own, and its end no
      # choice: only what both emitted is compared.
      end = min(len(mine), len(theirs)) if broken else None
      case = _case(plan, item, mine[:end], theirs[:end])
      finding = _finding(arm, case, groups[0].host.tokens_BL.shape)
      if finding.position is None:
        tokens += len(case.plain)
      else:
        tokens += finding.position + 1
        found.append(_described(arm, item, finding))
    count = lambda verdict, found=found: sum(
      x['verdict'] == verdict for x in found
    )
    out[arm.name] = {
      'promised': 'tokens',
      'requests': len(items),
      'tokens': tokens,
      'differing': len(found),
      'ties': count('tie'),
      'bugs': count('BUG'),
      'findings': found,
    }
  return out


def _case(plan: timing.Plan, item: requests.Item, plain, other) -> audit.Case:
  s = plan.sampling
  return audit.Case(
    item.tokens,
    plain,
    other,
    temperature=s.temperature,
    top_k=s.top_k,
    top_p=s.top_p,
    seed=s.seed,
    request=item.number,
  )


def _finding(arm: timing.Arm, case: audit.Case, shape) -> audit.Finding:
  rows, length = shape
  single = arm.engine.target.dtype == 'float32'
  return audit.audit(
    arm.model,
    arm.engine.target.params,
    case,
    gamma=arm.gamma,
    chunk=arm.engine.options.chunk,
    length=length,
    rows=rows,
    relative_limit=audit.NOISE_LIMIT if single else None,
  )


def _described(arm, item: requests.Item, finding: audit.Finding):
  text = lambda token: (
    None if token is None else arm.engine.target.tokenizer.decode([token])
  )
  return {
    'id': item.id,
    **dataclasses.asdict(finding),
    'plain_text': text(finding.plain),
    'other_text': text(finding.other),
  }


def broken(groups, outputs: Sequence[decode.Output]) -> list[dict[str, Any]]:
  """Requests that ended on logits that are not finite, and after how much."""
  items = [item for group in groups for item in group.items]
  rows = _broken_rows(groups, outputs)
  texts = timing.texts(groups, outputs)
  return [
    {'id': item.id, 'tokens': len(text)}
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


def run(
  arms: Sequence[timing.Arm], plan: timing.Plan, track: timing.Track
) -> dict[str, Any]:
  """Runs every arm once on all prompts and compares; arms[0] is plain.

  Raises:
    ValueError: no arm but plain decoding.
  """
  if len(arms) < 2:
    raise ValueError(
      'decode.methods and decode.gammas name nothing to compare with plain '
      'decoding: want a method and a gamma of 1 or more'
    )
  groups = timing.grouper(arms, plan)(plan.judged + plan.others)
  outputs = {
    arm.name: [
      jax.device_get(arm.engine.programs.generate(arm.engine.weights, x.full))
      for x in track(groups, f'decoding with {arm.name}')
    ]
    for arm in arms
  }
  audits = compare(arms, plan, groups, outputs, track)
  rows = [
    {
      'name': arm.name,
      'gamma': arm.gamma,
      **metrics.summary(timing.join(outputs[arm.name])),
      'audit': audits.get(arm.name),
      'broken': broken(groups, outputs[arm.name]),
    }
    for arm in arms
  ]
  return {
    'machine': machine.describe(),
    'setting': timing.setting(arms, plan),
    'rows': rows,
    'total': total(list(audits.values())),
  }


def total(audits: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Counts of several audits, and first divergences per 1,000 tokens.

  bugs_at_most: of the unexplained ones, the exact (Clopper-Pearson) upper 95 %
  bound, tokens taken as independent.
  """
  add = lambda name: sum(x[name] for x in audits)
  tokens, bugs = add('tokens'), add('bugs')
  good = tokens - bugs
  # Without a good one, no rate below 1 is ruled out.
  most = special.betaincinv(bugs + 1, good, 0.95) if good else 1.0
  rate = metrics.ratio(1000 * add('differing'), tokens)
  return {
    'texts': add('requests'),
    'tokens': tokens,
    'identical': add('requests') - add('differing'),
    'ties': add('ties'),
    'bugs': bugs,
    'per_1000_tokens': rate,
    'bugs_at_most': 1000 * float(most),
  }
