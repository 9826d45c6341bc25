"""Promises about distributions, checked by enumeration: no sampling error."""

import collections
import functools
import itertools
from typing import Any

import jax
import numpy as np

from specdec_jax import types
from specdec_jax.certify import (
  base,
  enumerate_window,
  load,
  problems,
  steps,
  table_model,
)
from specdec_jax.costs import scripted
from specdec_jax.drafters import branch

# (gamma, vocab, share of the problems). Each compiles once. Smallest first, so
# that the failing case that is reported is small.
SHAPES = ((1, 2, 0.4), (2, 4, 0.4), (3, 3, 0.2), (6, 2, 0.004))
# Levels of trees, by kind of siblings; the quick tier has the first three.
TREES = {
  'distinct': ('4', '1,1,2', '1,2,2', '2,2', '3,1'),
  'deterministic': ('2,2', '4'),
}
# Nodes of a tree in production steps -> V; see load.tree, load.sized_tree.
STEPS = {3: 5, 4: 5, 5: 3}
SIZED, SIZES = 'adaptive tree', {4: 3, 8: 5}
SCRIPTED = 'scripted'
FULL = 10_000  # pairs, from which all trees are enumerated
ROWS = 8192  # of the batches of production steps
# One long window of each pair of rule and drafter, in turns, at V 2.
LONG_GAMMAS = (8, 4, 5, 6, 7)
# Tokens of the prompts before it: short, and over edges of prefill's chunks.
LONG_ROWS = (3, 9, 14, 17, 25, 34)


def window_distribution(subject: base.Subject, amount: int) -> base.Figure:
  """Enumerates one window's accept tests: the p of gamma + 1 tokens."""
  worst, done, skipped = collections.defaultdict(float), [], []
  for rule in subject.rules:
    ran = []
    try:
      for x64, words, error in _runs(subject, rule, amount):
        with jax.enable_x64(x64):
          ran.append((x64, words, error()))
    except enumerate_window.NotEnumerable as why:
      skipped.append(_skipped(subject, rule, why))
      continue
    for x64, words, off in ran:
      worst[x64] = max(worst[x64], off)
      done.append(words)
  return _figure(worst, 'pairs (p, q): ', done, skipped)


def _skipped(subject: base.Subject, rule: types.Rule, why: Any) -> str:
  """Says why a rule is skipped; only a user's, or a coupled one, may be."""
  reason = f'{rule.name}: {why}'
  if 'rule' in subject.supplied or rule.coupled:
    return reason
  raise base.Broken(reason)


def _runs(subject: base.Subject, rule: types.Rule, amount: int):
  """Yields (float64 or not, what in words, its error) for each enumeration."""
  if rule in subject.apart():
    for x64, shape in itertools.product(base.BOUNDS, SHAPES):
      run = functools.partial(window_error, rule, subject.seed, amount, *shape)
      yield x64, f'{rule.name} {amount:,}', run
  cases, full, each = cases_of(rule), amount >= FULL, 1 + amount // 250
  chosen = itertools.product(base.BOUNDS, cases if full else cases[:3])
  if not full and rule is not subject.rules[0]:
    chosen = zip((True, False, True), cases, strict=False)
    each = 1 + amount // 1000
  for x64, case in chosen:
    words = f'{" ".join(case)} {each * len(problems.FAMILIES):,}'
    run = functools.partial(tree_error, rule, subject.seed, *case, each)
    yield x64, f'{rule.name} on trees {words}', run


def _figure(worst: dict[bool, float], of: str, done, skipped) -> base.Figure:
  """Makes a promise's figure. worst: by float64 or not. done: in words."""
  reasons = '; '.join(dict.fromkeys(skipped))
  if not done:
    raise base.NotChecked(f'{reasons}; counting covers it')
  ran, names = sorted(worst), ('float32', 'float64')
  size = of + ', '.join(dict.fromkeys(done))
  return base.Figure(
    f'off by {", ".join(f"{worst[x64]:.1e}" for x64 in ran)}',
    ', '.join(f'{base.BOUNDS[x64]:.0e} in {names[x64]}' for x64 in ran),
    f'{size}; not checked: {reasons}' if skipped else size,
  )


def cases_of(rule: types.Rule) -> list[tuple[str, str]]:
  """Lists (levels, kind) of the trees that a rule takes, its kinds in turns."""
  turns = itertools.zip_longest(*TREES.values())
  every = (x for turn in turns for x in zip(turn, TREES, strict=True))
  return [(levels, kind) for levels, kind in every if levels and rule.trees]


