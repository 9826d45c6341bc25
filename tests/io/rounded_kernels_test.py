"""A model rounded to blocks for the kernels of one CPU: int8, int4."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import build
from specdec_jax.drafters import table
from specdec_jax.io import export, load
from specdec_jax.io.quantised import rounded
from specdec_jax.models import convert, lm, weights
from tests.io import tiny
from tests.kernels import model_test

Kind = gguf.GGMLQuantizationType
SIZES = dict(width=64, head_dim=16, mlp=96, vocab=320)
# The largest error of a number, as a share of its group's largest: half a step,
# and what float16 rounds of scale and minimum.
ERRORS = {'int8': 0.5 / 127 + 2e-3, 'int4': 1 / 15 + 2e-3}


@pytest.fixture(autouse=True, scope='module')
def compiled():
  tiny.needs_kernels('Q8_0', 'Q4_1')


SOURCES = {
  'floats': lambda at: tiny.write_folder(at / 'a', tiny.config(**SIZES)),
  'tied': lambda at: tiny.write_folder(
    at / 'a', tiny.config('qwen2', **SIZES), 'qwen2'
  ),
  'quantised': lambda at: tiny.write_gguf(
    at / 'a.gguf', tiny.config(**SIZES), quantise=Kind.Q5_1
  ),
  # 48 inputs of down are no whole groups.
  'odd': lambda at: tiny.write_folder(
    at / 'a', tiny.config(**SIZES | dict(mlp=48))
  ),
  'random': lambda at: 'random:tiny',
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path):
  return request.param, SOURCES[request.param](tmp_path)


def plain(model):
  return lm.nest(convert.plain(model.config, model.params)[1])


@pytest.mark.more
@pytest.mark.parametrize('dtype', ERRORS)
def test_every_number_is_within_half_a_step(source, dtype):
  name, path = source
  few, all_ = (load.load(path, dtype=x) for x in (dtype, 'float32'))
  label = all_.label.replace('dequantised', f'again {dtype}')
  assert few.label == label + f' ({dtype})' * (name != 'quantised')
  assert few.digest == all_.digest
  kinds = set()
  for key, x in lm.flatten(few.params).items():
    if key in ('head', 'embed') or key.endswith('kernel'):
      inner = x.matrix if key == 'embed' else x
      kinds.add(inner.kind if isinstance(inner, weights.Quantised) else key)
  ends = {'int8': {'Q8_0'}, 'int4': {'Q4_1', 'Q8_0'}}[dtype]
  assert {x for x in kinds if 'down' not in x} == ends
  assert any('down' in x for x in kinds) == (name == 'odd')
  found, wanted = (lm.flatten(plain(m)) for m in (few, all_))
  for key, x in found.items():
    x_NK, y_NK = (np.asarray(a) for a in (x, wanted[key]))
    if key != 'embed' and x.ndim == 2:
      x_NK, y_NK = x_NK.T, y_NK.T
    if x.ndim < 2 or y_NK.shape[1] % 32:
      np.testing.assert_array_equal(x, wanted[key])
      continue
    most = np.abs(y_NK).reshape(len(y_NK), -1, 32).max(-1).repeat(32, -1)
    step = ERRORS['int8' if key in ('head', 'embed') else dtype]
    error = np.abs(x_NK - y_NK)
    assert 0 < error.max() and (error <= step * most).all(), key
    assert (error > 0.2 * step * most).any(), key


def test_logits_are_those_of_the_rounded_numbers(source):
  """And their bits depend on nothing that is read with them."""
  _, path = source
  m = load.load(path, dtype='int4')
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 20)))
  config = m.config.running(packed=False, fused=False)
  wanted = np.asarray(tiny.logits(config, plain(m), tokens))
  found = np.asarray(tiny.logits(m.config, m.params, tokens))
  assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max()
  alone, five = (model_test.logits(m.config, m.params, 1, x) for x in (1, 5))
  np.testing.assert_array_equal(five, alone)


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['int8', 'stored'])
def test_speculation_leaves_the_text_as_it_is(tmp_path, dtype):
  """Of rounded drafts, of the target's first layer, of one on its head."""
  path = SOURCES['tied'](tmp_path)
  if dtype == 'stored':
    c = tiny.config(**SIZES)
    path = tiny.write_gguf(tmp_path / 'a.gguf', c, quantise=Kind.Q8_0)
  m = specdec_jax.load(path, dtype=dtype)
  same = dict(max_new_tokens=16, temperature=0.0)
  texts = ['hello hello hello']
  plain = specdec_jax.generate(m, texts, **same)[0]
  drafts = {
    'lookup': None,
    'lm': dict(source=str(path), dtype='int4'),
    'early_exit': dict(exit=1),
    'self': {},
    'eagle': dict(source='random:0'),
  }
  for draft, options in drafts.items():
    out = specdec_jax.generate(
      m, texts, draft=draft, draft_options=options, **same
    )[0]
    assert out.tokens == plain.tokens and len(out.tokens) == 16, draft


