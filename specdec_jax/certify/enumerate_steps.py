"""The joint distribution of consecutive windows, by enumerating every draw.

Production steps run with chosen outcomes in place of noise. Each outcome is
weighted by its probability under the distribution that the step drew from.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from specdec_jax import decode, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.certify import base, enumerate_window, table_model

ROWS = 8192  # of the batches that are run here


class Choice(NamedTuple):
  """One outcome of every draw of a window, for every row.

  draft_BK: token that noise.draft returns at each offset; -1 draws it, with
    production's own noise.
  passes_BK: whether each accept test passes.
  next_B: token that noise.next returns.

  With passes_BK and next_B None, the accept tests and the next token are
  production's own.
  """

  draft_BK: Any
  passes_BK: Any = None
  next_B: Any = None


class Drawn(NamedTuple):
  """A draw of a window's drafts: what it was made from, and its result."""

  q_BV: np.ndarray
  tokens_B: np.ndarray


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


def _draft_token(found: list, choice: Choice, right: types.Noise, offset, q_BV):
  """noise.draft of a choice; appends (offset, q_BV, tokens_B) to `found`."""
  chosen_B = jnp.take(choice.draft_BK, offset, axis=1)
  tokens_B = jnp.where(chosen_B < 0, right.draft(offset, q_BV), chosen_B)
  # Called from inside the drafter's loops, so this cannot be returned. As bits:
  # a callback's thread would turn float64 into float32.
  bits = jax.lax.bitcast_convert_type(q_BV, jnp.uint32)
  unpack = lambda bits: np.asarray(bits).view(q_BV.dtype).reshape(q_BV.shape)
  record = lambda offset, bits, tokens_B: found.append(
    (int(offset), unpack(bits), np.asarray(tokens_B))
  )
  io_callback(record, None, offset, bits, tokens_B)
  return tokens_B


def watched(target: types.Model, drafter: types.Drafter, rule: types.Rule):
  """The production decode.step with outcomes that may be chosen.

  Returns (weights, request, state, info, choice) -> (state, info, seen, draws).
  seen has the rule's view of the window (draft, p_BNV) and the weights_BV of
  the next token; t_BK, where each accept test flips, for chosen passes_BK.
  draws has the Drawn of every offset.

  Raises:
    base.Broken: an offset is drawn twice.
  """
  found = []  # (offset, q_BV, tokens_B) of every noise.draft of the step

  @jax.jit
  def run(weights, request, state, info, choice: Choice):
    seen = {}

    def noise(*args, **kwargs):
      right = sampling_lib.noise(*args, **kwargs)

      def next_token(offset_B, weights_BV):
        seen.update(weights_BV=weights_BV)
        if choice.next_B is None:
          return right.next(offset_B, weights_BV)
        return choice.next_B

      draft = functools.partial(_draft_token, found, choice, right)
      return types.Noise(right.accept_BK, draft, next_token)

    def propose(weights, state, context, noise, target_cache):
      own = _DrafterNoise(noise.draft)
      return drafter.propose(weights, state, context, own, target_cache)

    def verify(noise, draft, p_BNV):
      seen.update(draft=draft, p_BNV=p_BNV)
      if choice.passes_BK is None:
        return rule.verify(noise, draft, p_BNV)
      no_draw = enumerate_window.no_draw
      t_BK = enumerate_window.thresholds(rule, draft, p_BNV)
      seen.update(t_BK=t_BK)
      u_BK = jnp.where(choice.passes_BK, t_BK / 2, (1 + t_BK) / 2)
      return rule.verify(types.Noise(u_BK, no_draw, no_draw), draft, p_BNV)

    loop = decode.Loop(
      target,
      drafter._replace(propose=propose),
      rule._replace(verify=verify, certain=False),
      decode.Options(widths=()),
      noise=noise,
    )
    return *decode.step(loop, weights, request, state, info), seen

  def step(weights, request, state, info, choice: Choice):
    found.clear()
    out = jax.device_get(run(weights, request, state, info, choice))
    jax.effects_barrier()
    return *out, _by_offset(drafter.name, found)

  return step


def _by_offset(name: str, found: list) -> dict[int, Drawn]:
  draws = {k: Drawn(*drawn) for k, *drawn in found}
  if len(draws) < len(found):
    raise base.Broken(f'{name} draws twice with the noise of one offset')
  return draws


def chance_of_drafts(seen, draws, choice: Choice) -> np.ndarray:
  """Probability of the chosen drafts under what each was drawn from: [B]."""
  B, K = choice.draft_BK.shape
  chance_BK = np.zeros((B, K))
  for k in range(K):
    # Nothing was drawn: only the first outcome counts.
    chance_BK[:, k] = choice.draft_BK[:, k] == 0
    if k in draws:
      q_BV = enumerate_window.normal(draws[k].q_BV.astype(np.float64))
      chance_BK[:, k] = _at(q_BV, choice.draft_BK[:, k])
  return chance_BK.prod(1)


