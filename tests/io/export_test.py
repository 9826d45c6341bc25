"""A saved model is the same model: to our reader, and to transformers."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from specdec_jax import requests, types
from specdec_jax.io import export, files, hf, sources
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm
from tests.io import files_test, tiny

GOLDENS = ('llama', 'qwen2', 'qwen3', 't5', 't5_gated')
TEXT = 'hello <|im_start|>héllo\n  wörld 123<|im_end|>'


def encoder_decoder(**more):
  shared = dict(position='relative', query_scale=1.0, buckets=(8, 20), **more)
  shared |= dict(kv_heads=4)
  own = tiny.config(**shared, depth=3, tied=True, causal=False)
  return dict(**shared, start=0, encoder=own)


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
  't5 1.0': (
    't5',
    dict(tied=True, head_scale=32**-0.5)
    | encoder_decoder(act='relu', gated=False),
  ),
  't5 1.1': ('t5', encoder_decoder(act='gelu_tanh')),
  'untied, scaled': (
    't5',
    dict(head_scale=32**-0.5) | encoder_decoder(act='gelu_tanh'),
  ),
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


def tokenizer(**changes):
  inner = tiny.byte_tokenizer()
  template = '{{ messages[0].content }}'
  known = dict(eos_ids=(259, 0), bos_id=258, chat_template=template)
  return tokenizer_lib.Tokenizer('mine', inner, **known | changes)


def again(folder, was, c=None):
  """The tokenizer of a folder that is saved with this one."""
  c = c or tiny.config()
  export.save(folder, c, random_params(c), was)
  return sources.open_source(str(folder)).tokenizer


def saved(folder, c, params=None, **changes):
  params = random_params(c) if params is None else params
  export.save(folder, c, params, tokenizer(), **changes)
  return tiny.read(folder, dtype=c.dtype)


def tokens_of(shape, vocab):
  return np.random.default_rng(0).integers(0, vocab, shape, np.int32)


# --- what comes back ---------------------------------------------------------


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('case', CASES)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path, case, dtype):
  family, changes = CASES[case]
  c = tiny.config(**changes).running(dtype=dtype)
  params = random_params(c)
  found = saved(tmp_path / 'x', c, params)
  assert found.config == c
  tiny.check_equal(found.params, params)
  assert files.read_json(tmp_path / 'x/config.json')['model_type'] == family


@pytest.mark.parametrize('family', GOLDENS)
def test_weights_are_those_that_transformers_wrote(family, tmp_path):
  """From names to layouts: its own file is the oracle."""
  c, reader, _ = hf.open_folder(tiny.GOLDEN / family, family)
  c = c.running(dtype='bfloat16')
  scanned = c.running(scan_layers=True)
  theirs = safetensors.numpy.load_file(tiny.GOLDEN / family / hf.SINGLE)
  raw = files.read_json(tiny.GOLDEN / family / 'config.json')
  for config, params in (
    (c, tiny.params(reader, c)),
    convert.fuse(c, tiny.params(reader, c)),
    (scanned, tiny.params(reader, scanned)),
  ):
    export.save(tmp_path / 'x', config, params, small_tokenizer())
    weights = safetensors.numpy.load_file(tmp_path / 'x' / hf.SINGLE)
    assert weights.keys() == theirs.keys()
    for name, x in theirs.items():
      assert weights[name].dtype == x.dtype
      np.testing.assert_array_equal(weights[name], x, name)
    said = files.read_json(tmp_path / 'x/config.json')
    for key in ('model_type', 'architectures', 'tie_word_embeddings'):
      assert said[key] == raw[key]


def test_weights_follow_the_umask(tmp_path):
  was = os.umask(0o027)
  try:
    saved(tmp_path / 'x', tiny.config())
  finally:
    os.umask(was)
  modes = {x.name: x.stat().st_mode & 0o777 for x in (tmp_path / 'x').iterdir()}
  assert modes == dict.fromkeys(export._FILES, 0o640)


def test_parameters_on_a_mesh_are_gathered(tmp_path):
  c = tiny.config()
  params = random_params(c)
  mesh = jax.make_mesh((8,), ('x',))
  spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
  flat = lm.flatten(params)
  for name in ('embed', 'layers/1/mlp/down/kernel'):
    flat[name] = jax.device_put(flat[name], spread)
  tiny.check_equal(saved(tmp_path / 'x', c, lm.nest(flat)).params, params)


# --- the tokenizer -----------------------------------------------------------


@pytest.mark.parametrize('add_bos', [False, True])
def test_the_tokenizer_comes_back(tmp_path, add_bos):
  was = tokenizer(add_bos=add_bos)
  if not add_bos:  # tokenizer.json has a first token that ours leaves out
    was.inner.post_processor = tokenizers.processors.TemplateProcessing(
      single='<|im_start|> $A', special_tokens=[('<|im_start|>', 258)]
    )
  now = again(tmp_path / 'x', was)
  assert now.encode(TEXT) == was.encode(TEXT)
  assert now.fingerprint() == was.fingerprint()
  for name in ('eos_ids', 'bos_id', 'add_bos', 'chat_template', 'size'):
    assert getattr(now, name) == getattr(was, name), name
  assert dict(now.specials) == dict(
    bos_token='<|im_start|>', eos_token='<|im_end|>'
  )
  # Those who read tokenizer.json alone get the same ids.
  alone = tokenizers.Tokenizer.from_file(str(tmp_path / 'x/tokenizer.json'))
  assert alone.encode(TEXT).ids == was.encode(TEXT)
  first = was.inner.encode('a').ids[0]
  assert (first == 258) != add_bos  # the caller's is as it was


@pytest.mark.parametrize('template', ['[{{ messages[0].content }}]', None])
@pytest.mark.parametrize('first', ['', '{{ bos_token }}'])
def test_a_gguf_files_chat_keeps_its_bos(tmp_path, template, first):
  """llama.cpp puts it before a chat; a folder's template has to write it."""
  template = template and first + template
  specials = (('bos_token', '<|im_start|>'),)
  was = tokenizer(
    add_bos=True, chat_bos=True, chat_template=template, specials=specials
  )
  now = again(tmp_path / 'x', was)
  asked = [dict(role='user', content='hello')]
  assert now.encode_chat(asked) == was.encode_chat(asked)
  assert now.encode_chat(asked)[0] == 258


