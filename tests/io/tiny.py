"""Tiny checkpoints, written as the world does it, without our tables."""

import json
import pathlib

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from specdec_jax import forward, program
from specdec_jax.io import hf, load, plan, sources, tokenizer
from specdec_jax.kernels import library
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

GOLDEN = pathlib.Path(__file__).parent / 'golden'

FAMILIES = {
  'llama': dict(tied=False),
  'qwen2': dict(qkv_bias=True, rope_theta=1e6),
  'qwen3': dict(qk_norm=True, tied=False, head_dim=16),
}


def config(family='llama', **changes):
  """Settings of a tiny model; Q and O are square in llama and qwen2."""
  sizes = dict(
    depth=2, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=320,
    context=128, norm_eps=1e-6,
  )  # fmt: skip
  return model_config.LMConfig(**(sizes | FAMILIES[family] | changes))


def arrays(c, seed=0):
  """Random weights under their Hugging Face names, [out, in]."""
  rng = np.random.default_rng(seed)
  Q, G = c.heads * c.head_dim, c.kv_heads * c.head_dim
  shapes = {'embed_tokens': (c.vocab, c.width), 'norm': (c.width,)}
  for i in range(c.depth):
    layer = {
      'input_layernorm': (c.width,),
      'post_attention_layernorm': (c.width,),
      'self_attn.q_proj': (Q, c.width),
      'self_attn.k_proj': (G, c.width),
      'self_attn.v_proj': (G, c.width),
      'self_attn.o_proj': (c.width, Q),
      'mlp.gate_proj': (c.mlp, c.width),
      'mlp.up_proj': (c.mlp, c.width),
      'mlp.down_proj': (c.width, c.mlp),
    }
    if c.qk_norm:
      layer |= {f'self_attn.{x}_norm': (c.head_dim,) for x in 'qk'}
    shapes |= {f'layers.{i}.{name}': shape for name, shape in layer.items()}
  shapes = {f'model.{name}.weight': shape for name, shape in shapes.items()}
  if c.qkv_bias:
    for i in range(c.depth):
      for x, size in zip('qkv', (Q, G, G), strict=True):
        shapes[f'model.layers.{i}.self_attn.{x}_proj.bias'] = (size,)
  if not c.tied:
    shapes['lm_head.weight'] = (c.vocab, c.width)
  normal = lambda shape: rng.standard_normal(shape).astype(np.float32) * 0.2
  return {name: normal(shape) for name, shape in shapes.items()}


def settings(c, family='llama'):
  """config.json as transformers 5 writes it."""
  return dict(
    model_type=family,
    hidden_size=c.width,
    num_hidden_layers=c.depth,
    num_attention_heads=c.heads,
    num_key_value_heads=c.kv_heads,
    head_dim=c.head_dim,
    intermediate_size=c.mlp,
    vocab_size=c.vocab,
    max_position_embeddings=c.context,
    rms_norm_eps=c.norm_eps,
    tie_word_embeddings=c.tied,
    hidden_act='silu',
    dtype='float32',
    rope_parameters=dict(rope_type='default', rope_theta=c.rope_theta),
    eos_token_id=257,
  )


