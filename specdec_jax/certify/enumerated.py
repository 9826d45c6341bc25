"""Promises about distributions, checked by enumeration: no sampling error."""

import collections
import itertools
from typing import Any

import jax
import numpy as np

from specdec_jax import types
from specdec_jax.certify import (
  base,
  enumerate_window,
  steps,
  table_model,
  trees,
)
from specdec_jax.costs import scripted
from specdec_jax.verify import tree

# (gamma, vocab, share of the problems). Each compiles once. Smallest first, so
# that the failing case that is reported is small.
SHAPES = ((1, 2, 0.4), (2, 4, 0.4), (3, 3, 0.2), (6, 2, 0.004))
SCRIPTED = 'scripted'
FULL = 10_000  # pairs, from which all trees are enumerated
ROWS = 8192  # of the batches of production steps
# One long window of each pair of rule and drafter, in turns, at V 2.
LONG_GAMMAS = (8, 4, 5, 6, 7)
# Tokens of the prompts before it: short, and over edges of prefill's chunks.
LONG_ROWS = (3, 9, 14, 17, 25, 34)


def window_distribution(subject: base.Subject, amount: int) -> base.Figure:
  """gamma + 1 tokens of one window, by enumerating its accept tests."""
  worst, done, skipped = collections.defaultdict(float), [], []
  for rule in subject.rules:
    try:
      shapes = SHAPES * (rule in subject.apart())
      for x64, shape in itertools.product(base.BOUNDS, shapes):
        with jax.enable_x64(x64):
          off = window_error(rule, subject.seed, amount, *shape)
        worst[x64] = max(worst[x64], off)
      done += [f'{rule.name} {amount:,}'] * bool(shapes)
      for x64, case, each in _on_trees(rule, amount, rule is subject.rules[0]):
        with jax.enable_x64(x64):
          off = trees.error(rule, subject.seed, *case, each)
        worst[x64] = max(worst[x64], off)
        many = each * len(enumerate_window.FAMILIES)
        done.append(f'{rule.name} on trees {" ".join(case)} {many:,}')
    except enumerate_window.NotEnumerable as why:
      skipped.append(f'{rule.name}: {why}')
  return _figure(worst, 'pairs (p, q): ', done, skipped)


