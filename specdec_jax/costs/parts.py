"""The parts of a window alone, as programs to be timed: verifying, drafting.

Neither reads a prompt: rows begin at their lengths over a cache of zeros, for
the time of a pass depends on how many slots it sees, not on what they hold. A
source is read, before what is timed.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import decode, forward, hosts, types
from specdec_jax.costs import scripted

Array = jax.Array


def timed(run: Callable, *args) -> tuple[float, Any]:
  """Returns (seconds, result) of run(*args).

  Seconds are those of process 0 in all: what follows from them has to be the
  same everywhere.
  """
  start = time.perf_counter()
  result = jax.block_until_ready(run(*args))
  took = time.perf_counter() - start
  return hosts.from_first(lambda: took), result


class Part(NamedTuple):
  """A part of a window: walk(steps) runs it that often; steps in a sample."""

  walk: Callable[[int], Any]
  steps: int


def seconds(
  parts: Mapping[Any, Part], rounds: Iterable
) -> dict[Any, list[float]]:
  """Seconds a step of every part in every round; the parts take turns."""
  none = {
    key: min(timed(part.walk, 0)[0] for _ in range(3))
    for key, part in parts.items()
  }
  out: dict[Any, list[float]] = {key: [] for key in parts}
  for _ in rounds:
    for key, (walk, steps) in parts.items():
      took, _ = timed(walk, steps)
      # An empty call that took nearly as long tells nothing of the steps.
      out[key].append(max(took - none[key], took / 10) / steps)
  return out


@functools.partial(jax.jit, static_argnames='loop')
def verify_along(
  weights: types.Weights,
  request: decode.Request,
  count: Array,
  steps: Array,
  *,
  loop: decode.Loop,
):
  """Runs `steps` windows of drafts that propose `count` tokens at no cost.

  Windows start at the request's lengths, and again at each limit. Of the loop's
  drafter only gamma counts; 0 is plain decoding. Returns a number that uses all
  the work.
  """
  gamma = loop.drafter.gamma
  drafter = scripted.make(gamma=gamma) if gamma else decode.PLAIN
  loop = loop._replace(drafter=drafter)
  script = request.tokens_BL, jnp.full_like(request.tokens_BL, count)
  weights = weights._replace(draft=script)
  begin = functools.partial(decode.start, loop)
  state, info = forward.blank(begin, weights, request)
  state = state._replace(
    tokens_BL=request.tokens_BL, cache=_cache(loop.target, weights, request)
  )
  span_B = jnp.maximum(request.limit_B - request.lengths_B, 1)

  def body(i, carry):
    state, info = carry
    state = state._replace(
      lengths_B=request.lengths_B + i % span_B,
      live_B=jnp.ones_like(state.live_B),
    )
    return decode.step(loop, weights, request, state, info)

  state, info = jax.lax.fori_loop(0, steps, body, (state, info))
  return jnp.sum(state.tokens_BL) + jnp.sum(info.calls_B)


@functools.partial(jax.jit, static_argnames='loop')
def propose_along(
  weights: types.Weights,
  request: decode.Request,
  steps: Array,
  *,
  loop: decode.Loop,
):
  """Runs only the drafter, at `steps` consecutive prefixes of a fixed text.

  Where the texts end it starts again, with the state that it had. The target is
  not run: features are zeros, and a drafter in its cache finds there what it
  wrote.

  request: prompts with the text after them, which ends at limit_B.

  Returns:
    (proposals_BL, check): the first token proposed for each index, -1 where
    none was, and a number that uses all the work.
  """
  B, L = request.tokens_BL.shape
  drafter = loop.drafter
  span_B = jnp.maximum(request.limit_B - request.lengths_B, 0)
  cache = _cache(loop.target, weights, request)
  before_BLE, after_BNE = _features(loop, weights, request, cache)

  def at(i):
    going = jnp.minimum(i, span_B), i < span_B
    text = request.tokens_BL, request.lengths_B + going[0], going[1]
    return decode.context_of(drafter, request, *text)

  def body(i, carry):
    state, cache, proposals_BL, check = carry
    context = at(i)
    draft, state, cache = _propose(
      loop, weights, request, state, context, cache
    )
    outcome = _token(context.live_B)
    state = drafter.commit(state, at(i + 1), outcome, after_BNE)
    index_B = jnp.where(context.live_B, context.lengths_B, L)
    token_B = jnp.where(draft.count_B > 0, draft.tokens_BK[:, 0], -1)
    proposals_BL = proposals_BL.at[jnp.arange(B), index_B].set(
      token_B, mode='drop'
    )
    return state, cache, proposals_BL, check + _sum(draft)

  state = drafter.init(weights, at(0), before_BLE)
  turn = jnp.maximum(jnp.max(span_B), 1)

  def along(carry):
    left, *rest = carry
    rest = jax.lax.fori_loop(0, jnp.minimum(turn, left), body, (state, *rest))
    return left - turn, *rest[1:]

  none_BL, going = jnp.full((B, L), -1, jnp.int32), lambda carry: carry[0] > 0
  first = steps, cache, none_BL, jnp.int32(0)
  return jax.lax.while_loop(going, along, first)[2:]


def _propose(loop: decode.Loop, weights, request, state, context, cache):
  noise = loop.noise(
    *(request.seed_B, request.request_B, context.lengths_B, request.sampling),
    gamma=loop.drafter.gamma,
    coupled=loop.rule.coupled,
  )
  return loop.drafter.propose(weights, state, context, noise, cache)


def _token(live_B) -> types.Outcome:
  """Of a window in which nothing is tested: live rows go on by a token."""
  one_B = live_B.astype(jnp.int32)
  return types.Outcome(0 * one_B, 0 * one_B, one_B)


def has_q(engine, group) -> bool:
  """Whether the q of an engine's drafter is known at each index of a text.

  It has a model of q, or its proposals are certain (q None) and it reads no
  features. Of a drafter around others it is not: which of them proposes at a
  place, and whether, depends on what was accepted before. Computes nothing; of
  a bench.plan.Group only the shapes count.
  """
  if engine.parts or engine.q is not None:
    return not engine.parts
  loop, weights, request = engine.loop, engine.weights, group.full
  if loop.drafter.taps:
    return False

  def propose():
    committed = request.tokens_BL, request.lengths_B, request.lengths_B > 0
    context = decode.context_of(loop.drafter, request, *committed)
    state = loop.drafter.init(weights, context, None)
    cache = _cache(loop.target, weights, request)
    return _propose(loop, weights, request, state, context, cache)[0]

  return jax.eval_shape(propose).q_BKV is None


def _features(loop: decode.Loop, weights, request, cache):
  """Zeros like the features of init and commit, None for one without taps."""
  tokens_BL, taps = request.tokens_BL, loop.drafter.taps
  if not taps:
    return None, None
  model, at = (loop.target, weights.target), (request.lengths_B, cache)
  window_BN = jnp.zeros((len(tokens_BL), loop.drafter.gamma + 1), jnp.int32)
  read = lambda: forward.read(
    *model, window_BN, *at, slots=tokens_BL.shape[1], taps=taps
  )
  prefill = lambda: forward.prefill(*model, tokens_BL, *at, chunk=1, taps=taps)
  return (
    forward.blank(lambda: prefill()[1]),
    forward.blank(lambda: forward.concat(read()[1])),
  )


def _cache(target, weights, request):
  """The target's cache, without a prompt."""
  rows, slots = request.tokens_BL.shape
  return forward.open_cache(target, weights.target, rows, slots, request.source)


def _sum(draft: types.Draft) -> Array:
  """A sum of all of a draft: XLA can leave out nothing that makes it."""
  total = jnp.sum(draft.tokens_BK) + jnp.sum(draft.count_B)
  if draft.q_BKV is not None:  # A real window reads what is written here.
    total += jnp.sum(draft.q_BKV[..., 0]).astype(total.dtype)
  return total
