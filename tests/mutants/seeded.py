"""All seeded bugs, and the failures that cannot be seeded here."""

from tests.mutants import (
  seeded_caches,
  seeded_draws,
  seeded_edges,
  seeded_loop,
  seeded_methods,
  seeded_rules,
)

MUTANTS = (
  *seeded_rules.RULES,
  *seeded_methods.BLOCK,
  *seeded_methods.METHODS,
  *seeded_draws.TRANSFORM,
  *seeded_draws.DRAWS,
  *seeded_loop.LAWS,
  *seeded_loop.ENDS,
  *seeded_loop.ROWS,
  *seeded_caches.CACHES,
  *seeded_edges.EDGES,
)

# Row of the list of failure modes: (failure, why nothing can be seeded).
ELSEWHERE = {
  14: (
    'a wide and a narrow matrix product round differently at near-ties',
    'no bug but arithmetic: every first difference is audited',
  ),
  21: ('a recurrent state cannot be rewound', 'there is none'),
  31: ('the cross cache of an encoder', 'models are decoder-only'),
  32: ('dropout or dropped experts in verification', 'there are none'),
  34: (
    'int32 products of rows and vocabulary',
    'no index is a product: every gather is along one axis',
  ),
  36: ('siblings and ancestors of a tree', 'drafts are chains'),
  37: ('one of several drafts judged as a sample', 'one draft a window'),
  38: (
    'penalties that do not advance inside a window',
    'settings with a history are refused by name',
  ),
  39: (
    'verification and baseline read different weights',
    'both are handed the same array of parameters',
  ),
  40: ('an overlapped step uses an old outcome', 'steps do not overlap'),
}
