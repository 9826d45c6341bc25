"""The joint distribution of consecutive windows, by enumerating every draw.

Production steps run with chosen outcomes in place of noise. Each outcome is
weighted by its probability under the distribution that the step drew from.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from specdec_jax import decode, types
from specdec_jax.certify import base, enumerate_window, table_model

ROWS = 8192  # of the batches that are run here


class Choice(NamedTuple):
  """One outcome of every draw of a window, for every row.

  draft_BK: token that noise.draft returns at each offset.
  passes_BK: whether each accept test passes.
  next_B: token that noise.next returns.
  """

  draft_BK: Any
  passes_BK: Any
  next_B: Any


def choices(vocab: int, gamma: int) -> Choice:
  """Every Choice of one window, as a batch."""
  every = itertools.product(
    itertools.product(range(vocab), repeat=gamma),
    itertools.product((True, False), repeat=gamma),
    range(vocab),
  )
  draft, passes, after = map(np.array, zip(*every, strict=True))
  return Choice(draft.astype(np.int32), passes, after.astype(np.int32))


class _DrafterNoise:
  """A types.Noise with the draft draw only: a drafter may use no other."""

  def __init__(self, draft):
    self.draft = draft

  @property
  def accept_BK(self):
    raise base.Broken('the drafter looks at the noise of the accept tests')

  def next(self, *_):
    raise base.Broken(
      'the drafter draws with the noise of the next token, which only a '
      'coupled rule allows'
    )


def step_with(target: types.Model, drafter: types.Drafter, rule: types.Rule):
  """The production decode.step with chosen outcomes instead of noise.

  Returns (weights, request, state, info, choice) -> (state, chance_B), with the
  probability of the choice given the state.
  """
  no_draw = enumerate_window.no_draw
  draws = []  # (offset, q_BV) of every noise.draft of the step that runs

  @jax.jit
  def run(weights, request, state, info, choice: Choice):
    seen = {}

    def draft_token(offset, q_BV):
      # Called from inside the drafter's loops, so this cannot be returned. As
      # bits: a callback's thread would turn float64 into float32.
      bits = jax.lax.bitcast_convert_type(q_BV, jnp.uint32)
      record = lambda offset, bits: draws.append(
        (int(offset), np.asarray(bits).view(q_BV.dtype).reshape(q_BV.shape))
      )
      io_callback(record, None, offset, bits)
      return jnp.take(choice.draft_BK, offset, axis=1)

    def propose(weights, state, context, noise, target_cache):
      own = _DrafterNoise(draft_token)
      return drafter.propose(weights, state, context, own, target_cache)

    def verify(noise, draft, p_BNV):
      t_BK = enumerate_window.thresholds(rule, draft, p_BNV)
      seen.update(draft=draft, t_BK=t_BK)
      u_BK = jnp.where(choice.passes_BK, t_BK / 2, (1 + t_BK) / 2)
      return rule.verify(types.Noise(u_BK, no_draw, no_draw), draft, p_BNV)

    def next_token(offset_B, weights_BV):
      seen.update(weights_BV=weights_BV)
      return choice.next_B

    noise = types.Noise(jnp.zeros(choice.draft_BK.shape), no_draw, next_token)
    loop = decode.Loop(
      target,
      drafter._replace(propose=propose),
      rule._replace(verify=verify, certain=False),
      decode.Options(widths=()),
      noise=lambda *_, **__: noise,
    )
    state, _ = decode.step(loop, weights, request, state, info)
    return state, seen

  def step(weights, request, state, info, choice: Choice):
    draws.clear()
    new, seen = jax.device_get(run(weights, request, state, info, choice))
    jax.effects_barrier()
    chance_B = _chance_of_drafts(drafter.name, state, seen, draws, choice)
    sides_BK = np.where(choice.passes_BK, seen['t_BK'], 1 - seen['t_BK'])
    next_BV = enumerate_window.normal(seen['weights_BV'].astype(np.float64))
    chance_B = chance_B * sides_BK.astype(np.float64).prod(1)
    return new, chance_B * _at(next_BV, choice.next_B)

  return step


def _chance_of_drafts(name: str, state, seen, draws, choice) -> np.ndarray:
  """Probability of the chosen drafts under what each was drawn from: [B].

  Raises:
    base.Broken: an offset drawn twice, or another q reported than drawn from.
  """
  draft, (B, K) = seen['draft'], choice.draft_BK.shape
  drawn = dict(draws)
  if len(drawn) < len(draws):
    raise base.Broken(f'{name} draws twice with the noise of one offset')
  chance_BK = np.zeros((B, K))
  for k in range(K):
    # Nothing was drawn: only the first outcome counts.
    chance_BK[:, k] = choice.draft_BK[:, k] == 0
    if k in drawn:
      q_BV = enumerate_window.normal(drawn[k].astype(np.float64))
      chance_BK[:, k] = _at(q_BV, choice.draft_BK[:, k])
      # A drafter may draw something else and derive its tokens from that.
      same_B = draft.tokens_BK[:, k] == choice.draft_BK[:, k]
      proposed_B = k < draft.count_B
      if draft.q_BKV is not None and same_B[proposed_B].all():
        can_B = proposed_B & (chance_BK[:, : k + 1] > 0).all(1)
        _check_reported(name, state, draft, k, q_BV, can_B)
  return chance_BK.prod(1)


def _check_reported(name: str, state, draft, k: int, q_BV, rows_B) -> None:
  """Rows that propose a token drawn from q_BV must report q_BV."""
  reported_BV = draft.q_BKV[:, k].astype(np.float64)
  off_B = np.abs(reported_BV - q_BV).max(1) * rows_B
  if not off_B.max() <= base.BOUNDS[draft.q_BKV.dtype == np.float64]:
    b = int(np.nan_to_num(off_B, nan=np.inf).argmax())
    text = state.tokens_BL[b, : state.lengths_B[b]].tolist()
    text += draft.tokens_BK[b, :k].tolist()
    raise base.Broken(
      f'after {text} {name} drew draft {k} from {base.show(q_BV[b])} and '
      f'reports q {base.show(reported_BV[b])}'
    )


def _at(p_BV, tokens_B):
  """The probability of each row's token."""
  return np.take_along_axis(p_BV, tokens_B[:, None], 1)[:, 0]


