"""The promise about one draw over a real vocabulary."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import sampling
from specdec_jax.certify import base

# Draws in which the short form is compared with sampling.draw.
SAME = 4096
# Tokens of the vocabulary that are looked at together.
LANES = 2048


def one_draw(subject: base.Subject, amount: int) -> base.Figure:
  """How often a flat tail of mass 0.01 wins a draw over 49,152 tokens."""
  V, head, mass, size = 49152, 8, 0.01, 64
  w_V = np.full(V, mass / (V - head), np.float32)
  w_V[:head] = (1 - mass) / head
  for at in range(SAME // size):
    drawn, short = _winners(size, w_V, head, subject.seed, at)
    if (drawn != short).any():
      raise base.Broken('the short form of a draw differs from the draw')
  won = 0
  for chunk in range(amount // (size * 256)):
    won += int(_tail_wins(size, 256, w_V, head, subject.seed, chunk))
  n = amount // (size * 256) * size * 256
  sigma = (won - n * mass) / math.sqrt(n * mass * (1 - mass))
  if not abs(sigma) <= 4:
    raise base.Broken(
      f'a tail of mass {mass} at V {V} won {won} of {n} draws: {sigma:+.1f} sd'
    )
  return base.Figure(
    f'{won / n:.5f} ({sigma:+.2f} sigma)',
    f'{mass} within 4 sigma',
    f'{n:,} draws over {V:,} tokens, {SAME:,} of them by sampling.draw',
  )


def _keys(seed, at, size):
  number = jnp.uint32(at * size) + jnp.arange(size, dtype=jnp.uint32)
  return sampling.next_keys(
    jnp.full(size, seed, jnp.uint32), number, jnp.zeros(size, jnp.int32)
  )


def _short(key, w_V, head: int):
  """The winner, the tail as one: of equal weights the first arrival counts.

  V is a multiple of LANES, and head at most LANES.
  """
  index = jnp.arange(LANES)
  first = sampling.bits(key, LANES)

  # The bits of the tail are never in memory: a third of the time is saved.
  def earlier(i, least):
    return jnp.minimum(least, sampling.bits(key, LANES, i * LANES))

  least = jnp.where(index < head, jnp.uint32(2**32 - 1), first)
  least = jax.lax.fori_loop(1, w_V.shape[0] // LANES, earlier, least)
  least = jnp.concatenate([first[:head], jnp.min(least)[None]])
  score = w_V[: head + 1] / sampling.arrival(least, w_V.dtype)
  return jnp.argmax(score)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _winners(size: int, w_V, head: int, seed, at):
  """(sampling.draw, its short form) of the same keys."""
  keys = _keys(seed, at, size)
  drawn = sampling.draw(
    jnp.array(True), keys, jnp.broadcast_to(w_V, (size, w_V.shape[0]))
  )
  short = jax.vmap(lambda key: _short(key, jnp.asarray(w_V), head))(keys)
  return jnp.minimum(drawn, head), short


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _tail_wins(size: int, turns: int, w_V, head: int, seed, chunk):
  def turn(won, i):
    keys = _keys(seed, chunk * turns + i, size)
    wins = jax.vmap(lambda key: _short(key, w_V, head) == head)(keys)
    return won + jnp.sum(wins, dtype=jnp.int32), None

  return jax.lax.scan(turn, jnp.int32(0), jnp.arange(turns))[0]
