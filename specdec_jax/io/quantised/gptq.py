"""GPTQ, versions 1 and 2 (AutoGPTQ, GPTQModel, auto-round).

qweight [in * bits / 32, out] has the codes of a column, one after the other;
qzeros [groups, out * bits / 32] those of a row; scales [groups, out]. g_idx
[in] has the group of each input, which `desc_act` has mixed.
"""

import math

import numpy as np

from specdec_jax.io.quantised import form

BITS = (2, 3, 4, 8)


def plan(m: form.Module) -> form.Plan:
  rows, O = m.matrix('qweight', 'I32')
  G, scales = m.matrix('scales', *form.FLOATS)
  zeros, words = m.matrix('qzeros', 'I32')
  I = math.prod(m.parts['g_idx'].shape) if 'g_idx' in m.parts else None
  # By the shapes, since `dynamic` settings give some modules other bits.
  fits = [
    b
    for b in BITS
    if words == -(-O * b // 32) and (I is None or rows == -(-I * b // 32))
  ]
  stated = m.settings.get('bits')
  bits = stated if stated in fits else fits[0] if len(fits) == 1 else 0
  if not bits or (zeros, scales) != (G, O):
    m.misfit(f'its parts fit no matrix of {BITS} bits')
  I = I or rows * 32 // bits
  if I % G:
    m.misfit(f'{I} inputs are not {G} groups of one size')
  group = I // G
  order = m.order('g_idx', I, group)

  def read() -> form.Form:
    codes = form.unpack(m.get('qweight').T, bits)[:, :I]
    stored = form.unpack(m.get('qzeros'), bits)[:, :O].T
    return form.Form(
      codes if order is None else codes[:, order],
      m.floats('scales').T,
      (1, group),
      zero=(stored + _first(m, stored, bits)) & ((1 << bits) - 1),
    )

  kind, parts = f'GPTQ {bits}-bit', ('qweight', 'qzeros', 'scales', 'g_idx')
  return form.integers(kind, (O, I), parts, read, bits, group, order)


def _first(m: form.Module, stored: np.ndarray, bits: int) -> int:
  """What a stored 0 stands for: 1 in version 1, 0 in version 2.

  Some files state the other version. The data of symmetric ones tell: their
  zeros are all in the middle.
  """
  middle, sym = 1 << (bits - 1), m.settings.get('sym')
  low, high = int(stored.min()), int(stored.max())
  if sym is not False and low == high and low in (middle - 1, middle):
    return middle - low
  if sym:
    m.refuse(
      f'symmetric, but its zeros are {low} to {high}; allowed are all '
      f'{middle - 1} (version 1), or all {middle} (version 2)'
    )
  return 0 if m.settings.get('checkpoint_format') == 'gptq_v2' else 1
