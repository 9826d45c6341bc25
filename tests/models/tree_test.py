"""One pass over a tree, against plain decoding along the path of each node.

Slots of other branches lie between those of a path, so that a slot's index is
not its position. Sliding windows, T5's bias and the sums of the kernels go by
positions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward, program, types
from specdec_jax.certify import table_model as tables
from specdec_jax.kernels import library
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm
from tests import fakes

# Of the last committed token: at the edges of panels of 16 and of 32 slots.
STARTS = np.array([31, 32, 33, 63, 64])
B, S = len(STARTS), 100
# Each row has a shape of its own: what the parent of node i is.
SHAPES = (
  lambda rng, i: rng.integers(-1, i),  # any node before it
  lambda rng, i: max(i - 2, -1) if i < 12 else rng.integers(3),  # two long ones
  lambda rng, i: i // 2 - 1,  # two children a node, level by level
  lambda rng, i: -1 if i < 4 else max(i - 4, rng.integers(-1, i)),
  lambda rng, i: -1 if rng.random() < 0.6 else i - 1,  # several short ones
)


def trees(rng, nodes: int) -> tuple[np.ndarray, np.ndarray]:
  """(paths_BND, depth_BN): the nodes down to each one; the root is node 0."""
  paths_BND = np.zeros((B, nodes + 1, nodes + 1), int)
  depth_BN = np.zeros((B, nodes + 1), int)
  for b, parent_of in enumerate(SHAPES):
    for i in range(1, nodes + 1):
      parent = int(parent_of(rng, i - 1)) + 1
      assert 0 <= parent < i
      depth = depth_BN[b, i] = depth_BN[b, parent] + 1
      paths_BND[b, i] = paths_BND[b, parent]
      paths_BND[b, i, depth] = i
  return paths_BND, depth_BN


def read_tree(model, params, tokens_BN, trees, cache):
  """(logits_BNV, cache) of one pass over the nodes of every row."""
  paths_BND, depth_BN = trees
  slots_BN = STARTS[:, None] + np.arange(depth_BN.shape[1])
  positions_BN = STARTS[:, None] + depth_BN
  at_BS = np.tile(np.arange(S), (B, 1))
  at_BS[np.arange(B)[:, None], slots_BN] = positions_BN
  mask_BNS = np.arange(S) < STARTS[:, None, None]
  mask_BNS = np.tile(mask_BNS, (1, depth_BN.shape[1], 1))
  # A path ends in zeros, which are the root: of every path.
  b_B11, n_1N1 = np.arange(B)[:, None, None], np.arange(depth_BN.shape[1])
  mask_BNS[b_B11, n_1N1[None, :, None], STARTS[:, None, None] + paths_BND] = 1

  @jax.jit
  def run(params, cache):
    hidden, _, new = model.apply(
      params, tokens_BN, slots_BN, positions_BN, mask_BNS, cache,
      at_BS=jnp.asarray(at_BS),
    )  # fmt: skip
    return model.head(params, hidden), new

  return run(params, cache)


def read_paths(model, params, tokens_BN, trees, cache):
  """The same by plain decoding, one token at a time; a row is a path."""
  paths_RD, depth_R = (x.reshape(-1, *x.shape[2:]) for x in trees)
  rows_R = np.repeat(np.arange(B), len(depth_R) // B)

  @jax.jit
  def step(params, tokens_R1, start_R, keep_R1, cache):
    hidden, _, cache = forward.read(
      model, params, tokens_R1, start_R, cache, slots=S, keep_BT=keep_R1
    )
    return model.head(params, hidden)[:, 0], cache

  cache = jax.tree.map(lambda x: x[rows_R], cache)
  found_RV = np.zeros((len(rows_R), model.vocab))
  for d in range(depth_R.max() + 1):
    logits_RV, cache = step(
      params,
      tokens_BN[rows_R, paths_RD[:, d]][:, None],
      STARTS[rows_R] + d,
      (d <= depth_R)[:, None],
      cache,
    )
    found_RV = np.where((d == depth_R)[:, None], logits_RV, found_RV)
  return found_RV.reshape(B, -1, model.vocab), cache


def compare(model, params, nodes: int, equal):
  """Logits of all nodes; and the cache after a path has moved to its place."""
  rng = np.random.default_rng(nodes)
  source = types.Source(rng.integers(0, model.vocab, (B, 9)), 5 + np.arange(B))
  cache = forward.open_cache(model, params, B, S, source)
  text_BL = jnp.asarray(rng.integers(0, model.vocab, (B, S)))
  cache = jax.jit(
    lambda cache: forward.prefill(
      model, params, text_BL, jnp.asarray(STARTS), cache, chunk=16
    )
  )(cache)
  tokens_BN = rng.integers(0, model.vocab, (B, nodes + 1))
  made = paths_BND, depth_BN = trees(rng, nodes)
  args = model, params, tokens_BN, made, cache
  got_BNV, cache = read_tree(*args)
  wanted_BNV, chains = read_paths(*args)
  equal(np.asarray(got_BNV), wanted_BNV)

  node_B = rng.integers(1, nodes + 1, B)
  index_1K = np.arange(1, nodes + 1)[None]
  from_BK = STARTS[:, None] + paths_BND[np.arange(B), node_B, 1:]
  moves_BK = index_1K <= depth_BN[np.arange(B), node_B][:, None]
  to_BK = np.where(moves_BK, STARTS[:, None] + index_1K, S)
  moved = jax.jit(model.compact)(cache, from_BK, to_BK)
  moved, chains = kv.by_slot((moved, chains))
  chain_B = np.arange(B) * (nodes + 1) + node_B
  pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(chains), strict=True)
  for x, y in pairs:
    # Slots are the last axis but one, of a table's caches the last.
    axis = max(1, x.ndim - 2)
    for b, end in enumerate(STARTS + moves_BK.sum(1) + 1):
      ends = lambda z, end=end, axis=axis: np.moveaxis(z, axis - 1, 0)[:end]
      equal(ends(x[b]), ends(y[chain_B[b]]))


def close(tolerance: float):
  return lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=0)


# Sliding windows that end within a tree, and before it.
GROUPED = dict(heads=4, kv_heads=2, depth=3, windows=(4, 40, 0))


def config_of(name: str, dtype: str, **changes):
  if name == 't5':
    return model_config.sized('t5_tiny', vocab=31, dtype=dtype, **changes)
  return fakes.tiny(dtype=dtype, **GROUPED, **changes)


@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('name', ['grouped', 't5'])
def test_by_xla_in_float64(name, scan, x64):
  config = config_of(name, 'float64').running(scan_layers=scan)
  compare(lm.make(config), lm.init(config, 0), 12, close(1e-12))


@pytest.mark.parametrize('encoder', [False, True])
def test_a_table_knows_the_position_of_each_slot(encoder):
  model = tables.make(5, encoder=encoder)
  params = jnp.asarray(tables.table(0, 5, hashes=101))
  compare(model, params, 33, np.testing.assert_array_equal)


@pytest.mark.parametrize('nodes', [2, 5, 33])
@pytest.mark.parametrize('name', ['grouped', 't5'])
def test_by_the_kernels_to_the_bit(name, nodes):
  if why := library.load(program.cache_folder()):
    pytest.skip(why)
  config = config_of(name, 'float32')
  packed = convert.pack(*convert.fuse(config, fakes.wild(config, 0)))
  compare(lm.make(packed[0]), packed[1], nodes, np.testing.assert_array_equal)
