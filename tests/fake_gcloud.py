"""Stands in for gcloud: records its arguments, and plays a cloud in a folder.

$FAKE_CLOUD has calls.jsonl (an argument list a line), host/ (the home of the
one host), bucket/ (what gs:// is), states (what a request goes through, a line
each; its last stays) and, while they are there, request and vm.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

CLOUD = pathlib.Path(os.environ['FAKE_CLOUD'])
ROOT = pathlib.Path(__file__).parents[1]
HOST, REQUEST, VM = CLOUD / 'host', CLOUD / 'request', CLOUD / 'vm'


def main(*words):
  with (CLOUD / 'calls.jsonl').open('a') as calls:
    calls.write(json.dumps(words) + '\n')
  flags = dict(w[2:].partition('=')[::2] for w in words if w.startswith('--'))
  match [w for w in words if not w.startswith('--')]:
    case [_, _, 'queued-resources', 'create', _]:
      REQUEST.touch()
    case [_, _, 'queued-resources', 'describe', _]:
      say(next_state() if REQUEST.exists() else '')
    case [_, _, 'queued-resources', 'delete', _]:
      REQUEST.unlink()
      VM.unlink(missing_ok=True)
      shutil.rmtree(HOST, ignore_errors=True)
    case [_, _, 'tpu-vm', 'describe', _]:
      say(VM.read_text() if VM.exists() else '')
    case [_, _, 'tpu-vm', 'scp', source, target]:
      shutil.copy(source, HOST / target.partition(':')[2])
    case [_, _, 'tpu-vm', 'ssh', _]:
      return on_host(flags['command'])
    case ['storage', 'rsync', source, target]:
      shutil.copytree(there(source), there(target), dirs_exist_ok=True)
    case ['storage', 'ls', path]:
      return 0 if there(path).exists() else 1
  return 0


def there(path):
  name = path.removeprefix('gs://')
  return CLOUD / 'bucket' / name if name != path else pathlib.Path(path)


def say(state):
  if not state:
    sys.exit('ERROR: (gcloud) NOT_FOUND: Resource was not found.')
  print(state)


def next_state():
  path = CLOUD / 'states'
  state, *left = path.read_text().split()
  if left:
    path.write_text('\n'.join(left))
  if state == 'ACTIVE' and not VM.exists():
    VM.write_text('READY')
    HOST.mkdir()
  return state


def on_host(command):
  _, install, kept = command.partition('vm.sh install')
  if install:  # this checkout, and no downloads
    code = HOST / 'specdec_jax'
    (code / '.venv/bin').mkdir(parents=True, exist_ok=True)
    python = code / '.venv/bin/python'
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for name in ('specdec_jax', 'scripts', 'configs'):
      (code / name).symlink_to(ROOT / name)
    command = 'bash specdec_jax/scripts/tpu/vm.sh fetch' + kept
  env = os.environ | {'HOME': str(HOST)}
  return subprocess.run(['bash', '-c', command], cwd=HOST, env=env).returncode


sys.exit(main(*sys.argv[1:]))
