"""Checks every promise of exactness and prints its number beside its bound.

python scripts/certify.py                          # 15 minutes, fixed seeds
python scripts/certify.py --tier=full              # hours, seeded by the date
python scripts/certify.py --only=machine           # first on a new machine
python scripts/certify.py --rule=file.py:verify    # your own rule
python scripts/certify.py --drafter=file.py:make   # your own drafter
python scripts/certify.py --model=file.py:make     # your own model
python scripts/certify.py --inject-fault=help      # lists known faults

docs/exactness.md lists the promises. Exit status 1 if a promise fails, or none
could be checked.
"""

import datetime
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
from absl import flags

from specdec_jax import program
from specdec_jax.certify import certificate, faults

_TIER = flags.DEFINE_enum('tier', 'quick', ['quick', 'full'], 'how much to try')
_ONLY = flags.DEFINE_list('only', [], 'names of promises; all if empty')
_RULE = flags.DEFINE_string('rule', '', "a rule's name or path")
_DRAFTER = flags.DEFINE_string('drafter', '', "a drafter's name or path")
_MODEL = flags.DEFINE_string(
  'model', '', 'a path: package.module:make, or file.py:make'
)
_FAULT = flags.DEFINE_string(
  'inject-fault', '', 'a known fault to plant, which must be found'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'folder for certificate.md, .json'
)


def run() -> bool:
  """True if every promise holds."""
  # Meshes are checked without accelerators.
  jax.config.update('jax_num_cpu_devices', 8)
  full = _TIER.value == 'full'
  seed = int(datetime.date.today().strftime('%Y%m%d')) if full else 0
  parts = _RULE.value, _DRAFTER.value, _MODEL.value
  with faults.subject(_FAULT.value, *parts, seed=seed) as subject:
    about = ('rule', 'drafter') if _FAULT.value else subject.supplied
    chosen = certificate.choose(_ONLY.value, about)
    folder = program.open_workdir(_WORKDIR.value)
    return certificate.run(subject, chosen, full=full, folder=folder)


if __name__ == '__main__':
  program.launch(run)