def _on_trees(rule: types.Rule, amount: int, first: bool):
  """(float64 or not, case, problems of a family) of what trees.error does.

  The quick tier has two cases of the first rule, and two of each other, with
  fewer problems and in one dtype each.
  """
  cases, full = trees.cases(rule), amount >= FULL
  if full or first:
    every = itertools.product(base.BOUNDS, cases if full else cases[:2])
    return [(*x, 1 + amount // 250) for x in every]
  return [(i == 0, x, 1 + amount // 1000) for i, x in enumerate(cases[1:3])]


def _figure(worst: dict[bool, float], of: str, done, skipped) -> base.Figure:
  """The figure of a promise. worst: by whether in float64. done: in words."""
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


def window_error(rule: types.Rule, seed, amount, gamma, vocab, share) -> float:
  """The largest error over all families, for three kinds of drafts.

  share: of the amount of problems of all shapes, for this one.

  Raises:
    base.Broken: an error above the bound; reports the simplest family.
  """
  families = list(enumerate_window.FAMILIES)
  each = max(1, round(amount * share / len(families)))
  p, q = enumerate_window.of_all_families(
    seed, each=each, gamma=gamma, vocab=vocab
  )
  rng = np.random.default_rng([seed, gamma, vocab])
  ragged = rng.integers(0, gamma + 1, len(p)).astype(np.int32)
  script = rng.integers(0, vocab, (len(p), gamma))
  kinds = {
    'sampled drafts': (q, np.full_like(ragged, gamma), None),
    'sampled drafts, fewer proposed': (q, ragged, None),
    'certain drafts (q None)': (None, ragged, script),
  }
  bound, worst = base.bound(), 0.0
  wanted = enumerate_window.target_distribution(p)
  for kind, (q_XKVV, count_X, script_XK) in kinds.items():
    batch = enumerate_window.windows(p, q_XKVV, count_X, script_XK)
    _check_support(rule, batch, kind)
    got = enumerate_window.window_distribution(rule, batch, wanted)
    off_X = np.abs(got - wanted).reshape(len(p), -1).max(1)
    off_X = np.where(np.isnan(off_X), np.inf, off_X)
    if off_X.max() > bound:
      worst_F = off_X.reshape(-1, each).max(1)
      first = int((worst_F > bound).argmax())
      x = first * each + int(off_X[first * each :][:each].argmax())
      raise base.Broken(
        f'{rule.name}, {kind}: wrong in {(worst_F > bound).sum()} of '
        f'{len(families)} families of (p, q); the plainest, '
        f'{families[first]!r}: gamma {gamma}, V {vocab}; p of the first token '
        f'{base.show(p[x, 0, 0])}, q {base.show(q[x, 0, 0])}; '
        f'{_shortest(got[x], wanted[x])}; off by {off_X[x]:.1e}, allowed '
        f'{bound:.0e}'
      )
    worst = max(worst, float(off_X.max()))
  return worst


def _shortest(got, wanted) -> str:
  """The shortest texts that show most of an error, in words."""
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


def _check_support(rule, batch: enumerate_window.Windows, kind: str) -> None:
  """Tokens of p = 0 must not be accepted at u = 0 either.

  An enumeration cannot see this: u = 0 has probability 0 there.
  """
  tokens_BK = np.asarray(batch.draft.tokens_BK)
  K = tokens_BK.shape[1]
  zeros = np.zeros(tokens_BK.shape, batch.p_BNV.dtype)
  accepted_B, _ = enumerate_window.run_rule(rule, batch, zeros)
  p_BK = np.take_along_axis(
    np.asarray(batch.p_BNV)[:, :K], tokens_BK[..., None], -1
  )[..., 0]
  wrong_B = ((np.arange(K) < accepted_B[:, None]) & (p_BK == 0)).any(1)
  wrong_B &= batch.chance_XR.reshape(-1) > 0  # the others are never drafted
  if wrong_B.any():
    b = int(wrong_B.argmax())
    raise base.Broken(
      f'{rule.name}, {kind}: at u = 0 it accepts {accepted_B[b]} of the drafts '
      f'{tokens_BK[b].tolist()}, whose p are {p_BK[b].tolist()}'
    )


# --- windows of production steps ----------------------------------------------


def _cells(pairs, vocab: int):
  """(rule, drafter, float64 or not, gamma, V, long) of what is enumerated.

  Three windows of gamma 2 after a short prompt, in both dtypes, and one long
  window of each pair. In float32 the proposed tokens vary from 0 to gamma. Of
  trees there are long windows alone.
  """
  gammas = itertools.cycle(LONG_GAMMAS)
  for i, (rule, name) in enumerate(pairs):
    if name == base.TREE:
      yield rule, name, True, 4, vocab, True
      yield rule, name, False, 3, vocab, True
      continue
    yield rule, name, True, 2, vocab, False
    yield rule, name, False, 2, vocab, False
    if name != SCRIPTED:  # its tokens are those of the short walks' rows
      yield rule, name, i % 2 == 0, next(gammas), 2, True


def windows_enumerated(subject: base.Subject, amount: int) -> base.Figure:
  """Windows of production steps, enumerating every draw; amount is V.

  Each pair of rule and drafter has three windows of gamma 2 in float64 and
  float32, and one of gamma 4 to 8, or a tree, after rows of several lengths.
  """
  worst, done, skipped = collections.defaultdict(float), [], []
  pairs = subject.pairs()
  if not subject.supplied:
    pairs += [(rule, SCRIPTED) for rule in subject.apart()]
  subject = subject._replace(drafters={**subject.drafters, SCRIPTED: script})
  why = {rule: enumerate_window.not_enumerable(rule) for rule in subject.rules}
  for rule, name, x64, gamma, vocab, long in _cells(pairs, amount):
    if why[rule]:
      skipped.append(f'{rule.name}: {why[rule]}')
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
        worst[x64] = max(worst[x64], error(world, pair, settings))
    done.append(f'{rule.name} {name} {own}')
  of = f'{len(done)} walks; rule, drafter, gamma: '
  return _figure(worst, of, done, skipped)


def script(world: base.World, gamma: int):
  """A base.Recipe of 0 to gamma fixed tokens, drafted with certainty."""
  tokens_1L = np.random.default_rng(1).integers(0, world.vocab, (1, 48))
  tokens_BL = np.repeat(tokens_1L.astype(np.int32), ROWS, 0)
  return scripted.make(gamma=gamma), (tokens_BL, tokens_BL % (gamma + 1))


def windows_error(world, pair: base.Pair, settings) -> float:
  """The largest error of the joint distribution of three windows; see walk.

  Raises:
    base.Broken: an error above the bound; reports the shortest wrong text.
  """
  tokens_RL, lengths_R, chance_R = walk(world, pair, settings, windows=3)
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
  """The largest error of one window's joint distribution, after LONG_ROWS.

  Raises:
    base.Broken: an error above the bound, after the shortest such row.
  """
  rng = np.random.default_rng(world.vocab)
  prompts = [rng.integers(0, world.vocab, n).tolist() for n in LONG_ROWS]
  texts, window, chance_XR = drafted(world, pair, settings, prompts)
  n = 1 + (len(pair.drafter.tree) or pair.drafter.gamma)
  wanted = [
    base.joint(world, prompt, n, text, **settings)
    for prompt, text in zip(prompts, texts, strict=True)
  ]
  if pair.drafter.tree:
    got = _of_trees(pair.rule, window, chance_XR, wanted)
  else:
    batch = enumerate_window.Windows(window.draft, window.p_BNV, chance_XR)
    got = enumerate_window.window_distribution(
      pair.rule, batch, np.stack(wanted)
    )
  return _largest_error(texts, got, wanted)


def _of_trees(rule: types.Rule, window: steps.Window, chance_XR, wanted):
  """The distribution after each text; trees of one shape are one batch."""
  own_BK, out = np.asarray(tree.proposed(window.draft)), []
  draft = window.draft._replace(proposed_BK=own_BK)
  parents_BK: Any = draft.parents_BK
  R = chance_XR.shape[1]
  for x, chance_R in enumerate(chance_XR):
    rows, one = slice(x * R, (x + 1) * R), wanted[x][None]
    parents_RK, total = parents_BK[rows], np.zeros_like(one)
    for parents_K in np.unique(parents_RK[chance_R > 0], axis=0):
      alike_R = (parents_RK == parents_K).all(1)
      # As many as in other batches, which compile once: the others never come.
      index_R = np.resize(np.flatnonzero(alike_R), R)
      share_R = chance_R[index_R] * (np.arange(R) < alike_R.sum())
      alike, p_RNV = base.take((draft, window.p_BNV), x * R + index_R)
      batch = trees.Windows(alike, p_RNV, share_R)
      total += trees.distribution(trees.ends(rule, batch), batch, one)
    out.append(total[0])
  return out


def _largest_error(texts, got, wanted) -> float:
  """The largest error of the distributions after some texts."""
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


def walk(world: base.World, pair: base.Pair, settings, windows: int):
  """All texts of some consecutive windows after PROMPT.

  settings: of sampling, fields of requests.Wanted.

  Returns (tokens_RL, lengths_R, chance_R) of R texts; the chance of each is
  that of its draws under the distributions that the steps drew from.
  """
  prompt = table_model.PROMPT[world.vocab]
  request = base.make_request(world, [prompt] * ROWS, 40, length=48, **settings)
  state, info, step = steps.begin(world, pair, request)
  each = choices(world.vocab, pair.drafter.gamma)
  count = len(each.next_B)
  rows, chance_R = base.take(state, [0]), np.ones(1)
  for _ in range(windows):
    parts, chances = [], []
    for start in range(0, len(chance_R) * count, ROWS):
      index = np.arange(start, start + ROWS)
      live = index < len(chance_R) * count
      index = np.where(live, index, 0)
      before = base.take(rows, index // count)
      choice = base.take(each, index % count)
      new, _, window = step(before, info, choice)
      chance_B = steps.chance(window, choice) * chance_R[index // count] * live
      parts.append(base.take(new, np.flatnonzero(chance_B != 0)))
      chances.append(chance_B[chance_B != 0])
    rows = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    chance_R = np.concatenate(chances)
  return rows.tokens_BL, rows.lengths_B, chance_R


def choices(vocab: int, gamma: int) -> steps.Choice:
  """Every Choice of one window, as a batch."""
  sizes = (vocab,) * gamma + (2,) * gamma + (vocab,)
  every = np.indices(sizes, np.int32).reshape(len(sizes), -1).T
  return steps.Choice(every[:, :gamma], every[:, gamma:-1] == 0, every[:, -1])


def children(vocab: int, levels: tuple[int, ...], siblings: str) -> np.ndarray:
  """All that a tree's numbers may have for children: [R, N, X]."""
  most, inner = min(max(levels), vocab), 1 + sum(levels[:-1])
  draws = itertools.permutations(range(vocab), most)
  if siblings == 'independent':
    draws = itertools.product(range(vocab), repeat=most)
  every = itertools.product([*draws], repeat=inner)
  return np.array([*every], np.int32)


def drafted(world: base.World, pair: base.Pair, settings, prompts):
  """Every draft of one window, after rows of several lengths.

  The X rows come to it from their prompts by three windows of production.

  Returns the tokens of each row before the window, the steps.Window of R drafts
  of each, and the chance of each, [X, R].

  Raises:
    base.Broken: a reported q that was not drawn from.
  """
  K, X, siblings = pair.drafter.gamma, len(prompts), pair.rule.siblings
  if levels := pair.drafter.tree:
    every = children(world.vocab, levels, siblings)
  else:
    every = enumerate_window.paths(world.vocab, K)
  R, new = len(every), 4 * (K + 1)
  length = max(map(len, prompts)) + new + K + 2
  request = base.make_request(
    world, prompts, new, length=length, gamma=K, **settings
  )
  # Rows that are alike, number included, draw alike: R copies of each.
  request = base.take(request, np.repeat(np.arange(X), R))
  state, info, step = steps.begin(world, pair, request)
  every = np.tile(every, (X,) + (1,) * (every.ndim - 1))
  choice = steps.Choice(every)
  if levels:
    choice = steps.Choice(None, children_BNX=every)
  drawn = jax.tree.map(lambda x: np.full_like(x, -1), choice)
  for _ in range(3):
    state, info, _ = step(state, info, drawn)
  _, _, window = step(state, info, choice)
  if levels:
    chance_B = trees.chance_of_children(window, choice, siblings)
  else:
    chance_B = steps.chance_of_drafts(window, choice)
  rows = zip(state.tokens_BL[::R], state.lengths_B[::R], strict=True)
  texts = [tokens_L[:end].tolist() for tokens_L, end in rows]
  return texts, window, chance_B.reshape(X, R)