def byte_tokenizer(
  specials=('<|im_start|>', '<|im_end|>'), merges=(('h', 'e'), ('he', 'l'))
):
  """Byte-level BPE with merges, and special tokens after them."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {char: i for i, char in enumerate(alphabet)}
  vocab |= {''.join(x): 256 + i for i, x in enumerate(merges)}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [*merges]))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.add_special_tokens(list(specials))
  return inner


def tokenizer_of(folder, inner, settings=None, **more):
  """The tokenizer of a folder with this tokenizer.json, settings, and other
  JSON files by their names."""
  folder.mkdir(exist_ok=True)
  inner.save(str(folder / 'tokenizer.json'))
  for name, value in {'tokenizer_config': settings or {}, **more}.items():
    (folder / f'{name}.json').write_text(json.dumps(value))
  return tokenizer.from_folder(folder, 'here')


def write_folder(folder, c, family='llama', weights=None, shards=1):
  """A Hugging Face folder; returns it."""
  folder.mkdir(exist_ok=True)
  weights = arrays(c) if weights is None else weights
  (folder / 'config.json').write_text(json.dumps(settings(c, family)))
  byte_tokenizer().save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(
    json.dumps(
      {'eos_token': '<|im_end|>', 'bos_token': {'content': '<|im_start|>'}}
    )
  )
  if shards == 1:
    safetensors.numpy.save_file(weights, folder / 'model.safetensors')
    return folder
  where = {}
  for s in range(shards):
    name = f'model-{s + 1:05d}-of-{shards:05d}.safetensors'
    part = {k: weights[k] for k in sorted(weights)[s::shards]}
    safetensors.numpy.save_file(part, folder / name)
    where |= dict.fromkeys(part, name)
  (folder / 'model.safetensors.index.json').write_text(
    json.dumps({'metadata': {}, 'weight_map': where})
  )
  return folder


GGUF_NAMES = {
  'model.embed_tokens': 'token_embd',
  'model.norm': 'output_norm',
  'lm_head': 'output',
  'model.layers.': 'blk.',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'self_attn.o_proj': 'attn_output',
  'self_attn.': 'attn_',
  'mlp.': 'ffn_',
  '_proj': '',
}
# Gemma's two norms more, and what Llama calls by the same name.
GEMMA_NAMES = {
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}


def permuted(x, heads):
  """Rows of Q or K as convert_hf_to_gguf.py orders them for arch llama."""
  C = x.shape[0] // heads
  x = x.reshape(heads, 2, C // 2, *x.shape[1:])
  return x.swapaxes(1, 2).reshape(heads * C, *x.shape[3:])


def write_gguf(
  path,
  c,
  arch='llama',
  weights=None,
  quantise=None,
  extra=None,
  tokens=None,
  **writer,
):
  """A .gguf file by the gguf package's own writer; returns its path.

  quantise: a kind of blocks for all matrices, or a function of a tensor's name
    and values that returns the kind and the blocks of one; None: float32.
  """
  weights = arrays(c) if weights is None else weights
  w = gguf.GGUFWriter(str(path), arch, **writer)
  w.add_block_count(c.depth)
  w.add_context_length(c.context)
  w.add_embedding_length(c.width)
  w.add_feed_forward_length(c.mlp)
  w.add_head_count(c.heads)
  w.add_head_count_kv(c.kv_heads)
  w.add_key_length(c.head_dim)
  w.add_layer_norm_rms_eps(c.norm_eps)
  w.add_rope_freq_base(c.rope_theta)
  inner = byte_tokenizer()
  count = inner.get_vocab_size()
  w.add_tokenizer_model('gpt2')
  w.add_tokenizer_pre('smollm')
  w.add_token_list(tokens or [inner.id_to_token(i) for i in range(count)])
  w.add_token_types([1] * (count - 2) + [3, 3])
  w.add_token_merges(['h e', 'he l'])
  w.add_eos_token_id(count - 1)
  w.add_bos_token_id(count - 2)
  for add in extra or []:
    add(w)
  gemma = arch.startswith('gemma')
  for name, x in weights.items():
    if gemma and name.endswith('norm.weight'):
      x = x + 1  # as convert_hf_to_gguf.py stores it
    heads = {'q_proj': c.heads, 'k_proj': c.kv_heads}.get(name.split('.')[-2])
    if arch == 'llama' and heads:
      x = permuted(x, heads)
    for old, new in (GGUF_NAMES | (GEMMA_NAMES if gemma else {})).items():
      name = name.replace(old, new)
    if quantise is not None and x.ndim == 2:
      kind, raw = quantise, None
      if callable(quantise):
        kind, raw = quantise(name, x)
      raw = gguf.quantize(x, kind) if raw is None else raw
      w.add_tensor(name, raw, raw_dtype=kind)
    else:
      w.add_tensor(name, x)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return path


def needs_kernels(*kinds: str) -> None:
  """Skips a test where the CPU kernels, or those of these kinds, are not."""
  for one in (library.ROWS, *map(library.quantised, kinds)):
    if why := library.load(program.cache_folder(), one):
      pytest.skip(why)


def read(source, dtype='float32', **settings) -> load.LanguageModel:
  """A model as its files have it: not fused, not packed."""
  opened = sources.open_source(str(source))
  return load.read(plan.make(opened, dtype, kernels='xla', **settings))


def weights_of(folder):
  """The parameters of a folder that needs no tokenizer."""
  c, reader, _ = hf.open_folder(folder, str(folder))
  return params(reader, c)


def params(reader, c, kernels='xla', dtype=''):
  """The parameters of an open file of weights, in the settings' dtype."""
  opened = sources.Source(
    'a file', 'a', byte_tokenizer(), c.running(scan_layers=False), reader
  )
  scan = c.run.scan_layers
  made = plan.make(opened, dtype or c.dtype, scan_layers=scan, kernels=kernels)
  return plan.read(made)


def eager_logits(config, params, tokens_BT, source=None):
  """Logits of one causal pass, operation by operation."""
  model = lm.make(config)
  return model.head(params, forward.hidden(model, params, tokens_BT, source))


logits = jax.jit(eager_logits, static_argnums=0)


def check_equal(a, b):
  """Parameters of the same names, dtypes and bits."""
  a, b = (dict(jax.tree_util.tree_leaves_with_path(x)) for x in (a, b))
  assert a.keys() == b.keys()
  for path in a:
    name = jax.tree_util.keystr(path)
    assert a[path].dtype == b[path].dtype, name
    np.testing.assert_array_equal(a[path], b[path], err_msg=name)
