"""The joint law of consecutive windows, by every outcome of every draw."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, types
from specdec_jax.certify import enumerate_window


class Choice(NamedTuple):
  """One outcome of every draw of a window."""

  draft_BK: Any
  passes_BK: Any
  next_B: Any


def step_with(target, drafter, rule: types.Rule):
  """The production decode.step with chosen outcomes instead of noise.

  Returns jitted (weights, request, state, info, choice) -> (state, info,
  chance_B): chance_B is the probability of the choice given the state.
  """

  def run(weights, request, state, info, choice: Choice):
    seen = {}

    def verify(noise, draft, p_BNV):
      t_BK = enumerate_window.breaks(
        rule, enumerate_window.mute(noise), draft, p_BNV
      )
      seen.update(draft=draft, t_BK=t_BK)
      accept_BK = jnp.where(choice.passes_BK, t_BK / 2, (1 + t_BK) / 2)
      # A rule that draws for itself raises NotEnumerable.
      own = enumerate_window.mute(noise)._replace(accept_BK=accept_BK)
      return rule.verify(own, draft, p_BNV)

    def next_token(offset_B, weights_BV):
      seen.update(weights_BV=weights_BV)
      return choice.next_B

    noise = types.Noise(
      jnp.zeros(choice.draft_BK.shape),
      lambda offset, q_BV: jnp.take(choice.draft_BK, offset, axis=1),
      next_token,
    )
    loop = decode.Loop(
      target,
      drafter,
      rule._replace(verify=verify),
      decode.Options(narrow=False),
      noise=lambda *_, **__: noise,
    )
    state, info = decode.step(loop, weights, request, state, info)
    draft, t_BK = seen['draft'], seen['t_BK']
    of = lambda w, at: (
      jnp.take_along_axis(w, at[..., None], -1)[..., 0] / jnp.sum(w, -1)
    )
    if draft.q_BKV is None:
      drawn_BK = draft.tokens_BK == choice.draft_BK
    else:
      drawn_BK = of(draft.q_BKV, choice.draft_BK)
    sides_BK = jnp.where(choice.passes_BK, t_BK, 1 - t_BK)
    chance_B = of(seen['weights_BV'], choice.next_B)
    return state, info, jnp.prod(drawn_BK * sides_BK, 1) * chance_B

  return jax.jit(run)


def outcomes(vocab: int, gamma: int) -> Choice:
  """Every Choice of one window, as a batch."""
  every = itertools.product(
    itertools.product(range(vocab), repeat=gamma),
    itertools.product((True, False), repeat=gamma),
    range(vocab),
  )
  draft, passes, following = zip(*every, strict=True)
  return Choice(
    np.array(draft, np.int32).reshape(len(draft), gamma),
    np.array(passes, bool).reshape(len(draft), gamma),
    np.array(following, np.int32),
  )


def walk(step, weights, request, state, info, choices: Choice, *, windows):
  """All texts of some consecutive windows, with their probabilities.

  step is step_with's. request, state and info have any number of equal rows:
  the size of the batches that are run. Returns (tokens_RL, lengths_R,
  chance_R).
  """
  size, O = state.lengths_B.shape[0], len(choices.next_B)
  # A drafter may keep its rows on any axis, or something without rows.
  axes, tree = jax.tree.flatten(state)
  axes = [x.shape.index(size) if size in x.shape else None for x in axes]
  take = lambda leaves, index: [
    x if axis is None else np.take(x, index, axis)
    for x, axis in zip(leaves, axes, strict=True)
  ]
  host = lambda state: [np.asarray(x) for x in jax.tree.leaves(state)]
  rows, chance_R = take(host(state), [0]), np.ones(1)
  for _ in range(windows):
    R = len(chance_R)
    parts, chances = [], []
    for at in range(0, R * O, size):
      index = np.arange(at, at + size)
      live = index < R * O
      index = np.where(live, index, 0)
      new, _, chance_B = step(
        weights,
        request,
        jax.tree.unflatten(tree, take(rows, index // O)),
        info,
        jax.tree.map(lambda x, i=index: x[i % O], choices),
      )
      chance_B = np.asarray(chance_B, np.float64) * chance_R[index // O] * live
      parts.append(take(host(new), np.flatnonzero(chance_B > 0)))
      chances.append(chance_B[chance_B > 0])
    rows = [
      x[0] if axis is None else np.concatenate(x, axis)
      for x, axis in zip(zip(*parts, strict=True), axes, strict=True)
    ]
    chance_R = np.concatenate(chances)
  end = jax.tree.unflatten(tree, rows)
  return end.tokens_BL, end.lengths_B, chance_R


def completed(tokens_RL, lengths_R, chance_R, law, start: int) -> np.ndarray:
  """Law of n tokens from texts of m <= n tokens, extended by the target's law.

  law: the target's own, [V] * n. start: length of the prompt.
  """
  n, V = law.ndim, law.shape[0]
  out = np.zeros_like(law)
  for m in range(1, n + 1):
    rows = lengths_R == start + m
    if not rows.any():
      continue
    flat = np.ravel_multi_index(tokens_RL[rows, start : start + m].T, (V,) * m)
    mass = np.bincount(flat, chance_R[rows], V**m).reshape((V,) * m)
    head = law.sum(tuple(range(m, n)), keepdims=True)
    with np.errstate(invalid='ignore'):
      rest = np.where(head > 0, law / head, 0)
    out += mass.reshape(mass.shape + (1,) * (n - m)) * rest
  return out
