"""Plants bugs in a copy of the tree and shows which quick test fails for each.

python scripts/mutants.py                        (the seeded ones)
python scripts/mutants.py --only='accept with <=,residual is p'
python scripts/mutants.py --noseeded --mechanical=100
"""

import functools
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import rich.console  # noqa: E402
import rich.progress  # noqa: E402
from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from tests.mutants import mechanical, seeded, table  # noqa: E402
from tests.mutants import run as runner  # noqa: E402

_SEEDED = flags.DEFINE_bool('seeded', True, 'the seeded bugs')
_MECHANICAL = flags.DEFINE_integer('mechanical', 0, 'how many mechanical ones')
_ONLY = flags.DEFINE_list('only', [], 'names of seeded bugs; all if empty')
_JOBS = flags.DEFINE_integer('jobs', 2, 'mutants at a time', lower_bound=1)
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder for mutants.md and .json')


def run() -> bool:
  """True if every seeded mutant is killed, and enough of the others."""
  began = time.monotonic()
  folder = runtime.open_workdir(_WORKDIR.value)
  if not _SEEDED.value and not _MECHANICAL.value:
    raise ValueError(
      'nothing to run: give --mechanical=N or leave --noseeded out'
    )
  planted = runner.chosen(seeded.MUTANTS, _ONLY.value) if _SEEDED.value else []
  drawn = mechanical.sample(_MECHANICAL.value)
  track = functools.partial(
    rich.progress.track,
    description='mutants',
    total=len(planted) + len(drawn),
    console=rich.console.Console(stderr=True),
  )
  outcomes = runner.run([*planted, *drawn], track, jobs=_JOBS.value)
  parts = outcomes[: len(planted)], outcomes[len(planted) :]
  titled = [
    x for x in zip(('Seeded', 'Mechanical'), parts, strict=True) if x[1]
  ]
  for title, part in titled:
    table.show(title, part)
  doc = table.summary(*parts) | dict(seconds=round(time.monotonic() - began))
  if folder:
    table.save(folder, titled, doc)
  print(json.dumps(doc))
  return bool(doc['good'])


if __name__ == '__main__':
  runtime.launch(run)
