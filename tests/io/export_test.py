"""A saved model is the same model: to our reader, and to transformers."""

import dataclasses
import errno
import json
import os
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from specdec_jax import build
from specdec_jax.io import export, hf, load, names
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from tests.io import exporting, reading


def saved(tiny, folder, c, params=None, **changes):
  params = exporting.random_params(c) if params is None else params
  export.save(folder, c, params, exporting.tokenizer(tiny), **changes)
  return reading.read(str(folder), dtype=c.dtype)


def check_equal(a, b):
  """Same names, dtypes and bits."""
  a, b = lm.flatten(a), lm.flatten(b)
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == b[name].dtype, name
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# --- what comes back ---------------------------------------------------------


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', exporting.CASES)
def test_a_saved_model_comes_back_bit_for_bit(tiny, tmp_path, case, dtype):
  family, changes = exporting.CASES[case]
  c = tiny.config(dtype=dtype, **changes)
  params = exporting.random_params(c)
  found = saved(tiny, tmp_path / 'x', c, params)
  assert found.config == c
  check_equal(found.params, params)
  assert hf.files.read_json(tmp_path / 'x/config.json')['model_type'] == family


def test_a_float64_model_comes_back(tiny, tmp_path, x64):
  c = tiny.config(dtype='float64')
  params = exporting.random_params(c)
  check_equal(saved(tiny, tmp_path / 'x', c, params).params, params)


@pytest.mark.parametrize('family', exporting.GOLDENS)
def test_weights_are_those_that_transformers_wrote(family):
  """From names to layouts: its own file is the oracle."""
  opened = hf.open_folder(exporting.GOLDEN / family, family)
  c = dataclasses.replace(opened.config, dtype='bfloat16')
  said = export.settings(c)
  theirs = safetensors.numpy.load_file(exporting.GOLDEN / family / hf.SINGLE)
  forms = (
    (c, names.read(opened.reader, c)),
    lm.fuse(c, names.read(opened.reader, c)),
    (
      scanned := dataclasses.replace(c, scan_layers=True),
      names.read(opened.reader, scanned),
    ),
  )
  for config, params in forms:
    weights = export._weights(config, params)
    assert weights.keys() == theirs.keys()
    for name, x in theirs.items():
      assert weights[name].dtype == x.dtype
      np.testing.assert_array_equal(weights[name], x, name)
  raw = json.loads((exporting.GOLDEN / family / 'config.json').read_text())
  for key in ('model_type', 'architectures', 'tie_word_embeddings'):
    assert said[key] == raw[key]


def test_weights_follow_the_umask(tiny, tmp_path):
  c = tiny.config()
  was = os.umask(0o027)
  try:
    saved(tiny, tmp_path / 'x', c)
  finally:
    os.umask(was)
  modes = {x.name: x.stat().st_mode & 0o777 for x in (tmp_path / 'x').iterdir()}
  assert modes == dict.fromkeys(export._FILES, 0o640)


def test_a_model_in_use_is_saved_and_gives_the_same_logits(tiny, tmp_path):
  """build.load fuses on one device; what it reads back is fused too."""
  tiny.write_folder(tmp_path / 'a', tiny.config('qwen2'), 'qwen2')
  a = build.load(tmp_path / 'a')
  assert a.config.fused
  export.save(tmp_path / 'b', a.config, a.params, a.tokenizer)
  b = build.load(tmp_path / 'b')
  assert b.config == a.config
  tokens_BT = np.arange(20, dtype=np.int32).reshape(2, 10)
  np.testing.assert_array_equal(
    exporting.logits_of(b.config, b.params, tokens_BT),
    exporting.logits_of(a.config, a.params, tokens_BT),
  )
  tokenizer_lib.check_same(a.tokenizer, b.tokenizer)


def test_parameters_on_a_mesh_are_gathered(tiny, tmp_path):
  c = tiny.config()
  params = exporting.random_params(c)
  mesh = jax.make_mesh((8,), ('x',))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  flat = lm.flatten(params)
  for name in ('embed', 'layers/1/mlp/down/kernel'):
    flat[name] = jax.device_put(flat[name], spread)
  found = saved(tiny, tmp_path / 'x', c, lm.nest(flat))
  check_equal(found.params, params)


# --- the tokenizer -----------------------------------------------------------


@pytest.mark.parametrize('add_bos', [False, True])
def test_the_tokenizer_comes_back(tiny, tmp_path, add_bos):
  c = tiny.config()
  was = exporting.tokenizer(tiny, add_bos=add_bos)
  export.save(tmp_path / 'x', c, exporting.random_params(c), was)
  now = load.open_source(str(tmp_path / 'x')).tokenizer
  assert now.encode(exporting.TEXT) == was.encode(exporting.TEXT)
  assert now.fingerprint() == was.fingerprint()
  for name in ('eos_ids', 'bos_id', 'add_bos', 'chat_template', 'size'):
    assert getattr(now, name) == getattr(was, name), name
  assert dict(now.specials) == dict(
    bos_token='<|im_start|>', eos_token='<|im_end|>'
  )
  # Those who read tokenizer.json alone get the same ids.
  alone = tokenizers.Tokenizer.from_file(str(tmp_path / 'x/tokenizer.json'))
  assert alone.encode(exporting.TEXT).ids == was.encode(exporting.TEXT)


def test_a_first_token_that_ours_leaves_out_is_left_out(tiny, tmp_path):
  was = exporting.tokenizer(tiny)
  was.inner.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|im_start|> $A', special_tokens=[('<|im_start|>', 258)]
  )
  c = tiny.config()
  export.save(tmp_path / 'x', c, exporting.random_params(c), was)
  alone = tokenizers.Tokenizer.from_file(str(tmp_path / 'x/tokenizer.json'))
  assert alone.encode(exporting.TEXT).ids == was.encode(exporting.TEXT)
  assert was.inner.encode('a').ids[0] == 258  # the caller's is as it was