def check_reported(name: str, state, draft, draws, can_B) -> int:
  """Every row that proposes a drawn token must report what it was drawn from.

  Args:
    name: of the drafter.
    state: before the window.
    draft: the window's, as the rule got it.
    draws: from watched.
    can_B: rows whose drafts can be drawn.

  Returns how many reported distributions were compared.

  Raises:
    base.Broken: the first draft with another q.
  """
  compared = 0
  for k, drawn in sorted(draws.items()):
    q_BV = enumerate_window.normal(drawn.q_BV.astype(np.float64))
    can_B = can_B & (_at(q_BV, drawn.tokens_B) > 0)
    if draft.q_BKV is None:
      continue
    tokens_B = draft.tokens_BK[:, k]
    # What is reported as certain is lawful, whatever made it.
    judged_B = (k < draft.count_B) & (_at(draft.q_BKV[:, k], tokens_B) != 1)
    # A drafter may draw something else and derive its tokens from that.
    if (tokens_B == drawn.tokens_B)[judged_B].all():
      _check_reported(name, state, draft, k, q_BV, judged_B & can_B)
      compared += int((judged_B & can_B).sum())
  return compared


def _check_reported(name: str, state, draft, k: int, q_BV, rows_B) -> None:
  """Rows that propose a token drawn from q_BV must report q_BV."""
  reported_BV = draft.q_BKV[:, k].astype(np.float64)
  off_B = np.where(rows_B, np.abs(reported_BV - q_BV).max(1), 0)
  wrong_B = ~(off_B <= base.BOUNDS[draft.q_BKV.dtype == np.float64])
  if wrong_B.any():
    b = int(np.where(wrong_B, state.lengths_B, np.inf).argmin())
    text = state.tokens_BL[b, : state.lengths_B[b]].tolist()
    text += draft.tokens_BK[b, :k].tolist()
    raise base.Broken(
      f'after {text} {name} drew draft {k} from {base.show(q_BV[b])} and '
      f'reports q {base.show(reported_BV[b])}'
    )


def _at(p_BV, tokens_B):
  """The probability of each row's token."""
  return np.take_along_axis(p_BV, tokens_B[:, None], 1)[:, 0]


def _chance(seen, draws, choice: Choice) -> np.ndarray:
  """Probability of a whole choice: [B]."""
  sides_BK = np.where(choice.passes_BK, seen['t_BK'], 1 - seen['t_BK'])
  next_BV = enumerate_window.normal(seen['weights_BV'].astype(np.float64))
  chance_B = chance_of_drafts(seen, draws, choice)
  chance_B = chance_B * sides_BK.astype(np.float64).prod(1)
  return chance_B * _at(next_BV, choice.next_B)


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
  step = watched(world.target, drafter, rule)
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
      new, _, seen, draws = step(weights, request, before, info, choice)
      chance_B = _chance(seen, draws, choice)
      able_B = np.ones(ROWS, bool)
      check_reported(drafter.name, before, seen['draft'], draws, able_B)
      chance_B = chance_B * chance_R[index // count] * live
      parts.append(take(new, np.flatnonzero(chance_B != 0)))
      chances.append(chance_B[chance_B != 0])
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    chance_R = np.concatenate(chances)
  return rows.tokens_BL, rows.lengths_B, chance_R


def drafted(world: base.World, drafter, draft_weights, rule, settings, prompts):
  """Every draft path of one window, after rows of several lengths.

  The rows come to it from their prompts by three windows of production.

  Args:
    world, drafter, draft_weights, rule, settings: as for walk.
    prompts: of the X rows.

  Returns:
    (texts, batch): the tokens of each row before the window, and its
    enumerate_window.Windows.

  Raises:
    base.Broken: a reported q that was not drawn from.
  """
  K, X = drafter.gamma, len(prompts)
  paths = list(itertools.product(range(world.vocab), repeat=K))
  paths_RK = np.array(paths, np.int32).reshape(-1, K)
  R, new = len(paths_RK), 4 * (K + 1)
  length = max(map(len, prompts)) + new + K + 2
  request = base.make_request(
    world, prompts, new, length=length, gamma=K, **settings
  )
  # Rows that are alike, number included, draw alike: R copies of each.
  request = jax.tree.map(lambda x: np.repeat(x, R, 0), request)
  weights = types.Weights(world.weights.target, draft_weights)
  programs = decode.programs(world.target, drafter, rule, base.OPTIONS)
  state, info = jax.device_get(programs.start(weights, request))
  step = watched(world.target, drafter, rule)
  drawn = Choice(np.full((X * R, K), -1, np.int32))
  every = Choice(np.tile(paths_RK, (X, 1)))
  for choice in (drawn, drawn, drawn, every):
    before = state
    state, info, seen, draws = step(weights, request, before, info, choice)
    check_reported(drafter.name, before, seen['draft'], draws, before.live_B)
  chance_XR = chance_of_drafts(seen, draws, every).reshape(X, R)
  ends = before.lengths_B[::R]
  rows = zip(before.tokens_BL[::R], ends, strict=True)
  texts = [tokens_L[:end].tolist() for tokens_L, end in rows]
  return texts, enumerate_window.Windows(
    seen['draft'], seen['p_BNV'], chance_XR
  )


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
    out += enumerate_window.continued(mass[None], target[None])[0]
  return out
