"""Models as their files have them: not fused, not placed."""

from specdec_jax.io import load


def read(source, **settings) -> load.LanguageModel:
  return load.read(load.open_source(str(source)), **settings)
