"""scripts/serve.py as a user runs it: it starts, answers, and ends."""

import os
import signal
import subprocess
import sys

import httpx2
import pytest

from specdec_jax.train import text as text_lib
from tests import programs
from tests.serve import loopback

TINY = *programs.TINY, '--rows=2', '--length=400'


def begin(*flags: str):
  """A server as a process, and a client of it."""
  command = [sys.executable, programs.ROOT / 'scripts/serve.py', *TINY, *flags]
  env = os.environ | programs.FAST
  process = subprocess.Popen(
    command, env=env, stdout=subprocess.PIPE, text=True
  )
  assert process.stdout
  url = process.stdout.readline().strip()
  return process, httpx2.Client(base_url=url, timeout=None, trust_env=False)


@pytest.mark.more
def test_a_kill_tears_nothing_and_sigterm_waits_for_what_is_asked(tmp_path):
  record = f'--record={(file := tmp_path / "texts.jsonl")}'
  process, client = begin('--port=0', '--name=it', record)
  asked = dict(model='it', prompt='ab', max_tokens=9, seed=0)
  long = asked | dict(max_tokens=390, stream=True)
  with client:
    first = client.post('/v1/completions', json=asked).json()['choices'][0]
    with client.stream('POST', '/v1/completions', json=long) as reply:
      next(reply.iter_lines())
      process.kill()
      process.wait()
  with open(file, 'ab') as torn:  # the worst that it can leave
    torn.write(b'{"text": "ab')
  process, client = begin(f'--port={client.base_url.port}', '--name=it', record)
  with client:
    again = client.post('/v1/completions', json=asked).json()['choices'][0]
    assert again['text'] == first['text']
    with client.stream('POST', '/v1/completions', json=long) as reply:
      process.send_signal(signal.SIGTERM)
      *_, end = loopback.events(reply)
    assert end['choices'][0]['finish_reason'] in ('length', 'stop')
    assert process.wait() == 0
    with pytest.raises(httpx2.ConnectError):
      client.get('/health')
  # The answer in mid-stream may have ended before the kill.
  one, *killed, two, three = text_lib.read(str(file), field='text').documents
  assert one == two and three.startswith('ab') and len(killed) < 2


@pytest.mark.more
def test_a_key_that_is_none_is_refused(tmp_path):
  (file := tmp_path / 'key').write_text('\n')
  done = programs.run('scripts/serve.py', *TINY, f'--api_key_file={file}')
  done.check_refused('must be a line of ASCII')
