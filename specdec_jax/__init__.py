"""Speculative decoding in JAX, where every claim is checked."""

from specdec_jax.api import Completion, Piece, Settings, generate, stream
from specdec_jax.build import DRAFTERS, RULES, LanguageModel, load

__all__ = [
  'DRAFTERS',
  'RULES',
  'Completion',
  'LanguageModel',
  'Piece',
  'Settings',
  'generate',
  'load',
  'stream',
]
