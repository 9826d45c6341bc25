"""Published drafts: what others compute with the same files, and refusals."""

import dataclasses
import functools
import importlib.util
import json
import pathlib
import types as python_types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import api, forward, program
from specdec_jax.distill import eagle_loss
from specdec_jax.io import load
from specdec_jax.io.published import eagle_folder
from specdec_jax.io.quantised import rounded
from specdec_jax.kernels import library
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from tests import fakes
from tests.io import tiny, torch_file

GOLDEN = pathlib.Path(__file__).parent / 'golden/eagle3'
LOGITS = dict(np.load(GOLDEN / 'logits.npz'))
TOKENS, FEATURES = LOGITS.pop('tokens'), LOGITS.pop('features')
PLAIN = 'llama_plain'


@functools.cache
def target(**changes):
  """What a golden draft was made for, as far as that is read."""
  sizes = dict(depth=10, width=16, vocab=40, dtype='float32')
  config = fakes.tiny(**sizes | changes)
  return python_types.SimpleNamespace(
    label='a target', config=config, ids=40, params=(), layout=None
  )


def logits(config, weights, model, tokens=TOKENS, features=FEATURES):
  """[3][T - k, R], as golden/eagle3/make.py has them: of steps of training.

  The tokens follow a first one, which no draft reads.
  """
  tokens = jnp.asarray([0, *tokens])[None]
  tokens_BTD = eagle.embed(model, weights, tokens, jnp.zeros_like(tokens))
  features = jnp.asarray([*features, features[0]], float)[None]
  steps = eagle_loss.steps(config, weights['layer'], tokens_BTD, features, 3)
  each = [eagle.reduced(config, weights, x)[0] for x in steps]
  return [np.asarray(x[1 + k :]) for k, x in enumerate(each)]


@pytest.mark.parametrize('name', LOGITS)
def test_logits_are_those_of_speculators(x64, name):
  """Of three chained steps, begun at every token."""
  given = target(dtype='float64')
  made = eagle_folder.fit(GOLDEN / name, name, given)
  for k, ours in enumerate(logits(*made, lm.make(given.config))):
    want = LOGITS[name][k, : len(TOKENS) - k]
    np.testing.assert_allclose(ours, want, rtol=0, atol=2e-5)


def maker(folder):
  """The make.py of golden files, where the package is."""
  pytest.importorskip('speculators', reason='needs speculators 0.9.0')
  spec = importlib.util.spec_from_file_location('made', folder / 'make.py')
  assert spec and spec.loader
  make = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(make)
  return make


@pytest.mark.parity
def test_speculators_still_writes_the_golden_files(tmp_path):
  make = maker(GOLDEN)
  for name, found in make.make(tmp_path).items():
    np.testing.assert_allclose(found, LOGITS[name], rtol=0, atol=1e-5)
    one, two = (
      safetensors.numpy.load_file(folder / name / 'model.safetensors')
      for folder in (tmp_path, GOLDEN)
    )
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[n], two[n]) for n in one)


# --- other forms, and folders that are refused --------------------------------


def content(name=PLAIN):
  """(config.json, arrays) of a golden folder."""
  raw = json.loads((GOLDEN / name / 'config.json').read_text())
  arrays = safetensors.numpy.load_file(GOLDEN / name / 'model.safetensors')
  return raw, arrays


def saved(folder, raw, arrays):
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(raw))
  arrays = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
  return folder


def raw_form(raw, arrays):
  """As EAGLE's authors, SpecForge and AngelSlim save it, with few facts."""
  layer = raw['transformer_layer_config']
  kept = ('hidden_size', 'intermediate_size', 'num_attention_heads')
  kept += ('rms_norm_eps', 'vocab_size', 'max_position_embeddings')
  facts = {k: layer[k] for k in kept}
  facts |= dict(architectures=['LlamaForCausalLMEagle3'], draft_vocab_size=12)
  facts |= dict(tie_word_embeddings=True)  # of which nothing is meant
  named = {n.replace('layers.0', 'midlayer'): x for n, x in arrays.items()}
  return facts, named


