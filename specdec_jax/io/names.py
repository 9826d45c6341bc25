"""Tables from weight names in files to parameter names of models.lm.

Each array is converted directly into its final dtype and placed on its device,
so the host never holds a second copy of the model.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

Put = Callable[[str, np.ndarray], jax.Array]


class Transform(NamedTuple):
  """A conversion of one stored array.

  apply(array, config) -> the parameter.
  stored(shape of the parameter) -> shape in the file.
  """

  apply: Callable[[np.ndarray, model_config.LMConfig], np.ndarray]
  stored: Callable[[tuple[int, ...]], tuple[int, ...]]


class Row(NamedTuple):
  """A line of a table of names.

  pattern: a regular expression for a name in the file.
  place: the parameter's flat name, with the pattern's groups as \\1, \\2.
  transform: from the stored array to the parameter.
  """

  pattern: str
  place: str
  transform: Transform


class Reader(NamedTuple):
  """An open weights file.

  source: its name, for error messages.
  rows: the table of its names.
  shapes: the stored shape of each array, by its name in the file.
  get(name) -> array: reads one array.
  """

  source: str
  rows: tuple[Row, ...]
  shapes: Mapping[str, tuple[int, ...]]
  get: Callable[[str], np.ndarray]


def unpermute(x: np.ndarray, config: model_config.LMConfig) -> np.ndarray:
  """Restores the row order of Q and K, which GGUF changes for arch llama.

  RoPE pairs the channels (2c, 2c + 1) there, (c, c + C/2) here.
  """
  C = config.head_dim
  return x.reshape(-1, C // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def plus_one(x: np.ndarray, config: model_config.LMConfig) -> np.ndarray:
  """A norm's scale that is stored as its difference from 1.

  In float32 or wider: bfloat16 would lose small differences.
  """
  return x.astype(np.float64 if x.dtype == np.float64 else np.float32) + 1


_same = lambda shape: shape
_reversed = lambda shape: shape[::-1]
keep = Transform(lambda x, config: x, _same)
transpose = Transform(lambda x, config: x.T, _reversed)
add_one = Transform(plus_one, _same)
unpermute_keep = Transform(unpermute, _same)
unpermute_transpose = Transform(lambda x, c: unpermute(x, c).T, _reversed)

# The token table: see _place for tied models.
_EMBED = 'embed'


def _rows(transform: Transform, table: dict[str, str]) -> tuple[Row, ...]:
  """Rows with one transform; '.N.' in a pattern is the number of a layer."""
  number = lambda pattern: pattern.replace('.N.', r'\.(\d+)\.')
  return tuple(Row(number(k), place, transform) for k, place in table.items())


_HF_KERNELS = _rows(
  transpose,
  {
    r'lm_head\.weight': 'head',
    r'model\.layers.N.self_attn\.([qkvo])_proj\.weight': (
      r'layers/\1/attn/\2/kernel'
    ),
    r'model\.layers.N.mlp\.(gate|up|down)_proj\.weight': (
      r'layers/\1/mlp/\2/kernel'
    ),
  },
) + _rows(
  keep,
  {
    r'model\.embed_tokens\.weight': _EMBED,
    r'model\.layers.N.self_attn\.([qkvo])_proj\.bias': (
      r'layers/\1/attn/\2/bias'
    ),
  },
)


def _hf_norms(transform: Transform, **norms: str) -> tuple[Row, ...]:
  """Rows of the norms; `norms` maps a norm's name in the file to ours."""
  table = {
    r'model\.norm\.weight': 'norm/scale',
    r'model\.layers.N.self_attn\.([qk])_norm\.weight': (
      r'layers/\1/attn/\2_norm/scale'
    ),
  }
  for stored, ours in norms.items():
    table[rf'model\.layers.N.{stored}\.weight'] = rf'layers/\1/{ours}/scale'
  return _rows(transform, table)


HF = _HF_KERNELS + _hf_norms(
  keep, input_layernorm='attn_norm', post_attention_layernorm='mlp_norm'
)

HF_GEMMA = _HF_KERNELS + _hf_norms(
  add_one,
  input_layernorm='attn_norm',
  post_attention_layernorm='attn_post_norm',
  pre_feedforward_layernorm='mlp_norm',
  post_feedforward_layernorm='mlp_post_norm',
)

