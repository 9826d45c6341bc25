"""Hugging Face folders of three families, in the forms that exist."""

import json

import ml_dtypes
import numpy as np
import pytest

from specdec_jax.io import config_hf, hf
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from tests.io import reading

FAMILIES = ('llama', 'qwen2', 'qwen3')


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('shards', [1, 3])
def test_every_weight_finds_its_place(tiny, tmp_path, family, shards):
  c = tiny.config(family)
  weights = tiny.arrays(c)
  tiny.write_folder(tmp_path, c, family, weights, shards)
  model = reading.read(str(tmp_path))
  assert model.config == c
  flat = lm.flatten(model.params)
  assert {k: x.shape for k, x in flat.items()} == {
    k: s.shape for k, s in lm.shapes(c).items()
  }
  q = weights['model.layers.1.self_attn.q_proj.weight']
  np.testing.assert_array_equal(flat['layers/1/attn/q/kernel'], q.T)
  down = weights['model.layers.0.mlp.down_proj.weight']
  np.testing.assert_array_equal(flat['layers/0/mlp/down/kernel'], down.T)
  table = weights['model.embed_tokens.weight']
  if c.tied:
    np.testing.assert_array_equal(flat['head'], table.T)
  else:
    np.testing.assert_array_equal(flat['embed'], table)
    np.testing.assert_array_equal(flat['head'], weights['lm_head.weight'].T)


def test_bfloat16_file_and_memory(tiny, tmp_path):
  c = tiny.config()
  weights = {k: x.astype(ml_dtypes.bfloat16) for k, x in tiny.arrays(c).items()}
  tiny.write_folder(tmp_path, c, weights=weights)
  wide = reading.read(str(tmp_path))
  narrow = reading.read(str(tmp_path), dtype='bfloat16')
  assert narrow.config.dtype == 'bfloat16'
  for k, x in lm.flatten(narrow.params).items():
    assert x.dtype == ml_dtypes.bfloat16
    same = np.asarray(x, np.float32)
    np.testing.assert_array_equal(same, lm.flatten(wide.params)[k])


def test_scanned_layers_are_stacked_and_put_once_each(tiny, tmp_path):
  c = tiny.config('qwen2')
  tiny.write_folder(tmp_path, c, 'qwen2')
  one = lm.flatten(reading.read(str(tmp_path)).params)
  placed = []

  def put(name, x):
    placed.append(name)
    return x

  scanned = reading.read(str(tmp_path), scan_layers=True, put=put)
  many = lm.flatten(scanned.params)
  assert sorted(placed) == sorted(many) == sorted(lm.shapes(scanned.config))
  for i in range(c.depth):
    np.testing.assert_array_equal(
      many['layers/attn/k/bias'][i], one[f'layers/{i}/attn/k/bias']
    )
  np.testing.assert_array_equal(
    many['layers/mlp/up/kernel'][1], one['layers/1/mlp/up/kernel']
  )


def edit(tmp_path, tiny, *, drop=(), **changes):
  raw = tiny.settings(tiny.config()) | changes
  raw = {k: v for k, v in raw.items() if k not in drop}
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(raw))
  return path


def test_transformers_4_and_5_forms(tiny, tmp_path):
  scaling = dict(
    rope_type='llama3',
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
  )
  new = edit(
    tmp_path,
    tiny,
    rope_parameters=scaling | {'rope_theta': 500000.0},
    dtype='bfloat16',
  )
  new = config_hf.read(new)[0]
  old = edit(
    tmp_path,
    tiny,
    drop=('rope_parameters', 'dtype', 'head_dim'),
    rope_scaling=scaling,
    rope_theta=500000.0,
    torch_dtype='bfloat16',
  )
  old = config_hf.read(old)[0]
  assert new == old
  assert new.rope_theta == 500000.0
  assert new.rope_scaling == model_config.RopeScaling(32.0, 1.0, 4.0, 64)


