"""A packed model: XLA's logits, the same bits whatever is read with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward, types
from specdec_jax.models import cache as cache_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm
from tests import fakes
from tests.io import tiny
from tests.models import lm_test

WIDTHS = (1, 2, 5, 16)
BATCHES = (1, 8)
LENGTH, SLOTS, VOCAB = 48, 50, 600
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH))
# The larger ones have no layer shape that these lack.
SIZES = [
  name
  for name, size in model_config.SIZES.items()
  if size['width'] * size['mlp'] < 20e6
]


@pytest.fixture(autouse=True, scope='module')
def compiled():
  tiny.needs_kernels()


def copied(params):
  """The same arrays in containers of their own; packing changes these."""
  return jax.tree.map(lambda x: x, params)


def both(config):
  """(config, params) of a random model, for XLA and packed."""
  config, params = convert.fuse(config, lm_test.params_of(config))
  return (config, params), convert.pack(config, copied(params))


def logits(config, params, rows: int, width: int):
  """Logits of all tokens, read `width` at a time."""
  model = lm.make(config)

  @jax.jit
  def step(params, tokens_BT, start, cache):
    start_B = jnp.full((rows,), start)
    hidden, _, cache = forward.read(
      model, params, tokens_BT, start_B, cache, slots=SLOTS
    )
    return model.head(params, hidden), cache

  source = types.Source(TOKENS[:, :37] % config.vocab, 37 - 4 * np.arange(8))
  few = jax.tree.map(lambda x: x[:rows], source)
  cache, out = forward.open_cache(model, params, rows, SLOTS, few), []
  for start in range(0, LENGTH, width):
    piece = TOKENS[:rows, start : start + width] % config.vocab
    found, cache = step(params, piece, start, cache)
    out.append(np.asarray(found))
  return np.concatenate(out, 1)


T5 = model_config.sized('t5_tiny', vocab=31)
RELU = dataclasses.replace(T5, act='relu', gated=False)


@pytest.mark.more
@pytest.mark.parametrize(
  'changes',
  [
    fakes.OLMO2,
    fakes.GPT,
    lm_test.RICH,
    pytest.param(T5, marks=pytest.mark.slow),
    pytest.param(RELU, marks=pytest.mark.slow),
  ],
)
def test_unpacks_to_the_same_and_is_as_precise_as_xla(changes, x64):
  del x64
  own = changes if isinstance(changes, model_config.LMConfig) else None
  plain, packed = both(own or fakes.tiny(dtype='float32', **changes))
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lm.flatten(packed[1])
  )
  assert shapes == lm.shapes(packed[0])
  config, params = convert.plain(*packed)
  same = convert.plain(*plain)
  assert config == same[0]
  jax.tree.map(np.testing.assert_array_equal, params, same[1])
  exact = config.running(dtype='float64')
  wide = lm.nest({n: x.astype(jnp.float64) for n, x in params.items()})
  wanted = logits(exact, wide, rows=3, width=8)
  xla, found = (
    np.abs(logits(*x, rows=3, width=8) - wanted) for x in (plain, packed)
  )
  # All tokens but one: where a softmax of T5 is nearly a step, luck decides.
  second = np.sort(found.max(-1), None)[-2]
  assert second < 4 * xla.max() and found.mean() < 4 * xla.mean()


# The layers of the other sizes are like those of these, but wider.
FEW = {('smollm2_135m', 'float32'), ('smollm2_135m', 'bfloat16')}


# What no published size has.
OTHER = fakes.OLMO2 | dict(residual_scale=0.6, rotated=(True, False))


def marked(size, dtype):
  if size.endswith('tiny') and dtype == 'float32':
    return size, dtype
  mark = pytest.mark.more if (size, dtype) in FEW else pytest.mark.slow
  return pytest.param(size, dtype, marks=mark)


@pytest.mark.more
@pytest.mark.parametrize(
  'size, dtype', [marked(x, y) for x in SIZES for y in ('float32', 'bfloat16')]
)
def test_a_tokens_logits_depend_neither_on_width_nor_on_batch(size, dtype):
  windows = model_config.SIZES[size].get('windows', (0,))
  config = model_config.sized(
    size,
    depth=min(2, len(windows) + 1),
    vocab=VOCAB,
    context=64,
    dtype=dtype,
    **(OTHER if size == 'tiny' else {}),
  )
  _, packed = both(config)
  alone = logits(*packed, rows=1, width=1)
  for width in (*WIDTHS[1:], LENGTH):
    np.testing.assert_array_equal(logits(*packed, rows=1, width=width), alone)
  for rows in BATCHES[1:]:
    one, five = (logits(*packed, rows=rows, width=w)[:1] for w in (1, 5))
    np.testing.assert_array_equal(one, alone)
    np.testing.assert_array_equal(five, alone)


@pytest.mark.slow
def test_a_short_source_is_encoded_without_most_of_its_padding():
  """To the same keys and values; there are none past the part that it needs."""
  _, (config, params) = both(T5)
  model = lm.make(config)

  @functools.partial(jax.jit, static_argnames='room')
  def read(length, room):
    source = types.Source(TOKENS[:1, :room] % config.vocab, length[None])
    cache = model.encode(params, source, model.init_cache(1, SLOTS))
    return cache_lib.by_slot(cache.store)

  for length, needed in ((1, 12), (12, 12), (13, 24), (24, 24), (25, 48)):
    wide, narrow = (read(np.int32(length), room) for room in (48, needed))
    for x, y in zip(
      jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True
    ):
      np.testing.assert_array_equal(x[:, :, :length], y[:, :, :length])
      assert np.any(x[:, :, needed - 1]) and not np.any(x[:, :, needed:])