def window_error(rule: types.Rule, seed, amount, gamma, vocab, share) -> float:
  """Measures the largest error in all families, on this share of problems."""
  each = max(1, round(amount * share / len(problems.FAMILIES)))
  p, q = problems.of_all_families(seed, each=each, gamma=gamma, vocab=vocab)
  rng = np.random.default_rng([seed, gamma, vocab])
  ragged_X = rng.integers(0, gamma + 1, len(p))
  kinds = {
    'sampled drafts': ('distinct', None),
    'sampled drafts, fewer proposed': ('distinct', ragged_X),
    'certain drafts (q None)': ('deterministic', ragged_X),
  }
  return max(
    _error(rule, what, p, q, problems.windows(p, q, kind, count_X=count_X))
    for what, (kind, count_X) in kinds.items()
  )


def tree_error(rule: types.Rule, seed, levels: str, kind: str, each: int):
  """Measures the same on `each` tree of every family.

  There is one id more than siblings: with as many, the last sibling is what the
  others left of p under any rule.
  """
  sizes = [*map(int, levels.split(','))]
  shape = dict(gamma=len(sizes), vocab=max(2, *sizes) + 1)
  p, q = problems.of_all_families(seed, each=each, **shape)
  batch = problems.windows(p, q, kind, problems.parents_of(levels))
  return _error(rule, f'a tree of {levels} {kind} siblings', p, q, batch)


def _error(rule: types.Rule, what: str, p, q, batch) -> float:
  """Measures the largest error of a window's distribution."""
  enumerate_window.check_support(rule, batch, what)
  wanted = problems.target_distribution(p)
  found = enumerate_window.ends(rule, batch)
  got = enumerate_window.distribution(found, batch, wanted)
  families, bound = [*problems.FAMILIES], base.bound()
  off_FX = np.abs(got - wanted).reshape(len(families), -1, got[0].size).max(2)
  off_FX = np.where(np.isnan(off_FX), np.inf, off_FX)
  if off_FX.max() > bound:
    wrong_F = off_FX.max(1) > bound
    first = int(wrong_F.argmax())
    x = first * off_FX.shape[1] + int(off_FX[first].argmax())
    raise base.Broken(
      f'{rule.name}, {what}: wrong in {wrong_F.sum()} of {len(families)} '
      f'families of (p, q); the plainest, {families[first]!r}: gamma '
      f'{q.shape[1]}, V {q.shape[2]}; p of the first token '
      f'{base.show(p[x, 0, 0])}, q {base.show(q[x, 0, 0])}; '
      f'{_shortest(got[x], wanted[x])}; off by {off_FX[first].max():.1e}, '
      f'allowed {bound:.0e}'
    )
  return float(off_FX.max())


def _shortest(got, wanted) -> str:
  """Writes the shortest texts that show most of an error."""
  off, n = np.abs(got - wanted).max(), got.ndim
  first = lambda x, m: x.sum(tuple(range(m, n)))  # of the first m tokens
  error = lambda m: np.abs(first(got, m) - first(wanted, m))
  m = next(m for m in range(1, n + 1) if not error(m).max() < 0.1 * off)
  one, two = first(got, m), first(wanted, m)
  if m == 1:
    return f'emitted {base.show(one)} instead of {base.show(two)}'
  at = np.unravel_index(error(m).argmax(), one.shape)
  tokens = ' '.join(map(str, at))
  return f'tokens {tokens} come {one[at]:.6g} instead of {two[at]:.6g}'


# --- windows of production steps ----------------------------------------------


def _cells(pairs, vocab: int):
  """Yields (rule, drafter, float64 or not, gamma, V, long) to enumerate.

  Three windows at gamma 2 after a short prompt, in both dtypes, and one long
  window for each pair. In float32 the proposed tokens vary from 0 to gamma.
  Trees have long windows alone, all sizes under the first rule, others 3 and 5.
  """
  gammas = itertools.cycle(LONG_GAMMAS)
  for i, (rule, name) in enumerate(pairs):
    if name in (base.TREE, SIZED):
      sizes = STEPS if name == base.TREE else SIZES
      for gamma, own in sizes.items():
        if rule is pairs[0][0] or gamma in (3, 5):
          yield rule, name, gamma != 3, gamma, own, True
      continue
    yield rule, name, True, 2, vocab, False
    yield rule, name, False, 2, vocab, False
    if name != SCRIPTED:  # its tokens are those of the short walks' rows
      yield rule, name, i % 2 == 0, next(gammas), 2, True