def test_sources_end_with_eos_for_those_who_read_tokenizer_json(tmp_path):
  """As spiece.model gives it, a T5's tokenizer adds none by itself."""
  c, was = tiny.config(**CASES['t5 1.1'][1]), tokenizer(add_bos=False)
  assert was.inner.encode('one two').ids[-1] != 259
  again(tmp_path / 'x', was, c)
  alone = tokenizers.Tokenizer.from_file(str(tmp_path / 'x/tokenizer.json'))
  assert alone.encode('one two').ids == [*was.encode('one two'), 259]
  now = tiny.read(tmp_path / 'x')
  read = requests.item(now, 'one two', 0, chat=False).source
  assert list(read) == [*was.encode('one two'), 259]


def test_a_tokenizer_without_special_ids_gets_none(tmp_path):
  now = again(tmp_path / 'x', tokenizer_lib.from_bytes(256, 'bytes'))
  assert (now.eos_ids, now.bos_id, now.specials) == ((), None, ())
  raw = files.read_json(tmp_path / 'x/config.json')
  assert [raw[f'{x}_token_id'] for x in ('bos', 'eos', 'pad')] == [None] * 3


# --- the folder --------------------------------------------------------------


def test_only_an_export_is_replaced(tmp_path):
  c, folder = tiny.config(), tmp_path / 'models' / 'x'
  folder.mkdir(parents=True)
  saved(folder, c, made_by={'seed': 3})
  assert files.read_json(folder / export.MARK)['made_by'] == {'seed': 3}
  other = random_params(c, seed=1)
  tiny.check_equal(saved(folder, c, other).params, other)
  (folder / 'README.md').write_text('mine')
  tiny.write_folder(tmp_path / 'model', c)
  (tmp_path / 'file').write_text('mine')
  before = sorted(tmp_path.rglob('*'))
  for path in (folder, tmp_path / 'model', tmp_path / 'file'):
    with pytest.raises(ValueError, match=f'{path.name}: is there and is no ex'):
      saved(path, c)
  assert sorted(tmp_path.rglob('*')) == before


