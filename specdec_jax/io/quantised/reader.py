"""Reads quantised checkpoints: finds their matrices, dequantises each as asked.

What a matrix is stored as is told by its parts, since settings err; settings
say what the parts cannot.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdec_jax.io import files
from specdec_jax.io.quantised import awq, bnb, compressed, form, fp8, gptq, mlx
from specdec_jax.io.quantised.module import Module, Plan, Tensor

_KEYS = ('quantization_config', 'quantization')
# Older files have the settings beside config.json.
_BESIDE = {'quantize_config.json': 'gptq', 'quant_config.json': 'awq'}
_SYNONYMS = {'w_bit': 'bits', 'wbits': 'bits', 'q_group_size': 'group_size'}
# quant_method -> setting -> its allowed values; an absent one is None.
_METHODS: dict[str, dict[str, tuple]] = {
  'gptq': {
    'bits': (*gptq.BITS, None),
    'checkpoint_format': ('gptq', 'gptq_v2', None),
    'is_marlin_format': (False, None),
  },
  'awq': {
    'bits': (4, None),
    'version': ('gemm', 'gemv', 'gemv_fast', 'llm-awq', None),
  },
  'compressed-tensors': {
    'format': (
      *('pack-quantized', 'int-quantized', 'float-quantized'),
      *('naive-quantized', 'mixed-precision', 'dense', None),
    ),
  },
  'fp8': {},
  'bitsandbytes': {},
  'mlx': {'bits': mlx.BITS, 'mode': ('affine', None)},
}
# auto-round's packing_format, after 'auto_round:' -> settings that it means.
_ROUND: dict[str, dict[str, Any]] = {
  'auto_gptq': dict(quant_method='gptq', checkpoint_format='gptq'),
  'gptq': dict(quant_method='gptq', checkpoint_format='gptq'),
  'gptqmodel': dict(quant_method='gptq', checkpoint_format='gptq_v2'),
  'auto_awq': dict(quant_method='awq'),
  'fp8': dict(quant_method='fp8'),
}
_PARTS = re.compile(
  r'(.+)\.(qweight|qzeros|scales|g_idx|scaled_zeros|biases'
  r'|weight(_(packed|scale|scale_inv|zero_point|shape|g_idx))?|scale'
  r'|input_scale|input_zero_point|SCB|weight_format'
  r'|weight\.((nested_)?(absmax|quant_map)|quant_state\.bitsandbytes__\w+))'
)


@dataclasses.dataclass(frozen=True)
class Quantised:
  """A checkpoint's arrays, as if it had been dequantised.

  plans: name of a matrix -> how it is read.
  plain: the arrays that are no part of one, by their names.
  stored(name) -> one of these arrays.
  """

  plans: Mapping[str, Plan]
  plain: Mapping[str, Tensor]
  stored: Callable[[str], np.ndarray]

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    plain = {name: x.shape for name, x in self.plain.items()}
    return plain | {name: x.shape for name, x in self.plans.items()}

  @property
  def kind(self) -> str:
    """'GPTQ 4-bit', of most of its elements; '' if nothing is quantised."""
    sizes: dict[str, int] = {}
    for x in self.plans.values():
      sizes[x.kind] = sizes.get(x.kind, 0) + x.shape[0] * x.shape[1]
    return max(sizes, key=lambda kind: sizes[kind], default='')

  def get(self, name: str) -> np.ndarray:
    """An array; of a matrix, its values in float32."""
    if name in self.plans:
      return form.dequantise(self.plans[name].form())
    return self.stored(name)

  @property
  def kinds(self) -> dict[str, str]:
    """How each matrix is kept, or what there is no kind of panels for."""
    return {name: x.stored for name, x in self.plans.items()}

  @property
  def orders(self) -> dict[str, np.ndarray]:
    """The order that the inputs of some matrices are kept in (Form.order)."""
    each = {name: x.order for name, x in self.plans.items()}
    return {name: x for name, x in each.items() if x is not None}

  def blocks(self, name: str) -> np.ndarray:
    """A matrix as it is kept, one of gguf.blocks.KEPT."""
    x = self.plans[name]
    return form.blocks(x.form(), int(x.stored.split('_')[1]))

  def spare(self, name: str) -> bool:
    """Whether an array is the empty bias that some files give every matrix."""
    matrix = name.removesuffix('.bias') + '.weight'
    return matrix in self.plans and not self.stored(name).any()


def settings(
  raw: dict[str, Any], path: pathlib.Path
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
  """(settings of the quantisation, all others) of a config.json.

  Args:
    raw: its content. path: its own; older settings are in a file beside it.

  Raises:
    ValueError: a method, or a form of one, that is not read.
  """
  inner = raw.get('text_config')
  places = [raw, inner] if isinstance(inner, dict) else [raw]
  rest = {k: x for k, x in raw.items() if k not in _KEYS}
  if isinstance(inner, dict):
    own = {k: x for k, x in inner.items() if k not in _KEYS}
    rest['text_config'] = own
  found = [x[k] for x in places for k in _KEYS if x.get(k) is not None]
  for name, method in _BESIDE.items():
    beside = path.with_name(name)
    if not found and beside.exists():
      found, path = [files.read_json(beside)], beside
      found[0].setdefault('quant_method', method)
  return (_checked(found[0], path) if found else None), rest


def _checked(values: Any, path: pathlib.Path) -> dict[str, Any]:
  """The settings under the names that are read here."""
  if not isinstance(values, dict):
    raise ValueError(f'{path}: quantization_config={values!r}: give an object')
  named: dict[str, Any] = values
  out = {_SYNONYMS.get(key, key): x for key, x in named.items()}
  method = out.setdefault('quant_method', 'mlx')
  if method == 'auto-round':
    packing = str(out.get('packing_format', 'auto_round:auto_gptq'))
    out |= _ROUND.get(packing.removeprefix('auto_round:'), {})
    method = out['quant_method']
  if isinstance(out.get('version'), str):
    out['version'] = out['version'].lower()
  if method == 'gptq':
    out.setdefault('checkpoint_format', out.get('format'))
    if 'zero_point' in out:
      out.setdefault('sym', not out['zero_point'])
  if not isinstance(method, str) or method not in _METHODS:
    raise ValueError(
      f'{path}: quantization_config with quant_method={method!r} and the keys '
      f'{sorted(values)} is not supported; allowed are {sorted(_METHODS)}, and '
      f'auto-round with packing_format auto_round: {sorted(_ROUND)}'
    )
  for key, allowed in _METHODS[method].items():
    if (found := out.get(key)) not in allowed:
      what = f'{key}={found!r} of {method} is not supported'
      raise ValueError(
        f'{path}: {what}; allowed: {", ".join(map(repr, allowed))}'
      )
  return out


def plan(
  source: str,
  values: Mapping[str, Any],
  tensors: Mapping[str, Tensor],
  get: Callable[[str], np.ndarray],
) -> Quantised:
  """Plans how to read a checkpoint; reads no matrix.

  Args:
    source: of the checkpoint, for error messages.
    values: its settings, from `settings`.
    tensors: what is stored, by name.
    get: get(name) -> array.

  Raises:
    ValueError: parts that are missing, or do not fit together.
  """
  modules: dict[str, dict[str, Tensor]] = {}
  for name, x in tensors.items():
    if match := _PARTS.fullmatch(name):
      modules.setdefault(match[1], {})[match[2]] = x
  plans, plain = {}, dict(tensors)
  for name, parts in modules.items():
    read = lambda part, name=name: get(f'{name}.{part}')
    m = Module(source, name, parts, read, values)
    if family := _family(m):
      plans[f'{name}.weight'] = found = family(m)
      for part in parts.keys() & set(found.parts):
        del plain[f'{name}.{part}']
      if f'{name}.weight' in plain:
        m.misfit('it is stored twice, quantised and as a weight')
  return Quantised(plans, plain, get)


def _family(m: Module) -> Callable[[Module], Plan] | None:
  """What plans a module; None: it is not quantised."""
  if 'qweight' in m.parts:
    if 'g_idx' in m.parts:
      return gptq.plan
    # Old files of GPTQ have none; where shapes do not tell, settings do.
    method = m.settings['quant_method']
    return awq.plan if awq.is_gemm(m) or method == 'awq' else gptq.plan
  if 'weight_packed' in m.parts:
    return compressed.plan
  if bnb.state_of(m):
    return bnb.plan4
  own = {'SCB', 'weight_format'} & m.parts.keys()
  integers = bnb.plan8 if own else compressed.plan
  dtype = m.parts['weight'].dtype if 'weight' in m.parts else ''
  return {'F8_E4M3': fp8.plan, 'I8': integers, 'U32': mlx.plan}.get(dtype)
