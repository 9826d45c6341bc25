"""Predicts and measures every method's improvement at some temperatures.

bash experiments/prediction/run.sh [--temperatures=0,1] [--config...]
bash experiments/prediction/run.sh --show  # of what is stored: figure, tables
bash experiments/prediction/run.sh --own=DIR/results/bench.json,...
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.prediction import cells as cells_lib
from experiments.prediction import stored
from specdec_jax import program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, prompts, verdict
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(HERE / 'config.py'))
_PROMPTS = flags.DEFINE_string('prompts', '', 'in place of bench.prompts')
_SHOW = flags.DEFINE_bool('show', False, 'measure nothing: draw what is stored')
_OWN = flags.DEFINE_list(
  'own',
  [],
  "results of scripts/bench.py, for this machine's own error of costs",
)
_WARM = flags.DEFINE_list('temperatures', ['0', '1'], '')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """Returns whether every difference from plain decoding is explained."""
  if _SHOW.value:
    draw(pathlib.Path(_RESULTS.value))
    stored.write()
    return True
  if _OWN.value:
    print(f'Added to {stored.add_own(_OWN.value)}.')
    return True
  settings = settings_lib.settings(_CONFIG.value)
  warmths = [
    dataclasses.replace(settings.sampling, temperature=float(x))
    for x in _WARM.value
  ]
  folder = program.open_workdir(_RESULTS.value)
  chosen = prompts.chosen(_PROMPTS.value or settings.bench.prompts)
  e = settings_lib.load(settings)
  arms, plan = plan_lib.arms(e, measure=False), plan_lib.make(e, chosen)
  cells, sound, text = [], True, ''
  for sampling in warmths:
    doc = benchmark.run(arms, plan._replace(sampling=sampling))
    sound &= verdict.sound(doc)
    s = doc.setting
    pair = f'{s.target} {s.draft or ""}'.strip()
    cells += cells_lib.of(page.plain(doc._asdict()), pair)
    caption = (
      f'{page.made_on(doc.machine)} {s.target}, {s.dtype}; '
      f'{s.judged_prompts} prompts judged, predicted from {s.other_prompts} '
      f'others, {s.max_new_tokens} new tokens at most, {s.repeats} repeats.'
    )
    text = cells_lib.markdown(cells, caption)
    page.save(folder, HERE, {'machine': doc.machine, 'cells': cells}, text)
  if folder is not None:
    draw(folder)
  print(text)
  return sound


def draw(folder: pathlib.Path) -> None:
  """Writes prediction.png from a folder's prediction.json."""
  doc = files.read_json(folder / 'prediction.json')
  cells = [cells_lib.Cell(**x) for x in doc['cells']]
  files.write(folder / 'prediction.png', cells_lib.figure(cells))


if __name__ == '__main__':
  program.launch(run)
