r"""Runs a program of ours in several processes on this machine's CPU.

python scripts/launch_local.py --processes=4 --devices=2 -- \
  scripts/generate.py --config=...

They are what hosts are on a TPU pod (docs/many_hosts.md). Prints what process 0
prints; the others write PROCESS.log into --logs. When one fails, all end, and
the exit status is the one of the process that failed first.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from specdec_jax import program

_PROCESSES = flags.DEFINE_integer('processes', 2, 'to start', lower_bound=1)
_DEVICES = flags.DEFINE_integer(
  'devices', 1, 'CPU devices of each process', lower_bound=1
)
_LOGS = flags.DEFINE_string(
  'logs', '', "folder of the other processes' output; a new one if empty"
)
# Seconds for the others to end after one has: they may fail in the same way.
_PATIENCE = 8


def run(command: list[str]) -> bool:
  """Ends with the status of the process that failed first; 0 if none did."""
  if not command:
    raise ValueError('no program: name it after --, as in -- scripts/train.py')
  logs = program.open_workdir(_LOGS.value) or pathlib.Path(tempfile.mkdtemp())
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  env = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': str(_DEVICES.value),
    'JAX_COORDINATOR_BIND_ADDRESS': address,
  }
  children = []
  for index in range(_PROCESSES.value):
    where = f'--distributed={address},{_PROCESSES.value},{index}'
    log = None if index == 0 else open(logs / f'{index}.log', 'wb')
    full = [sys.executable, *command, where]
    children.append(subprocess.Popen(full, env=env, stdout=log, stderr=log))
  with program.interrupts() as caught:
    failed = _watch(children, caught)
  statuses = {child.returncode for child in children}
  # Alike if they have refused; also if one was killed, and the others then.
  if failed is None or (len(statuses) == 1 and min(statuses) > 0):
    sys.exit(statuses.pop())
  index, why = failed
  print(f'process {index} {why}; logs: {logs}', file=sys.stderr)
  status = children[index].returncode
  sys.exit(status if status > 0 else 128 - status)


def _watch(children: list[subprocess.Popen], caught: list[int]):
  """(the process that failed first, how), when all have ended; None if none."""
  failed, since, told = None, 0.0, 0
  while None in [child.poll() for child in children]:
    # Ctrl-C reaches the children by itself, SIGTERM does not.
    for number in caught[told:]:
      told += 1
      if number == signal.SIGTERM:
        for child in children:
          child.terminate()
    if failed is None:
      failed, since = _failed(children), time.monotonic()
    elif time.monotonic() - since > _PATIENCE:
      for child in children:
        child.kill()
    time.sleep(0.02)
  return _failed(children) if failed is None else failed


def _failed(children: list[subprocess.Popen]) -> tuple[int, str] | None:
  """One that failed and how; of several, one that is the cause of others."""
  statuses = {i: x.returncode for i, x in enumerate(children) if x.returncode}
  if not statuses:
    return None
  stopped = [i for i, child in enumerate(children) if _stopped(child)]
  if stopped:
    return stopped[0], 'was stopped, and is ended'
  # JAX aborts those that notice it.
  order = sorted(statuses, key=lambda i: statuses[i] == -signal.SIGABRT)
  status = statuses[order[0]]
  if status < 0:
    return order[0], f'was ended by {signal.Signals(-status).name}'
  return order[0], f'ended with status {status}'


def _stopped(child: subprocess.Popen) -> bool:
  asked = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
  try:
    return os.waitid(os.P_PID, child.pid, asked) is not None
  except ChildProcessError:  # it has ended
    return False


if __name__ == '__main__':
  program.launch(run, positional=True)
