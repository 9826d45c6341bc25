"""compressed-tensors: integers, packed or not; its floats are those of fp8.

weight_packed [out, in * bits / 32] has a row's codes, less 2^(bits - 1), one
after the other; until 2025 a word had whole codes only, ten of three bits.
weight_zero_point is packed likewise, along the outputs.
"""

import functools

import numpy as np

from specdec_jax.io.quantised import form, module

BITS = (2, 3, 4, 8)


def plan(m: module.Module) -> module.Plan:
  packed = 'weight_packed' in m.parts
  part = 'weight_packed' if packed else 'weight'
  shape = O, columns = m.matrix(part, 'I32' if packed else 'I8')
  bits, whole, parts = 8, False, [part, 'weight_scale', *module.INPUTS]
  if packed:
    shape = _shape(m, O)
    bits, whole = _packing(m, shape[1], columns)
    parts += ['weight_shape', 'weight_g_idx']
  block = m.block('weight_scale', shape, m.stated('block_structure'))
  if zeros := m.parts.get('weight_zero_point'):
    parts += ['weight_zero_point']
    fit = 'I8', m.parts['weight_scale'].shape
    if packed:
      fit = 'I32', (_words(O, bits, whole), -(-shape[1] // block[1]))
    if zeros != fit:
      m.misfit(f'weight_zero_point fits no matrix of {bits} bits')
  order = None
  if 'weight_g_idx' in m.parts:
    order = m.order('weight_g_idx', shape[1], block[1])
  read = functools.partial(_form, m, shape, bits, whole, block, order)
  kind = f'compressed-tensors {bits}-bit'
  return module.Plan(kind, shape, tuple(parts), read, bits, block[1], order)


def _shape(m: module.Module, O: int) -> tuple[int, int]:
  """The shape of a packed matrix, which is stored."""
  tensor = m.parts.get('weight_shape')
  shape = None
  if tensor is not None and tensor.shape == (2,):
    shape = tuple(m.get('weight_shape').tolist())
  if shape is None or shape[0] != O or shape[1] < 1:
    m.misfit(f'weight_shape {shape} is not that of the matrix')
  return O, shape[1]


def _words(count: int, bits: int, whole: bool) -> int:
  """Words for a row of codes; whole: none is in two words."""
  return -(-count // (32 // bits)) if whole else -(-count * bits // 32)


def _packing(m: module.Module, I: int, words: int) -> tuple[int, bool]:
  """(bits, whether words have whole codes): the one way that fits."""
  stated = m.stated('num_bits') or BITS
  fits = {
    (bits, whole)
    for bits in stated
    if bits in BITS
    for whole in {False, 32 % bits > 0}
    if words == _words(I, bits, whole)
  }
  if len(fits) != 1:
    m.misfit(f'{len(fits)} ways fit {stated} bits, of the allowed {BITS}')
  return fits.pop()


def _unpack(words: np.ndarray, bits: int, whole: bool) -> np.ndarray:
  if not whole:
    return form.unpack(words, bits)
  each = form.unpack(words.reshape(-1, 1), bits)[:, : 32 // bits]
  return each.reshape(len(words), -1)


def _form(
  m: module.Module, shape, bits: int, whole: bool, block, order
) -> form.Form:
  (O, I), zero = shape, None
  if 'weight_packed' in m.parts:
    codes = _unpack(m.get('weight_packed'), bits, whole)[:, :I]
    zero = np.full((1, 1), 1 << (bits - 1))
    if 'weight_zero_point' in m.parts:
      zero = _unpack(m.get('weight_zero_point').T, bits, whole)[:, :O].T
  else:
    codes = m.get('weight')
    if 'weight_zero_point' in m.parts:
      zero = m.get('weight_zero_point').reshape(-(-O // block[0]), -1)
  codes = codes if order is None else codes[:, order]
  scale = m.scales('weight_scale', shape, block)
  return form.Form(codes, scale, block, zero, order=order)
