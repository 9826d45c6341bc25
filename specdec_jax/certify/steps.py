"""Watches production steps: drafts' reported q, and every p of long rows.

Outcomes can be chosen in place of noise, which certify.enumerated does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from specdec_jax import decode, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.certify import base, enumerate_window, table_model
from specdec_jax.verify import tree


class Choice(NamedTuple):
  """One outcome of every draw of a window, for every row; None: production's.

  children_BNX: tokens that noise.draft (X = 1) and noise.children return for
    each number's children; -1 draws them with production's own noise.
  passes_BK: whether each uniform is below its flip.
  next_B: token that noise.next returns.
  """

  children_BNX: Any
  passes_BK: Any = None
  next_B: Any = None


class Window(NamedTuple):
  """Records one window of a step: draft and p_BNV as the rule got them.

  t_BK: where each uniform flips the verdict; None if passes_BK is not chosen.
  weights_BV: the next token is drawn from them. draws: by node (-1 the root),
  its children's q_BV and tokens_BX. reported: how many q were compared with
  those.
  """

  draft: types.Draft
  p_BNV: Any
  t_BK: Any = None
  weights_BV: Any = None
  draws: dict[int, tuple[np.ndarray, np.ndarray]] = {}
  reported: int = 0


class Chosen:
  """Replaces a step's noise and rule, with a choice's outcomes.

  Its methods stand in for theirs while a step is traced. They keep what they
  see in `window`, and what drafts are drawn from in `drawn`.
  """

  def __init__(self, rule: types.Rule, choice: Choice, drawn: list):
    self.rule, self.choice, self.drawn = rule, choice, drawn

  def noise(self, *args, **kwargs) -> types.Noise:
    self.right = sampling_lib.noise(*args, **kwargs)
    own = self.draft, self.next, self.children
    return types.Noise(self.right.accept_BK, *own)

  def children(self, parents_BM, depth, q_BMV, count):
    tokens_BMX, ok_BMX = self.right.children(parents_BM, depth, q_BMV, count)
    number_BM1 = parents_BM[..., None] + 1
    chosen_BNX = self.choice.children_BNX
    chosen_BMX = jnp.take_along_axis(chosen_BNX, number_BM1, 1)[..., :count]
    tokens_BMX = jnp.where(chosen_BMX < 0, tokens_BMX, chosen_BMX)
    for m in range(parents_BM.shape[1]):
      self._keep(parents_BM[0, m], q_BMV[:, m], tokens_BMX[:, m])
    return tokens_BMX, ok_BMX

  def draft(self, offset, q_BV):
    chosen_B = jnp.take(self.choice.children_BNX, offset, axis=1)[:, 0]
    tokens_B = jnp.where(chosen_B < 0, self.right.draft(offset, q_BV), chosen_B)
    self._keep(offset - 1, q_BV, tokens_B[:, None])
    return tokens_B

  def _keep(self, parent, q_BV, tokens_BX):
    def record(parent, bits, tokens_BX):
      own_BV = np.asarray(bits).view(q_BV.dtype).reshape(q_BV.shape)
      self.drawn.append((int(parent), own_BV, np.asarray(tokens_BX)))

    # Called from inside the drafter's loops, so q_BV cannot be returned. As
    # bits: a callback's thread would turn float64 into float32.
    bits = jax.lax.bitcast_convert_type(q_BV, jnp.uint32)
    io_callback(record, None, parent, bits, tokens_BX)

  def verify(self, noise, draft, p_BNV) -> types.Verdict:
    self.window = Window(draft, p_BNV)
    if (passes_BK := self.choice.passes_BK) is None:
      return self.rule.verify(noise, draft, p_BNV)
    t_BK = enumerate_window.flips(self.rule, draft, p_BNV)
    self.window = self.window._replace(t_BK=t_BK)
    u_BK = jnp.where(passes_BK, t_BK / 2, (1 + t_BK) / 2)
    return self.rule.verify(enumerate_window.uniforms(u_BK), draft, p_BNV)

  def next(self, offset_B, weights_BV):
    self.window = self.window._replace(weights_BV=weights_BV)
    if self.choice.next_B is None:
      return self.right.next(offset_B, weights_BV)
    return self.choice.next_B


class _DrafterNoise:
  """Keeps types.Noise's draws of drafts: a drafter may use no other."""

  def __init__(self, noise):
    self.draft, self.children = noise.draft, noise.children

  @property
  def accept_BK(self):
    raise base.Broken('the drafter looks at the noise of the accept tests')

  def next(self, *_):
    raise base.Broken(
      'the drafter draws with the noise of the next token, which only a '
      'coupled rule allows'
    )