_GPT2 = r'(?:transformer\.)?'
# A layer's modules, each with weight and bias; Conv1D stores kernels [in, out].
# c_attn[0] to c_attn[2] are the thirds of c_attn: see split.
_GPT2_MODULES = {
  'ln_1': ('attn_norm', 'scale'),
  'ln_2': ('mlp_norm', 'scale'),
  r'attn\.c_attn\[0\]': ('attn/q', 'kernel'),
  r'attn\.c_attn\[1\]': ('attn/k', 'kernel'),
  r'attn\.c_attn\[2\]': ('attn/v', 'kernel'),
  r'attn\.c_proj': ('attn/o', 'kernel'),
  r'mlp\.c_fc': ('mlp/up', 'kernel'),
  r'mlp\.c_proj': ('mlp/down', 'kernel'),
}
HF_GPT2 = _rows(transpose, {r'lm_head\.weight': 'head'}) + _rows(
  keep,
  {
    _GPT2 + r'wte\.weight': _EMBED,
    _GPT2 + r'wpe\.weight': 'positions',
    _GPT2 + r'ln_f\.weight': 'norm/scale',
    _GPT2 + r'ln_f\.bias': 'norm/bias',
    **{
      rf'{_GPT2}h.N.{stored}\.{kind}': rf'layers/\1/{ours}/{leaf}'
      for stored, (ours, weight) in _GPT2_MODULES.items()
      for kind, leaf in (('weight', weight), ('bias', 'bias'))
    },
  },
)
GPT2_QKV = _GPT2 + r'h\.\d+\.attn\.c_attn\.(weight|bias)'

_GGUF = _rows(
  transpose,
  {
    r'output\.weight': 'head',
    r'blk.N.attn_v\.weight': r'layers/\1/attn/v/kernel',
    r'blk.N.attn_output\.weight': r'layers/\1/attn/o/kernel',
    r'blk.N.ffn_(gate|up|down)\.weight': r'layers/\1/mlp/\2/kernel',
  },
) + _rows(
  keep,
  {
    r'token_embd\.weight': _EMBED,
    r'output_norm\.weight': 'norm/scale',
    r'blk.N.attn_norm\.weight': r'layers/\1/attn_norm/scale',
    r'blk.N.ffn_norm\.weight': r'layers/\1/mlp_norm/scale',
    r'blk.N.attn_v\.bias': r'layers/\1/attn/v/bias',
  },
)
_GGUF_QK = {r'blk.N.attn_([qk])\.weight': r'layers/\1/attn/\2/kernel'}
_GGUF_QK_BIAS = {r'blk.N.attn_([qk])\.bias': r'layers/\1/attn/\2/bias'}

GGUF_QWEN2 = _GGUF + _rows(transpose, _GGUF_QK) + _rows(keep, _GGUF_QK_BIAS)

# Norms are stored as they are applied, 1 already added.
GGUF_GEMMA = GGUF_QWEN2 + _rows(
  keep,
  {
    r'blk.N.attn_([qk])_norm\.weight': r'layers/\1/attn/\2_norm/scale',
    r'blk.N.post_attention_norm\.weight': r'layers/\1/attn_post_norm/scale',
    r'blk.N.post_ffw_norm\.weight': r'layers/\1/mlp_post_norm/scale',
  },
)

# Without unpermute the model still runs, with perplexity 41.6 instead of 7.2.
GGUF_LLAMA = (
  _GGUF
  + _rows(unpermute_transpose, _GGUF_QK)
  + _rows(unpermute_keep, _GGUF_QK_BIAS)
)

# Derived from the settings, or already read into them (io.gguf).
HARMLESS = re.compile(
  r'model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq'
  r'|model\.rotary_emb\.inv_freq|rope_freqs\.weight'
  r'|(transformer\.)?h\.\d+\.attn\.(masked_)?bias'  # GPT-2's causal mask
)


