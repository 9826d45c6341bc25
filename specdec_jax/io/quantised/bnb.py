"""bitsandbytes: four bits from a table (nf4, fp4), and int8.

Four-bit blocks divide the flat matrix and may cross its rows; the first code is
a byte's high half. Block scales may be codes themselves, "double quantised".
int8 has one scale per row, over 127.
"""

import json
import math
from typing import Any

import numpy as np

from specdec_jax.io.quantised import form
from specdec_jax.kernels import quantised

_STATE = 'weight.quant_state.bitsandbytes__'
# Bytes may be stored as another type (bnb_4bit_quant_storage).
_WIDTHS = {'U8': 1, 'F16': 2, 'BF16': 2, 'F32': 4}


def state_of(m: form.Module) -> str:
  """Returns the part with the four-bit settings; '' if there is none."""
  return next((x for x in m.parts if x.startswith(_STATE)), '')


def plan4(m: form.Module) -> form.Plan:
  part = state_of(m)
  s = _state(m, part)
  shape, block, nested = tuple(s['shape']), s['blocksize'], 'nested_offset' in s
  size = math.prod(shape)
  blocks = -(-size // block)
  wanted = {'absmax': blocks, 'quant_map': 16}
  if nested:
    scales = -(-blocks // s['nested_blocksize'])
    wanted |= {'nested_absmax': scales, 'nested_quant_map': 256}
  others = {
    f'weight.{k}': ('U8' if nested and k == 'absmax' else 'F32', (count,))
    for k, count in wanted.items()
  }
  dtype, stored = m.kind('weight') or ('', ())
  fits = _WIDTHS.get(dtype, 0) * math.prod(stored) == -(-size // 2)
  if not fits or any(m.kind(k) != x for k, x in others.items()):
    m.misfit(f'its parts fit no matrix {list(shape)} in blocks of {block}')

  def read() -> form.Form:
    data = m.get('weight').reshape(-1).view(np.uint8)
    codes = np.stack([data >> 4, data & 15], -1).reshape(1, -1)[:, :size]
    scale, table = _absmax(m, s)[None], m.floats('weight.quant_map')
    return form.Form(codes, scale, (1, block), table=table, shape=shape)

  kind = stored = f'bitsandbytes {s["quant_type"]}'
  if not (shape[1] % block or block % 64):
    own = np.array_equal(m.floats('weight.quant_map'), quantised.NF4)
    stored = 'NF4_64' if own else kind
  return form.Plan(kind, shape, ('weight', part, *others), read, stored)


def _state(m: form.Module, part: str) -> dict[str, Any]:
  try:
    s = json.loads(m.get(part).tobytes())
    sizes = [*s['shape'], s['blocksize']]
    sizes += [s['nested_blocksize']] if 'nested_offset' in s else []
    good = all(type(x) is int and x > 0 for x in sizes)
    good &= len(s['shape']) == 2 and s['quant_type'] in ('nf4', 'fp4')
    good &= math.isfinite(s.get('nested_offset', 0))
  except (ValueError, KeyError, TypeError):
    s, good = {}, False
  if not good:
    m.refuse(f'{part} is damaged, or not of a matrix in nf4 or fp4')
  return s


def _absmax(m: form.Module, s: dict[str, Any]) -> np.ndarray:
  if 'nested_offset' not in s:
    return m.floats('weight.absmax')
  codes = m.get('weight.absmax')
  scale = m.floats('weight.nested_absmax')
  table = m.floats('weight.nested_quant_map')
  each = np.repeat(scale, s['nested_blocksize'])[: len(codes)]
  return table[codes] * each + np.float32(s['nested_offset'])


def plan8(m: form.Module) -> form.Plan:
  shape = O, I = m.matrix('weight', 'I8')
  if m.kind('SCB') != ('F32', (O,)):
    m.misfit('SCB is not a scale a row')
  order = m.get('weight_format').item() if 'weight_format' in m.parts else 0
  if order:
    m.refuse(f'weight_format {order} is for one GPU; allowed: 0, row by row')

  def read() -> form.Form:
    scale = m.floats('SCB')[:, None]
    return form.Form(m.get('weight'), scale, (1, I), unit=1 / 127)

  kind, parts = 'bitsandbytes int8', ('weight', 'SCB', 'weight_format')
  return form.integers(kind, shape, parts, read, 8, I)
