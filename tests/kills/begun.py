"""Runs a program of ours, and notes when the processes of its job have joined.

python -m tests.kills.begun FOLDER PROGRAM [ARGUMENTS]

FOLDER/N gets the pid of process N. The program knows nothing of it.
"""

import os
import pathlib
import runpy
import sys


def main(folder: str, program: str, *args: str) -> None:
  import jax

  from specdec_jax import hosts

  join = hosts.join

  def joined(given):
    several = join(given)
    path = pathlib.Path(folder, str(jax.process_index()))
    path.write_text(str(os.getpid()))
    return several

  hosts.join = joined
  sys.argv = [program, *args]
  runpy.run_path(program, run_name='__main__')


if __name__ == '__main__':
  main(*sys.argv[1:])
