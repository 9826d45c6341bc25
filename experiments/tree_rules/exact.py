"""How many tokens of a tree each rule accepts, by enumeration."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.tree_rules import optimum
from specdec_jax import build, types
from specdec_jax.certify import base, enumerate_window, trees

KINDS = 'distinct', 'independent', 'deterministic'
# Children of a node at each level, and ids of the vocabulary.
SIZES = ('2', 5), ('3', 5), ('4', 5), ('2,2', 3)
# Below it a share of the optimum tells of rounding alone.
LEAST = 1e-6


class Problems(NamedTuple):
  """Pairs of p and q, and every tree that may be drawn of each.

  counts: children of a node at each level.
  p_XNVV, q_XKVV: as of enumerate_window.problems.
  chance_XR, parents: of each tree, and of all.
  """

  kind: str
  counts: tuple[int, ...]
  p_XNVV: np.ndarray
  q_XKVV: np.ndarray
  batch: trees.Windows
  chance_XR: np.ndarray
  parents: tuple[int, ...]

  def total(self, reach_BK: np.ndarray) -> np.ndarray:
    """Nodes accepted on average, [X], of how often each is in each tree."""
    shape = self.chance_XR.shape
    return (self.chance_XR * reach_BK.sum(1).reshape(shape)).sum(1)


def problems(kind: str, levels: str, vocab: int, each: int) -> Problems:
  """`each` problems of every family, in their order."""
  counts, parents = tuple(map(int, levels.split(','))), trees.parents_of(levels)
  p, q = enumerate_window.of_all_families(
    0, each=each, gamma=len(counts), vocab=vocab
  )
  batch = trees.windows(p, q, parents, kind)
  chance_XR = batch.chance_B.reshape(len(p), -1)
  return Problems(kind, counts, p, q, batch, chance_XR, parents)


def rules_of(kind: str) -> list[types.Rule]:
  """The lossless rules that take trees of a kind of siblings."""
  found = build.lossless_rules().values()
  return [x for x in found if x.trees and kind in kinds_of(x)]


def kinds_of(rule: types.Rule) -> tuple[str, ...]:
  """What reads the distribution that each was drawn from takes every kind."""
  if getattr(rule, 'siblings', 'distinct') == 'independent':
    return ('independent',)
  return ('distinct', 'deterministic') if rule.coupled else KINDS


def best(x: Problems) -> np.ndarray:
  """The most tokens that any rule accepts, [X]."""
  found = [collections.defaultdict(float) for _ in x.chance_XR]
  draft = x.batch.draft
  tokens_BK, proposed_BK = map(np.asarray, (draft.tokens_BK, draft.proposed_BK))
  for b in np.flatnonzero(x.batch.chance_B):
    paths = []
    for parent, token in zip(x.parents, tokens_BK[b].tolist(), strict=True):
      paths.append((*(paths[parent] if parent >= 0 else ()), token))
    trie = frozenset(itertools.compress(paths, proposed_BK[b].tolist()))
    found[b // x.chance_XR.shape[1]][trie] += x.batch.chance_B[b]
  target = enumerate_window.target_distribution(x.p_XNVV)
  pairs = zip(found, target, strict=True)
  return np.array([optimum.accepted(*pair) for pair in pairs])


def accepted(rule: types.Rule, x: Problems) -> np.ndarray:
  """Tokens that a rule accepts on average, [X].

  Raises:
    base.Broken: what it emits is not distributed as the target's tokens.
  """
  if rule.coupled and x.kind == 'distinct':
    return _raced(x, 0)[:, 0]
  if rule.coupled:
    # Its own draws, whatever the tree is.
    reach_BK = along(x, of_tokens(x))
  else:
    wanted = enumerate_window.target_distribution(x.p_XNVV)
    found = trees.distribution(rule, x.batch, wanted)
    if not (off := np.abs(found - wanted).max()) <= base.bound():
      raise base.Broken(f'{rule.name}, {x.kind}: off by {off:.1e}')
    t_BK = trees.thresholds(rule, x.batch.draft, x.batch.p_BNV)
    reach_BK = along(x, _tested(x, np.asarray(t_BK, np.float64)))
  return x.total(reach_BK)


def of_tokens(x: Problems) -> np.ndarray:
  """p of each node's token, [B, K]."""
  numbers = np.array(x.parents) + 1
  tokens_BK1 = np.asarray(x.batch.draft.tokens_BK)[..., None]
  return np.take_along_axis(x.batch.p_BNV[:, numbers], tokens_BK1, -1)[..., 0]


def _tested(x: Problems, t_BK: np.ndarray) -> np.ndarray:
  """How often each node is accepted once its parent is: the elders failed."""
  t_BK = t_BK * np.asarray(x.batch.draft.proposed_BK)
  found_BK = t_BK.copy()
  for i, parent in enumerate(x.parents):
    for elder in range(i):
      if x.parents[elder] == parent:
        found_BK[:, i] *= 1 - t_BK[:, elder]
  return found_BK


def along(x: Problems, of_parent_BK: np.ndarray) -> np.ndarray:
  """How often each node is accepted: its path's product."""
  reach_BK = of_parent_BK * np.asarray(x.batch.draft.proposed_BK)
  for i, parent in enumerate(x.parents):
    if parent >= 0:
      reach_BK[:, i] *= reach_BK[:, parent]
  return reach_BK


def _raced(x: Problems, depth: int) -> np.ndarray:
  """Tokens that `coupled` accepts from a level on, [X, V] by the one before."""
  p_XVV, q_XVV = x.p_XNVV[:, depth], x.q_XKVV[:, depth]
  X, V, _ = p_XVV.shape
  own_XVV = optimum.raced(
    *(z.reshape(X * V, V).astype(np.float64) for z in (p_XVV, q_XVV)),
    x.counts[depth],
  ).reshape(X, V, V)
  if depth + 1 < len(x.counts):
    own_XVV = own_XVV * (1 + _raced(x, depth + 1))[:, None]
  return own_XVV.sum(-1)


def rows(each: int) -> Iterator[dict[str, Any]]:
  """For each tree, kind of siblings and rule: its share of the optimum.

  'families': by name [the optimum, mean share, least share], the first a mean
  too; None where nothing can be accepted.
  """
  for (levels, vocab), kind in itertools.product(SIZES, KINDS):
    found = problems(kind, levels, vocab, each)
    best_X = best(found)
    for rule in rules_of(kind):
      own_X, families = accepted(rule, found), {}
      assert (own_X <= best_X + LEAST).all(), (rule.name, kind, levels)
      for i, name in enumerate(enumerate_window.FAMILIES):
        at = slice(i * each, (i + 1) * each)
        some = best_X[at] > LEAST
        share = own_X[at][some] / best_X[at][some]
        told = [share.mean(), share.min()] if some.any() else [None, None]
        families[name] = [best_X[at].mean(), *told]
      yield dict(levels=levels, kind=kind, rule=rule.name, families=families)
