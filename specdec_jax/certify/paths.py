"""The promise about long rows: every q and every p along sampled texts."""

import jax
import numpy as np

from specdec_jax import decode, types
from specdec_jax.certify import base, enumerate_steps, table_model

GAMMA, VOCAB, NEW = 8, 6, 96
QUICK = 12  # rows
# Tokens of the prompts: around the edges of prefill's chunks, and long ones. A
# batch holds one of each.
LENGTHS = (1, 2, 8, 9, 10, 16, 17, 18, 26, 33, 40, 61)
# Of the rows, in turns: a batch mixes greedy and sampled ones.
TEMPERATURES, TOP_K, TOP_P = (1.0, 0.7, 1.3, 0.0), (0, 4, 2), (1.0, 0.9)


def long_rows(subject: base.Subject, amount: int) -> base.Figure:
  """Drafts' reported q, and the target's p, at every offset of long rows.

  Production steps with production's noise, in float64. What each draft was
  drawn from is compared with the q that the rule got for it; and p, of every
  position that the rule got, with the table's.

  amount: rows of each pair of rule and drafter.
  """
  done: dict[tuple[str, str, int], int] = {}
  many_p = longest = 0
  with jax.enable_x64(True):
    world = subject.tables(VOCAB)
    for rule, name, gamma, rows in _cells(subject, amount):
      drafter, other = subject.drafters[name](world, gamma)
      cell = rule.name, name, drafter.gamma
      if cell in done:  # a drafter may fix its gamma
        continue
      method, seeds = (rule, drafter, other), range(0, rows, len(LENGTHS))
      try:
        found = _follow(world, method, [subject.seed + seed for seed in seeds])
      except base.Broken as error:
        what = f'{rule.name} with {drafter.name}, gamma {drafter.gamma}'
        raise base.Broken(f'{what}: {error}') from None
      done[cell] = found[0]
      many_p, longest = many_p + found[1], max(longest, found[2])
  return base.Figure(
    f'0 of {sum(done.values()):,} q and of {many_p:,} p differ',
    f'{base.BOUNDS[True]:.0e} in float64',
    f'rows to {longest} tokens, prompts of 1 to {max(LENGTHS)}; rule, drafter, '
    'gamma: '
    + ', '.join(f'{" ".join(map(str, x))} {n:,} q' for x, n in done.items()),
  )


def _cells(subject: base.Subject, amount: int):
  """(rule, drafter, gamma, rows): each pair at one gamma or, if full, at all.

  The first rule, which meets every drafter, has the largest.
  """
  every = range(1, GAMMA + 1)
  gammas = {rule.name: [5 + i % 3] for i, rule in enumerate(subject.rules[1:])}
  gammas[subject.rules[0].name] = [GAMMA]
  for rule, name in subject.pairs():
    for gamma in every if amount > QUICK else gammas[rule.name]:
      yield rule, name, gamma, amount // (len(every) if amount > QUICK else 1)


def settings(rows: int) -> list[dict[str, float]]:
  """Sampling settings of each row."""
  return [
    dict(
      temperature=TEMPERATURES[b % len(TEMPERATURES)],
      top_k=TOP_K[b % len(TOP_K)],
      top_p=TOP_P[b // 2 % len(TOP_P)],
    )
    for b in range(rows)
  ]


def _request(world: base.World, seed: int, gamma: int) -> decode.Request:
  """A batch of a prompt of each of LENGTHS."""
  rng = np.random.default_rng([seed, gamma])
  rows = len(LENGTHS)
  every = settings(rows)
  return base.make_request(
    world,
    [rng.integers(0, world.vocab, n).tolist() for n in LENGTHS],
    NEW,
    length=max(LENGTHS) + NEW + gamma + 2,
    sources=16,
    gamma=gamma,
    seed=seed,
    request=list(range(rows)),
    **{name: [row[name] for row in every] for name in every[0]},
  )


def _follow(world: base.World, method, seeds) -> tuple[int, int, int]:
  """Decodes a batch of each seed, looking at every window.

  method: rule, drafter and weights.draft. Returns how many q and p were
  compared, and the length of the longest row.

  Raises:
    base.Broken: the first q that was not drawn from, or p that is not the
      target's.
  """
  rule, drafter, other = method
  many_q = many_p = longest = 0
  weights = types.Weights(world.weights.target, other)
  step = enumerate_steps.watched(world.target, drafter, rule)
  programs = decode.programs(world.target, drafter, rule, base.OPTIONS)
  for seed in seeds:
    request = _request(world, seed, drafter.gamma)
    state, info = jax.device_get(programs.start(weights, request))
    free_BK = np.full((len(LENGTHS), drafter.gamma), -1, np.int32)
    choice, tables = enumerate_steps.Choice(free_BK), _tables(world, request)
    while state.live_B.any():
      new, info, seen, draws = step(weights, request, state, info, choice)
      many_q += enumerate_steps.check_reported(
        drafter.name, state, seen['draft'], draws, state.live_B
      )
      many_p += _check_target(tables, state, seen['draft'], seen['p_BNV'])
      state = new
    longest = max(longest, int(state.lengths_B.max()))
  return many_q, many_p, longest


def _tables(world: base.World, request: decode.Request) -> list[np.ndarray]:
  """The target's probabilities under each row's settings and source."""
  rows = enumerate(settings(len(request.lengths_B)))
  return [
    table_model.given(
      table_model.warped(world.weights.target, **row),
      base.source_of(world, request.tokens_BL[b, : request.lengths_B[b]]),
    )
    for b, row in rows
  ]


def _check_target(tables, state, draft: types.Draft, p_BNV) -> int:
  """Compares p of every proposed draft, and of the token after them."""
  compared = 0
  for b in np.flatnonzero(state.live_B):
    text = state.tokens_BL[b, : state.lengths_B[b]].tolist()
    for k in range(draft.count_B[b] + 1):
      prefix = text + draft.tokens_BK[b, :k].tolist()
      wanted_V = table_model.row_of(tables[b], prefix)
      off = np.abs(p_BNV[b, k] - wanted_V).max()
      compared += 1
      if not off <= base.BOUNDS[True]:
        raise base.Broken(
          f'after {prefix}, of which {k} are drafts, p is '
          f'{base.show(p_BNV[b, k])} instead of {base.show(wanted_V)}'
        )
  return compared
