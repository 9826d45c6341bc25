"""Drafters as the certificate builds them: base.Recipe."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.drafters import early_exit, lookup, ngram
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm


def of(make: Callable[..., Any], *, model: bool = False):
  """A drafter's make as a recipe: (world, gamma) -> (drafter, weights.draft).

  model: make(model, gamma=...) takes the draft model and reads weights.draft.
  """
  return lambda world, gamma: (
    _made(make, *[world.draft] * model, gamma=gamma),
    world.weights.draft if model else (),
  )


def ngrams(world, gamma):
  """Counts of a text of few patterns; stops where they are not sure."""
  counts = _counts(world.vocab)
  model = ngram.model(world.target.vocab, order=4, ids=world.vocab)
  return _made(ngram.make, model, gamma=gamma, min_confidence=0.3), counts


@functools.cache
def _counts(vocab: int) -> ngram.Counts:
  text = np.arange(600) ** 2 // 7 % vocab
  return ngram.count([text], order=4, vocab=vocab)


def early_exits(world, gamma):
  """The target's first layer."""
  return _made(early_exit.make, world.target, gamma=gamma, exit=1), ()


def eagles(world, gamma):
  """A random layer on the first layer's features; one id is never drafted."""
  target, at = world.target, jax.ShapeDtypeStruct((1, 1), np.int32)
  x_BTD = jax.eval_shape(target.embed, world.weights.target, at, at)
  config, params = _layer(
    x_BTD.shape[-1], x_BTD.dtype.name, target.context, world.vocab
  )
  drafter = _made(eagle_drafter.make, config, target, gamma=gamma)
  return drafter, params | {'target': world.weights.target}


@functools.cache
def _layer(width: int, dtype: str, context: int, vocab: int):
  """(settings, weights.draft without the target) of a random layer."""
  block = model_config.LMConfig(
    depth=1,
    width=width,
    heads=2,
    kv_heads=1,
    head_dim=4,
    mlp=8,
    vocab=vocab,
    context=context,
    dtype=dtype,
    fused=True,
  )
  config = eagle.EagleConfig(block, (0,))
  layer = lm.nest(jax.device_get(eagle.init(config, 0)))
  ids = np.arange(1, vocab, dtype=np.int32)
  head = np.random.default_rng(0).normal(size=(width, len(ids)))
  return config, dict(layer=layer, head=head.astype(jnp.dtype(dtype)), ids=ids)


@functools.cache
def _made(make, *models, **settings):
  """make(*models, **settings), once: an equal one would compile again."""
  return make(*models, **settings)


# Every drafter as the certificate builds it.
RECIPES = {
  'lm': of(lm_drafter.make, model=True),
  'lookup': of(lookup.make),
  'ngram': ngrams,
  'early_exit': early_exits,
  'eagle': eagles,
}
