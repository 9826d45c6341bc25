"""Samples for the criteria, from the production code that is imported.

One program of a table model serves all distributions and one of a transformer
all texts, because compilation dominates the time of a mutant.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, decode, sampling, types
from specdec_jax.certify import base, load, table_model

V, GAMMA, ROWS, LENGTH, HASHES = 10, 2, 8192, 16, 5


def softmax(z):
  return np.exp(z) / np.exp(z).sum(-1, keepdims=True)


class Distributions(NamedTuple):
  """p of the target and q of the draft: float64, the same for every token."""

  p_V: np.ndarray
  q_V: np.ndarray


def flat() -> Distributions:
  """vLLM's: softmax of uniforms."""
  return Distributions(*softmax(np.random.default_rng(0).random((2, V))))


def peaked() -> Distributions:
  """Softmax of normals: temperature and the like move more mass."""
  return Distributions(*softmax(np.random.default_rng(1).normal(size=(2, V))))


def world_of(logits_2RVV) -> base.World:
  model = table_model.make(V)
  wide = [np.asarray(x, np.float32) for x in logits_2RVV]
  return base.World(model, model, types.Weights(*wide), V)


def same_everywhere(pair: Distributions) -> base.World:
  spread = lambda x: np.broadcast_to(np.log(x), (HASHES, V, V))
  return world_of([spread(x) for x in pair])


def request_of(world: base.World, new, prompts=None, **settings):
  """ROWS requests, in the one shape that the table model's program takes."""
  return base.make_request(
    world,
    prompts or [[1]] * ROWS,
    new,
    length=LENGTH,
    gamma=GAMMA,
    **dict(stop_ids=[V]) | settings,
  )


def run(world: base.World, request, rule='reject') -> decode.Output:
  drafter, other = load.RECIPES['lm'](world, GAMMA)
  return base.run(world, drafter, build.rule_of(rule), other, request)


def tokens(world: base.World, amount: int, new: int, at: int = 0, **settings):
  """New tokens of `amount` requests from number `at` on: [amount, new]."""
  settings = dict(temperature=1.0) | settings
  request, parts = request_of(world, new, **settings), []
  start = int(request.lengths_B[0])
  for i in range(0, amount, ROWS):
    numbers = np.arange(ROWS, dtype=request.request_B.dtype) + at + i
    out = run(world, request._replace(request_B=numbers))
    parts.append(out.tokens_BL[:, start : start + new])
    if (out.lengths_B != start + new).any():
      raise base.Broken('a text has another length than was asked for')
  return np.concatenate(parts)[:amount]


def counted(tokens, size: int = V) -> np.ndarray:
  return np.bincount(np.ravel(tokens), minlength=size).astype(np.float64)


# --- one window without the loop, at TensorRT-LLM's size ----------------------

WIDE, KEPT, WINDOWS = 500, 100, 50_000


def truncated() -> Distributions:
  """TensorRT-LLM's: the 100 largest of 500 uniforms, normalised."""
  x = np.random.default_rng(2).random((2, WIDE))
  x *= x >= np.sort(x, 1)[:, -KEPT, None]
  return Distributions(*x / x.sum(1, keepdims=True))


@functools.partial(jax.jit, static_argnums=0)
def _first(rule: types.Rule, p_V, q_V, request_B):
  """First token of a window with one draft token."""
  B = request_B.shape[0]
  seed_B, lengths_B = jnp.zeros(B, jnp.uint32), jnp.full(B, 5, jnp.int32)
  warm = sampling.settings(B, 1.0)
  noise = sampling.noise(
    seed_B, request_B, lengths_B, warm, gamma=1, coupled=rule.coupled
  )
  q_BV, p_BV = (jnp.broadcast_to(x, (B, WIDE)) for x in (q_V, p_V))
  drafted_B = noise.draft(0, q_BV)
  draft = types.Draft(drafted_B[:, None], q_BV[:, None], jnp.ones(B, jnp.int32))
  verdict = rule.verify(noise, draft, jnp.stack([p_BV, p_BV], 1))
  next_B = noise.next(verdict.accepted_B, verdict.weights_BV)
  return jnp.where(verdict.accepted_B > 0, drafted_B, next_B)


def first_of_wide(rule: str = 'reject') -> np.ndarray:
  p_V, q_V = (x.astype(np.float32) for x in truncated())
  size = WINDOWS // 10
  numbers = np.arange(WINDOWS, dtype=np.uint32).reshape(-1, size)
  run_one = functools.partial(_first, build.rule_of(rule), p_V, q_V)
  return np.concatenate([jax.device_get(run_one(x)) for x in numbers])


# --- greedy texts of a transformer --------------------------------------------

PROMPTS, NEW = 100, 32


@functools.cache
def _limited(drafter: types.Drafter) -> types.Drafter:
  """Proposes at most weights.draft tokens; with 0 it is plain decoding.

  Both arms then share one program, which halves compilation.
  """

  def inner(weights):
    return weights._replace(draft=weights.draft[0])

  def propose(weights, state, *others):
    draft, state, cache = drafter.propose(inner(weights), state, *others)
    count_B = jnp.minimum(draft.count_B, weights.draft[1])
    return draft._replace(count_B=count_B), state, cache

  return drafter._replace(
    init=lambda weights, *others: drafter.init(inner(weights), *others),
    propose=propose,
  )


@functools.cache
def transformer() -> base.World:
  return base.transformers(13, depth=1)


def transformer_run(draft: str, temperature: float = 0.0) -> decode.Output:
  """One run. draft: 'none', 'random' or 'same', as Hugging Face names them."""
  with jax.enable_x64(True):
    world = transformer()
    drafter, other = load.RECIPES['lm'](world, 3)
    other = world.weights.target if draft == 'same' else other
    request = base.make_request(
      world,
      base.ragged_prompts(PROMPTS, 13, 0),
      NEW,
      length=48,
      temperature=temperature,
      seed=0,
    )
    return base.run(
      world,
      _limited(drafter),
      build.rule_of('reject'),
      (other, np.int32(0 if draft == 'none' else 3)),
      request,
    )


def greedy_texts(draft: str) -> list[list[int]]:
  out = transformer_run(draft)
  starts = map(len, base.ragged_prompts(PROMPTS, 13, 0))
  return [
    text[start:] for text, start in zip(base.texts(out), starts, strict=True)
  ]