def walk(
  world: base.World,
  drafter: types.Drafter,
  draft_weights: Any,
  rule: types.Rule,
  settings: dict[str, Any],
  windows: int,
):
  """All texts of some consecutive windows after PROMPT.

  Args:
    world: table models.
    drafter, draft_weights, rule: of the steps.
    settings: sampling settings, as requests.make takes them.
    windows: number of windows.

  Returns:
    (tokens_RL, lengths_R, chance_R) of R texts; chance_R are probabilities.
  """
  prompt = table_model.PROMPT[world.vocab]
  weights = types.Weights(world.weights.target, draft_weights)
  request = base.make_request(world, [prompt] * ROWS, 40, length=48, **settings)
  programs = decode.programs(world.target, drafter, rule)
  state, info = programs.start(weights, request)
  step = step_with(world.target, drafter, rule)
  each = choices(world.vocab, drafter.gamma)
  count = len(each.next_B)
  take = lambda tree, index: jax.tree.map(lambda x: x[index], tree)
  rows, chance_R = take(jax.device_get(state), [0]), np.ones(1)
  for _ in range(windows):
    parts, chances = [], []
    for start in range(0, len(chance_R) * count, ROWS):
      index = np.arange(start, start + ROWS)
      live = index < len(chance_R) * count
      index = np.where(live, index, 0)
      before, choice = take(rows, index // count), take(each, index % count)
      new, chance_B = step(weights, request, before, info, choice)
      chance_B = chance_B * chance_R[index // count] * live
      parts.append(take(new, np.flatnonzero(chance_B != 0)))
      chances.append(chance_B[chance_B != 0])
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    chance_R = np.concatenate(chances)
  return rows.tokens_BL, rows.lengths_B, chance_R


def completed(tokens_RL, lengths_R, chance_R, target, start: int) -> np.ndarray:
  """Distribution of n tokens, from texts of m <= n that the target continues.

  Args:
    tokens_RL, lengths_R, chance_R: from walk.
    target: the target's joint distribution of n tokens, [V] * n.
    start: length of the prompt, in tokens.
  """
  n, V = target.ndim, target.shape[0]
  out = np.zeros_like(target)
  for m in range(1, n + 1):
    rows = lengths_R == start + m
    if not rows.any():
      continue
    flat = np.ravel_multi_index(tokens_RL[rows, start : start + m].T, (V,) * m)
    mass = np.bincount(flat, chance_R[rows], V**m).reshape((V,) * m)
    head = target.sum(tuple(range(m, n)), keepdims=True)
    with np.errstate(invalid='ignore'):
      rest = np.where(head > 0, target / head, 0)
    out += mass.reshape(mass.shape + (1,) * (n - m)) * rest
  return out
