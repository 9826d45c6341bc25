"""AWQ's three layouts for 4-bit codes (AutoAWQ, llm-awq).

gemm: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out].
gemv: qweight [out, in / 8], qzeros [out, words], scales [out, 8 words]; more
  words than groups need.
fast: qweight [out / 4, in] in 16 bits, scales [8 words, out], and qzeros, or
  scaled_zeros, like them: -zero * scale, which is added.
"""

import functools

from specdec_jax.io.quantised import form

# Columns of a word, as they are in its nibbles: 0 2 4 6 1 3 5 7.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def is_gemm(m: form.Module) -> bool:
  """Tells gemm's parts from GPTQ's without g_idx."""
  qweight, scales = m.parts['qweight'].shape, m.parts.get('scales')
  outputs = 8 * qweight[-1] if qweight else 0
  return scales is not None and scales.shape[-1:] == (outputs,)


def plan(m: form.Module) -> form.Plan:
  fast = m.parts['qweight'].dtype == 'I16'
  rows, columns = m.matrix('qweight', 'I16' if fast else 'I32')
  scales = m.matrix('scales', *form.FLOATS)
  part = 'scaled_zeros' if 'scaled_zeros' in m.parts else 'qzeros'
  zeros = m.matrix(part, *(form.FLOATS if fast else ('I32',)))
  if not fast and is_gemm(m):
    O, I, form_of = 8 * columns, rows, _gemm
    group = max(1, I // scales[0])
    fit = (I // group, O), (I // group, columns)
  else:
    O, I = (4 * rows, columns) if fast else (rows, 8 * columns)
    form_of = _fast if fast else _gemv
    # The padded parts do not tell it.
    group = m.settings.get('group_size', 128)
    if type(group) is not int or (group < 1 and group != -1):
      m.refuse(f'group_size={group!r}; a number is needed, or -1')
    group = I if group == -1 else group
    words = _words(I, group)
    fit = (O, 8 * words), (O, words)
    fit = ((8 * words, O),) * 2 if fast else fit
  if (scales, zeros) != fit or I % group or (fast and I % 64):
    m.misfit(f'its parts fit no matrix of 4 bits in groups of {group}')
  read = functools.partial(form_of, m, part, (O, I), group)
  parts = ('qweight', 'scales', part)
  return form.integers('AWQ 4-bit', (O, I), parts, read, 4, group)


def _words(I: int, group: int) -> int:
  """Counts words for a row's zeros, padded for AutoAWQ's kernels."""
  multiple = 1 if group >= 128 else 2 if group >= 64 else 4
  words = -(-(I // group) // 8)
  return -(-words // multiple) * multiple


def _gemm(m: form.Module, zeros: str, shape, group: int) -> form.Form:
  def sorted_codes(part):
    codes = form.unpack(m.get(part), 4)
    words = codes.reshape(len(codes), -1, 8)[..., _ORDER]
    return words.reshape(codes.shape).T

  scale, zero = m.floats('scales').T, sorted_codes(zeros)
  return form.Form(sorted_codes('qweight'), scale, (1, group), zero)


def _gemv(m: form.Module, zeros: str, shape, group: int) -> form.Form:
  groups = shape[1] // group
  zero = form.unpack(m.get(zeros), 4)[:, :groups]
  scale = m.floats('scales')[:, :groups]
  return form.Form(form.unpack(m.get('qweight'), 4), scale, (1, group), zero)


def _fast(m: form.Module, zeros: str, shape, group: int) -> form.Form:
  """Undoes AutoAWQ's pack_intweight (awq/modules/linear/gemv_fast.py)."""
  (O, I), groups = shape, shape[1] // group
  x = form.unpack(m.get('qweight'), 4).reshape(O // 4, I // 64, 4, 64)
  x = x.swapaxes(1, 2).reshape(O, I // 8, 2, 4).swapaxes(2, 3)
  x = x.reshape(O, I // 32, 4, 4, 2).swapaxes(2, 3).reshape(O, I)
  scale, minimum = (m.floats(k)[:groups].T for k in ('scales', zeros))
  return form.Form(x, scale, (1, group), minimum=minimum)
