"""Computes how many tokens of a tree each rule accepts, by enumeration."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from experiments.tree_rules import optimum
from specdec_jax import build, types
from specdec_jax.certify import base, enumerate_window
from specdec_jax.certify import problems as problems_lib

# Children of a node at each level, and ids of the vocabulary.
SIZES = ('2', 5), ('3', 5), ('4', 5), ('2,2', 3)
# Below it a share of the optimum tells of rounding alone.
LEAST = 1e-6


class Problems(NamedTuple):
  """Pairs of p and q, and every tree that may be drawn from each.

  counts: a node's children at each level. p_XNVV, q_XKVV: as in
  problems.of_all_families. chance_XR: each tree's. parents: all trees'.
  """

  kind: str
  counts: tuple[int, ...]
  p_XNVV: np.ndarray
  q_XKVV: np.ndarray
  batch: enumerate_window.Windows
  chance_XR: np.ndarray
  parents: tuple[int, ...]


def problems(kind: str, levels: str, vocab: int, each: int) -> Problems:
  """Draws `each` problems of every family, in their order."""
  counts = tuple(map(int, levels.split(',')))
  parents = problems_lib.parents_of(levels)
  p, q = problems_lib.of_all_families(
    0, each=each, gamma=len(counts), vocab=vocab
  )
  batch = problems_lib.windows(p, q, kind, parents)
  chance_XR = batch.chance_B.reshape(len(p), -1)
  return Problems(kind, counts, p, q, batch, chance_XR, parents)


def rules_of_trees() -> list[types.Rule]:
  """Lists the lossless rules that take trees."""
  return [x for x in build.lossless_rules().values() if x.trees]


def best(x: Problems) -> np.ndarray:
  """Computes the most tokens that any rule accepts, [X]."""
  found = [collections.defaultdict(float) for _ in x.chance_XR]
  draft = x.batch.draft
  tokens_BK, proposed_BK = map(np.asarray, (draft.tokens_BK, draft.proposed_BK))
  for b in np.flatnonzero(x.batch.chance_B):
    paths = []
    for parent, token in zip(x.parents, tokens_BK[b].tolist(), strict=True):
      paths.append((*(paths[parent] if parent >= 0 else ()), token))
    trie = frozenset(itertools.compress(paths, proposed_BK[b].tolist()))
    found[b // x.chance_XR.shape[1]][trie] += x.batch.chance_B[b]
  target = problems_lib.target_distribution(x.p_XNVV)
  pairs = zip(found, target, strict=True)
  return np.array([optimum.accepted(*pair) for pair in pairs])


def accepted(rule: types.Rule, x: Problems) -> np.ndarray:
  """Computes the mean tokens that a rule accepts, [X]; Broken if lossy."""
  if rule.coupled and x.kind == 'distinct':
    return _raced(x, 0)[:, 0]
  if rule.coupled:
    return certain(x)  # its own draws, whatever the tree is
  wanted = problems_lib.target_distribution(x.p_XNVV)
  ends = enumerate_window.ends(rule, x.batch)
  found = enumerate_window.distribution(ends, x.batch, wanted)
  if not (off := np.abs(found - wanted).max()) <= base.bound():
    raise base.Broken(f'{rule.name}, {x.kind}: off by {off:.1e}')
  accepted_B = sum(end.accepted_B * end.chance_B for end in ends)
  return np.asarray(accepted_B).reshape(len(wanted), -1).sum(1)


def certain(x: Problems) -> np.ndarray:
  """Counts a certain tree's nodes on the target's own path, [X] on average."""
  numbers = np.array(x.parents) + 1
  tokens_BK = np.asarray(x.batch.draft.tokens_BK)
  p_BK = np.take_along_axis(
    x.batch.p_BNV[:, numbers], tokens_BK[..., None], -1
  )[..., 0]
  for i, parent in enumerate(x.parents):
    if parent >= 0:
      p_BK[:, i] *= p_BK[:, parent]
  return (x.batch.chance_B * p_BK.sum(1)).reshape(len(x.p_XNVV), -1).sum(1)


def _raced(x: Problems, depth: int) -> np.ndarray:
  """Computes what `coupled` accepts from a level on, [X, V] by last token."""
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
  """Computes a rule's share of the optimum, for each tree and kind of siblings.

  'families': by name [the optimum, mean share, least share], the first a mean
  too; None where nothing can be accepted.
  """
  for (levels, vocab), kind in itertools.product(SIZES, problems_lib.KINDS):
    found = problems(kind, levels, vocab, each)
    best_X = best(found)
    for rule in rules_of_trees():
      own_X, families = accepted(rule, found), {}
      assert (own_X <= best_X + LEAST).all(), (rule.name, kind, levels)
      for i, name in enumerate(problems_lib.FAMILIES):
        at = slice(i * each, (i + 1) * each)
        some = best_X[at] > LEAST
        share = own_X[at][some] / best_X[at][some]
        told = [share.mean(), share.min()] if some.any() else [None, None]
        families[name] = [best_X[at].mean(), *told]
      yield dict(levels=levels, kind=kind, rule=rule.name, families=families)
