"""Times plain and speculative sampling at several K."""

import collections
import re
from collections.abc import Mapping

from experiments import empirical, papers
from experiments import loaded as loaded_lib
from experiments.chen_table1 import texts
from specdec_jax import metrics
from specdec_jax import settings as settings_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import timing

# Of a text of the paper: its samplings, as (name, temperature, top_p).
SAMPLINGS = {
  texts.XSUM: (('nucleus', 1.0, 0.8), ('greedy', 0.0, 1.0)),
  texts.HUMANEVAL: (('nucleus', 0.8, 0.95),),
}
SWEPT = 1, 2, papers.CHEN_K, 8


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """A cell for each sampling, draft and K; a quarter of table 2's prompts."""
  most = max(1, asked.prompts // 4)
  asked = asked._replace(repeats=min(2, asked.repeats))
  chosen, wanted = texts.read(loaded.row.name, most)
  loaded = loaded._replace(prompts=tuple(chosen), references=wanted)
  cells = []
  for name, temperature, top_p in SAMPLINGS[loaded.row.theirs]:
    plan = loaded_lib.plan(loaded, temperature, asked.seed, 1)
    sampling = settings_lib.Sampling(temperature, 0, top_p, asked.seed)
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
  groups = plan_lib.groups(arms, plan, plan.test)
  programs = timing.compile_arms(arms, groups[0].full)
  runs, outputs = empirical.timed(arms, groups, programs, asked.repeats)
  scores = {
    name: _rouge(loaded, loaded_lib.answers_of(loaded, groups, x))
    for name, x in outputs.items()
  }
  speeds = {name: timing.tok_s(r) for name, r in runs.items()}
  ms = {name: x and 1000 / x for name, x in speeds.items()}
  return [
    {
      'draft': arm.drafter,
      'k': arm.gamma,
      'texts': len(plan.test),
      'ms': [ms[plain.name], ms[arm.name]],
      'speed': empirical.improvement(runs[arm.name], runs[plain.name]),
      'rouge': [scores[plain.name], scores[arm.name]],
      'efficiency': metrics.summary(
        metrics.join(outputs[arm.name])
      ).block_efficiency,
    }
    for arm in arms[1:]
  ]


def _rouge(loaded: loaded_lib.Loaded, found: Mapping[str, str]) -> list[float]:
  """Of each answer, in the order of the prompts; [] without references."""
  wanted = loaded.references
  return [rouge2(found[x], wanted[x]) for x in sorted(wanted, key=int)]


def rouge2(found: str, wanted: str) -> float:
  """F1 of the two texts' pairs of neighbouring words, without stemming.

  Lin 2004, https://aclanthology.org/W04-1013.
  """
  pairs = []
  for x in (found, wanted):
    words = re.findall('[a-z0-9]+', x.lower())
    pairs.append(collections.Counter(zip(words, words[1:], strict=False)))
  total = sum(x.total() for x in pairs)
  return 2 * (pairs[0] & pairs[1]).total() / total if total else 0.0
