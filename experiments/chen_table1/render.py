"""Times plain and speculative sampling at several K: table 1, and figure 1."""

import collections
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import claims as claims_lib
from experiments import empirical, papers, resampled
from experiments import loaded as loaded_lib
from experiments.chen_table1 import texts
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import plan as plan_lib

# Of a text of the paper: its samplings, as (name, temperature, top_p).
SAMPLINGS = {
  texts.XSUM: (('nucleus', 1.0, 0.8), ('greedy', 0.0, 1.0)),
  texts.HUMANEVAL: (('nucleus', 0.8, 0.95),),
}
SWEPT = 1, 2, papers.CHEN_K, 8


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """Makes cells by sampling, draft and K, on a quarter of table 2's prompts."""
  most = max(1, asked.prompts // 4)
  asked = asked._replace(repeats=min(2, asked.repeats))
  chosen, wanted = texts.read(loaded.row.name, most)
  loaded = loaded._replace(prompts=tuple(chosen), references=wanted)
  cells = []
  for name, temperature, top_p in SAMPLINGS[loaded.row.theirs]:
    plan = loaded_lib.plan(loaded, temperature, 1)
    sampling = sampling_lib.Sampling(temperature, top_p=top_p)
    found = _cells(loaded, plan._replace(sampling=sampling), asked)
    cells += [{'sampling': name} | x for x in found]
  return cells


def _cells(loaded: loaded_lib.Loaded, plan: plan_lib.Plan, asked):
  plain = plan_lib.Arm('autoregressive', 'autoregressive', 0, loaded.plain)
  gammas = [x for x in asked.gammas if x in SWEPT]
  arms = [plain] + [
    plan_lib.Arm(f'{name} K={k}', name, k, engine)
    for name, engine in loaded.engines.items()
    for k in gammas
  ]
  found = empirical.measured(arms, plan, asked.repeats)
  runs, rows = found.runs, {x.name: x for x in found.rows}
  wanted, scores = loaded.references, {}
  order = sorted(wanted, key=int)  # the prompts'
  for name, x in runs.items():
    said = loaded_lib.texts_of(loaded, x.answers)
    scores[name] = [rouge2(said[i], wanted[i]) for i in order]
  ms = {name: x.tok_s and 1000 / x.tok_s for name, x in rows.items()}
  return [
    {
      'draft': arm.drafter,
      'k': arm.gamma,
      'texts': len(plan.test),
      'ms': [ms[plain.name], ms[arm.name]],
      'speed': empirical.improvement(runs[arm.name], runs[plain.name]),
      'rouge': [scores[plain.name], scores[arm.name]],
      'efficiency': rows[arm.name].counts.block_efficiency,
    }
    for arm in arms[1:]
  ]


def rouge2(found: str, wanted: str) -> float:
  """Computes F1 over texts' pairs of neighbouring words, without stemming.

  Lin 2004, https://aclanthology.org/W04-1013.
  """
  pairs = []
  for x in (found, wanted):
    words = re.findall('[a-z0-9]+', x.lower())
    pairs.append(collections.Counter(zip(words, words[1:], strict=False)))
  total = sum(x.total() for x in pairs)
  return 2 * (pairs[0] & pairs[1]).total() / total if total else 0.0


# --- the page -----------------------------------------------------------------

OURS = (
  'text=target, draft, sampling, K=k, plain ms a token=ms.0:.2f, '
  'speculated=ms.1:.2f, speed:.2fx, tokens a window=efficiency:.2f, '
  'plain ROUGE-2=mean.0:.3f, speculated=mean.1:.3f'
)
THEIRS = (
  'text, sampling, plain ms a token=plain_ms:.1f, speculated=ms:.2f, '
  'speed:.2fx, plain result=plain:.3f, speculated:.3f'
)


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [
    x | {'mean': [float(np.mean(y)) if y else None for y in x['rouge']]}
    for x in empirical.lines(cells, every)
  ]
  return [
    Part('Ours, decoding at batch 1, with 95 % intervals.', OURS, ours),
    Part(
      f'Theirs, a draft of 4B for 70B, K = {papers.CHEN_K}. The result of '
      'HumanEval is the share of functions that pass, which is not measured '
      'here.',
      THEIRS,
      papers.CHEN,
    ),
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Claims speed at the paper's K, and what speculation changes in ROUGE-2.

  Greedy texts are plain decoding's own, so that theirs cannot change.
  """
  return [
    claim
    for theirs in papers.CHEN
    for name, found in cells.items()
    if every[name].theirs == theirs.text
    for x in found
    if (x['sampling'], x['k']) == (theirs.sampling, papers.CHEN_K)
    for claim in _claims(theirs, every[name].name, x)
  ]


def _claims(theirs: papers.Chen, name: str, x: Mapping[str, Any]):
  cell, place = f'{theirs.text}, {theirs.sampling}', f'{name}, {x["draft"]}'
  why = f'{x["efficiency"]:.2f} tokens a window'
  given = f'{cell}: speed', theirs.speed, 2, place, x['speed'], why
  yield claims_lib.speed(*given)
  plain, mine = (np.asarray(y) for y in x['rouge'])
  if len(plain) and theirs.sampling != 'greedy':
    change = theirs.speculated - theirs.plain
    # Of two numbers that round.
    ends = (round(change + x, 4) for x in (-1e-3, 1e-3))
    ours_R = resampled.draws(len(plain)) @ (mine - plain) / len(plain)
    ours, form = resampled.interval(ours_R, len(plain)), '{:+.3f}'
    given = f'{cell}: change of ROUGE-2', form.format(change), place, *ends
    yield claims_lib.Claim(*given, ours, form, of='quality')


TABLE = empirical.Table(
  'chen_table1',
  measure,
  parts,
  claims,
  why='EAGLE and lookup for 135M, not a draft of 4B',
  theirs="The paper's target, Chinchilla of 70B: not run, its weights are not "
  'published; your own: `{run} --target=SOURCE --draft=SOURCE`.',
  rows=texts.rows,
)
