"""The promise about long rows: every q and every p along sampled texts."""

import jax
import numpy as np

from specdec_jax import decode, types
from specdec_jax.certify import base, enumerate_steps, table_model

GAMMA, VOCAB, NEW = 8, 6, 96
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
  done: dict[str, int] = {}
  many_p = longest = 0
  with jax.enable_x64(True):
    world = subject.tables(VOCAB)
    for rule, name in subject.pairs():
      drafter, other = subject.drafters[name](world, GAMMA)
      what = f'{rule.name} with {drafter.name}, gamma {drafter.gamma}'
      step = enumerate_steps.watched(world.target, drafter, rule)
      many_q = 0
      for start in range(0, amount, len(LENGTHS)):
        request = _request(world, subject.seed + start, drafter.gamma)
        weights = types.Weights(world.weights.target, other)
        try:
          more_q, more_p, last = _follow(
            world, drafter, rule, step, weights, request
          )
        except base.Broken as error:
          raise base.Broken(f'{what}: {error}') from None
        many_q, many_p = many_q + more_q, many_p + more_p
        longest = max(longest, last)
      done[f'{rule.name} {name}'] = many_q
  bound = base.BOUNDS[True]
  return base.Figure(
    f'0 of {sum(done.values()):,} q and of {many_p:,} p differ',
    f'{bound:.0e} in float64',
    f'gamma {GAMMA}, rows to {longest} tokens, prompts of 1 to {max(LENGTHS)}; '
    + ', '.join(f'{name} {n:,} q' for name, n in done.items()),
  )


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


def _follow(world, drafter, rule, step, weights, request):
  """Decodes a batch, looking at every window; -> counts of q, p, and a length.

  Raises:
    base.Broken: the first q that was not drawn from, or p that is not the
      target's.
  """
  programs = decode.programs(world.target, drafter, rule, base.OPTIONS)
  state, info = jax.device_get(programs.start(weights, request))
  rows = len(request.lengths_B)
  free_BK = np.full((rows, drafter.gamma), -1, np.int32)
  tables = [
    table_model.given(
      table_model.warped(world.weights.target, **row),
      base.source_of(world, request.tokens_BL[b, : request.lengths_B[b]]),
    )
    for b, row in enumerate(settings(rows))
  ]
  many_q = many_p = 0
  while state.live_B.any():
    choice = enumerate_steps.Choice(free_BK)
    new, info, seen, draws = step(weights, request, state, info, choice)
    many_q += enumerate_steps.check_reported(
      drafter.name, state, seen['draft'], draws, state.live_B
    )
    many_p += _check_target(tables, state, seen['draft'], seen['p_BNV'])
    state = new
  return many_q, many_p, int(state.lengths_B.max())


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
