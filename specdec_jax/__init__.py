"""Speculative decoding in JAX, where every claim is checked."""

from specdec_jax import runtime

runtime.set_xla_flags()

from specdec_jax.analysis.record_page import html  # noqa: E402
from specdec_jax.api import (  # noqa: E402
  Completion,
  Piece,
  Settings,
  generate,
  stream,
)
from specdec_jax.build import DRAFTERS, RULES, LanguageModel, load  # noqa: E402

__all__ = [
  'DRAFTERS',
  'RULES',
  'Completion',
  'LanguageModel',
  'Piece',
  'Settings',
  'generate',
  'html',
  'load',
  'stream',
]
