"""Programs in several processes, as on several hosts, are what they are in one.

What the processes do is in tests/on_hosts.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import hosts
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


def free_address():
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return f'127.0.0.1:{free.getsockname()[1]}'


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
  ).check()


@pytest.mark.slow
@pytest.mark.parametrize(
  'program', [('scripts/bench.py', '--minutes=0'), ('scripts/audit.py',)]
)
def test_texts_are_compared_in_several_processes(tmp_path, program):
  rows = [{'prompt': 'ab' * n, 'category': 'ab'} for n in range(2, 6)]
  (tmp_path / 'in.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  done = together(
    tmp_path,
    *program,
    '--config=configs/pair.py:tiny',
    '--config.mesh.data=2',
    '--config.bench.batch_size=2',
    f'--prompts={tmp_path / "in.jsonl"}',
    f'--workdir={tmp_path / "out"}',
  ).check()
  plain, *others = done.document['rows']
  if program[0] == 'scripts/bench.py':
    assert plain['name'] == 'autoregressive'
    assert [*tmp_path.glob('out/results/bench.json')]
  else:
    others = [plain, *others]
    assert [*tmp_path.glob('out/audit.json')]
  assert len(others) == 3  # lm, lookup, adaptive
  for row in others:
    assert row['audit']['requests'] >= 2 and not row['audit']['findings']
    assert row['counts']['emitted_tokens'] > 0
  # Tables are those of process 0 alone.
  assert 'Machine' in done.out
  assert 'Machine' not in (tmp_path / 'logs/1.log').read_text()


@pytest.mark.slow
def test_all_processes_choose_by_the_costs_that_the_first_measured(tmp_path):
  lines = '{"prompt": "abcabca"}\n{"prompt": "what now"}'
  (tmp_path / 'in.jsonl').write_text(lines)
  together(
    tmp_path,
    'scripts/generate.py',
    '--config=configs/pair.py:tiny',
    '--config.mesh.data=2',
    '--config.bench.batch_size=2',
    "--config.decode.methods=('adaptive',)",
    '--config.adaptive.drafter=lookup',
    '--config.decode.gammas=(2,)',
    '--config.decode.max_new_tokens=8',
    f'--prompts={tmp_path / "in.jsonl"}',
    f'--output={tmp_path / "out.jsonl"}',
  ).check()
  rows = [*map(json.loads, (tmp_path / 'out.jsonl').read_text().splitlines())]
  costs = [row['metrics']['costs'] for row in rows]
  assert len(costs) == 2 and costs[0] == costs[1] and costs[0]['lookup']


@pytest.mark.slow
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


@pytest.mark.slow
def test_sharded_training_in_two_processes_is_that_of_one(tmp_path):
  """Parameters and moments split over devices of both (FSDP), 50 steps."""
  task = (
    'scripts/train.py',
    '--config=configs/train_lm.py:tiny',
    '--config.mesh.data=2',
    '--config.mesh.model=2',
    '--config.mesh.fsdp=True',
    '--config.run.steps=50',
  )
  one, two = (f'--workdir={tmp_path / name}' for name in ('one', 'two'))
  programs.run(*task, one, JAX_NUM_CPU_DEVICES='4').check()
  together(tmp_path, *task, two, devices=2).check()
  model = 'model/model.safetensors'
  found = [
    safetensors.numpy.load_file(tmp_path / name / model)
    for name in ('one', 'two')
  ]
  for name, wanted in found[0].items():
    np.testing.assert_allclose(found[1][name], wanted, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
  'name, number, words',
  [
    pytest.param('SIGKILL', 1, 'ended by SIGKILL', marks=pytest.mark.more),
    pytest.param('SIGKILL', 0, 'ended by SIGKILL', marks=pytest.mark.slow),
    pytest.param('SIGSTOP', 1, 'stopped', marks=pytest.mark.slow),
    pytest.param('SIGSTOP', 0, 'stopped', marks=pytest.mark.slow),
  ],
)
def test_a_process_that_dies_or_stops_ends_the_job(
  tmp_path, name, number, words
):
  done = together(
    tmp_path, 'tests/on_hosts.py', f'--what=death,{name},{number}'
  ).check(128 + signal.SIGKILL)
  assert f'process {number} was {words}' in done.err
  if name == 'SIGSTOP' and number:  # silence: JAX says whose
    assert f'(stopped sending heartbeats):\n{number}\n' in done.err


@pytest.mark.parametrize('given', ['4', 'a:1,2,2', ':1,2,0', 'a:1,2,x'])
def test_another_form_is_refused(given):
  with pytest.raises(ValueError, match=f'distributed={given}: allowed are'):
    hosts._place(given)


HURRIED = """
from specdec_jax import hosts, program
hosts._START = 3
program.launch(lambda: True, hosts=True)
"""


@pytest.mark.more
@pytest.mark.parametrize('index', [0, 1])
def test_a_process_that_nobody_joins_says_so(tmp_path, index):
  address = free_address()
  (tmp_path / 'hurried.py').write_text(HURRIED)
  programs.run(
    tmp_path / 'hurried.py',
    f'--distributed={address},2,{index}',
    PYTHONPATH=str(programs.ROOT),
  ).check_refused(f'distributed={address},2,{index}: not all')


@pytest.mark.slow
def test_what_several_processes_cannot_do_is_refused(tmp_path):
  config = '--config=configs/pair.py:tiny'
  done = together(tmp_path, 'scripts/tpu_report.py', config).check(2)
  words = '2 processes: this program runs in one'
  assert words in done.err and words in (tmp_path / 'logs/1.log').read_text()


@pytest.mark.more
def test_processes_with_other_settings_are_named(tmp_path):
  address = free_address()
  start = lambda index, what: subprocess.Popen(
    [sys.executable, 'tests/on_hosts.py', f'--what={what}']
    + [f'--distributed={address},2,{index}'],
    cwd=programs.ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'},
    stderr=subprocess.PIPE,
    text=True,
  )
  both = start(0, 'words'), start(1, 'words,more')
  for child in both:
    _, err = child.communicate()
    assert 'process 1: its flags, config, code or version of jax' in err
    assert child.returncode == 2
