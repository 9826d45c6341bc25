"""Programs in several processes, as on several hosts, are what they are in one.

What the processes do is in tests/on_hosts.py.
"""

import os
import signal

import numpy as np
import pytest

from tests import programs
from tests.train import runs

LAUNCH = 'scripts/launch_local.py'


def together(folder, program, *arguments, processes=2, devices=1, **env):
  """A program in several processes on this machine."""
  return programs.run(
    LAUNCH,
    f'--processes={processes}',
    f'--devices={devices}',
    f'--logs={folder / "logs"}',
    '--',
    program,
    *arguments,
    **env,
  )


def test_arrays_and_values_reach_every_process(tmp_path):
  done = together(tmp_path, 'tests/on_hosts.py').check()
  assert done.document == {'processes': 2, 'good': True}
  assert 'processes' not in (tmp_path / 'logs/1.log').read_text()


@pytest.mark.parametrize(
  'processes, devices, rules',
  [
    pytest.param(2, 2, 'reject', marks=pytest.mark.more),
    pytest.param(2, 2, 'block,coupled', marks=pytest.mark.slow),
    pytest.param(4, 2, 'reject,coupled', marks=pytest.mark.slow),
  ],
)
def test_tokens_do_not_depend_on_processes(tmp_path, processes, devices, rules):
  together(
    tmp_path,
    'tests/on_hosts.py',
    f'--what=tokens,{rules}',
    processes=processes,
    devices=devices,
    JAX_ENABLE_X64='1',
    **programs.FAST,
  ).check()


@pytest.mark.more
@pytest.mark.parametrize('first', [1, 2])
def test_a_run_goes_on_in_another_number_of_processes(tmp_path, first):
  """After a stop that only one process was told of; then equals one process."""
  whole, folder = tmp_path / 'whole', tmp_path / 'run'
  runs.run(whole, runs.task())
  stop = lambda step, params: step == 6 and os.kill(os.getpid(), signal.SIGTERM)
  what = f'--what=training,{folder}'
  if first == 1:
    runs.run(folder, runs.task()._replace(refresh=stop))
    together(tmp_path, 'tests/on_hosts.py', what).check()
  else:
    together(tmp_path, 'tests/on_hosts.py', f'{what},6').check()
    runs.run(folder, runs.task())
  found, wanted = runs.saved(folder)[14], runs.saved(whole)[14]
  for x, y in zip(found[0], wanted[0], strict=True):
    x, y = (np.frombuffer(z, np.float32) for z in (x, y))
    np.testing.assert_allclose(x, y, atol=1e-6)
  assert found[1]['data'] == wanted[1]['data']
  assert len(runs.lines(folder)) == len(runs.lines(whole))
