"""Names and layouts of stored weights, from and to those of models.lm. Converts
each array directly into its final dtype, so that the host never holds a second
copy of the model."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax.kernels import blocks, quantised
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, weights


class Naming(NamedTuple):
  """How a kind of file names and stores parameters.

  layer: how a layer's names start, with its number as {}.
  modules: our name for a module -> theirs.
  convert(our name, stored array, config) -> array: what is stored otherwise.
  transposed: kernels are stored [out, in]; the head always is.
  joined: modules stored as one array, side by side in its outputs.
  prefix: what names may begin with, or not. encoder: names the encoder's.
  """

  layer: str
  modules: Mapping[str, str]
  convert: Callable[[str, np.ndarray, model_config.LMConfig], np.ndarray] = (
    lambda name, x, config: x
  )
  transposed: bool = True
  joined: tuple[tuple[str, ...], ...] = ()
  prefix: str = ''
  encoder: 'Naming | None' = None

  def stored(self, name: str) -> str:
    """Maps 'layers/3/attn/q/bias' to 'model.layers.3.self_attn.q_proj.bias'."""
    if self.encoder and name.startswith('encoder/'):
      return self.encoder.stored(name.removeprefix('encoder/'))
    layer, module, leaf = _parts(name)
    start = '' if layer is None else self.layer.format(layer)
    leaf = 'bias' if leaf == 'bias' else 'weight'
    return f'{start}{self.modules[module]}.{leaf}'

  def turned(self, name: str) -> bool:
    """Tells whether a parameter is the stored array transposed."""
    return name == 'head' or (self.transposed and name.endswith('/kernel'))


def _parts(name: str) -> tuple[str | None, str, str | None]:
  """Splits a parameter's flat name into (layer number, module, leaf)."""
  pattern = r'(?:layers/(\d+)/)?(.+?)(?:/(kernel|scale|bias))?'
  match = re.fullmatch(pattern, name)
  assert match is not None
  layer, module, leaf = match.groups()
  return layer, module, leaf


class Place(NamedTuple):
  """Where an unstacked parameter lies in a file. name: its flat name. stored:
  the array's name there. start: its first output. kind: its codes; '': none."""

  name: str
  stored: str
  start: int = 0
  kind: str = ''


class Reader(NamedTuple):
  """An open weights file.

  source, naming: its name, for error messages, and how it names arrays.
  shapes: the stored shape of each array, by its name in the file.
  get(name) -> array: reads one array.
  kind: what its matrices are dequantised from, 'GPTQ 4-bit'; '': nothing.
  spare(name): whether an array without a place may be left out.
  kinds: of its quantised matrices, in kernels.blocks.KEPT or not.
  blocks(name) -> array: reads one of KEPT, uint8 [rows, blocks, bytes].
  orders: how inputs are mixed (Quantised.order), for matrices where they are.
  narrow: whether all its other matrices, one or more, are bfloat16.
  """

  source: str
  naming: Naming
  shapes: Mapping[str, tuple[int, ...]]
  get: Callable[[str], np.ndarray]
  kind: str = ''
  spare: Callable[[str], bool] = lambda name: False
  kinds: Mapping[str, str] = {}
  blocks: Callable[[str], np.ndarray] = lambda name: np.empty(0, np.uint8)
  orders: Mapping[str, np.ndarray] = {}
  narrow: bool = False

  def stored(self, name: str) -> str:
    """Returns a parameter's name in this file, with or without the prefix."""
    found, prefix = self.naming.stored(name), self.naming.prefix
    others = prefix + found, found.removeprefix(prefix)
    return next((x for x in others if x in self.shapes), found)

  def unties(self) -> bool:
    """Tells whether a stored head differs from the embedding."""
    head, table = self.stored('head'), self.stored('embed')
    if not {head, table} <= self.shapes.keys():
      return False
    return not np.array_equal(self.get(head), self.get(table))

  def places(self, config: model_config.LMConfig) -> dict[str, Place]:
    """Returns where each unscanned layer's parameters lie; ValueError unless
    the file has exactly these."""
    naming, shapes = self.naming, self.shapes
    wanted = lm.shapes(config)
    stored = {name: self.stored(name) for name in wanted}
    head, table = self.stored('head'), self.stored('embed')
    if config.tied:
      # Tied models look tokens up in the head's columns.
      stored['head'] = table if table in shapes or head not in shapes else head
    places, needed = {}, {}
    for name, x in stored.items():
      need, start = wanted[name].shape, 0
      module = _parts(name)[1]
      for group in naming.joined:
        if module in group:
          every = [name.replace(module, other) for other in group]
          sizes = [wanted[other].shape[-1] for other in every]
          need = (*need[:-1], sum(sizes))
          start = sum(sizes[: group.index(module)])
      turned = naming.turned(name)
      kind = self.kinds.get(x, '') if turned or name == 'embed' else ''
      places[name] = Place(name, x, start, kind)
      needed[x] = need[::-1] if turned else need
    spare = lambda x: x == head or HARMLESS.fullmatch(x) or self.spare(x)
    rest = {x: s for x, s in shapes.items() if x in needed or not spare(x)}
    check(self.source, needed, rest)
    return places

  def floats(self, config: model_config.LMConfig, row: Any) -> np.ndarray:
    """Reads a plan's row, in its final dtype."""
    x = np.empty(row.shape, row.dtype)
    each: Any = x if row.places[1:] else [x]
    for out, at in zip(each, row.places, strict=True):
      y = self.naming.convert(at.name, self.get(at.stored), config)
      y = y.T if self.naming.turned(at.name) else y
      # Casts and transposes in one pass, without a temporary array.
      part = y[..., at.start : at.start + out.shape[-1]]
      np.copyto(out, part, casting='unsafe')
      check_finite(self.source, at.stored, out)
    return x

  def codes(self, config: model_config.LMConfig, row: Any) -> weights.Quantised:
    """Reads a matrix as stored: rows there, columns here."""
    (at,), count = row.places, row.shape[0 if row.name == 'embed' else 1]
    columns = self.naming.convert(at.name, self.blocks(at.stored), config)
    columns = columns[at.start : at.start + count]
    packed = blocks.pack(columns, at.kind)
    if bad := quantised.broken(packed, row.held):
      raise ValueError(
        f'{self.source}: {at.stored} has {bad} scales that are not finite; the '
        'file is damaged'
      )
    order = self.orders.get(at.stored)
    order = None if order is None else jnp.asarray(order, jnp.int32)
    return weights.Quantised(jnp.asarray(packed), row.held, count, order=order)


