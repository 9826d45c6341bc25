"""Trains nothing and saves each step: the process that tests kill."""

import sys

import jax
import jax.numpy as jnp

from specdec_jax.io import checkpoint


def start():
  return {
    'w': jnp.linspace(-1, 1, 3000, dtype=jnp.float32),
    'key': jax.random.key_data(jax.random.key(1)),
  }


def advance(state, step: int):
  key = jax.random.fold_in(jax.random.wrap_key_data(state['key']), step)
  noise = jax.random.normal(key, state['w'].shape)
  return {'w': state['w'] * 0.9 + noise, 'key': jax.random.key_data(key)}


def main(folder: str, last: int) -> None:
  with checkpoint.Checkpoints(folder) as checkpoints:
    state, done = start(), 0
    restored = checkpoints.restore(jax.eval_shape(start))
    if restored:
      state, done = restored.arrays, restored.step
    for step in range(done + 1, last + 1):
      state = advance(state, step)
      # The save before this one is complete once this one returns.
      checkpoints.save(step, state, {'next': step + 1}, best=step % 5 == 1)
      print(step, flush=True)


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))