def test_a_full_disk_leaves_what_was_there(tmp_path):
  """A limit on the size of files fails the write as a full disk does."""
  c = tiny.config()
  params = random_params(c)
  saved(tmp_path / 'x', c, params)
  other = random_params(c, seed=1)
  for name in ('x', 'y'):
    refused = pytest.raises(ValueError, match=f'{name}: cannot be written')
    with files_test.small_files(10_000), refused:
      saved(tmp_path / name, c, other)
  assert os.listdir(tmp_path) == ['x']
  tiny.check_equal(tiny.read(tmp_path / 'x').params, params)


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(act='gelu'), "nearest, Llama, has act='silu', not 'gelu'"),
    (encoder_decoder(act='relu'), "nearest, T5, has act='gelu_tanh', not 'rel"),
    (
      encoder_decoder(act='gelu_tanh') | dict(head_scale=0.5),
      r'T5, has head_scale=0\.17.*, not 0.5',
    ),
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
def test_settings_of_no_family_are_named(changes, message):
  with pytest.raises(ValueError, match=message):
    export.settings(tiny.config(**changes))


def test_settings_that_say_the_same_are_no_difference(tmp_path):
  c = tiny.config(windows=(0, 0, 0), query_scale=8**-0.5)
  found = saved(tmp_path / 'x', c)
  assert found.config == dataclasses.replace(c, windows=(0,), query_scale=None)


# --- transformers ------------------------------------------------------------


@pytest.fixture(name='transformers')
def _transformers():
  pytest.importorskip('torch', reason='needs torch (extra parity)')
  return pytest.importorskip(
    'transformers', reason='needs transformers (extra parity)'
  )


def small_tokenizer():
  """32 words; the golden models know 64 ids."""
  words = {f'w{i}': i for i in range(32)}
  inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, 'w0'))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return tokenizer_lib.Tokenizer('words', inner)


@pytest.mark.parity
@pytest.mark.parametrize('case', CASES)
def test_transformers_agrees_with_the_saved_model(transformers, tmp_path, case):
  import torch

  c = tiny.config(**CASES[case][1])
  params = random_params(c)
  export.save(tmp_path / 'x', c, params, tokenizer())
  auto = transformers.AutoModelForCausalLM
  if c.encoder is not None:
    auto = transformers.AutoModelForSeq2SeqLM
  model, info = auto.from_pretrained(tmp_path / 'x', output_loading_info=True)
  assert not any(info.values()), info
  assert model.dtype == torch.float32
  assert model.config.eos_token_id == [259, 0]
  tokens_BT, source = tokens_of((2, 80), c.vocab), None
  read = dict(input_ids=torch.as_tensor(tokens_BT))
  if c.encoder is not None:
    source = types.Source(tokens_BT[:, ::-1], np.array([80, 80]))
    read = dict(
      input_ids=torch.as_tensor(tokens_BT[:, ::-1].copy()),
      decoder_input_ids=read['input_ids'],
    )
  with torch.no_grad():
    theirs = model(**read).logits.numpy()
  ours = np.asarray(tiny.logits(c, params, tokens_BT, source))
  scale = np.abs(ours).max()
  np.testing.assert_allclose(theirs / scale, ours / scale, atol=1e-5)


@pytest.mark.parity
@pytest.mark.parametrize('add_bos', [False, True])
@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_transformers_tokenizes_alike(transformers, tmp_path, family, add_bos):
  was = tokenizer(add_bos=add_bos)
  again(tmp_path / 'x', was, tiny.config(family))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'x')
  ids = was.encode(TEXT)
  assert theirs(TEXT).input_ids == ids
  assert (theirs.eos_token_id, theirs.bos_token_id) == (259, 258)
  assert theirs.decode(ids) == was.decode(ids, special=True)
  messages = [dict(role='user', content='hello')]
  text = theirs.apply_chat_template(messages, tokenize=False)
  assert text == was.chat(messages)
