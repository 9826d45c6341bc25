"""What only a GPU can show; JAX_PLATFORMS=cuda pytest tests/gpu_test.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward
from specdec_jax.certify import hardware
from specdec_jax.models import alone, attention, config, lm

pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif(
    jax.default_backend() != 'gpu', reason='needs a GPU, JAX_PLATFORMS=cuda'
  ),
]


def logits(c, params, tokens_BT, chunks: int):
  """Of a text that is read in as many passes, from a padded buffer."""
  model = lm.make(c)
  cache, out = model.init_cache(len(tokens_BT), 256), []
  for part_BT in np.split(tokens_BT, chunks, 1):
    start = sum(x.shape[1] for x in out)
    hidden_BTD, _, cache = forward.read(
      model,
      params,
      part_BT,
      np.full(len(part_BT), start),
      cache,
      slots=256,
    )
    out.append(model.head(params, hidden_BTD))
  return np.concatenate(out, 1)


@pytest.mark.parametrize('chunks', [1, 2, 128])
def test_attention_of_cudnn_and_of_xla_agree(monkeypatch, chunks):
  c = config.sized('smollm2_135m', dtype='bfloat16', activations='bfloat16')
  params = lm.init(c, 0)
  tokens_BT = np.random.default_rng(0).integers(0, c.vocab, (1, 128))
  got = logits(c, params, tokens_BT, chunks)
  monkeypatch.setattr(attention, 'CUDNN_FROM', 10**9)
  monkeypatch.setattr(alone, 'ROWS', 1)
  jax.clear_caches()
  wanted = logits(c, params, tokens_BT, 1)
  # bfloat16 rounds to 2^-9 of a logit, over and over in 30 layers.
  assert np.abs(got - wanted).mean() < 0.02 * wanted.std()


def test_the_machine_decodes_as_it_should():
  hardware.decodes_right(None, 40)


def test_float32_is_not_rounded():
  x = jnp.float32(1) + jnp.arange(64, dtype=jnp.float32)[None] * 2.0**-20
  eye = jnp.eye(64, dtype=jnp.float32)
  np.testing.assert_array_equal(jnp.matmul(x, eye, precision='highest'), x)