def watched(target: types.Model, drafter: types.Drafter, rule: types.Rule):
  """Wraps the production decode.step with outcomes that may be chosen.

  Returns (weights, request, state, info, choice) -> (state, info, Window), on
  the host; with choice None all outcomes are production's own. It raises
  base.Broken if children are drawn twice, or a live row reports another q than
  a draft was drawn from.
  """
  drawn: list[tuple] = []

  def propose(weights, state, context, noise, target_cache):
    own = _DrafterNoise(noise)
    return drafter.propose(weights, state, context, own, target_cache)

  @jax.jit
  def run(weights, request, state, info, choice: Choice):
    chosen = Chosen(rule, choice, drawn)
    loop = decode.Loop(
      target,
      drafter._replace(propose=propose),
      rule._replace(verify=chosen.verify, certain=False),
      decode.Options(widths=()),
      noise=chosen.noise,
    )
    return *decode.step(loop, weights, request, state, info), chosen.window

  def step(weights, request, state, info, choice: Choice | None = None):
    drawn.clear()
    size = len(state.lengths_B), drafter.gamma, drafter.gamma
    choice = choice or Choice(np.full(size, -1, np.int32))
    *out, window = jax.device_get(run(weights, request, state, info, choice))
    jax.effects_barrier()
    draws = {parent: found for parent, *found in drawn}
    if len(draws) < len(drawn):
      raise base.Broken(
        f'{drafter.name} draws twice with the noise of one offset'
      )
    window = window._replace(draws=draws)
    reported = _check_reported(drafter.name, state, window)
    return *out, window._replace(reported=reported)

  return step


def begin(world: base.World, pair: base.Pair, request: decode.Request):
  """Prefills: (state, info, step of `watched`) on the host, before a window."""
  rule, drafter, _ = pair
  weights = world.with_draft(pair)
  programs = decode.programs(world.target, drafter, rule, base.OPTIONS)
  step = watched(world.target, drafter, rule)
  step = functools.partial(step, weights, request)
  return *jax.device_get(programs.start(weights, request)), step


# --- what was drawn and what is reported --------------------------------------


def chance_of_drafts(window: Window, choice: Choice):
  """Computes p of the chosen children under what each was drawn from: [B].

  Where nothing was drawn, or no mass is left, the first token comes for sure.
  """
  B, N, _ = choice.children_BNX.shape
  V, chance_B = window.p_BNV.shape[-1], np.ones(B)
  none = np.zeros((B, V)), np.zeros((B, 0))
  for number in range(N):
    q_BV, drawn_BX = window.draws.get(number - 1, none)
    left_BV, free_BV = q_BV.astype(np.float64), np.ones((B, V))
    for x, token_B in enumerate(choice.children_BNX[:, number].T):
      left_BV *= x < drawn_BX.shape[1]
      none_B1 = left_BV.sum(1, keepdims=True) <= 0  # NaN is no 0
      first_BV = np.eye(V)[free_BV.argmax(1)]
      share_BV = enumerate_window.normal(np.where(none_B1, first_BV, left_BV))
      chance_B *= _at(share_BV, token_B)
      for each_BV in (left_BV, free_BV):
        np.put_along_axis(each_BV, token_B[:, None], 0, 1)
  return chance_B


def chance(window: Window, choice: Choice) -> np.ndarray:
  """Computes a whole choice's probability: [B]."""
  t_BK = window.t_BK.astype(np.float64)
  chance_B = np.where(choice.passes_BK, t_BK, 1 - t_BK).prod(1)
  chance_B *= chance_of_drafts(window, choice)
  return chance_B * _at(_normal(window.weights_BV), choice.next_B)


