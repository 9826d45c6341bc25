"""Checks that the machine computes what the models and the loop ask for.

Finds a backend's mistakes that show in no error message, and repeats two
promises in little: half a minute on a new accelerator.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import sampling
from specdec_jax.bench import timing
from specdec_jax.certify import base, enumerated, identity, load
from specdec_jax.chips import roofline
from specdec_jax.models import weights
from specdec_jax.verify import reject

# Largest error of a row of 512 float32 products; in bfloat16 it is about 2e-3.
_PRECISE = 1e-5


def decodes_right(subject: base.Subject, amount: int) -> base.Figure:
  """Checks products, chances, a window and `amount` tokens of audited text."""
  rounds, chances = float32_products(64), whole_vocabulary(50_000)
  ours = base.Subject((reject.RULE,), {'lm': load.RECIPES['lm']})
  ((arm, tokens, ties),) = identity.audited(ours, 'float32', amount)
  window = enumerated.window_error(reject.RULE, 0, 200, 2, 4, 1.0)
  return base.Figure(
    f'float32 products are off by {rounds:.1e}, chances by {chances:.1e}, a '
    f'window by {window:.1e}; {ties} texts part at a tie, none elsewhere; '
    f'memory is read at {bandwidth()}',
    f'{_PRECISE:.0e}, 1e-03, {base.bound():.0e}',
    f'50,000 ids, 200 pairs (p, q), {tokens} tokens of {arm}',
  )


def float32_products(rows: int) -> float:
  """Measures products' largest relative error; base.Broken if not float32's."""
  rng = np.random.default_rng(0)
  x, kernel = rng.normal(size=(rows, 512)), rng.normal(size=(512, 256))
  x, kernel = x.astype(np.float32), kernel.astype(np.float32)
  got = np.asarray(weights.matmul(jnp.asarray(x), jnp.asarray(kernel)))
  exact = x.astype(np.float64) @ kernel.astype(np.float64)
  size = np.abs(x).astype(np.float64) @ np.abs(kernel)
  off = float((np.abs(got - exact) / size).max())
  if not off <= _PRECISE:
    raise base.Broken(
      f'float32 products are off by {off:.1e} of the summed sizes; float32 '
      'rounds to some 1e-7, bfloat16 to 1e-3: see jax_default_matmul_precision '
      'and XLA_FLAGS'
    )
  return off


def whole_vocabulary(ids: int) -> float:
  """Measures the largest relative error of p over `ids` ids.

  Raises base.Broken if some can never be drawn, or the error is above 1e-3.
  """
  logits_V = np.random.default_rng(0).normal(size=ids).astype(np.float32)
  settings = sampling.settings(1, temperature=1.0)
  p_V = jax.jit(sampling.probabilities)(logits_V[None, None], settings)[0, 0]
  if lost := int((np.asarray(p_V) == 0).sum()):
    raise base.Broken(f'{lost:,} of {ids:,} ids can never be drawn')
  exact_V = np.exp(logits_V.astype(np.float64))
  off_V = np.asarray(p_V, np.float64) / (exact_V / exact_V.sum()) - 1
  if not (off := float(np.abs(off_V).max())) <= 1e-3:
    raise base.Broken(f'a probability is off by {off:.1e} of its size')
  return off


def bandwidth() -> str:
  """Writes '1300 GB/s of the 4800 of h200'; base.Broken if less than half."""
  found = timing.bandwidth(timing.reads('bfloat16'))['sustained']
  chip = roofline.called(jax.devices()[0].device_kind)
  if not chip:
    return f'{found:.0f} GB/s'
  stated = roofline.CHIPS[chip].device.bandwidth / 1e9
  reached = f'{found:.0f} GB/s of the {stated:.0f} of {chip}'
  if not found >= stated / 2:
    raise base.Broken(f'{reached}; is another program on this chip?')
  return reached
