"""The most that any rule can accept of a tree, and what `coupled` accepts."""

import itertools
from collections.abc import Mapping

import numpy as np
from scipy import optimize

# The token path of every node.
Trie = frozenset[tuple[int, ...]]


def accepted(tries: Mapping[Trie, float], target) -> float:
  """Computes the most tokens a rule accepts on average, by linear programming.

  Over all rules that end at a tree's node, draw one more token, and leave the
  tokens after it to the target, so that all are distributed as the target's.
  With one level it is the optimal transport from sets of candidates to p: Sun
  et al. 2023, section 4 (https://arxiv.org/abs/2310.15141).

  tries: each tree's probability, as its nodes' token paths. target:
  distribution of one token more than a tree has levels, [V, ..., V]. Raises
  AssertionError if the solver found no optimum.
  """
  V, N = len(target), target.ndim
  every = (
    u for n in range(1, N + 1) for u in itertools.product(range(V), repeat=n)
  )
  chance = {u: float(p) for u in every if (p := target[u].sum()) > 0}
  ends = [
    (row, len(path), (*path, y))
    for row, trie in enumerate(tries)
    for path in ((), *trie)
    for y in range(V)
    if (*path, y) in chance and (*path, y) not in trie  # or it accepts that too
  ]
  # After the variables of `ends`, for each text u the share of its chance with
  # which a window emits u itself: over a text's beginnings they add up to 1.
  size = len(ends) + len(chance)
  place = {u: i for i, u in enumerate(chance)}
  drawn = np.zeros((len(tries), size))
  emitted, whole = np.zeros((len(chance), size)), []
  for i, (row, _, u) in enumerate(ends):
    drawn[row, i] = emitted[place[u], i] = 1
  for u, p in chance.items():
    emitted[place[u], len(ends) + place[u]] = -p
    if len(u) == N:
      whole.append(np.zeros(size))
      for n in range(N):
        whole[-1][len(ends) + place[u[: n + 1]]] = 1
  found = optimize.linprog(
    [-depth for _, depth, _ in ends] + [0] * len(chance),
    A_ub=drawn,
    b_ub=[*tries.values()],
    A_eq=np.concatenate([emitted, whole]),
    b_eq=[0] * len(chance) + [1] * len(whole),
    # Presolving calls problems with probabilities below 1e-9 infeasible.
    options={'presolve': False},
  )
  assert found.status == 0, found.message
  return -float(found.fun)


def raced(p_XV, q_XV, count: int) -> np.ndarray:
  """Computes how often each token is the target's draw and among the draft's.

  `count` distinct draws from one exponential race, as under `coupled`: token x
  arrives in the target at E_x / p_x and in the draft at E_x / q_x. Given that x
  wins there at E_x = e, a rival y is before it in the draft if E_y is between e
  p_y / p_x and e q_y / q_x, and fewer than `count` rivals may be. For one draw
  that is 1 / sum_y max(p_y / p_x, q_y / q_x): Daliri et al. 2024, section 3
  (https://arxiv.org/abs/2408.07978).

  Returns: [X, V]; the sum over V is the acceptance.
  """
  X, V = p_XV.shape
  out_XV = np.zeros((X, V))
  for x in range(V):
    can_X = (p_XV[:, x] > 0) & (q_XV[:, x] > 0)
    p_X1, q_X1 = (np.where(can_X, z[:, x], 1)[:, None] for z in (p_XV, q_XV))
    begin_XV = p_XV / p_X1
    end_XV = np.maximum(begin_XV, q_XV / q_X1)
    rivals = [y for y in range(V) if y != x]
    for number in range(min(count, V)):
      for before in itertools.combinations(rivals, number):
        # The product of exp(-e begin) - exp(-e end) over those before x, and of
        # exp(-e end) over the others, integrated over e term by term.
        for ends in itertools.product((False, True), repeat=number):
          early = [y for y, end in zip(before, ends, strict=True) if not end]
          late = [y for y in rivals if y not in early]
          rate_X = 1 + begin_XV[:, early].sum(1) + end_XV[:, late].sum(1)
          out_XV[:, x] += np.where(can_X, (-1) ** sum(ends) / rate_X, 0)
  return out_XV
