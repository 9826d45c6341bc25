"""Compares every drafter under every rule at T = 0 and 1, on one model.

bash experiments/methods/run.sh [--rules=reject,block] [--temperatures=0,0.7,1]
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.methods import render
from specdec_jax import build, machine, printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts, timing

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(HERE / 'config.py'))
_RULES = flags.DEFINE_list(
  'rules', ['reject', 'block', 'coupled', 'lenient:0.5'], 'names of rules'
)
_TEMPERATURES = flags.DEFINE_list('temperatures', ['0', '1'], '')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """Returns whether every difference from plain decoding is explained."""
  settings = settings_lib.settings(_CONFIG.value)
  if len(settings.decode.gammas) != 1 or not settings.decode.gammas[0]:
    what = f'decode.gammas={settings.decode.gammas}'
    raise ValueError(f'{what}: want one gamma of 1 or more')
  rules = [build.rule_of(name) for name in _RULES.value]
  warmths = [
    dataclasses.replace(settings.sampling, temperature=float(x))
    for x in _TEMPERATURES.value
  ]
  folder = program.open_workdir(_RESULTS.value)
  e = settings_lib.load(settings)
  plan = plan_lib.make(e, prompts.builtin())
  # All prompts are judged: nothing is predicted here.
  plan = plan._replace(test=plan.test + plan.calibration, calibration=())
  plain, arms = _arms(e, rules)
  doc = {
    'machine': machine.describe(),
    'setting': plan_lib.setting([plain], plan),
    'gamma': settings.decode.gammas[0],
    'exit': settings.drafters['early_exit'].exit,
    'cells': [],
  }
  # Greedy, all lossless rules are equal; only the first one runs.
  first = next((rule.name for rule in rules if rule.lossless), None)
  text, level = '', 1 - 0.05 / len(warmths)
  for sampling in warmths:
    once = lambda rule: not rule.lossless or rule.name == first
    used = [x for x in arms if sampling.temperature or once(x.engine.rule)]
    warm = plan._replace(sampling=sampling)
    doc['cells'] += _cells(plain, used, warm, level)
    text = render.markdown(page.plain(doc))
    page.save(folder, HERE, doc, text)
  print(text)
  printing.result(doc)
  return not any(x['failed'] or x['audit'].bugs for x in doc['cells'])


def _arms(e: settings_lib.Setup, rules):
  """Makes plain decoding, and each method under each rule: 'method rule'."""
  out, plain = [], None
  for rule in rules:
    d = dataclasses.replace(e.settings.decode, rule=rule.name)
    own = dataclasses.replace(e.settings, decode=d)
    first, *others = plan_lib.arms(dataclasses.replace(e, settings=own))
    plain = plain or first
    out += [arm._replace(name=f'{arm.drafter} {rule.name}') for arm in others]
  return plain, out


def _cells(plain, arms, plan: plan_lib.Plan, level: float):
  """Makes a cell for each arm at one temperature; level: of all intervals."""
  found = timing.measured([plain, *arms], plan, level=level)
  first, *rows = found.rows
  for arm, row in zip(arms, rows, strict=True):
    yield {
      'name': arm.name,
      'drafter': arm.drafter,
      'rule': arm.engine.rule.name,
      'lossless': arm.engine.rule.lossless,
      'temperature': plan.sampling.temperature,
      'improvement': row.improvement,
      'tok_s': first.tok_s,
      'counts': row.counts,
      'alpha': row.alpha,
      'audit': row.audit,
      'failed': [x for x in found.failed if x.method == arm.name],
    }


if __name__ == '__main__':
  program.launch(run)
