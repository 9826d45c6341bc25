"""Divergences by data sources, on a small pair that this run trains first.

bash experiments/distillspec_grid/run.sh [--workdir=DIR] [--pair] [--show]
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from absl import flags, logging  # noqa: E402

from experiments import page  # noqa: E402
from experiments.distillspec_grid import grid, render  # noqa: E402
from specdec_jax import machine, program  # noqa: E402
from specdec_jax.io import files  # noqa: E402

_CONFIG = program.config_flag(
  str(HERE / 'config.py'), keys='experiments/distillspec_grid/config.py'
)
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder of the models')
_PAIR = flags.DEFINE_bool('pair', False, 'train target and drafts of rows.toml')
_SHOW = flags.DEFINE_bool('show', False, 'train nothing: draw what is stored')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  """True if every greedy text equals plain decoding's."""
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  s = _CONFIG.value
  folder = program.open_workdir(_RESULTS.value)
  if _SHOW.value:
    assert folder is not None, 'name --results'
    doc = json.loads((folder / f'{HERE.name}.json').read_text('utf-8'))
    files.write(folder / f'{HERE.name}.png', render.figure(doc))
    return True
  workdir = program.open_workdir(_WORKDIR.value)
  if workdir is None:
    raise ValueError("workdir='': name a folder for the models, --workdir=DIR")
  if _PAIR.value:
    print(*grid.pair(s, workdir))
    return True
  # Read before writing files, which would make the commit dirty.
  doc = {'machine': machine.describe(), 'settings': s.to_dict()}
  doc |= grid.run(s, workdir)
  text, picture = render.markdown(doc), render.figure(doc)
  page.save(folder, HERE, doc, text)
  if folder is not None:
    files.write(folder / f'{HERE.name}.png', picture)
  print(text)
  return not any(x['differ'] for x in doc['rows'] if x['temperature'] == 0)


if __name__ == '__main__':
  program.launch(run)
