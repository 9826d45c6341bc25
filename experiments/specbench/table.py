r"""Runs a config's every method on Spec-Bench's questions, by category.

bash experiments/specbench/run.sh --questions=PATH/question.jsonl \
  [--config=configs/smollm2.py] [--limit=2] [--results=DIR]
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.specbench import questions, render
from specdec_jax import printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, verdict
from specdec_jax.bench import plan as plan_lib

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(ROOT / 'configs/smollm2.py'))
_QUESTIONS = flags.DEFINE_string('questions', '', 'a question.jsonl')
_LIMIT = flags.DEFINE_integer(
  'limit', 0, 'of each category, the first; 0: all', lower_bound=0
)
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """Returns whether every difference from plain decoding is explained."""
  settings = settings_lib.settings(_CONFIG.value)
  d = settings.decode
  if not d.methods or not any(d.gammas):
    what = f'decode.methods={d.methods}, decode.gammas={d.gammas}'
    raise ValueError(f'{what}: want a method, and a gamma of 1 or more')
  chosen = questions.grouped(questions.read(_QUESTIONS.value, _LIMIT.value))
  folder = program.open_workdir(_RESULTS.value)
  e = settings_lib.load(settings)
  plan, about = questions.judged(e, _QUESTIONS.value, chosen)
  doc = benchmark.run(plan_lib.arms(e, measure=False), plan)
  out = {'questions': about, **doc._asdict()}
  if doc.categories:
    text = render.markdown(given := page.plain(out))
    page.save(folder, HERE, out, text, picture=render.figure(given))
    print(text)
  printing.result(out)
  return verdict.sound(doc)


if __name__ == '__main__':
  program.launch(run)
