"""EAGLE in chains and in trees, beside plain decoding: tokens and seconds.

bash experiments/tree_rules/run.sh speed --questions=PATH [--dtypes=float32]
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.specbench import questions as questions_lib
from specdec_jax import build, printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import (
  budget,
  intervals,
  predict,
  records,
  tables,
  timing,
)
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration
from specdec_jax.drafters import branch

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(ROOT / 'configs/smollm2.py'))
_DTYPES = flags.DEFINE_list('dtypes', ['float32', 'int8', 'stored'], 'target')
_SHAPES = flags.DEFINE_string(
  'shapes', '2;4;2,2;4,4,2,1;best:4;best:11', 'one level: a chain'
)
_QUESTIONS = flags.DEFINE_string('questions', '', 'question.jsonl of MT-Bench')
_LIMIT = flags.DEFINE_integer('limit', 4, 'questions of each category', 1)
_REPEATS = flags.DEFINE_integer('repeats', 2, 'runs of each question', 1)
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """Returns whether every text is plain decoding's."""
  folder = program.open_workdir(_RESULTS.value)
  config = _CONFIG.value.copy_and_resolve_references()
  chosen = questions_lib.read(_QUESTIONS.value, _LIMIT.value)
  chains, trees = _shapes()
  longest = max(chains + [branch.size_of(x) for x in trees])
  config.decode.gammas = (longest,)  # that buffers have room for
  config.bench.repeats = _REPEATS.value
  doc = {
    'machine': page.made_here(),
    'questions': questions_lib.describe(_QUESTIONS.value, chosen),
    'rows': [],
  }
  for dtype in _DTYPES.value:
    config.target.dtype = dtype
    doc['rows'] += _rows(settings_lib.settings(config), chosen)
    printing.progress_console().print(doc['rows'][-1], soft_wrap=True)
  text = _markdown(doc)
  page.save(folder, HERE, page.plain(doc), text, 'speed')
  print(text)
  return not any('BUG' in (row['differing'] or '') for row in doc['rows'])


def _shapes() -> tuple[list[int], list[str]]:
  """Lists the chains' gammas, ascending, and the trees."""
  every = _SHAPES.value.split(';')
  chains = sorted(int(x) for x in every if x.isdecimal())
  if not chains:
    raise ValueError(f'shapes={_SHAPES.value}: name a chain too, such as 4')
  return chains, [x for x in every if not x.isdecimal()]


def _arms(e: settings_lib.Setup) -> list[plan_lib.Arm]:
  """Makes plain decoding and every shape; chains are caps of the longest."""
  chains, trees = _shapes()
  plain = settings_lib.engine(e, 'lookup', 0)
  out = [plan_lib.Arm('plain', 'plain', 0, plain)]
  engine = _eagle(e, '', chains[-1])
  out += [plan_lib.Arm(f'chain of {x}', 'chain', x, engine) for x in chains]
  for tree in trees:
    engine = _eagle(e, tree, branch.size_of(tree))
    out.append(plan_lib.Arm(tree, tree, engine.drafter.gamma, engine))
  return out


def _eagle(e: settings_lib.Setup, tree: str, gamma: int) -> build.Engine:
  draft = dataclasses.replace(e.settings.drafters['eagle'], tree=tree)
  engine = build.engine(e.target, draft, gamma=gamma)
  # Costs are kept by name.
  drafter = engine.drafter._replace(name=tree or 'chain')
  return dataclasses.replace(engine, drafter=drafter)


def _rows(s: settings_lib.Settings, chosen) -> list[dict]:
  """Measures what every shape gives on one target."""
  e = settings_lib.load(s)
  arms, plan = _arms(e), plan_lib.make(e, chosen)
  request = plan_lib.middle(arms, plan, budget.WINDOWS).full
  costs = calibration.calibrate(arms, request, _REPEATS.value + 1)
  programs = timing.compile_arms(arms, request)
  outputs = {arm.name: [] for arm in arms}
  for group in plan_lib.groups(arms, plan, plan.calibration):
    for name, ran in timing.turn(arms[1:], programs, group).items():
      outputs[name].append(ran.output)
  told = predict.improvements(arms, costs, outputs, plan.batches)
  found = timing.measured(arms, plan, programs)
  # The best by what was known before.
  chains = [arm.name for arm in arms if arm.drafter == 'chain']
  chain = max(chains, key=lambda name: told[name].improvement)
  over = [chain, *(arm.name for arm in arms[1 + len(chains) :])]
  over = timing.improvements({name: found.runs[name] for name in over})
  rows = []
  for arm, mine in zip(arms[1:], found.rows[1:], strict=True):
    foretold = told[arm.name]
    predicted = foretold.improvement, foretold.low, foretold.high
    if len(outputs[arm.name]) < records.FEWEST:
      predicted = predicted[:1]
    row = dict(
      target=e.target.label,
      shape=arm.name,
      tokens=mine.counts.block_efficiency,
      verify=float(calibration.at_width(costs.verify, arm.gamma + 1)),
      drafting=calibration.interpolated(costs.propose[arm.drafter], arm.gamma),
      predicted=intervals.Interval(*predicted),
      improvement=mine.improvement,
      over_chain=None if arm.name == chain else over.get(arm.name),
      tok_s=mine.tok_s,
      differing=tables.identity([mine.audit]),
    )
    rows.append(row)
  plain = dict(target=e.target.label, shape='plain', tok_s=found.rows[0].tok_s)
  return page.plain([dict.fromkeys(rows[0]) | plain, *rows])


def _markdown(doc) -> str:
  q, about = doc['questions'], page.made_on(doc['machine'])
  said = (
    f'{about} SmolLM2 with its EAGLE, greedy, {page.asked(q)}, of '
    'which half predict and half '
    'are judged. v, drafting: the pass over the window and what drafts it, in '
    'plain steps. Predicted before, with the 90 % interval; measured, with the '
    '95 % interval over questions; over the chain that was foretold to be best.'
  )
  columns = (
    'target, shape, tokens a window=tokens:.2f, v=verify:.2f, '
    'drafting:.2f, predicted:.2fx, improvement:.2fx, '
    'over a chain=over_chain:.2fx, tok/s=tok_s:.1f, differing'
  )
  return page.text(page.Part(said, columns, doc['rows']))


if __name__ == '__main__':
  program.launch(run)
