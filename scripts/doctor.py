"""Checks in half a minute whether this machine decodes as it should.

python scripts/doctor.py

Devices, versions and memory; the mistakes that show in no error message (a
hidden top-k, one key for every step, another row's temperature, float32
products in bfloat16); the loop's exact distribution and an audited text on this
backend; memory bandwidth. Ends in OK, or in what is wrong and status 1.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from specdec_jax import program
from specdec_jax.certify import doctor

if __name__ == '__main__':
  program.launch(doctor.run)