def split(reader: Reader, pattern: str, parts: int) -> Reader:
  """A reader that splits the arrays matching `pattern` along their last axis.

  Part i of 'a.weight' is named 'a[i].weight'. An array whose last axis is not a
  multiple of `parts` is not split.
  """
  whole = dict(reader.shapes)
  part_of: dict[str, tuple[str, int]] = {}
  for name, shape in reader.shapes.items():
    if re.fullmatch(pattern, name) and shape and shape[-1] % parts == 0:
      del whole[name]
      stem, leaf = name.rsplit('.', 1)
      part_of |= {f'{stem}[{i}].{leaf}': (name, i) for i in range(parts)}

  def get(name: str) -> np.ndarray:
    if name not in part_of:
      return reader.get(name)
    stored, i = part_of[name]
    return np.split(reader.get(stored), parts, -1)[i]

  def shape_of(stored: str) -> tuple[int, ...]:
    *rest, last = reader.shapes[stored]
    return (*rest, last // parts)

  shapes = whole | {n: shape_of(stored) for n, (stored, _) in part_of.items()}
  return reader._replace(shapes=shapes, get=get)


def read(
  reader: Reader, config: model_config.LMConfig, put: Put | None = None
) -> types.Params:
  """Reads the parameters of lm.make(config), nested.

  Args:
    reader: the weights.
    config: of the model; with its dtype, stacked if scan_layers.
    put: put(flat name, array) -> jax.Array places each parameter as it is read;
      None: on the default device.

  Raises:
    ValueError: unknown or missing names, wrong shapes, or values that are not
      finite.
  """
  put = put or (lambda name, x: jnp.asarray(x))
  plan = _plan(reader, config)
  out: dict[str, Any] = {}
  for name, want in lm.shapes(config).items():
    out[name] = put(name, _assemble(reader, config, plan, name, want))
  return lm.nest(out)


def _plan(reader: Reader, config) -> dict[str, tuple[str, Transform]]:
  """{parameter name: (stored name, transform)}, checked to be complete."""
  flat = lm.shapes(dataclasses.replace(config, scan_layers=False))
  plan: dict[str, tuple[str, Transform]] = {}
  unknown, twins = [], []
  for stored in reader.shapes:
    place, transform = _place(reader.rows, stored, config)
    if place in plan and place == 'head':
      twins.append((stored, plan[place][0]))
    elif place in flat and place not in plan:
      plan[place] = stored, transform
    elif not HARMLESS.fullmatch(stored):
      unknown.append(stored)
  missing = [name for name in flat if name not in plan]
  if unknown or missing:
    raise ValueError(
      f'{reader.source}: no place for {_some(unknown)}; '
      f'nothing for {_some(missing)}'
    )
  for place, (stored, transform) in plan.items():
    need, have = transform.stored(flat[place].shape), reader.shapes[stored]
    if tuple(have) != tuple(need):
      raise ValueError(
        f'{reader.source}: {stored} has shape {tuple(have)}; '
        f'{place} of these settings needs {tuple(need)}'
      )
  for a, b in twins:
    if not np.array_equal(reader.get(a), reader.get(b)):
      raise ValueError(
        f'{reader.source}: {a} and {b} differ, but the settings tie them; '
        'set tie_word_embeddings to false in config.json'
      )
  return plan


def _place(rows, stored: str, config) -> tuple[str | None, Transform]:
  for row in rows:
    match = re.fullmatch(row.pattern, stored)
    if match:
      place = match.expand(row.place)
      if place == _EMBED and config.tied:
        # Tied models look tokens up in the head's columns.
        return 'head', transpose
      return place, row.transform
  return None, keep


def _assemble(reader, config, plan, name: str, want) -> np.ndarray:
  """One parameter in its final dtype; scanned layers are read one by one."""
  out = np.empty(want.shape, want.dtype)
  if config.scan_layers and name.startswith('layers/'):
    rest = name.removeprefix('layers/')
    parts = [(f'layers/{i}/{rest}', out[i]) for i in range(config.depth)]
  else:
    parts = [(name, out)]
  for place, target in parts:
    stored, transform = plan[place]
    x = transform.apply(reader.get(stored), config)
    if x.shape != target.shape:
      raise ValueError(
        f'{reader.source}: {stored} became {x.shape}; {place} is {target.shape}'
      )
    # Casts and transposes in one pass, without a temporary array.
    np.copyto(target, x, casting='unsafe')
    if not np.isfinite(target).all():
      bad = int((~np.isfinite(target)).sum())
      raise ValueError(
        f'{reader.source}: {stored} has {bad} values that are not finite in '
        f'{want.dtype}; the file is damaged or needs a wider dtype'
      )
  return out


def _some(names: list[str], most: int = 12) -> str:
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return f'[{", ".join(names[:most])}{more}]'