def windows_enumerated(subject: base.Subject, amount: int) -> base.Figure:
  """Enumerates every draw in windows of production steps; amount is V.

  Each pair of rule and drafter has three windows of gamma 2 in float64 and
  float32, and one of gamma 4 to 8, or a tree, after rows of several lengths.
  """
  worst, skipped = collections.defaultdict(float), []
  pairs = subject.pairs()
  if not subject.supplied:
    pairs += [(rule, SCRIPTED) for rule in subject.apart()]
  first, own = subject.rules[0], {SCRIPTED: script, SIZED: load.sized_tree}
  if base.TREE in subject.drafters:
    pairs.append((first, SIZED))
  subject = subject._replace(drafters={**subject.drafters, **own})
  why = {rule: _not_enumerable(subject, rule) for rule in subject.rules}
  ran = []
  for rule, name, x64, gamma, vocab, long in _cells(pairs, amount):
    if why[rule]:
      continue
    with jax.enable_x64(x64):
      world = subject.tables(vocab)
      pair = subject.pair(world, gamma, rule, name)
      own = pair.drafter.gamma
      if pair.drafter.tree and not long:
        continue
      if own > (max(LONG_GAMMAS) if long else gamma):
        skipped.append(f'{name}: gamma {own} has too many outcomes')
        continue
      settings: dict[str, Any] = dict(temperature=1.0)
      if not x64:
        pair = pair._replace(drafter=base.ragged(pair.drafter))
        settings = dict(temperature=0.7, top_k=2)
      error = long_window_error if long else windows_error
      with base.naming(f'{pair}, V {vocab}, {settings}'):
        try:
          off = error(world, pair, settings)
        except enumerate_window.NotEnumerable as reason:
          why[rule] = _skipped(subject, rule, reason)
          continue
    ran.append((rule, x64, f'{rule.name} {name} {own}', off))
  # A rule counts where all of its walks ran.
  ran = [x for x in ran if not why[x[0]]]
  for _, x64, _, off in ran:
    worst[x64] = max(worst[x64], off)
  of, done = f'{len(ran)} walks; rule, drafter, gamma: ', [x[2] for x in ran]
  return _figure(worst, of, done, [*filter(None, why.values()), *skipped])


def _not_enumerable(subject: base.Subject, rule: types.Rule) -> str:
  """Says why a rule's outcomes on chains cannot be enumerated, else ''."""
  p, q = problems.of_all_families(0, each=20, gamma=2, vocab=3)
  try:
    enumerate_window.ends(rule, problems.windows(p, q, 'distinct'))
  except enumerate_window.NotEnumerable as why:
    return _skipped(subject, rule, why)
  return ''


def script(world: base.World, gamma: int):
  """Drafts 0 to gamma fixed tokens with certainty: a base.Recipe."""
  tokens_1L = np.random.default_rng(1).integers(0, world.vocab, (1, 48))
  tokens_BL = np.repeat(tokens_1L.astype(np.int32), ROWS, 0)
  return scripted.make(gamma=gamma), (tokens_BL, tokens_BL % (gamma + 1))


def windows_error(world, pair: base.Pair, settings) -> float:
  """Measures the largest error of three windows' joint p; see walk."""
  tokens_RL, lengths_R, chance_R = walk(world, pair, settings)
  total = float(chance_R.sum())
  if not abs(total - 1) <= base.bound():
    raise base.Broken(
      f'all outcomes together have probability {total:.6g}: a distribution '
      'that is drawn from does not sum to 1, or is not finite'
    )
  prompt, V = table_model.PROMPT[world.vocab], world.vocab
  n, start = 3 * (pair.drafter.gamma + 1), len(prompt)
  wanted = base.joint(world, prompt, n, **settings)
  got = np.zeros_like(wanted)
  for m in range(1, n + 1):  # the target continues the texts of m tokens
    rows = lengths_R == start + m
    texts = tokens_RL[rows, start : start + m]
    flat = np.ravel_multi_index(tuple(texts.T), (V,) * m)
    mass = np.bincount(flat, chance_R[rows], V**m).reshape((1,) + (V,) * m)
    got += enumerate_window.continued(mass, wanted[None])[0]
  return _largest_error([prompt], got[None], wanted[None])


