"""What export's tests share: settings, parameters, a tokenizer."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import forward
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

GOLDEN = pathlib.Path(__file__).parent / 'golden'
GOLDENS = ('llama', 'qwen2', 'qwen3')
TEXT = 'hello <|im_start|>héllo\n  wörld 123<|im_end|>'

# Name -> (family that must be chosen, settings of tiny.config).
CASES = {
  'tied': ('llama', dict(tied=True)),
  'untied': ('llama', dict(tied=False, head_dim=16, rope_theta=12345.678)),
  'all biases': ('llama', dict(qkv_bias=True, o_bias=True)),
  'llama 3': (
    'llama',
    dict(rope_scaling=model_config.RopeScaling(4.0, 1.5, 3.0, 64)),
  ),
  'stretched': (
    'llama',
    dict(rope_scaling=model_config.RopeScaling(2.0, original_context=0)),
  ),
  'qwen2': ('qwen2', dict(tied=True, qkv_bias=True, kv_heads=1, norm_eps=1e-5)),
  'qwen2, untied': ('qwen2', dict(qkv_bias=True, head_dim=16)),
  'qwen3': ('qwen3', dict(qk_norm=True, kv_heads=4, head_dim=16)),
}


def random_params(config, seed=0):
  """No scale is 1 and no bias 0: a lost one shows."""
  rng = np.random.default_rng(seed)
  return lm.nest(
    {
      name: jnp.asarray(rng.normal(0.2, 0.2, s.shape), s.dtype)
      for name, s in lm.shapes(config).items()
    }
  )


def tokenizer(tiny, **changes):
  inner = tiny.byte_tokenizer()
  known = dict(eos_ids=(259, 0), bos_id=258, chat_template='{{ messages }}')
  return tokenizer_lib.Tokenizer('mine', inner, **known | changes)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config, params, tokens_BT):
  model = lm.make(config)
  B, T = tokens_BT.shape
  cache = model.init_cache(B, T)
  start_B = jnp.zeros((B,), jnp.int32)
  hidden, _, _ = forward.read(model, params, tokens_BT, start_B, cache, slots=T)
  return model.head(params, hidden)
