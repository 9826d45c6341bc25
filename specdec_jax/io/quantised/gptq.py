"""GPTQ, versions 1 and 2 (AutoGPTQ, GPTQModel, auto-round).

qweight [in * bits / 32, out] has a column's codes in sequence; qzeros [groups,
out * bits / 32] a row's; scales [groups, out]; g_idx [in] each input's group,
which `desc_act` has mixed.
"""

import math
import re

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
    return form.Form(
      codes if order is None else codes[:, order],
      m.floats('scales').T,
      (1, group),
      zero=_zeros(m, bits, O),
    )

  kind, parts = f'GPTQ {bits}-bit', ('qweight', 'qzeros', 'scales', 'g_idx')
  return form.integers(kind, (O, I), parts, read, bits, group, order)


def _zeros(m: form.Module, bits: int, O: int) -> np.ndarray:
  """Returns the zeros [O, groups]; version 1 stores each less 1. GPTQModel
  takes one number from each word, so that a zero of 0 borrows from the next
  one. Some files state the wrong version; symmetric ones tell: all zeros are in
  the middle."""
  words, settings = m.get('qzeros').view(np.uint32), m.settings
  # A 1 for each code of three words; of 3 bits GPTQModel has them backwards.
  ones = sum(1 << i for i in range(0, 96, bits))
  each = np.array([ones >> i & 0xFFFFFFFF for i in (64, 32, 0)], np.uint32)
  more = words + np.resize(each, words.shape[1])
  stored, whole = (form.unpack(x, bits)[:, :O].T for x in (words, more))
  one = (stored + 1) & ((1 << bits) - 1)
  middle, sym = 1 << (bits - 1), settings.get('sym')
  if sym is not False:
    for zeros in (stored, one, whole):
      if (zeros == middle).all():
        return zeros
  if sym:
    m.refuse(
      f'symmetric, but its zeros are {stored.min()} to {stored.max()}; allowed '
      f'are all {middle - 1} (version 1), or all {middle} (version 2)'
    )
  if settings.get('checkpoint_format') == 'gptq_v2':
    return stored
  made_by = re.search(r'gptqmodel\W*(\d*)', str(settings.get('meta')))
  # Since version 7 it treats 3 bits code by code.
  return whole if made_by and (bits != 3 or int(made_by[1] or 0) < 7) else one
