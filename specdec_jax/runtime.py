"""What must be set before JAX computes anything; every program calls it."""

import importlib.metadata
import os


def prepare() -> None:
  """Sets the XLA flag this jaxlib needs and the strict switches.

  Call it before the first computation; importing jax before it is fine.
  """
  flags = os.environ.get('XLA_FLAGS', '')
  needs = importlib.metadata.version('jaxlib') == '0.10.2'
  if needs and 'xla_cpu_experimental_ynn_fusion_type' not in flags:
    # jaxlib 0.10.2 miscompiles a narrow matvec + reduce on CPU (jax#39103).
    # The minus takes one pattern off the list; without it the fast kernels go.
    flag = '--xla_cpu_experimental_ynn_fusion_type=-reduce'
    os.environ['XLA_FLAGS'] = f'{flags} {flag}'.strip()
  import jax

  jax.config.update('jax_numpy_rank_promotion', 'raise')
