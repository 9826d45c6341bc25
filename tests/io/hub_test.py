"""hf: sources against a stand-in for the Hub on this machine."""

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from specdec_jax.io import download
from tests.io import tiny

pytest.importorskip('huggingface_hub', reason='needs huggingface_hub')

COMMIT = 'a' * 40
ROOT = pathlib.Path(__file__).parents[2]

# HF_ENDPOINT is read when huggingface_hub is imported: a process of its own.
FETCH = """
import json, sys
from specdec_jax.io import download
from tests.io import tiny
out = []
for source in sys.argv[1:]:
  try:
    folder = download.from_hub(source)
    out.append(sorted(p.name for p in folder.rglob('*')))
  except ValueError as e:
    out.append(str(e))
print(json.dumps(out))
"""


@contextlib.contextmanager
def stand_in(folder):
  """Serves `folder` as org/tiny at main and v1; org/gated asks for consent."""
  asked = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
      pass

    def reply(self, status, body=b'', **headers):
      self.send_response(status)
      for key, value in headers.items():
        self.send_header(key.replace('_', '-'), value)
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      if self.command != 'HEAD':
        self.wfile.write(body)

    def do_GET(self):
      path = self.path.partition('?')[0]
      asked.append(path)
      api = '/api/models/org/tiny'
      if 'org/gated' in path:
        self.reply(403, X_Error_Code='GatedRepo')
      elif 'org/tiny' not in path:
        self.reply(404, X_Error_Code='RepoNotFound')
      elif path in (f'{api}/revision/main', f'{api}/revision/v1', api):
        self.json(dict(id='org/tiny', sha=COMMIT, siblings=self.files()))
      elif path in [f'{api}/tree/{r}' for r in ('main', 'v1', COMMIT)]:
        self.json([self.entry(p) for p in folder.rglob('*') if p.is_file()])
      elif path.startswith(f'/org/tiny/resolve/{COMMIT}/'):
        data = (folder / path.split(f'{COMMIT}/')[1]).read_bytes()
        etag = hashlib.sha1(data).hexdigest()
        self.reply(200, data, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
      else:
        self.reply(404, X_Error_Code='RevisionNotFound')

    do_HEAD = do_GET

    def json(self, value):
      self.reply(
        200, json.dumps(value).encode(), Content_Type='application/json'
      )

    def files(self):
      # huggingface_hub 1.0 reads these; 2.4 asks for the tree.
      paths = [p for p in folder.rglob('*') if p.is_file()]
      return [dict(rfilename=p.relative_to(folder).as_posix()) for p in paths]

    def entry(self, path):
      oid = hashlib.sha1(path.read_bytes()).hexdigest()
      name = path.relative_to(folder).as_posix()
      size = path.stat().st_size
      return dict(type='file', path=name, size=size, oid=oid)

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield f'http://127.0.0.1:{server.server_port}', asked
  finally:
    server.shutdown()
    server.server_close()


def fetch(endpoint, home, *sources):
  env = os.environ | dict(
    HF_ENDPOINT=endpoint,
    HF_HOME=str(home),
    HF_HUB_DISABLE_TELEMETRY='1',
    PYTHONPATH=str(ROOT),
    NO_PROXY='127.0.0.1',
  )
  env.pop('HF_TOKEN', None)
  done = subprocess.run(
    [sys.executable, '-c', FETCH, *sources],
    env=env,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.more
def test_fetches_data_only_and_then_works_without_the_hub(tmp_path):
  folder = tiny.write_folder(tmp_path / 'repo', tiny.config(), shards=2)
  for name in ('pytorch_model.bin', 'modeling.py', 'consolidated.safetensors'):
    (folder / name).write_text('unwanted')
  (folder / 'original').mkdir()
  (folder / 'original' / 'params.json').write_text('{}')
  home = tmp_path / 'home'
  with stand_in(folder) as (endpoint, asked):
    main, tag, none, revision, gated = fetch(
      endpoint,
      home,
      'hf:org/tiny',
      'hf:org/tiny@v1',
      'hf:org/none',
      'hf:org/tiny@v9',
      'hf:org/gated',
    )
  assert (
    main
    == tag
    == [
      'config.json',
      'model-00001-of-00002.safetensors',
      'model-00002-of-00002.safetensors',
      'model.safetensors.index.json',
      'tokenizer.json',
      'tokenizer_config.json',
    ]
  )
  assert not any('.bin' in p or '.py' in p or 'original' in p for p in asked)
  assert none.startswith('hf:org/none: the Hub has no model org/none')
  assert revision == "hf:org/tiny@v9: org/tiny has no revision 'v9'"
  assert 'asks for permission' in gated and 'HF_TOKEN' in gated

  # The server is gone: what is cached loads, the rest says what to do.
  cached, missing = fetch(endpoint, home, 'hf:org/tiny', 'hf:org/other')
  assert cached == main
  for words in ('hf:org/other', str(home), endpoint, 'local folder'):
    assert words in missing
  assert '\n' not in missing


@pytest.mark.parametrize('source', ['hf:', 'hf:tiny', 'hf:a/b/c', 'hf:a/b@'])
def test_malformed_sources(source):
  with pytest.raises(ValueError, match='the form is hf:org/name'):
    download.from_hub(source)
