"""Hugging Face folders of all families, in the forms that exist."""

import dataclasses
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax.io import hf
from specdec_jax.io.config_json import families
from specdec_jax.models import config, lm
from tests.io import tiny

# What openai-community/gpt2, google/gemma-2-2b, google/gemma-3-270m and
# google/gemma-3-1b-it say, less what has no bearing on the numbers.
GPT2 = dict(
  model_type='gpt2', activation_function='gelu_new', layer_norm_epsilon=1e-5,
  n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024,
  vocab_size=50257,
)  # fmt: skip
GEMMA = dict(
  attention_bias=False, head_dim=256, rms_norm_eps=1e-6,
  hidden_activation='gelu_pytorch_tanh', query_pre_attn_scalar=256,
)  # fmt: skip
GEMMA2 = GEMMA | dict(
  model_type='gemma2', attn_logit_softcapping=50.0,
  final_logit_softcapping=30.0, hidden_act='gelu_pytorch_tanh',
  hidden_size=2304, intermediate_size=9216, max_position_embeddings=8192,
  num_attention_heads=8, num_hidden_layers=26, num_key_value_heads=4,
  rope_theta=10000.0, sliding_window=4096, vocab_size=256000,
)  # fmt: skip
GEMMA3 = GEMMA | dict(
  model_type='gemma3_text', attn_logit_softcapping=None,
  final_logit_softcapping=None, max_position_embeddings=32768,
  num_attention_heads=4, num_key_value_heads=1, rope_local_base_freq=10000,
  rope_scaling=None, rope_theta=1000000, sliding_window=512, vocab_size=262144,
)  # fmt: skip
GEMMA3_1B = GEMMA3 | dict(
  hidden_size=1152, intermediate_size=6912, num_hidden_layers=26,
  sliding_window_pattern=6,
)  # fmt: skip
GEMMA3_270M = GEMMA3 | dict(
  hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
  layer_types=(['sliding_attention'] * 5 + ['full_attention']) * 3,
  use_bidirectional_attention=False,
)  # fmt: skip
LLAMA = tiny.settings(tiny.config())


def settings(raw):
  return families.from_json(raw, pathlib.Path('config.json'))[0]


# --- config.json -------------------------------------------------------------


@pytest.mark.parametrize(
  'size, raw',
  [
    ('gpt2', GPT2),
    ('gemma2_2b', GEMMA2),
    ('gemma3_270m', GEMMA3_270M),
    ('gemma3_1b', GEMMA3_1B),
  ],
)
def test_sizes_are_those_of_the_published_files(size, raw):
  table = config.sized(size)
  pattern = table.windows
  windows = tuple(pattern[i % len(pattern)] for i in range(table.depth))
  read_windows = pattern if size == 'gpt2' else windows
  assert settings(raw) == dataclasses.replace(table, windows=read_windows)


def test_transformers_4_and_5_forms():
  scaling = dict(
    rope_type='llama3',
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
  )
  old = {k: v for k, v in LLAMA.items() if k not in ('dtype', 'head_dim')}
  old |= dict(rope_parameters=None, rope_theta=5e5, torch_dtype='bfloat16')
  c = settings(old | dict(rope_scaling=None, num_key_value_heads=None))
  assert (c.rope_theta, c.rope_scaling, c.kv_heads) == (5e5, None, 4)
  new = settings(LLAMA | dict(rope_parameters=scaling | {'rope_theta': 5e5}))
  assert new == settings(old | dict(rope_scaling=scaling))
  assert new.rope_theta == 5e5
  assert new.rope_scaling == config.RopeScaling(32.0, 1.0, 4.0, 64)


def test_both_forms_of_two_rope_bases():
  linear = dict(rope_type='linear', factor=8.0)
  old = settings(GEMMA3_1B | dict(rope_scaling=linear))
  rope = dict(
    full_attention=linear | dict(rope_theta=1e6),
    sliding_attention=dict(rope_type='default', rope_theta=1e4),
  )
  drop = ('rope_theta', 'rope_local_base_freq', 'rope_scaling')
  new = {k: v for k, v in GEMMA3_1B.items() if k not in drop}
  assert old == settings(new | dict(rope_parameters=rope))
  assert (old.rope_theta, old.local_rope_theta) == (1e6, 1e4)
  assert old.rope_scaling == config.RopeScaling(8.0, original_context=0)


# --- weights: parity_test.py has their values --------------------------------


