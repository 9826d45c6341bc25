"""Many runs of programs from one process, which imports JAX once for all.

Reads from stdin, and writes to stdout, a list as JSON: of the arguments of each
run, and of its [status, stdout, stderr]. Each runs in a fork, so no device may
be in use before.
"""

import importlib
import json
import os
import pathlib
import runpy
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

for name in ('distill.distillation', 'serve.app', 'bench.benchmark'):
  importlib.import_module(f'specdec_jax.{name}')


def forked(arguments: list[str]) -> tuple[int, str, str]:
  """Runs a program, named by its path in the repository, as __main__."""
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    if not (child := os.fork()):
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      sys.argv = [str(ROOT / arguments[0]), *arguments[1:]]
      # Its own folder comes first, as where Python is given a file.
      sys.path.insert(0, str((ROOT / arguments[0]).parent))
      try:
        runpy.run_path(sys.argv[0], run_name='__main__')
        status = 0
      except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
      except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
      for stream in (sys.stdout, sys.stderr):
        stream.flush()
      os._exit(status or 0)
    _, status = os.waitpid(child, 0)
    texts = []
    for file in (out, err):
      file.seek(0)
      texts.append(file.read().decode())
  return os.waitstatus_to_exitcode(status), *texts


if __name__ == '__main__':
  json.dump([forked(x) for x in json.load(sys.stdin)], sys.stdout)
