"""Compares target weights x draft weights: speed, acceptance, and distance.

bash experiments/quantised/run.sh TARGET DRAFT [--targets=...] [--drafts=...]

Takes bench.py's --config, whose dtypes --targets and --drafts replace. A target
that is in the results, but not in --targets, stays there.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.quantised import render
from specdec_jax import program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, budget, prompts, verdict
from specdec_jax.bench import plan as plan_lib
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
  kept, sound = _kept(folder), True
  made_by = page.made_by()
  for dtype in _TARGETS.value:
    target = dataclasses.replace(settings.target, dtype=dtype)
    found = _run(dataclasses.replace(settings, target=target))
    sound &= verdict.sound(found)
    # The pages that the targets before have written are no change.
    found = found._replace(machine=found.machine | made_by)
    kept[dtype] = page.plain({'weights': dtype, **found._asdict()})
    doc = {'runs': [kept[x] for x in convert.DTYPES if x in kept]}
    text = render.markdown(doc)
    page.save(folder, HERE, doc, text, picture=render.figure(doc))
  print(text)
  return sound


def _kept(folder: pathlib.Path | None) -> dict[str, Any]:
  """Returns the results' runs, by the target's dtype."""
  path = folder and folder / f'{HERE.name}.json'
  if not path or not path.exists():
    return {}
  return {x['weights']: x for x in json.loads(path.read_text())['runs']}


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
    name, drafters = f'lm {dtype}', dict(e.settings.drafters)
    drafters['lm'] = dataclasses.replace(drafters['lm'], dtype=dtype)
    own = dataclasses.replace(e.settings, drafters=drafters)
    made = settings_lib.engine(
      dataclasses.replace(e, settings=own), 'lm', gammas[-1]
    )
    named = made.drafter._replace(name=name)
    engine = dataclasses.replace(made, drafter=named)
    out += [plan_lib.Arm(f'{name} g={x}', name, x, engine) for x in gammas]
  return out


if __name__ == '__main__':
  program.launch(run)
