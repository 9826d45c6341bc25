"""compressed-tensors: integers, packed or not; fp8 reads its floats.

weight_packed [out, in * bits / 32] has a row's codes in sequence, 2^(bits-1)
added. Until 2025 a word had whole codes only: ten, if they have three bits.
weight_zero_point is packed likewise, along the outputs.
"""

import numpy as np

from specdec_jax.io.quantised import form

BITS = (2, 3, 4, 8)
_PARTS = 'weight_scale', 'weight_zero_point', 'weight_shape', 'weight_g_idx'


def plan(m: form.Module) -> form.Plan:
  packed = 'weight_packed' in m.parts
  part = 'weight_packed' if packed else 'weight'
  O, I = m.matrix(part, 'I32' if packed else 'I8')
  bits, whole = 8, False
  if packed:
    words, I = I, _inputs(m, O)
    bits, whole = _packing(m, I, words)
  block = m.block('weight_scale', (O, I), m.stated('block_structure'))
  if zeros := m.kind('weight_zero_point'):
    fit = 'I8', m.parts['weight_scale'].shape
    if packed:
      fit = 'I32', (_words(O, bits, whole), -(-I // block[1]))
    if zeros != fit:
      m.misfit(f'weight_zero_point fits no matrix of {bits} bits')
  order = m.order('weight_g_idx', I, block[1])

  def read() -> form.Form:
    codes, zero = m.get(part), None
    if packed:
      codes = _unpack(codes, bits, whole)[:, :I]
      zero = np.full((1, 1), 1 << (bits - 1))
    if zeros and packed:
      zero = _unpack(m.get('weight_zero_point').T, bits, whole)[:, :O].T
    elif zeros:
      zero = m.get('weight_zero_point').reshape(-(-O // block[0]), -1)
    codes = codes if order is None else codes[:, order]
    scale = m.scales('weight_scale', (O, I), block)
    return form.Form(codes, scale, block, zero)

  kind, parts = f'compressed-tensors {bits}-bit', (part, *_PARTS)
  return form.integers(kind, (O, I), parts, read, bits, block[1], order)


def _inputs(m: form.Module, O: int) -> int:
  """Returns a packed matrix's columns, from its stored shape."""
  stored, shape = m.kind('weight_shape'), None
  if stored and stored[1] == (2,):
    shape = tuple(m.get('weight_shape').tolist())
  if shape is None or shape[0] != O or shape[1] < 1:
    m.misfit(f'weight_shape {shape} is not that of the matrix')
  return shape[1]


def _words(count: int, bits: int, whole: bool) -> int:
  """Counts words for a row of codes; whole: no code spans two."""
  return -(-count // (32 // bits)) if whole else -(-count * bits // 32)


def _packing(m: form.Module, I: int, words: int) -> tuple[int, bool]:
  """Returns (bits, whether words have whole codes): the one way that fits."""
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