def unpermute(name: str, x: np.ndarray, config) -> np.ndarray:
  """Restores Q's and K's row order, which GGUF changes for arch llama. RoPE
  pairs the channels (2c, 2c + 1) there, (c, c + C/2) here. Without this the
  model still runs, with perplexity 41.6 instead of 7.2."""
  if _parts(name)[1] not in ('attn/q', 'attn/k'):
    return x
  C = config.head_dim
  return x.reshape(-1, C // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _add_1_to_scales(name: str, x: np.ndarray, config) -> np.ndarray:
  """Adds the 1 that Gemma leaves out of a norm's stored scale. In float32 or
  wider: bfloat16 would lose small differences."""
  if not name.endswith('/scale'):
    return x
  return x.astype(np.promote_types(x.dtype, np.float32)) + 1


_QKV = ('attn/q', 'attn/k', 'attn/v')
_GATE_UP = ('mlp/gate', 'mlp/up')

HF = Naming(
  layer='model.layers.{}.',
  modules={
    'head': 'lm_head',
    'embed': 'model.embed_tokens',
    'norm': 'model.norm',
    'attn_norm': 'input_layernorm',
    'mlp_norm': 'post_attention_layernorm',
    **{f'attn/{x}': f'self_attn.{x}_proj' for x in 'qkvo'},
    **{f'attn/{x}_norm': f'self_attn.{x}_norm' for x in 'qk'},
    **{f'mlp/{x}': f'mlp.{x}_proj' for x in ('gate', 'up', 'down')},
  },
  prefix='model.',
)
# OLMo 2 has norms after its parts alone, Gemma before them too; Gemma 1 has
# those of a Llama.
HF_OLMO2 = HF._replace(
  modules={
    **HF.modules,
    'attn_post_norm': 'post_attention_layernorm',
    'mlp_post_norm': 'post_feedforward_layernorm',
  },
)
HF_GEMMA = HF._replace(
  modules={**HF_OLMO2.modules, 'mlp_norm': 'pre_feedforward_layernorm'},
  convert=_add_1_to_scales,
)
HF_GEMMA1 = HF._replace(convert=_add_1_to_scales)
HF_PHI3 = HF._replace(
  modules={
    **HF.modules,
    **dict.fromkeys(_QKV, 'self_attn.qkv_proj'),
    **dict.fromkeys(_GATE_UP, 'mlp.gate_up_proj'),
  },
  joined=(_QKV, _GATE_UP),
)
HF_GPT2 = Naming(
  layer='h.{}.',
  modules={
    'head': 'lm_head',
    'embed': 'wte',
    'positions': 'wpe',
    'norm': 'ln_f',
    'attn_norm': 'ln_1',
    'mlp_norm': 'ln_2',
    **dict.fromkeys(_QKV, 'attn.c_attn'),
    'attn/o': 'attn.c_proj',
    'mlp/up': 'mlp.c_fc',
    'mlp/down': 'mlp.c_proj',
  },
  transposed=False,
  joined=(_QKV,),
  prefix='transformer.',
)


def _t5(gated: bool) -> Naming:
  """Names T5's weights: its blocks are layers, its layers their parts."""
  attention = {'attn_norm': 'layer.0.layer_norm'}
  attention |= {f'attn/{x}': f'layer.0.SelfAttention.{x}' for x in 'qkvo'}
  cross = {'cross_norm': 'layer.1.layer_norm'}
  cross |= {f'cross_attn/{x}': f'layer.1.EncDecAttention.{x}' for x in 'qkvo'}
  ways = {'gate': 'wi_0', 'up': 'wi_1'} if gated else {'up': 'wi'}

  def stack(name: str, number: int, **more: str) -> Naming:
    first = f'{name}.block.0.layer.0.SelfAttention'
    dense = f'layer.{number}.DenseReluDense'
    modules = {
      **attention,
      **more,
      'norm': f'{name}.final_layer_norm',
      'relative': f'{first}.relative_attention_bias',
      'mlp_norm': f'layer.{number}.layer_norm',
      **{f'mlp/{x}': f'{dense}.{y}' for x, y in ways.items()},
      'mlp/down': f'{dense}.wo',
    }
    return Naming(f'{name}.block.{{}}.', modules)

  encoder = stack('encoder', 1)
  ends = dict(head='lm_head', embed='shared')
  return stack('decoder', 2, **cross, **ends)._replace(encoder=encoder)


HF_T5, HF_T5_GATED = _t5(False), _t5(True)
# Norms of Gemma are stored as they are applied, 1 already added.
GGUF = Naming(
  layer='blk.{}.',
  modules={
    'head': 'output',
    'embed': 'token_embd',
    'norm': 'output_norm',
    'attn_norm': 'attn_norm',
    'attn_post_norm': 'post_attention_norm',
    'mlp_norm': 'ffn_norm',
    'mlp_post_norm': 'post_ffw_norm',
    'attn/o': 'attn_output',
    **{f'attn/{x}': f'attn_{x}' for x in ('q', 'k', 'v', 'q_norm', 'k_norm')},
    **{f'mlp/{x}': f'ffn_{x}' for x in ('gate', 'up', 'down')},
  },
)
GGUF_LLAMA = GGUF._replace(convert=unpermute)

# Derived from the settings, or already read into them (gguf.architectures).
HARMLESS = re.compile(
  r'(model\.)?(layers\.\d+\.self_attn\.)?'
  r'rotary_emb\.(inv_freq|cos_cached|sin_cached)'
  r'|rope_freqs\.weight'
  r'|(transformer\.)?h\.\d+\.attn\.(masked_)?bias'  # GPT-2's causal mask
  # Copies of T5's shared embedding; an unused table of old checkpoints.
  r'|(en|de)coder\.embed_tokens\.weight'
  r'|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias'
  r'\.weight'
  # Heads that draft, in a model tuned with them (io.published.medusa_heads).
  r'|medusa_head\..*'
  # And a MiMo's own module (io.published.eagle_folder).
  r'|model\.mtp_layers\..*'
  # How caches and activations may be rounded, which are not.
  r'|.+\.([qkv]|kv|prob_output|input|output)_(scale|zero_point)'
  # Of training with rewards: it scores a text.
  r'|v_head\.(summary\.)?(weight|bias)'
  # Of a model that sees images too; a text does not pass through them.
  r'|(model\.)?(vision_tower|multi_modal_projector)\..*'
)
# What names of the language model in such a model begin with.
INNER = re.compile(r'^(model\.)?language_model\.')


def check_finite(source: str, name: str, x: np.ndarray) -> None:
  if bad := int(np.count_nonzero(~np.isfinite(x))):
    raise ValueError(
      f'{source}: {name} has {bad} values that are not finite in {x.dtype}; '
      'the file is damaged or needs a wider dtype'
    )


def check(
  source: str,
  needed: Mapping[str, tuple[int, ...]],
  stored: Mapping[str, tuple[int, ...]],
  who: str = 'its settings',
  advice: str = '',
) -> None:
  """Refuses arrays that have no place, are missing, or have another shape.
  needed, stored: shapes, by stored name."""
  unknown = [x for x in stored if x not in needed]
  missing = [x for x in needed if x not in stored]
  if unknown or missing or not needed:
    some = lambda names: (
      f'[{", ".join(names[:12])}{", ..." * bool(names[12:])}]'
    )
    found = {'no place for': unknown, 'nothing for': missing}
    what = [f'{k} {some(x)}' for k, x in found.items() if x]
    raise ValueError(f'{source}: {"; ".join(what) or "no arrays"}{advice}')
  for name, need in needed.items():
    if tuple(stored[name]) != need:
      raise ValueError(
        f'{source}: {name} has shape {tuple(stored[name])}; {who} need '
        f'{need}{advice}'
      )
