"""Settings of published checkpoints, as their config.json says them."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from specdec_jax.io import config_hf, hf, names
from specdec_jax.models import config, lm

GOLDEN = pathlib.Path(__file__).parent / 'golden'

# What openai-community/gpt2, google/gemma-2-2b, google/gemma-3-270m and
# google/gemma-3-1b-it say, less what has no bearing on the numbers.
GPT2 = dict(
  model_type='gpt2',
  activation_function='gelu_new',
  layer_norm_epsilon=1e-5,
  n_ctx=1024,
  n_embd=768,
  n_head=12,
  n_layer=12,
  n_positions=1024,
  vocab_size=50257,
)
GEMMA = dict(
  attention_bias=False,
  head_dim=256,
  hidden_activation='gelu_pytorch_tanh',
  query_pre_attn_scalar=256,
  rms_norm_eps=1e-6,
)
GEMMA2 = GEMMA | dict(
  model_type='gemma2',
  attn_logit_softcapping=50.0,
  final_logit_softcapping=30.0,
  hidden_act='gelu_pytorch_tanh',
  hidden_size=2304,
  intermediate_size=9216,
  max_position_embeddings=8192,
  num_attention_heads=8,
  num_hidden_layers=26,
  num_key_value_heads=4,
  rope_theta=10000.0,
  sliding_window=4096,
  vocab_size=256000,
)
GEMMA3 = GEMMA | dict(
  model_type='gemma3_text',
  attn_logit_softcapping=None,
  final_logit_softcapping=None,
  max_position_embeddings=32768,
  num_attention_heads=4,
  num_key_value_heads=1,
  rope_local_base_freq=10000,
  rope_scaling=None,
  rope_theta=1000000,
  sliding_window=512,
  vocab_size=262144,
)
GEMMA3_1B = GEMMA3 | dict(
  hidden_size=1152,
  intermediate_size=6912,
  num_hidden_layers=26,
  sliding_window_pattern=6,
)
GEMMA3_270M = GEMMA3 | dict(
  hidden_size=640,
  intermediate_size=2048,
  num_hidden_layers=18,
  layer_types=(['sliding_attention'] * 5 + ['full_attention']) * 3,
  use_bidirectional_attention=False,
)


def read(tmp_path, raw):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(raw))
  return config_hf.read(path)[0]


@pytest.mark.parametrize(
  'size, raw',
  [
    ('gpt2', GPT2),
    ('gemma2_2b', GEMMA2),
    ('gemma3_270m', GEMMA3_270M),
    ('gemma3_1b', GEMMA3_1B),
  ],
)
def test_sizes_are_those_of_the_published_files(tmp_path, size, raw):
  table = config.sized(size)
  pattern = table.windows
  windows = tuple(pattern[i % len(pattern)] for i in range(table.depth))
  read_windows = pattern if size == 'gpt2' else windows
  assert read(tmp_path, raw) == dataclasses.replace(table, windows=read_windows)


def test_both_forms_of_two_rope_bases(tmp_path):
  old = GEMMA3_1B | dict(rope_scaling=dict(rope_type='linear', factor=8.0))
  rope = dict(
    full_attention=dict(rope_type='linear', factor=8.0, rope_theta=1e6),
    sliding_attention=dict(rope_type='default', rope_theta=1e4),
  )
  drop = ('rope_theta', 'rope_local_base_freq', 'rope_scaling')
  new = {k: v for k, v in GEMMA3_1B.items() if k not in drop}
  new |= dict(rope_parameters=rope)
  c = read(tmp_path, old)
  assert c == read(tmp_path, new)
  assert (c.rope_theta, c.local_rope_theta) == (1e6, 1e4)
  assert c.rope_scaling == config.RopeScaling(8.0, original_context=0)


SCALED = dict(sliding_attention=dict(rope_type='linear', factor=8.0))


@pytest.mark.parametrize(
  'raw, changes, message',
  [
    (GPT2, dict(n_head=7), 'n_embd=768 must be a multiple of n_head=7'),
    (GPT2, dict(activation_function='relu'), "='relu'.*'gelu_new'"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), 'inverse_layer_idx'),
    (GPT2, dict(add_cross_attention=True), 'add_cross_attention'),
    (GEMMA2, dict(hidden_activation='gelu'), "hidden_activation='gelu'"),
    (GEMMA2, dict(attn_logit_softcapping=-1), 'attn_logit_softcapping=-1'),
    (GEMMA3_1B, dict(use_bidirectional_attention=True), 'bidirectional'),
    (GEMMA3_1B, dict(layer_types=['full_attention']), 'each of 26 layers'),
    (GEMMA3_1B, dict(layer_types=['x'] * 26), 'layer_types=.*sliding_attent'),
    (GEMMA3_1B, dict(rope_parameters=SCALED), 'scaled .* sliding_attention'),
    (GEMMA3_1B, dict(model_type='gemma3'), "'gemma3' is not .*'gemma3_text'"),
  ],
)
def test_what_the_model_lacks_is_named(tmp_path, raw, changes, message):
  with pytest.raises(ValueError, match=message):
    read(tmp_path, raw | changes)


def test_gpt2_files_without_prefix_and_with_masks(tmp_path):
  """The form of openai-community/gpt2: no prefix, and buffers of the mask."""
  folder = GOLDEN / 'gpt2'
  stored = safetensors.numpy.load_file(folder / 'model.safetensors')
  bare = {k.removeprefix('transformer.'): x for k, x in stored.items()}
  assert bare.keys() & {'wte.weight', 'h.0.attn.c_attn.weight'}
  bare['h.0.attn.bias'] = np.tri(8, dtype=np.uint8)
  bare['h.1.attn.masked_bias'] = np.float32([-1e4])
  (tmp_path / 'config.json').write_bytes((folder / 'config.json').read_bytes())
  safetensors.numpy.save_file(bare, tmp_path / 'model.safetensors')
  ours, theirs = (
    lm.flatten(names.read(opened.reader, opened.config))
    for opened in (hf.open_folder(f, 'gpt2') for f in (tmp_path, folder))
  )
  assert ours.keys() == theirs.keys()
  for name, x in theirs.items():
    np.testing.assert_array_equal(ours[name], x, err_msg=name)


def test_a_fused_tensor_of_another_size_is_named(tmp_path):
  folder = GOLDEN / 'gpt2'
  stored = safetensors.numpy.load_file(folder / 'model.safetensors')
  name = 'transformer.h.1.attn.c_attn.weight'
  (tmp_path / 'config.json').write_bytes((folder / 'config.json').read_bytes())
  for columns, message in ((95, f'no place for .{name}'), (93, r'\(32, 31\)')):
    cut = stored | {name: np.ascontiguousarray(stored[name][:, :columns])}
    safetensors.numpy.save_file(cut, tmp_path / 'model.safetensors')
    opened = hf.open_folder(tmp_path, 'gpt2')
    with pytest.raises(ValueError, match=message):
      names.read(opened.reader, opened.config)
