"""Compares every trained draft and the shipped EAGLE, side by side."""

import dataclasses
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from configs import smollm2
from experiments import page
from experiments.heads import kinds, render
from experiments.specbench import questions
from specdec_jax import build, printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, verdict
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent


def run() -> bool:
  """Returns whether every difference from plain decoding is explained."""
  config = smollm2.get_config(kinds.SIZE.value).unlock()
  config.eagle.tree = ''  # of no draft that is measured
  config.decode.max_new_tokens = kinds.TOKENS.value
  chosen = questions.read(kinds.QUESTIONS.value, kinds.LIMIT.value)
  kept = [kinds.folder(f'{kind}.json') for kind in kinds.KINDS.value]
  trained = [*map(files.read_json, kept)]
  folder = program.open_workdir(kinds.RESULTS.value)
  e = settings_lib.load(settings_lib.settings(config))
  plan, about = questions.judged(e, kinds.QUESTIONS.value, chosen)
  found = benchmark.run(_arms(e, trained), plan)
  found = found._replace(machine=page.made_here())
  doc = page.plain({'questions': about, 'trained': trained} | found._asdict())
  text = render.markdown(doc)
  page.save(folder, HERE, doc, text, picture=render.figure(doc))
  print(text)
  printing.result(doc)
  return verdict.sound(found)


def _arms(e: settings_lib.Setup, trained: list[Any]) -> list[plan_lib.Arm]:
  """Makes plain decoding, the config's draft, and each that was trained."""
  gamma = max(e.settings.decode.gammas)

  def arm(name: str, drafter: str, **changes: str) -> plan_lib.Arm:
    draft = dataclasses.replace(e.settings.drafters[drafter], **changes)
    made = build.engine(e.target, draft, gamma=gamma, measure=False)
    # A name of its own, by which costs and acceptance are told apart.
    named = made.drafter._replace(name=name)
    engine = dataclasses.replace(made, drafter=named)
    return plan_lib.Arm(f'{name} g={gamma}', name, gamma, engine)

  plain = settings_lib.engine(e, 'lookup', 0)
  out = [plan_lib.Arm('autoregressive', 'autoregressive', 0, plain)]
  out.append(arm(render.SHIPPED, 'eagle'))
  for x in trained:
    kind = x['kind']
    drafter = kind if kind in e.settings.drafters else 'eagle'
    # After a short training it may be worse than what a check lets pass.
    out.append(arm(kind, drafter, source=x['found']['draft'], check='off'))
  return out


if __name__ == '__main__':
  program.launch(run)