def test_the_form_of_its_authors_is_read_alike(tmp_path):
  """Heads are counted, rotations are those of base 10000."""
  raw, arrays = content()
  config, want = eagle_folder.fit(GOLDEN / PLAIN, '', target())
  facts, named = raw_form(raw, arrays)
  ids = {'eagle_config': {'eagle_aux_hidden_state_layer_ids': [1, 4, 8]}}
  folder = saved(tmp_path, facts | ids, named)
  same, found = eagle_folder.fit(folder, '', target())
  block = dataclasses.replace(config.block, rope_theta=10000.0)
  assert same == dataclasses.replace(config, block=block)
  chex.assert_trees_all_equal(found, want)
  # By vLLM's ids, and by none: the usual three of ten layers.
  for more, taps in (
    ({'eagle_aux_hidden_state_layer_ids': [0, 5, 10]}, (-1, 4, 9)),
    ({}, (1, 4, 6)),
  ):
    folder = saved(tmp_path, facts | more, named)
    assert eagle_folder.fit(folder, '', target())[0].taps == taps
  # EAGLE-3.1, as PyTorch's .bin; without an embedding, the target's is read.
  facts |= dict(fc_norm=True, norm_output=True, norm_before_residual=True)
  named |= {f'fc_norm.{i}.weight': np.ones(16, 'f4') for i in range(3)}
  del named['embed_tokens.weight']
  saved(tmp_path, facts, {})
  (tmp_path / 'model.safetensors').unlink()
  torch_file.save(tmp_path / 'pytorch_model.bin', named)
  same, found = eagle_folder.fit(tmp_path, '', target())
  assert (same.tap_norm, same.last_norm) == ('each', 'fed')
  assert same.normed_residual and 'embed' not in found


def test_layers_that_a_target_lacks_are_named_as_the_folder_counts(tmp_path):
  """SGLang's ids from 0, vLLM's from 1."""
  facts, named = raw_form(*content())
  ids = {'eagle_aux_hidden_state_layer_ids': [1, 4, 11]}
  folder = saved(tmp_path, facts | {'eagle_config': ids}, named)
  with pytest.raises(ValueError, match=r'\(1, 4, 11\), .* has -1 to 10; give'):
    eagle_folder.fit(folder, '', target())
  eagle_folder.fit(saved(tmp_path, facts | ids, named), '', target())
  ids['eagle_aux_hidden_state_layer_ids'] = [1, 4, 12]
  with pytest.raises(ValueError, match=r'\(1, 4, 12\), .* has 0 to 11; give'):
    eagle_folder.fit(saved(tmp_path, facts | ids, named), '', target())


def test_the_form_of_deepspec_is_read_alike(tmp_path):
  """Any number of taps, no d2t: a head for all ids, padding left out."""
  raw, arrays = content('qwen3_plain')
  facts = raw['transformer_layer_config'] | {'target_layer_ids': [1, 4, 5, 8]}
  arrays = {n: x for n, x in arrays.items() if n not in ('d2t', 't2d')}
  arrays['fc.weight'] = np.ones((16, 64), 'f4')
  arrays['lm_head.weight'] = np.arange(640, dtype='f4').reshape(40, 16)
  folder, padded = saved(tmp_path, facts, arrays), target()
  padded.ids = 38
  config, made = eagle_folder.fit(folder, '', padded)
  padded.ids = 40
  assert config.taps == (1, 4, 5, 8) and config.block.qk_norm
  assert made['ids'].tolist() == list(range(38))
  np.testing.assert_array_equal(made['head'], arrays['lm_head.weight'][:38].T)


