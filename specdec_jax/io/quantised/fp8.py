"""FP8: e4m3 codes, with one scale for each block, row or whole matrix. The
scale multiplies, whatever its name says (DeepSeek-V3, Qwen3: blocks are 128 by
128, smaller at the edges)."""

import ml_dtypes
import numpy as np

from specdec_jax.io.quantised import form

_BYTES = np.arange(256, dtype=np.uint8)
TABLE = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_SCALES = ('weight_scale_inv', 'weight_scale', 'scale')


def plan(m: form.Module) -> form.Plan:
  shape = m.matrix('weight', 'F8_E4M3')
  part = next((x for x in _SCALES if x in m.parts), 'weight_scale')
  block = m.block(part, shape, m.stated('weight_block_size', 'block_structure'))

  def read() -> form.Form:
    return form.Form(
      m.get('weight'), m.scales(part, shape, block), block, table=TABLE
    )

  return form.Plan('FP8', shape, ('weight', part), read, 'FP8')
