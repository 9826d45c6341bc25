"""Models the cost of speculative decoding: formulas only, no measurements.

Leviathan et al. 2023, https://arxiv.org/abs/2211.17192. alpha is the mean of
sum min(p, q); c is a draft step's time over a plain target step's; v(n) is an
n-wide verify's time over a plain step's, v(1) = 1.
"""

import heapq

# Of what its elder siblings leave, the share that a further child is accepted
# with: an assumption. Of an EAGLE it is less, of a good draft model more.
LATER = 0.2


def expected_tokens(alpha: float, gamma: int) -> float:
  """Computes E[tokens of a window], equation 1: (1 - a^(g + 1)) / (1 - a), as
  if tokens were accepted independently with probability alpha."""
  assert 0 <= alpha <= 1 and gamma >= 0, (alpha, gamma)
  if alpha == 1:
    return gamma + 1.0
  return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def improvement(alpha: float, gamma: int, c: float, v: float = 1) -> float:
  """Computes the expected wall time improvement, theorem 3.8: E / (g c + v),
  with v = v(gamma + 1), which the theorem assumes to be 1."""
  return expected_tokens(alpha, gamma) / (gamma * c + v)


def tree_tokens(alpha: float, nodes: int, levels: int) -> float:
  """Computes E[tokens of a window] with a tree's likeliest nodes.

  Adds to 1 each node's chance that all on its path are accepted, as in Sequoia
  (Chen et al. 2024, https://arxiv.org/abs/2402.12374, section 4.1): a node's
  first child with alpha, each other with LATER of what is left.
  """
  total, heap = 1.0, [(-alpha, 1.0, 1.0 - alpha, 1)]
  for _ in range(nodes):
    chance, parent, left, level = heapq.heappop(heap)
    total -= chance
    later = LATER * left
    heapq.heappush(heap, (-parent * later, parent, left - later, level))
    if level < levels:
      first = chance * alpha, -chance, 1.0 - alpha, level + 1
      heapq.heappush(heap, first)
  return total


def best(improvements: dict[int, float]) -> int:
  """Picks the gamma that improves most; 0 (do not speculate) if all <= 1."""
  gamma = max(improvements, key=improvements.__getitem__, default=0)
  return gamma if improvements and improvements[gamma] > 1 else 0