def read(made, given):
  """Logits after every token, by the drafter's way through a cache."""
  (config, weights), model = made, lm.make(given.config)
  T = len(TOKENS)
  features = eagle.features_of(weights['layer'], config, FEATURES[None])
  hidden, _, _ = forward.read(
    eagle.reader(config, model, features),
    weights,
    jnp.asarray(TOKENS)[None],
    jnp.ones(1, jnp.int32),
    eagle.init_cache(config, 1, T + 1),
    slots=T + 1,
  )
  return np.asarray(eagle.reduced(config, weights, hidden)[0])


@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama_joined', 'qwen3_each_fed'])
def test_the_kernels_compute_the_same(name, monkeypatch):
  """Of a packed target, but for int8; a pass through a cache is golden."""
  if not library.ready('auto', program.cache_folder()):
    pytest.skip('needs a C compiler')

  def far(**run):
    given = target(run=model_config.Execution(**run))
    made = eagle_folder.fit(GOLDEN / name, name, given)
    assert made[0].block.run.packed == bool(run)
    return np.abs(read(made, given) - LOGITS[name][0]).max()

  packed = dict(fused=True, packed=True)
  assert far() < 1e-3 < far(**packed) < 0.3
  monkeypatch.setattr(rounded, '_round', lambda *_: None)
  assert far(**packed) < 1e-3


def changed(config=(), layers=(), arrays=(), without=()):
  """A change of a golden folder's content."""

  def change(raw, own):
    raw |= config
    raw['transformer_layer_config'] |= layers
    own |= arrays
    for name in without:
      del own[name]

  return change


ONES = functools.partial(np.ones, dtype='f4')
OFFSETS = content()[1]['d2t']
BAD = [
  (
    changed(dict(speculators_model_type='dflash')),
    'dflash is no draft that is',
  ),
  (
    changed(
      dict(speculators_model_type=None, architectures=['LlamaForCausalLM']),
      without=['layers.0.hidden_norm.weight'],
    ),
    r"\['LlamaForCausalLM'\] is no draft that is read; read are EAGLE 1 to 3",
  ),
  (
    changed(dict(target_hidden_size=32)),
    'for a target of width 32, and a target has 16; give a draft of this',
  ),
  (
    changed(layers=dict(vocab_size=41)),
    'for a target of vocabulary 41, and a target has 40; give a draft of this',
  ),
  (
    changed(dict(eagle_aux_hidden_state_layer_ids=[2, 5, 12])),
    r'it reads layers \(2, 5, 12\), .* where a target has 0 to 11; give a',
  ),
  (
    changed(without=['fc.weight', 'lm_head.weight']),
    r'^eagle F: nothing for \[fc.weight, lm_head.weight\]$',
  ),
  (changed(arrays={'x.y': ONES(2)}), r'^eagle F: no place for \[x.y\]$'),
  (
    changed(arrays={'fc.weight': np.full((16, 48), np.nan, 'f4')}),
    'fc.weight has 768 values that are not finite in float32; the file is dam',
  ),
  # As ids, not offsets; none, of a head for some ids.
  (changed(arrays=dict(d2t=OFFSETS + np.arange(12))), 'damaged: i . d2t'),
  (changed(without=['d2t']), 'damaged: i . d2t'),
]


@pytest.mark.parametrize('change, message', BAD)
def test_a_draft_of_something_else_is_refused(change, message, tmp_path):
  raw, arrays = content()
  change(raw, arrays)
  folder = saved(tmp_path, raw, arrays)
  with pytest.raises(ValueError, match=message) as error:
    eagle_folder.fit(folder, 'eagle F', target())
  assert str(error.value).startswith(('eagle F: ', str(folder)))


def test_a_narrower_draft_needs_an_embedding(tmp_path):
  raw, arrays = content()
  raw['target_hidden_size'] = 32
  arrays['fc.weight'] = ONES((16, 96))
  wide = target(width=32)
  config, _ = eagle_folder.fit(saved(tmp_path, raw, arrays), '', wide)
  assert (config.block.width, config.features) == (16, 96)
  del arrays['embed_tokens.weight']
  with pytest.raises(
    ValueError, match='has no embed_tokens.weight, and is not'
  ):
    eagle_folder.fit(saved(tmp_path, raw, arrays), '', wide)