def test_a_tokenizer_without_special_ids_gets_none(tiny, tmp_path):
  c = tiny.config()
  bare = tokenizer_lib.from_bytes(256, 'bytes')
  export.save(tmp_path / 'x', c, exporting.random_params(c), bare)
  now = load.open_source(str(tmp_path / 'x')).tokenizer
  assert (now.eos_ids, now.bos_id, now.specials) == ((), None, ())
  raw = json.loads((tmp_path / 'x/config.json').read_text())
  assert [raw[f'{x}_token_id'] for x in ('bos', 'eos', 'pad')] == [None] * 3


# --- the folder --------------------------------------------------------------


def test_only_an_export_is_replaced_and_only_when_told(tiny, tmp_path):
  c = tiny.config()
  folder = tmp_path / 'models' / 'x'
  saved(tiny, folder, c, made_by={'seed': 3})
  mark = json.loads((folder / export.MARK).read_text())
  assert mark['made_by'] == {'seed': 3}
  other = exporting.random_params(c, seed=1)
  with pytest.raises(ValueError, match='earlier export.*overwrite=True'):
    saved(tiny, folder, c, other)
  check_equal(saved(tiny, folder, c, other, overwrite=True).params, other)
  (folder / 'README.md').write_text('mine')
  with pytest.raises(ValueError, match='holds README.md besides'):
    saved(tiny, folder, c, overwrite=True)
  assert os.listdir(tmp_path / 'models') == ['x']
  assert {x.name for x in folder.iterdir()} == export._FILES | {'README.md'}


@pytest.mark.parametrize('overwrite', [False, True])
def test_what_is_no_export_is_kept(tiny, tmp_path, overwrite):
  tiny.write_folder(tmp_path / 'model', tiny.config())
  (tmp_path / 'file').write_text('mine')
  for name in ('model', 'file'):
    with pytest.raises(ValueError, match=f'{name}: is there and is no export'):
      saved(tiny, tmp_path / name, tiny.config(), overwrite=overwrite)
  reading.read(str(tmp_path / 'model'))
  (tmp_path / 'empty').mkdir()
  saved(tiny, tmp_path / 'empty', tiny.config())


def test_a_full_disk_leaves_what_was_there(tiny, tmp_path):
  """A limit on the size of files fails the write as a full disk does."""
  c = tiny.config()
  params = exporting.random_params(c)
  saved(tiny, tmp_path / 'x', c, params)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  other = exporting.random_params(c, seed=1)
  for name in ('x', 'y'):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
      with pytest.raises(ValueError, match=f'{name}: cannot be written'):
        saved(tiny, tmp_path / name, c, other, overwrite=True)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert os.listdir(tmp_path) == ['x']
  check_equal(reading.read(str(tmp_path / 'x')).params, params)


@pytest.mark.parametrize('fails', [1, 2])
def test_a_rename_that_fails_leaves_the_earlier_one(
  tiny, tmp_path, monkeypatch, fails
):
  c = tiny.config()
  params = exporting.random_params(c)
  saved(tiny, tmp_path / 'x', c, params)
  rename, calls = os.rename, []

  def failing(a, b):
    calls.append(a)
    if len(calls) == fails:
      raise OSError(errno.EIO, 'broken')
    rename(a, b)

  monkeypatch.setattr(os, 'rename', failing)
  with pytest.raises(ValueError, match='broken'):
    saved(
      tiny, tmp_path / 'x', c, exporting.random_params(c, 1), overwrite=True
    )
  assert os.listdir(tmp_path) == ['x']
  check_equal(reading.read(str(tmp_path / 'x')).params, params)


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(act='gelu'), "nearest, Llama, has act='silu', not 'gelu'"),
    (dict(qkv_bias=True, qk_norm=True), 'Qwen3, has .*o_bias=True, not False'),
    (dict(windows=(0, 16)), r'windows=\(0, 0\), not \(0, 16\)'),
    (dict(query_scale=0.5), r'query_scale=0\.35.*, not 0.5'),
    (dict(o_bias=True), 'o_bias=False, not True'),
    (
      dict(rope_scaling=model_config.RopeScaling(2.0, 9.0, original_context=0)),
      'rope_scaling=RopeScaling.*low_freq_factor=1.0, .*, not RopeScaling',
    ),
  ],
)
def test_settings_of_no_family_are_named(tiny, tmp_path, changes, message):
  c = tiny.config(**changes)
  with pytest.raises(ValueError, match=message):
    export.settings(c)


def test_settings_that_say_the_same_are_no_difference(tiny, tmp_path):
  c = tiny.config(windows=(0, 0, 0), query_scale=8**-0.5)
  found = saved(tiny, tmp_path / 'x', c)
  assert found.config == dataclasses.replace(c, windows=(0,), query_scale=None)


def test_models_that_cannot_be_saved_are_refused(tiny, tmp_path):
  c = tiny.config()
  save = lambda config, params, **more: export.save(
    tmp_path / 'x', config, params, exporting.tokenizer(tiny), **more
  )
  params = exporting.random_params(c)
  params['norm']['scale'] = params['norm']['scale'].at[3].set(jnp.inf)
  with pytest.raises(ValueError, match='norm/scale has 1 values'):
    save(c, params)
  with pytest.raises(ValueError, match='has 260 ids, the model 259'):
    small = tiny.config(vocab=259)
    save(small, exporting.random_params(small))
  with pytest.raises(ValueError, match='made_by: is not JSON'):
    save(c, exporting.random_params(c), made_by={'x': float('nan')})
  assert not os.listdir(tmp_path)
