"""Compares target weights x draft weights: speed, acceptance, and distance.

bash experiments/quantised/run.sh TARGET DRAFT [--targets=...] [--drafts=...]

Takes bench.py's --config, whose dtypes --targets and --drafts replace. A target
that is in the results, but not in --targets, stays there.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.quantised import render
from specdec_jax import program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, budget, prompts, verdict
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files
from specdec_jax.models import convert

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(ROOT / 'configs/pair.py'))
_TARGETS = flags.DEFINE_list(
  'targets', ['bfloat16', 'int8', 'int4', 'stored'], 'dtypes of the target'
)
_DRAFTS = flags.DEFINE_list(
  'drafts', ['int8', 'int4', 'stored'], 'dtypes of the draft'
)
_REFERENCE = flags.DEFINE_string(
  'reference', 'float32', 'what distances are from, as of bench.py'
)
_MINUTES = flags.DEFINE_float(
  'minutes', 12, 'of each target, to benchmark it; 0: all'
)
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """Returns whether every difference from plain decoding is explained."""
  settings = settings_lib.settings(_CONFIG.value)
  for flag in _TARGETS, _DRAFTS:
    if unknown := {*flag.value} - {*convert.DTYPES}:
      known = ', '.join(convert.DTYPES)
      raise ValueError(f'{flag.name}={",".join(unknown)}: allowed are {known}')
  folder = program.open_workdir(_RESULTS.value)
  # The pages that the targets before have written are no change.
  sound, made = True, page.made_here()
  path = (folder or pathlib.Path()) / f'{HERE.name}.json'
  known = files.read_json(path, {'runs': []})['runs'] if folder else []
  kept = {x['weights']: x for x in known}
  for dtype in _TARGETS.value:
    target = dataclasses.replace(settings.target, dtype=dtype)
    found = _run(dataclasses.replace(settings, target=target))
    sound &= verdict.sound(found)
    found = {'weights': dtype, **found._replace(machine=made)._asdict()}
    kept[dtype] = page.plain(found)
    doc = {'runs': [kept[x] for x in convert.DTYPES if x in kept]}
    text = render.markdown(doc)
    page.save(folder, HERE, doc, text, picture=render.figure(doc))
  print(text)
  return sound


def _run(settings: settings_lib.Settings):
  """Runs the benchmark on one target with every draft."""
  e = settings_lib.load(settings)
  plan = plan_lib.make(e, prompts.chosen(settings.bench.prompts))
  arms = _arms(e)
  away = None
  if _REFERENCE.value not in ('', settings.target.dtype):
    away = benchmark.distance(e, arms, plan, _REFERENCE.value)
  clock = budget.clock(_MINUTES.value).later(program.elapsed())
  return benchmark.run(arms, plan, clock, away)


def _arms(e: settings_lib.Setup) -> list[plan_lib.Arm]:
  """Makes plain decoding, other methods, and lm with each draft: 'lm int4'."""
  out = [x for x in plan_lib.arms(e, measure=False) if x.drafter != 'lm']
  gammas = sorted(set(e.settings.decode.gammas) - {0})
  for dtype in _DRAFTS.value:
    name, s = f'lm {dtype}', e.settings
    draft = dataclasses.replace(s.drafters['lm'], dtype=dtype)
    s = dataclasses.replace(s, drafters={**s.drafters, 'lm': draft})
    own = dataclasses.replace(e, settings=s)
    made = settings_lib.engine(own, 'lm', gammas[-1])
    named = made.drafter._replace(name=name)
    engine = dataclasses.replace(made, drafter=named)
    out += [plan_lib.Arm(f'{name} g={x}', name, x, engine) for x in gammas]
  return out


if __name__ == '__main__':
  program.launch(run)
