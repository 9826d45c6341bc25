"""Measures decoding on one GPU, part by part; each is stored as it ends.

bash experiments/gpu/run.sh [--parts=...] [--tiny] [--results=DIR]
"""

import pathlib
import sys
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.gpu import parts, programs, render
from specdec_jax import machine, printing, program
from specdec_jax.costs import parts as timing
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
_PARTS = flags.DEFINE_list('parts', list(parts.PARTS), 'what to measure')
_TINY = flags.DEFINE_bool('tiny', False, 'every line, on tiny models')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')
_COMMIT = flags.DEFINE_string(
  'commit', '', 'of this code, for a copy of it whose git does not know'
)


def run() -> bool:
  """Returns whether every part that was asked for was measured."""
  for name in (names := _PARTS.value):
    if name not in parts.PARTS:
      raise ValueError(f'parts={name}: allowed are {", ".join(parts.PARTS)}')
  sizes = programs.TINY if _TINY.value else programs.Sizes()
  folder = program.open_workdir(_RESULTS.value)
  assert folder
  path, about = folder / 'gpu.json', machine.describe() | programs.card()
  if _COMMIT.value:
    about |= dict(commit=_COMMIT.value, dirty=False)
  doc = files.read_json(path, {'parts': {}})
  doc |= dict(command='experiments/gpu/measure.py', machine=about)
  done = doc['parts']
  failed = []
  for name in names:
    if missing := parts.NEEDS.get(name, set()) - set(done):
      raise ValueError(
        f'parts={name}: needs {", ".join(sorted(missing))} first'
      )
    try:
      took, rows = timing.timed(parts.PARTS[name], sizes, done)
    except Exception:  # the other parts are still worth their time
      traceback.print_exc()
      failed.append(name)
      continue
    done[name] = dict(machine=about | programs.card(), seconds=took, rows=rows)
    files.write(path, printing.compact(doc))
    text = render.part(name, done[name])
    took = f'{took:.0f} s, {program.elapsed():.0f} in all'
    print(f'{text}\n\n{name}: {took}\n', flush=True)
  if not failed:
    page.write(folder, HERE, render.markdown(doc))
  return not failed


if __name__ == '__main__':
  program.launch(run)
