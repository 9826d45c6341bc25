"""Every method of a config on Spec-Bench's questions, category by category.

bash experiments/specbench/run.sh --questions=PATH/question.jsonl \
  [--config=configs/smollm2.py] [--limit=2] [--results=DIR]
"""

import dataclasses
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from absl import flags  # noqa: E402

from experiments import page  # noqa: E402
from experiments.specbench import questions, render  # noqa: E402
from specdec_jax import runtime  # noqa: E402
from specdec_jax import settings as settings_lib  # noqa: E402
from specdec_jax.bench import (  # noqa: E402
  benchmark,
  report,
  verdict,
)

_CONFIG = runtime.config_flag(str(ROOT / 'configs/smollm2.py'))
_QUESTIONS = flags.DEFINE_string('questions', '', 'a question.jsonl')
_LIMIT = flags.DEFINE_integer('limit', 0, 'of each category, the first; 0: all')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """True if every output is explained."""
  settings = settings_lib.settings(_CONFIG.value)
  d = settings.decode
  if not d.methods or not any(d.gammas):
    what = f'decode.methods={d.methods}, decode.gammas={d.gammas}'
    raise ValueError(f'{what}: want a method, and a gamma of 1 or more')
  chosen = questions.grouped(questions.read(_QUESTIONS.value, _LIMIT.value))
  folder = runtime.open_workdir(_RESULTS.value)
  e = settings_lib.load(settings)
  plan = settings_lib.plan(e, chosen)
  judged = plan.judged + plan.others  # None are kept back to predict from.
  plan = dataclasses.replace(plan, judged=judged, others=())
  chosen = questions.among(chosen, judged)
  doc = {'questions': questions.describe(_QUESTIONS.value, chosen)}
  doc |= benchmark.run(
    settings_lib.arms(e), plan, track=runtime.track, show=_show
  )
  if doc['categories']:
    doc['table'] = render.table(doc, questions.ids(chosen))
    page.save(folder, HERE, doc, text := render.markdown(doc))
    print(text)
  print(runtime.compact(doc))
  return verdict.sound(verdict.named_rows(doc))


def _show(stage: str, doc) -> None:
  if stage in ('machine', 'setting', 'calibration', 'failed'):
    report.show(stage, doc)


if __name__ == '__main__':
  runtime.launch(run)
