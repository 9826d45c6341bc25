"""scripts/serve.py as a user runs it: it starts, answers, and ends."""

import os
import signal
import subprocess
import sys

import httpx2
import pytest

from tests import programs
from tests.serve import loopback

TINY = (
  '--config=configs/pair.py:tiny',
  "--config.decode.methods=('lookup',)",
  '--config.decode.gammas=(1,)',
  '--rows=2',
  '--length=400',
)


@pytest.mark.more
def test_it_answers_and_ends_when_all_is_answered():
  command = [sys.executable, programs.ROOT / 'scripts/serve.py', *TINY]
  process = subprocess.Popen(
    [*command, '--port=0', '--name=it'],
    env=os.environ | programs.FAST,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert process.stdout
  url = process.stdout.readline().strip()
  body = dict(model='it', prompt='ab', max_tokens=390, stream=True)
  with httpx2.Client(base_url=url, timeout=60, trust_env=False) as client:
    with client.stream('POST', '/v1/completions', json=body) as reply:
      process.send_signal(signal.SIGTERM)
      *_, end = loopback.events(reply)
    assert end['choices'][0]['finish_reason'] in ('length', 'stop')
    assert process.wait(30) == 0
    with pytest.raises(httpx2.ConnectError):
      client.get('/health')


@pytest.mark.more
def test_a_key_that_is_none_is_refused(tmp_path):
  (file := tmp_path / 'key').write_text('\n')
  done = programs.run('scripts/serve.py', *TINY, f'--api_key_file={file}')
  done.check_refused('must be a line of ASCII')