def long_window_error(world, pair: base.Pair, settings) -> float:
  """Measures one window's largest error, three windows after LONG_ROWS."""
  (rule, drafter, _), rng = pair, np.random.default_rng(world.vocab)
  prompts = [rng.integers(0, world.vocab, n).tolist() for n in LONG_ROWS]
  K, X, levels = drafter.gamma, len(prompts), drafter.tree
  every = np.zeros((1, sum(levels), 1), np.int32)
  if not branch.is_ranked(drafter):  # which draws nothing
    every = children(world.vocab, levels or (1,) * K)
  R, new = len(every), 4 * (K + 1)
  length = max(LONG_ROWS) + new + K + 2
  shape = dict(length=length, gamma=K, drafts=[K, K, 1, K, K // 2, K])
  request = base.make_request(world, prompts, new, **shape, **settings)
  # Rows that are alike, number included, draw alike: R copies of each.
  request = base.take(request, np.repeat(np.arange(X), R))
  state, info, step = steps.begin(world, pair, request)
  choice = steps.Choice(np.tile(every, (X, 1, 1)))
  drawn = steps.Choice(np.full_like(choice.children_BNX, -1))
  for _ in range(3):
    state, info, _ = step(state, info, drawn)
  _, _, window = step(state, info, choice)
  chance_B = steps.chance_of_drafts(window, choice)
  batch = enumerate_window.Windows(window.draft, window.p_BNV, chance_B)
  found = enumerate_window.ends(rule, batch)
  rows = zip(state.tokens_BL[::R], state.lengths_B[::R], strict=True)
  texts = [tokens_L[:end].tolist() for tokens_L, end in rows]
  joint = functools.partial(base.joint, world, n=1 + (len(levels) or K))
  pairs = zip(prompts, texts, strict=True)
  wanted = np.stack([joint(x, text=text, **settings) for x, text in pairs])
  got = enumerate_window.distribution(found, batch, wanted)
  return _largest_error(texts, got, wanted)


def _largest_error(texts, got, wanted) -> float:
  """Measures the largest error of the distributions after some texts."""
  bound, worst = base.bound(), 0.0
  for text, one, two in zip(texts, got, wanted, strict=True):
    off = float(np.abs(one - two).max())
    if not off <= bound:
      raise base.Broken(
        f'after {text} {_shortest(one, two)}; off by {off:.1e}, allowed '
        f'{bound:.0e}'
      )
    worst = max(worst, off)
  return worst


def walk(world: base.World, pair: base.Pair, settings):
  """Lists all texts of three consecutive windows after PROMPT.

  Returns (tokens_RL, lengths_R, chance_R) for R texts; each chance is that of
  its draws under the distributions that the steps drew from.

  settings: fields of sampling.Sampling.
  """
  prompt = table_model.PROMPT[world.vocab]
  request = base.make_request(world, [prompt] * ROWS, 40, length=48, **settings)
  state, info, step = steps.begin(world, pair, request)
  each = choices(world.vocab, pair.drafter.gamma)
  count = len(each.next_B)
  rows, chance_R = base.take(state, [0]), np.ones(1)
  for _ in range(3):
    parts, chances = [], []
    for start in range(0, len(chance_R) * count, ROWS):
      index = np.arange(start, start + ROWS)
      live = index < len(chance_R) * count
      index = np.where(live, index, 0)
      before = base.take(rows, index // count)
      choice = base.take(each, index % count)
      new, _, window = step(before, info, choice)
      chance_B = steps.chance(window, choice)
      chance_B *= chance_R[index // count] * live
      parts.append(base.take(new, np.flatnonzero(chance_B != 0)))
      chances.append(chance_B[chance_B != 0])
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    chance_R = np.concatenate(chances)
  return rows.tokens_BL, rows.lengths_B, chance_R


def choices(vocab: int, gamma: int) -> steps.Choice:
  """Lists every Choice of one window, as a batch."""
  sizes = (vocab,) * gamma + (2,) * gamma + (vocab,)
  every = np.indices(sizes, np.int32).reshape(len(sizes), -1).T
  drafts_RNX = every[:, :gamma, None]
  return steps.Choice(drafts_RNX, every[:, gamma:-1] == 0, every[:, -1])


def children(vocab: int, levels: tuple[int, ...]) -> np.ndarray:
  """Lists all children that a tree's or chain's numbers may have: [R, N, X]."""
  most, inner = min(max(levels), vocab), 1 + sum(levels[:-1])
  draws = [*itertools.permutations(range(vocab), most)]
  every = itertools.product(draws, repeat=inner)
  return np.array([*every], np.int32)