def text(model, folder=None, gamma=2):
  """What a model says, perhaps with the draft in a folder."""
  options = dict(source=str(folder), check='off')
  how = dict(draft='eagle', draft_options=options, gamma=gamma)
  how = dict(max_new_tokens=12) | (how if folder else {})
  return api.generate(model, 'some words', **how)[0].tokens


@pytest.mark.more
def test_it_drafts_for_a_model(tmp_path):
  """From a folder, once for a target; the text is plain decoding's."""
  raw, arrays = content()
  small = load.load('random:tiny')
  facts, named = raw_form(raw, arrays)
  facts |= dict(vocab_size=512, target_hidden_size=64)
  facts['eagle_aux_hidden_state_layer_ids'] = [0, 1, 2]
  draw = np.random.default_rng(0).normal
  named |= {
    'fc.weight': draw(size=(16, 192)).astype('f4'),
    'embed_tokens.weight': draw(size=(512, 16)).astype('f4'),
    't2d': np.isin(np.arange(512), OFFSETS + np.arange(12)),
  }
  folder = saved(tmp_path, facts, named)
  assert text(small, folder) == text(small)
  made = [x for x in small.drafts if x[0] == 'eagle']
  assert len(made) == 1 and text(small, folder, gamma=3) == text(small)
  assert [x for x in small.drafts if x[0] == 'eagle'] == made


def eagle_1(w, head, tokens, features, theta=10000.0):
  """The logits [n, V] of a chain, in NumPy: entry k follows tokens[m + k].

  The chain is teacher-forced. tokens: from the text's second on; features: the
  normed state of the token before each, of the first m + 1 of them.
  """
  rms = lambda x, name: w[name] * x / np.sqrt((x * x).mean(-1) + 1e-6)
  layer, m, out = 'layers.0.', len(features) - 1, []
  keys, values = [], []
  for t, token in enumerate(tokens):
    f = features[t] if t <= m else out[-1]
    z = np.concatenate([w['embed_tokens.weight'][token], f]) @ w['fc.weight'].T
    z = z + w['fc.bias']
    q, k, v = (
      (w[f'{layer}self_attn.{x}_proj.weight'] @ z).reshape(-1, 8) for x in 'qkv'
    )
    angle = (t + 1) * theta ** -(np.arange(4) / 4)
    turn = np.exp(1j * angle)
    q, k = ((x[:, :4] + 1j * x[:, 4:]) * turn for x in (q, k))
    keys.append(k)
    values.append(v)
    score = np.einsum('hc,thc->ht', q, np.conj(keys)).real / np.sqrt(8)
    p = np.exp(score - score.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    read = np.einsum('ht,thc->hc', p, values).reshape(-1)
    y = z + w[f'{layer}self_attn.o_proj.weight'] @ read
    n = rms(y, f'{layer}post_attention_layernorm.weight')
    gate, up, down = (
      w[f'{layer}mlp.{x}_proj.weight'] for x in ('gate', 'up', 'down')
    )
    g = gate @ n
    out.append(y + down @ (g / (1 + np.exp(-g)) * (up @ n)))
  return np.stack(out[m:]) @ head


@pytest.mark.more
def test_eagle_1_drafts_as_numpy_reads_it(tmp_path, x64):
  """Every draft of a greedy text, whose first token it does not read."""
  raw, arrays = content()
  facts, _ = raw_form(raw, arrays)
  facts |= dict(architectures=['LlamaForCausalLM'], num_key_value_heads=4)
  draw, D, H = np.random.default_rng(0).normal, 16, 32
  shapes = {
    'embed_tokens': (40, D),
    'fc': (D, 2 * D),
    **{f'layers.0.self_attn.{x}_proj': (H, D) for x in 'qkv'},
    'layers.0.self_attn.o_proj': (D, H),
    **{f'layers.0.mlp.{x}_proj': (24, D) for x in ('gate', 'up')},
    'layers.0.mlp.down_proj': (D, 24),
    'layers.0.post_attention_layernorm': (D,),
  }
  w = {f'{n}.weight': draw(size=s) / 3 for n, s in shapes.items()}
  w['fc.bias'] = draw(size=D)
  saved(tmp_path, facts, w)
  given = target(dtype='float64', depth=2, tied=False)
  given.params = fakes.wild(given.config, 0)
  config, weights = eagle_folder.fit(tmp_path, '', given)
  model = lm.make(given.config)
  tokens = jnp.asarray([3, *TOKENS])[None]
  at = jnp.zeros(1, jnp.int32)
  cache = model.init_cache(1, T := tokens.shape[1])
  hidden, tapped, _ = forward.read(
    model, given.params, tokens, at, cache, slots=T, taps=config.taps
  )
  embedded = eagle.embed(model, weights, tokens, jnp.zeros_like(tokens))
  steps = eagle_loss.steps(config, weights['layer'], embedded, tapped[0], 3)
  ours = [eagle.logits(config, model, weights, x).whole()[0] for x in steps]
  features = np.asarray(model.norm(given.params, hidden)[0])
  for m in range(T - 4):  # a chain after token m + 1
    want = eagle_1(
      w, given.params['head'], tokens[0, 1 : m + 4], features[: m + 1]
    )
    found = [x[m + 1 + k] for k, x in enumerate(ours)]
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-9)


