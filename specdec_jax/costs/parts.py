"""Runs a window's parts alone, as programs to be timed: verifying, drafting.

Neither reads a prompt: rows begin at their lengths over a cache of zeros, for a
pass's time depends on how many slots it sees, not on what they hold. A source
is read before timing.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import along, decode, forward, hosts, types
from specdec_jax.costs import scripted

Array = jax.Array


def timed(run: Callable, *args) -> tuple[float, Any]:
  """Returns (seconds, result) of run(*args); seconds are process 0's in all, so
  that what follows from them is the same everywhere."""
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
  """Times a step of every part in every round; the parts take turns."""
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
  """Runs `steps` windows whose drafts propose `count` tokens at no cost.

  Windows start at the request's lengths, and again at each limit. Only gamma
  counts of the loop's drafter; 0 is plain decoding. Returns a number that uses
  all the work.
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
  """Runs only the drafter, for `steps` windows along a fixed text, prompts and
  what follows them to limit_B.

  At the end it starts again, with the state that it had. The target does not
  run: features are zeros, and a drafter in its cache finds there what it wrote.
  Returns a number that uses all the work.
  """
  cache = _cache(loop.target, weights, request)
  before_BLE, after_BNE = _features(loop, weights, request, cache)
  begun = loop.drafter.init(
    weights, along.context(loop, request, 0), before_BLE
  )

  def body(i, carry):
    own, cache, check = carry
    draft, own, cache = along.window(
      loop, weights, request, i, own, cache, after_BNE
    )
    return own, cache, check + _sum(draft)

  turn = jnp.maximum(jnp.max(request.limit_B - request.lengths_B), 1)

  def once(carry):
    left, *rest = carry
    _, *rest = jax.lax.fori_loop(
      0, jnp.minimum(turn, left), body, (begun, *rest)
    )
    return left - turn, *rest

  going = lambda carry: carry[0] > 0
  return jax.lax.while_loop(going, once, (steps, cache, jnp.int32(0)))[-1]


def _features(loop: decode.Loop, weights, request, cache):
  """Returns zeros like init's and commit's features, None without taps."""
  (B, L), taps = request.tokens_BL.shape, loop.drafter.taps
  if not taps:
    return None, None
  window_BN = jnp.zeros((B, loop.drafter.gamma + 1), jnp.int32)
  given = loop.target, weights.target, window_BN, request.lengths_B, cache
  read = lambda: forward.read(*given, slots=L, taps=taps)[1]
  after_BNE = forward.blank(lambda: forward.concat(read()))
  # Those of a prefill are wider.
  return jnp.zeros((B, L, after_BNE.shape[-1])), after_BNE


def _cache(target, weights, request):
  """Opens the target's cache, without a prompt."""
  rows, slots = request.tokens_BL.shape
  return forward.open_cache(target, weights.target, rows, slots, request.source)


def _sum(draft: types.Draft) -> Array:
  """Sums a whole draft: XLA can leave out nothing that makes it."""
  total = jnp.sum(draft.tokens_BK) + jnp.sum(draft.count_B)
  if draft.q_BKV is not None:  # A real window reads what is written here.
    total += jnp.sum(draft.q_BKV[..., 0]).astype(total.dtype)
  return total