def test_shards_and_bfloat16_files(tmp_path):
  c = tiny.config()
  narrow = {k: x.astype(ml_dtypes.bfloat16) for k, x in tiny.arrays(c).items()}
  one = tiny.write_folder(tmp_path / 'one', c, weights=narrow)
  three = tiny.write_folder(tmp_path / 'three', c, weights=narrow, shards=3)
  bfloat16 = tiny.read(one, dtype='bfloat16')
  tiny.check_equal(bfloat16.params, tiny.read(three, dtype='bfloat16').params)
  assert bfloat16.config == dataclasses.replace(c, dtype='bfloat16')
  wide = lm.flatten(tiny.read(one).params)
  for name, x in lm.flatten(bfloat16.params).items():
    assert x.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(x, np.float32), wide[name])


ONES = np.ones((2, 2), np.float32)
IMAGES = {'vision_tower.x.weight': ONES}
IMAGES['model.multi_modal_projector.norm.weight'] = ONES
# Family, how its names begin here, and what files of this form have beside.
OTHERS = {
  'gpt2': (
    *('gpt2', 'transformer.', ''),
    {'h.0.attn.bias': ONES, 'h.1.attn.masked_bias': np.float32([-1e4])},
  ),
  # As transformers writes a base model, and its version 4 frequencies; trl a
  # head of rewards.
  'base': (
    *('qwen2', 'model.', ''),
    {
      'rotary_emb.inv_freq': np.ones(4),
      'layers.0.self_attn.rotary_emb.cos_cached': np.ones(4),
      'v_head.summary.weight': np.ones((1, 32)),
    },
  ),
  # As transformers 4 and 5 name the weights of one that sees images.
  'inside': ('gemma3', 'model.', 'language_model.model.', IMAGES),
  'inner': ('gemma3', 'model.', 'model.language_model.', IMAGES),
}


@pytest.mark.parametrize('form', OTHERS)
def test_names_may_begin_in_other_ways(tmp_path, form):
  family, prefix, other, more = OTHERS[form]
  folder = tiny.GOLDEN / family
  own = json.loads((folder / 'config.json').read_text())
  if family == 'gemma3':
    own = dict(model_type='gemma3', text_config=own, vision_config={})
  (tmp_path / 'config.json').write_text(json.dumps(own))
  stored = safetensors.numpy.load_file(folder / hf.SINGLE)
  named = {k.replace(prefix, other, 1): x for k, x in stored.items()}
  if form == 'inside':
    table = stored['model.embed_tokens.weight']
    more = more | {'language_model.lm_head.weight': table}
  assert not named.keys() & stored.keys()
  safetensors.numpy.save_file(named | more, tmp_path / hf.SINGLE)
  assert hf.open_folder(tmp_path, 'x')[0] == hf.open_folder(folder, 'x')[0]
  tiny.check_equal(tiny.weights_of(tmp_path), tiny.weights_of(folder))


TABLE, HEAD = 'model.embed_tokens.weight', 'lm_head.weight'


@pytest.mark.parametrize(
  'change, tied',
  [
    (lambda w: w.update({HEAD: w[TABLE].copy()}), True),
    (lambda w: w.update({HEAD: w[TABLE] + 1}), False),
    (lambda w: w.update({HEAD: w.pop(TABLE)}), True),
  ],
  ids=['equal', 'other', 'alone'],
)
def test_a_stored_head_counts_where_the_settings_tie_it(tmp_path, change, tied):
  """What transformers 5 does: it ties only what is equal or missing."""
  c = tiny.config('qwen2')
  weights = tiny.arrays(c)
  change(weights)
  model = tiny.read(tiny.write_folder(tmp_path, c, 'qwen2', weights))
  flat = lm.flatten(model.params)
  np.testing.assert_array_equal(flat['head'].T, weights[HEAD])
  assert model.config.tied == tied == ('embed' not in flat)
  if not tied:
    np.testing.assert_array_equal(flat['embed'], weights[TABLE])


def test_nested_settings_of_a_published_file():
  """google/gemma-3-4b-it says no more; the rest are defaults."""
  own = dict(
    hidden_size=2560,
    intermediate_size=10240,
    model_type='gemma3_text',
    num_hidden_layers=34,
    rope_scaling=dict(factor=8.0, rope_type='linear'),
    sliding_window=1024,
  )
  c = settings(dict(model_type='gemma3', text_config=own, vocab_size=3))
  assert (c.heads, c.kv_heads, c.head_dim, c.vocab) == (8, 4, 256, 262208)
  assert c.windows[:6] == (1024,) * 5 + (0,) and c.tied and c.context == 131072
  assert c.rope_scaling == config.RopeScaling(8.0, original_context=0)
  nested = dict(model_type='mistral3', text_config={}, quantization_config={})
  assert settings(nested | dict(quantization_config=None)).kv_heads == 8
  with pytest.raises(ValueError, match='quantization_config'):
    settings(nested)
  with pytest.raises(ValueError, match='text_config'):
    settings(LLAMA | dict(text_config=own))
