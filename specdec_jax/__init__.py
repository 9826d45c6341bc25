"""Speculative decoding in JAX, where every claim is checked."""

from specdec_jax import program

# Before JAX computes anything: jaxlib 0.10.2 miscompiles a narrow matrix-vector
# product with a reduction on CPU (jax#39103), which gave wrong tokens, and XLA
# reads its flags once.
program.set_xla_flags()

from specdec_jax.api import check_cache, generate, stream  # noqa: E402
from specdec_jax.build import RULES, LanguageModel, load  # noqa: E402
from specdec_jax.completion import Completion, Piece, Settings  # noqa: E402
from specdec_jax.drafters.table import DRAFTERS  # noqa: E402
from specdec_jax.io.load import wrap  # noqa: E402
from specdec_jax.requests import NonFiniteLogits  # noqa: E402
from specdec_jax.show import html  # noqa: E402

__all__ = [
  'DRAFTERS',
  'RULES',
  'Completion',
  'LanguageModel',
  'NonFiniteLogits',
  'Piece',
  'Settings',
  'check_cache',
  'generate',
  'html',
  'load',
  'stream',
  'wrap',
]