def _check_reported(name: str, state, window: Window) -> int:
  """Compares each proposed draft's reported q with what it was drawn from.

  That is q without its elder siblings. Returns how many were compared; raises
  base.Broken for the first that differs.

  name: the drafter's. state: before the window.
  """
  if (draft := window.draft).q_BKV is None:
    return 0
  tokens_BK, (B, K) = draft.tokens_BK, draft.tokens_BK.shape
  parents_BK = np.asarray(enumerate_window.parents(draft))
  sees_BNN = np.asarray(enumerate_window.sees(draft))
  proposed_BK = np.asarray(tree.proposed(draft))
  q_BNV, drawn_BNX = np.ones(draft.q_BKV.shape), np.full((B, K, K), -1)
  for number in range(K):
    q_BV, drawn_BX = window.draws.get(number - 1, (np.zeros((B, 0)), tokens_BK))
    if q_BV.shape[1] == q_BNV.shape[-1]:  # ids: else it draws something else
      q_BNV[:, number] = q_BV
      drawn_BNX[:, number, : drawn_BX.shape[1]] = drawn_BX[:, :K]
  compared, rows_B, chain = 0, np.arange(B), draft.parents_BK is None
  bound = base.BOUNDS[draft.q_BKV.dtype == np.float64]
  bound = bound if chain else base.bound()
  can_BN = np.repeat(state.live_B[:, None], K + 1, 1)
  for i in range(K):
    parent_B, token_B = parents_BK[:, i], tokens_BK[:, i]
    elders_BX = parents_BK[:, :i] == parent_B[:, None]
    drawn_B = drawn_BNX[rows_B, parent_B + 1, elders_BX.sum(1)]
    q_BV = q_BNV[rows_B, parent_B + 1]
    b, elder = np.nonzero(elders_BX)
    q_BV[b, tokens_BK[b, elder]] = 0
    q_BV = _normal(q_BV)
    reported_BV = draft.q_BKV[:, i].astype(np.float64)
    impossible_B = (drawn_B >= 0) & (_at(q_BV, drawn_B) <= 0)  # NaN is compared
    can_BN[:, i + 1] = can_BN[rows_B, parent_B + 1] & ~impossible_B
    # What is reported as certain is lawful.
    some_B = _at(reported_BV, token_B) != 1
    some_B &= (drawn_B >= 0) & proposed_BK[:, i]
    other_B = some_B & (token_B != drawn_B)
    # A drafter may draw something else and derive its tokens from that.
    if chain and other_B.any():
      continue
    can_B = some_B & can_BN[:, i + 1]
    compared += int(can_B.sum())
    off_B = np.where(can_B, np.abs(reported_BV - q_BV).max(1), 0)
    wrong_B = can_B & (other_B | ~(off_B <= bound))
    if wrong_B.any():
      b = int(np.where(wrong_B, state.lengths_B, np.inf).argmin())
      text = state.tokens_BL[b, : state.lengths_B[b]].tolist()
      text += tokens_BK[b, sees_BNN[b, parent_B[b] + 1, 1:]].tolist()
      raise base.Broken(
        f'after {text} {name} drew draft {i} from {base.show(q_BV[b])} and '
        f'reports q {base.show(reported_BV[b])}'
      )
  return compared


def _normal(weights_BV) -> np.ndarray:
  with np.errstate(invalid='ignore'):
    return enumerate_window.normal(weights_BV.astype(np.float64))


def _at(p_BV, tokens_B):
  """Picks the probability of each row's token."""
  return np.take_along_axis(p_BV, tokens_B[:, None], 1)[:, 0]


# --- long rows ----------------------------------------------------------------

