"""MLX's affine codes: each group of inputs has a scale and a bias.

weight [out, in * bits / 32] has a row's codes in sequence; scales and biases
[out, groups]. Embeddings are quantised too. Shapes tell the bits: some matrices
have others than the settings say.
"""

from specdec_jax.io.quantised import form

BITS = (2, 3, 4, 5, 6, 8)


def plan(m: form.Module) -> form.Plan:
  group = m.settings.get('group_size')
  if type(group) is not int or group < 1:
    m.refuse(f'group_size={group!r}; a number is needed')
  O, words = m.matrix('weight', 'U32')
  scales, biases = (m.matrix(x, *form.FLOATS) for x in ('scales', 'biases'))
  I = scales[1] * group
  bits, rest = divmod(words * 32, I)
  if scales[0] != O or biases != scales or rest or bits not in BITS:
    m.misfit(f'its parts fit no matrix of {BITS} bits in groups of {group}')

  def read() -> form.Form:
    codes = form.unpack(m.get('weight'), bits)
    scale, minimum = m.floats('scales'), m.floats('biases')
    return form.Form(codes, scale, (1, group), minimum=minimum)

  kind, parts = f'MLX {bits}-bit', ('weight', 'scales', 'biases')
  return form.integers(kind, (O, I), parts, read, bits, group)