@pytest.mark.slow
def test_an_encoder_is_rounded_too():
  few, all_ = (
    load.load('random:t5_tiny', dtype=x) for x in ('int8', 'float32')
  )
  texts = ['a source'], dict(max_new_tokens=8)
  for key, x in lm.flatten(few.params).items():
    if key.endswith('/kernel'):
      assert isinstance(x, weights.Quantised), key
  a, b = (lm.flatten(plain(m)) for m in (few, all_))
  for key in a:
    np.testing.assert_allclose(a[key], b[key], atol=0.02 * np.abs(b[key]).max())
  ask = lambda **more: specdec_jax.generate(few, texts[0], **texts[1], **more)
  alone = ask()[0].tokens
  drafted = ask(draft='lm', draft_options=dict(source='random:t5_tiny:1'))
  assert alone and drafted[0].tokens == ask(draft='self')[0].tokens == alone


def test_a_rounded_model_is_exported_in_floats(tmp_path):
  m = load.load(SOURCES['tied'](tmp_path), dtype='int4')
  export.save(tmp_path / 'out', m.config, m.params, m.tokenizer)
  again = load.load(tmp_path / 'out')
  tiny.check_equal(plain(m), plain(again))


def test_a_number_past_float16s_scales_is_refused(tmp_path):
  c = tiny.config(**SIZES)
  arrays = tiny.arrays(c)
  arrays['lm_head.weight'][3, 5] = 1e9
  path = tiny.write_folder(tmp_path / 'a', c, weights=arrays)
  with pytest.raises(ValueError) as caught:
    load.load(path, dtype='int4')
  assert str(caught.value) == (
    f"{path}: head is too large for int4; give dtype='float32'"
  )


@pytest.mark.parametrize('mlp', [96, 48, 80])
def test_a_draft_beside_floats_is_rounded(tmp_path, mlp):
  """All but what has no whole blocks; gate and up have panels of their own."""
  c = tiny.config(**SIZES | dict(mlp=mlp))
  path = tiny.write_folder(tmp_path / 'a', c)
  settings = table.with_options('eagle', dict(source='random:0'))
  drafts = [
    build.engine(load.load(path, kernels=x), settings, gamma=2).weights.draft
    for x in ('auto', 'xla')
  ]
  few, all_ = (lm.flatten({k: x[k] for k in ('layer', 'head')}) for x in drafts)
  assert few.keys() == all_.keys()
  for name, x in few.items():
    wanted_KN = np.asarray(all_[name], np.float32)
    if not name.endswith(('kernel', 'head')):
      np.testing.assert_array_equal(x, wanted_KN)
      continue
    whole = len(wanted_KN) % 32 == 0
    assert isinstance(x, weights.Quantised if whole else weights.Panels), name
    error_KN = np.abs(np.asarray(x.dense()) - wanted_KN)
    assert error_KN.shape == wanted_KN.shape
    if whole:
      most = np.abs(wanted_KN.T).reshape(wanted_KN.shape[1], -1, 32).max(-1)
      assert (error_KN.T <= ERRORS['int8'] * most.repeat(32, -1)).all(), name
    assert (error_KN.max() > 0) == whole
    assert x.parts == 1 + ('gate_up' in name)  # no panel holds both


def test_a_draft_past_float16s_scales_stays_in_floats():
  """No dtype of the target's would help."""
  large, small = np.full((32, 32), 1e9, np.float32), np.ones((32, 32))
  own = {'layer': {'o': {'kernel': large}, 'q': {'kernel': small}}}
  layer = rounded.pack_draft(own)['layer']
  assert isinstance(layer['o']['kernel'], weights.Panels)
  assert isinstance(layer['q']['kernel'], weights.Quantised)
  np.testing.assert_array_equal(layer['o']['kernel'].dense(), large)