GAMMA, VOCAB, NEW = 8, 6, 96
QUICK = 12  # rows
# Tokens of the prompts: around the edges of prefill's chunks, and long ones. A
# batch holds one of each.
LENGTHS = (1, 2, 8, 9, 10, 16, 17, 18, 26, 33, 40, 61)
# Of the rows, in turns: a batch mixes greedy and sampled ones.
TEMPERATURES, TOP_K, TOP_P = (1.0, 0.7, 1.9, 0.0), (0, 4, 2), (1.0, 0.9, 0.5)
SETTINGS = [
  dict(
    temperature=TEMPERATURES[b % 4], top_k=TOP_K[b % 3], top_p=TOP_P[b // 4 % 3]
  )
  for b in range(len(LENGTHS))
]


def long_rows(subject: base.Subject, amount: int) -> base.Figure:
  """Compares drafts' reported q, and the target's p, all along long rows.

  Runs production steps with production's noise, in float64. The q that the rule
  got is compared with what each draft was drawn from, and p with the table's.

  amount: rows for each pair of rule and drafter.
  """
  done: dict[str, int] = {}
  many_p = longest = 0
  with jax.enable_x64(True):
    world = subject.tables(VOCAB)
    for rule, name, gamma, rows in _cells(subject, amount):
      pair = subject.pair(world, gamma, rule, name)
      cell = f'{rule.name} {name} {pair.drafter.gamma}'
      if cell in done:  # a drafter may fix its gamma
        continue
      seeds = [subject.seed + seed for seed in range(0, rows, len(LENGTHS))]
      with base.naming(pair):
        done[cell], p, length = _follow(world, pair, seeds)
      many_p, longest = many_p + p, max(longest, length)
  return base.Figure(
    f'0 of {sum(done.values()):,} q and of {many_p:,} p differ',
    f'{base.BOUNDS[True]:.0e} in float64',
    f'rows to {longest} tokens, prompts of 1 to {max(LENGTHS)}; rule, drafter, '
    f'gamma: {", ".join(f"{cell} {n:,} q" for cell, n in done.items())}',
  )


def _cells(subject: base.Subject, amount: int):
  """Yields (rule, drafter, gamma, rows): pairs at one gamma, if full at all."""
  few = [GAMMA, *(5 + i % 3 for i in range(len(subject.rules)))]
  for rule, name in subject.pairs():
    one = few[subject.rules.index(rule)]
    gammas = range(1, GAMMA + 1) if amount > QUICK else [one]
    for gamma in gammas:
      yield rule, name, gamma, amount // len(gammas)


def _follow(world: base.World, pair: base.Pair, seeds) -> tuple[int, int, int]:
  """Counts the q and p that these batches compared, and the longest row."""
  many_q = many_p = longest = 0
  gamma = pair.drafter.gamma
  for seed in seeds:
    rng = np.random.default_rng([seed, gamma])
    prompts = [rng.integers(0, world.vocab, n).tolist() for n in LENGTHS]
    more = {name: [row[name] for row in SETTINGS] for name in SETTINGS[0]}
    more |= dict(length=max(LENGTHS) + NEW + gamma + 2, sources=16)
    request = base.make_request(
      world, prompts, NEW, gamma=gamma, seed=seed, **more
    )
    tables = [
      base.target_table(world, prompt, **row)
      for prompt, row in zip(prompts, SETTINGS, strict=True)
    ]
    state, info, step = begin(world, pair, request)
    while state.live_B.any():
      # From window to window, as of hybrid's and adaptive's drafters.
      request.gamma_B[:] = _caps(rng, len(LENGTHS), gamma)
      new, info, window = step(state, info)
      many_q += window.reported
      many_p += check_target(tables, state, window)
      state = new
    longest = max(longest, int(state.lengths_B.max()))
  return many_q, many_p, longest


def _caps(rng, rows: int, gamma: int) -> np.ndarray:
  """Caps each row's drafts, by chance: at gamma, or at 0 to gamma."""
  some_B = rng.integers(0, gamma + 1, rows)
  return np.where(rng.random(rows) < 0.5, gamma, some_B)


def check_target(tables, state, window: Window) -> int:
  """Compares p at every proposed draft, and at the token after them.

  tables: each row's target p. state: before the window. Returns how many were
  compared; raises base.Broken for the first that differs.
  """
  compared, draft = 0, window.draft
  proposed_BK = np.asarray(tree.proposed(draft))
  sees_BNN = np.asarray(enumerate_window.sees(draft))
  for b in np.flatnonzero(state.live_B):
    text = state.tokens_BL[b, : state.lengths_B[b]].tolist()
    for number in [0, *np.flatnonzero(proposed_BK[b]) + 1]:
      above = draft.tokens_BK[b, sees_BNN[b, number, 1:]].tolist()
      wanted_V = table_model.row_of(tables[b], text + above)
      own_V = window.p_BNV[b, number]
      compared += 1
      if not np.abs(own_V - wanted_V).max() <= base.BOUNDS[True]:
        raise base.Broken(
          f'after {text + above}, of which {len(above)} are drafts, p is '
          f'{base.show(own_V)} instead of {base.show(wanted_V)}'
        )
  return compared