# --- the MTP module inside a MiMo ---------------------------------------------

MTP = GOLDEN.parent / 'mtp'


def test_an_mtp_module_says_what_speculators_computes(x64):
  """Of each state and the token after it; its last norm is the only one."""
  x = dict(np.load(MTP / 'logits.npz'))
  given = target(dtype='float64', tied=False)
  norm = dict(scale=np.linspace(1, 2, 16))
  given.params = dict(embed=x['embed'], head=x['head'].T, norm=norm)
  config, weights = eagle_folder.fit(MTP, '', given)
  assert config.taps == (10,) and config.last_norm == 'fed'
  model, tokens = lm.make(given.config), jnp.asarray(x['tokens'])[None]
  weights = jax.tree.map(jnp.asarray, weights)
  embedded = eagle.embed(model, weights, tokens, jnp.zeros_like(tokens))
  states = jnp.asarray(x['states'], float)[None]
  (found,) = eagle_loss.steps(config, weights['layer'], embedded, states, 1)
  ours = eagle.logits(config, model, weights, found).whole()[0, 1:]
  want = x['logits']
  np.testing.assert_allclose(ours[: len(want)], want, rtol=0, atol=2e-5)


@pytest.mark.parity
def test_speculators_still_writes_the_golden_module(tmp_path):
  make = maker(MTP)
  want = np.load(MTP / 'logits.npz')['logits']
  np.testing.assert_allclose(make.make(tmp_path), want, rtol=0, atol=1e-5)


def mimo(folder, without=''):
  """A tiny MiMo: a Qwen2 with a module of one layer more."""
  c = tiny.config('qwen2')
  module = {
    n.removeprefix('model.layers.0.'): x
    for n, x in tiny.arrays(c, 1).items()
    if n.startswith('model.layers.0.')
  }
  for name in ('token_layernorm', 'hidden_layernorm', 'final_layernorm'):
    module[f'{name}.weight'] = ONES(c.width)
  draw = np.random.default_rng(0).normal(size=(c.width, 2 * c.width))
  module['input_proj.weight'] = draw.astype('f4') / 5
  module.pop(without, None)
  own = {f'model.mtp_layers.0.{n}': x for n, x in module.items()}
  return tiny.write_folder(folder, c, 'mimo', weights=tiny.arrays(c) | own)


@pytest.mark.more
def test_a_mimo_drafts_for_itself(tmp_path):
  folder = str(mimo(tmp_path))
  small = load.load(folder)
  assert small.config.qkv_bias
  assert text(small, folder) == text(small)