def test_old_config_without_scaling(tiny, tmp_path):
  path = edit(
    tmp_path,
    tiny,
    drop=('rope_parameters', 'num_key_value_heads'),
    rope_scaling=None,
    rope_theta=25000.0,
  )
  c, _ = config_hf.read(path)
  assert (c.rope_theta, c.rope_scaling, c.kv_heads) == (25000.0, None, 4)


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(model_type='gemma'), r"'gemma'.*llama.*qwen2.*qwen3"),
    (dict(rope_parameters={'rope_type': 'yarn'}), "'yarn'.*'llama3'"),
    (dict(rope_scaling={'type': 'dynamic'}, rope_parameters=None), "'dynamic'"),
    (dict(rope_parameters={'rope_type': 'linear'}), 'factor=None'),
    (dict(rope_parameters={'full_attention': {}}), 'per layer type'),
    (dict(model_type=['llama']), 'model_type'),
    (dict(mlp_bias=[1]), 'mlp_bias'),
    (dict(hidden_act='gelu'), "hidden_act='gelu'"),
    (dict(use_sliding_window=True), 'use_sliding_window'),
    (dict(layer_types=['sliding_attention']), 'sliding_attention'),
    (dict(quantization_config={'bits': 4}), 'quantization_config'),
    (dict(hidden_size=-1), 'hidden_size=-1; a positive integer'),
    (dict(hidden_size=True), 'hidden_size=True'),
    (dict(vocab_size='320'), 'vocab_size'),
    (dict(rms_norm_eps=float('nan')), 'rms_norm_eps=nan'),
    (dict(num_key_value_heads=3), 'multiple of kv_heads=3'),
  ],
)
def test_unsupported_settings_are_named(tiny, tmp_path, changes, message):
  path = edit(tmp_path, tiny, **changes)
  with pytest.raises(ValueError, match=message):
    config_hf.read(path)


def test_errors_list_both_sides(tiny, tmp_path):
  c = tiny.config()
  weights = tiny.arrays(c)
  weights['model.extra.weight'] = weights.pop('model.norm.weight')
  weights['model.layers.2.mlp.up_proj.weight'] = np.ones((2, 2), np.float32)
  weights['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(
    4, np.float32
  )
  tiny.write_folder(tmp_path, c, weights=weights)
  with pytest.raises(ValueError) as e:
    reading.read(str(tmp_path))
  for name in ('model.extra.weight', 'model.layers.2', 'nothing for [norm/sca'):
    assert name in str(e.value)
  assert 'inv_freq' not in str(e.value)


def test_wrong_shape_names_both(tiny, tmp_path):
  c = tiny.config()
  weights = tiny.arrays(c)
  name = 'model.layers.0.mlp.up_proj.weight'
  weights[name] = np.ascontiguousarray(weights[name].T)
  tiny.write_folder(tmp_path, c, weights=weights)
  with pytest.raises(
    ValueError, match=r'up_proj.* \(32, 48\).*needs \(48, 32\)'
  ):
    reading.read(str(tmp_path))


def test_values_that_are_not_finite_are_refused(tiny, tmp_path):
  c = tiny.config()
  weights = tiny.arrays(c)
  weights['model.norm.weight'][3] = np.nan
  tiny.write_folder(tmp_path, c, weights=weights)
  with pytest.raises(ValueError, match='model.norm.weight has 1 values'):
    reading.read(str(tmp_path))


def test_tied_head_may_be_stored_twice_but_not_differ(tiny, tmp_path):
  c = tiny.config('qwen2')
  weights = tiny.arrays(c)
  weights['lm_head.weight'] = weights['model.embed_tokens.weight'].copy()
  tiny.write_folder(tmp_path, c, 'qwen2', weights)
  reading.read(str(tmp_path))
  weights['lm_head.weight'][0, 0] += 1
  tiny.write_folder(tmp_path, c, 'qwen2', weights)
  with pytest.raises(ValueError, match='lm_head.*differ.*tie_word_embeddings'):
    reading.read(str(tmp_path))


@pytest.mark.parametrize(
  'name', ['../secret.safetensors', '/etc/x.safetensors', 'a\\b', 'x.bin', '..']
)
def test_an_index_stays_in_its_folder(tiny, tmp_path, name):
  tiny.write_folder(tmp_path, tiny.config(), shards=2)
  index = tmp_path / hf.INDEX
  index.write_text(json.dumps({'weight_map': {'lm_head.weight': name}}))
  with pytest.raises(ValueError, match='weight_map names'):
    reading.read(str(tmp_path))


@pytest.mark.parametrize('keep', [0, 4, 9, 200, -1])
def test_a_cut_safetensors_file_is_one_message(tiny, tmp_path, keep):
  tiny.write_folder(tmp_path, tiny.config())
  path = tmp_path / hf.SINGLE
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match='model.safetensors: not a whole'):
    reading.read(str(tmp_path))


def test_missing_and_pointer_files_say_what_to_do(tiny, tmp_path):
  tiny.write_folder(tmp_path, tiny.config())
  path = tmp_path / hf.SINGLE
  path.write_bytes(
    b'version https://git-lfs.github.com/spec/v1\noid sha256:0\n'
  )
  with pytest.raises(ValueError, match='git lfs pull'):
    reading.read(str(tmp_path))
  path.unlink()
  with pytest.raises(ValueError, match='no such file; weights are read from'):
    reading.read(str(tmp_path))
  (tmp_path / 'config.json').write_text('[' * 100_000)
  with pytest.raises(ValueError, match='config.json: not readable as JSON'):
    reading.read(str(tmp_path))
