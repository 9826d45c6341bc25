"""MLX's affine codes: each group of inputs has a scale and a bias.

weight [out, in * bits / 32] has a row's codes, one after the other; scales and
biases [out, groups]. Embeddings are quantised like the rest.
"""

from typing import Any

from specdec_jax.io.quantised import form, module

BITS = (2, 3, 4, 5, 6, 8)


def plan(m: module.Module) -> module.Plan:
  s = _settings(m)
  bits, group, mode = s.get('bits'), s.get('group_size'), s.get('mode')
  if mode not in ('affine', None) or bits not in BITS or type(group) is not int:
    what = f'mode={mode!r}, bits={bits!r}, group_size={group!r}'
    m.refuse(f'{what}; allowed: affine, {BITS}, a number')
  O, words = m.matrix('weight', 'U32')
  scales, biases = (m.matrix(x, *module.FLOATS) for x in ('scales', 'biases'))
  G, I = scales[1], words * 32 // bits
  if scales != (O, G) or biases != scales or G * group * bits != words * 32:
    m.misfit(f'its parts fit no matrix of {bits} bits in groups of {group}')

  def read() -> form.Form:
    codes = form.unpack(m.get('weight'), bits)
    scale, minimum = m.floats('scales'), m.floats('biases')
    return form.Form(codes, scale, (1, group), minimum=minimum)

  parts = ('weight', 'scales', 'biases')
  return module.Plan(f'MLX {bits}-bit', (O, I), parts, read, bits, group)


def _settings(m: module.Module) -> dict[str, Any]:
  """Those of all matrices, or of this one; its name may have other prefixes."""
  for key, own in m.settings.items():
    ends = f'.{m.name}'.endswith(f'.{key}') or f'.{key}'.endswith(f'.{m.name}')
    if ends and isinstance(own, dict):
      return {**m.settings, **own}
  return dict(m.settings)
