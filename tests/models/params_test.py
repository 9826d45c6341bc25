"""Parameters by name, random initialisation, and padded vocabularies."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling, sharding
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from tests import fakes


def test_initial_values_depend_on_name_and_seed_only():
  config = fakes.tiny(dtype='float32', depth=1, heads=4, kv_heads=2, mlp=32)
  deeper = dataclasses.replace(config, depth=2)
  layout = sharding.lay_out(sharding.make_mesh(2, 2), config)
  placed = {}

  def put(name, x):
    placed[name] = x
    return layout.put(name, x)

  base = lm.flatten(lm.init(config, 0))
  other = lm.flatten(lm.init(config, 1))
  more = lm.flatten(lm.init(deeper, 0))
  spread = lm.flatten(lm.init(config, 0, put=put))
  # What is measured against another dtype of it is the same model.
  half = dataclasses.replace(config, dtype='bfloat16')
  for name, x in lm.flatten(lm.init(half, 0)).items():
    np.testing.assert_array_equal(x, base[name].astype(jnp.bfloat16))
  assert set(placed) == set(base)
  split = [x for x in spread.values() if not x.sharding.is_fully_replicated]
  assert len(split) > 5
  for name, x in base.items():
    for same in (placed, spread, more):
      np.testing.assert_array_equal(same[name], x)
    assert name.endswith('scale') or (np.asarray(other[name]) != x).any()


# Totals of the published checkpoints; of the GPT-like pair the paper says 97M
# and 6M, which are the matrices, as are what our own sizes are called by.
PUBLISHED = {
  'smollm2_135m': 134_515_008,
  'smollm2_360m': 361_821_120,
  'smollm2_1_7b': 1_711_376_384,
  'tinyllama_1b': 1_100_048_384,
  'llama2_7b': 6_738_415_616,
  'llama3_1b': 1_235_814_400,
  'llama3_8b': 8_030_261_248,
  'qwen2_5_0_5b': 494_032_768,
  'qwen2_5_1_5b': 1_543_714_304,
  'qwen2_5_7b': 7_615_616_512,
  'qwen3_8b': 8_190_735_360,
  'gpt2': 124_439_808,
  'gemma2_2b': 2_614_341_888,
  'gemma3_270m': 268_098_176,
  'gemma3_1b': 999_885_952,
  't5_small': 76_961_152,
  't5_base': 247_577_856,
  't5_large': 783_150_080,
  't5_xl': 2_849_757_184,
  't5_xxl': 11_135_332_352,
}
MATRICES = {'gpt_97m': 97.5e6, 'gpt_6m': 5.8e6, 'small': 2.95e6, 'mini': 0.32e6}
MATRICES |= {'t5_w128': 9.6e6, 't5_w256': 22.0e6}


@pytest.mark.parametrize(
  'size', sorted(model_config.SIZES.keys() - {'tiny', 't5_tiny'})
)
def test_sizes_have_the_published_number_of_parameters(size):
  shapes = lm.shapes(model_config.sized(size))
  count = lambda names: sum(math.prod(shapes[name].shape) for name in names)
  if size in PUBLISHED:
    assert count(shapes) == PUBLISHED[size]
  else:
    matrices = [n for n in shapes if n.endswith(('kernel', 'embed', 'head'))]
    assert count(matrices) == pytest.approx(MATRICES[size], rel=0.01)
    assert len(matrices) < len(shapes)


@pytest.mark.more
def test_kernels_have_variance_one_over_fan_in():
  config = fakes.tiny(
    dtype='float32',
    width=256,
    mlp=512,
    vocab=1000,
    tied=False,
    position='learned',
    context=64,
  ).running(scan_layers=True)
  flat = lm.flatten(lm.init(config, 0))
  for name, fan_in in {
    'head': 256,
    'embed': 256,
    'positions': 256,
    'layers/mlp/up/kernel': 256,
    'layers/mlp/down/kernel': 512,
  }.items():
    assert np.std(flat[name]) == pytest.approx(fan_in**-0.5, rel=0.02), name


@pytest.mark.more
@pytest.mark.parametrize(
  'ids, vocab',
  [(None, None), (10, None), (10, 20), (10, 11), (None, 20), (13, 9)],
)
def test_padded_ids_have_logit_minus_infinity_and_no_probability(ids, vocab):
  config = fakes.tiny(dtype='float32')
  params = lm.init(config, 0)
  V = vocab or 13
  real = min(ids or V, 13, V)
  hidden = jnp.asarray(
    np.random.default_rng(0).normal(size=(4, 2, 16)), jnp.float32
  )
  plain = lm.make(config).head(params, hidden)
  model = lm.make(config, ids=ids, vocab=vocab)
  logits = model.head(params, hidden)
  assert model.vocab == V and logits.shape == (4, 2, V)
  np.testing.assert_array_equal(logits[..., :real], plain[..., :real])
  assert (np.asarray(logits[..., real:]) == -np.inf).all()
  p = sampling.probabilities(
    logits,
    sampling.settings(4, [0, 1.0, 0.7, 1.0], [0, 0, 12, 0], [1, 1, 1, 0.99]),
  )
  assert (np.asarray(p)[..., real:] == 0).all()
  np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-6)
