"""Turns logits into probabilities, and makes every random draw.

All noise is keyed by request: no draw depends on the batch, row or padding.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, types

Array = jax.Array

# Below this, temperature is 0: logits / temperature would only add rounding.
GREEDY_BELOW = 1e-5
# Roles keep the streams apart; each is folded into the request's key first.
_DRAFT, _ACCEPT, _NEXT = range(3)


@dataclasses.dataclass(frozen=True)
class Sampling(fields.Checked):
  """How a request is sampled, on the host; types.Sampling is that of rows."""

  # What float32 holds.
  temperature: float = fields.setting(0.0, low=0, high=1e30, help='0 is greedy')
  top_k: int = fields.setting(0, low=0, high=2**31 - 1, help='0 is off')
  top_p: float = fields.setting(1.0, low=1e-30, high=1, help='1 is off')
  seed: int = fields.setting(
    0,
    low=0,
    high=2**32 - 1,
    help='one seed gives one text, in any batch; sampled with `adaptive`, at '
    'the same costs',
  )


def settings(
  rows: int, temperature: Any = 0.0, top_k: Any = 0, top_p: Any = 1.0
) -> types.Sampling:
  """Makes types.Sampling for `rows` rows, from scalars or a value a row."""
  spread = lambda x, dtype: np.broadcast_to(np.asarray(x, dtype), (rows,))
  wide = jnp.result_type(float)
  t, p = spread(temperature, wide), spread(top_p, wide)
  return types.Sampling(t, spread(top_k, np.int32), p)


def of(each: Sequence[Sampling]) -> types.Sampling:
  """Makes types.Sampling for rows with these settings."""
  rows = [(x.temperature, x.top_k, x.top_p) for x in each]
  return settings(len(rows), *zip(*rows, strict=True))


def probabilities(
  logits_BNV: Array, sampling: types.Sampling, best: Array | None = None
) -> Array:
  """Turns logits into p and q, as no other function does; float32 or wider.

  Applies temperature, then top-k, then top-p. Temperature 0 gives a one-hot at
  the first maximum. Ties at a cut are kept. A step that no row uses is skipped.
  best: the largest logits, [B, N, 1], if they are known.
  """
  wide = jnp.promote_types(logits_BNV.dtype, jnp.result_type(float))
  x = logits_BNV.astype(wide)
  spread = lambda a: a.reshape(-1, *(1,) * (x.ndim - 1))
  greedy_B11 = spread(is_greedy(sampling))
  best = jnp.max(x, -1, keepdims=True) if best is None else best.astype(wide)
  index = jnp.arange(x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,))
  # Functions, so that each branch below begins at the logits: what a branch is
  # given is written out before, and read in another pass over the vocabulary.
  one_hot = lambda: (index == first_of(x, best)).astype(wide)

  def scaled():
    assert sampling.temperature_B is not None
    t_B = jnp.where(is_greedy(sampling), 1, sampling.temperature_B)
    return (x - best) / spread(t_B).astype(wide)

  def cut():
    z = jax.lax.cond(
      jnp.any(sampling.top_k_B > 0),
      _cut_top_k,
      lambda z, k: z,
      scaled(),
      spread(sampling.top_k_B),
    )
    return jax.lax.cond(
      jnp.any(sampling.top_p_B < 1),
      _cut_top_p,
      lambda p, top: p,
      _normalised(jnp.exp(z)),
      spread(sampling.top_p_B),
    )

  def warp():
    cuts = jnp.any((sampling.top_k_B > 0) | (sampling.top_p_B < 1))
    p = jax.lax.cond(cuts, cut, lambda: _normalised(jnp.exp(scaled())))
    return jax.lax.cond(
      jnp.any(greedy_B11),
      lambda p: jnp.where(greedy_B11, one_hot(), p),
      lambda p: p,
      p,
    )

  return of_greedy(sampling, one_hot, warp)


def logprobs(
  logits_BNV: Array, tokens_BN: Array, count: int
) -> tuple[Array | None, tuple[Array, Array] | None, Array | None]:
  """Computes log-probabilities and entropies at temperature 1.

  logits_BNV: before temperature.
  count: X, how many of the likeliest tokens; below 2 none; 0 computes nothing.

  Returns the log-probabilities of the tokens [B, N]; ids and log-probabilities
  of the likeliest, [B, N, X] each, descending; the entropies of the
  distributions, [B, N] nats. None for what is not computed.
  """
  if not count:
    return None, None, None
  logit_BN1 = jnp.take_along_axis(logits_BNV, tokens_BN[..., None], -1)
  total_BN = jax.nn.logsumexp(logits_BNV, -1)
  logprob_BN = logit_BN1[..., 0] - total_BN
  log_BNV = logits_BNV - total_BN[..., None]
  p_BNV = jnp.exp(log_BNV)
  # Padding has the logarithm -inf, and adds nothing.
  entropy_BN = -jnp.sum(p_BNV * jnp.where(p_BNV > 0, log_BNV, 0), -1)
  if count == 1:
    return logprob_BN, None, entropy_BN
  best_BNX, ids_BNX = jax.lax.top_k(logits_BNV, count)
  top_BNX = ids_BNX, best_BNX - total_BN[..., None]
  return logprob_BN, top_BNX, entropy_BN


def _normalised(weights: Array) -> Array:
  return weights / jnp.sum(weights, -1, keepdims=True)


def first_of(x: Array, best: Array) -> Array:
  """Finds the first index of the largest value on the last axis, [..., 1].

  best: jnp.max(x, -1, keepdims=True). Over a vocabulary jnp.argmax takes 4
    times as long on CPU, and top_k(x, 1) compiles to a sort on TPU.
  """
  V = x.shape[-1]
  index = jnp.arange(V, dtype=jnp.int32).reshape((1,) * (x.ndim - 1) + (-1,))
  first = jnp.min(jnp.where(x == best, index, V), -1, keepdims=True)
  # NaN equals nothing, not even itself: without this, first would be V.
  return jnp.minimum(first, V - 1)


def is_greedy(sampling: types.Sampling) -> Array:
  if sampling.temperature_B is None:
    return jnp.ones(sampling.top_k_B.shape, bool)
  return sampling.temperature_B < GREEDY_BELOW


def of_greedy(sampling: types.Sampling, greedy, sampled):
  """Calls greedy() if all rows are, else sampled(); compiles what can run."""
  if sampling.temperature_B is None:
    return greedy()
  return jax.lax.cond(jnp.all(is_greedy(sampling)), greedy, sampled)


def _cut_top_k(z: Array, k_B11: Array) -> Array:
  """Puts -inf below the k-th largest of z <= 0; keeps ties with it."""
  bits = _ordered_bits(-z)
  k = jnp.where(k_B11 > 0, k_B11, z.shape[-1])
  enough = lambda t: jnp.sum(bits <= t, -1, keepdims=True) >= k
  # The smallest t with at least k values at or under it.
  t = _bisect(enough, z, smallest=True)
  return jnp.where(bits <= t, z, -jnp.inf)


def _cut_top_p(p: Array, top_p_B11: Array) -> Array:
  """Keeps p >= t and renormalises; t: the largest float that keeps top_p."""
  bits = _ordered_bits(p)
  mass = lambda t: jnp.sum(jnp.where(bits >= t, p, 0), -1, keepdims=True)
  top = jnp.where(top_p_B11 < 1, top_p_B11, 0).astype(p.dtype)
  t = _bisect(lambda t: mass(t) >= top, p, smallest=False)
  kept = jnp.where(bits >= t, p, 0)
  # Rows without top-p must not change in any bit because another row uses it.
  off_B11 = top_p_B11 >= 1
  total = jnp.where(off_B11, 1, jnp.sum(kept, -1, keepdims=True))
  return jnp.where(off_B11, p, kept / total)


def _ordered_bits(x: Array) -> Array:
  """Reads the bits of floats >= 0 as integers, which sort as the floats do."""
  integer = {4: jnp.int32, 8: jnp.int64}[x.dtype.itemsize]
  # + 0.0 turns -0.0, whose bits are negative, into 0.0.
  return jax.lax.bitcast_convert_type(x + 0.0, integer)


def _bisect(holds, like: Array, *, smallest: bool) -> Array:
  """Finds each row's boundary of `holds`, a monotone predicate on ordered bits.

  Returns the smallest integer where it holds if `smallest`, else the largest.
  Sorting the vocabulary instead costs 30 times as much on CPU.
  """
  width = like.dtype.itemsize * 8 - 1
  integer = {4: jnp.int32, 8: jnp.int64}[like.dtype.itemsize]
  t = jnp.zeros((*like.shape[:-1], 1), integer)

  def body(i, t):
    bit = jnp.left_shift(
      jnp.asarray(1, integer), (width - 1 - i).astype(integer)
    )
    if smallest:  # keep the bit out where the predicate holds without it
      return jnp.where(holds(t + (bit - 1)), t, t + bit)
    return jnp.where(holds(t + bit), t + bit, t)

  return jax.lax.fori_loop(0, width, body, t)


# --- draws -----------------------------------------------------------------


def next_keys(seed_B: Array, request_B: Array, position_B: Array) -> Array:
  """Makes the key of each row's emitted token, by its index in the buffer."""
  return _fold(_role_keys(seed_B, request_B, _NEXT)[:, 0], position_B)


def _role_keys(seed_B: Array, request_B: Array, *roles: int) -> Array:
  """Makes the keys for X roles: [B, X]."""

  def keys(seed, request):
    key = jax.random.key(seed, impl='threefry2x32')
    own = jax.random.fold_in(key, request)
    return jax.vmap(jax.random.fold_in, (None, 0))(own, jnp.array(roles))

  return jax.vmap(keys)(seed_B, request_B)


_fold = jax.vmap(jax.random.fold_in)


def noise(
  seed_B: Array,
  request_B: Array,
  lengths_B: Array,
  sampling: types.Sampling,
  *,
  gamma: int,
  coupled: bool,
) -> types.Noise:
  """Makes the randomness for the window that starts after lengths_B tokens.

  Keys draft and accept draws by (seed, request, role, window start, offset);
  the emitted token by (seed, request, role, its index). Keying the first two by
  index alone would bias rules that look ahead: that few drafts were accepted is
  evidence about the later ones, and the next window would draw the same tokens
  again. Keys children by parent + 1: a chain in a tree gets the same draws.

  seed_B, request_B: uint32. coupled: drafts draw with the noise of the token
    emitted at their index.
  """
  pick = functools.partial(draw, sampling)
  each = jax.vmap(_fold, (1, None), 1)
  roles_B2 = _role_keys(seed_B, request_B, _DRAFT, _ACCEPT)
  window_B2 = each(roles_B2, lengths_B)
  # All offsets at once: a hash takes as long to compile as a product.
  at = lambda offset: each(window_B2, jnp.full_like(lengths_B, offset))
  keys_KB2 = jax.vmap(at)(jnp.arange(gamma))
  position_BN = lengths_B[:, None] + jnp.arange(gamma + 1)[None]
  keys_of_next = functools.partial(next_keys, seed_B, request_B)
  next_keys_BN = jax.vmap(keys_of_next, 1, 1)(position_BN)

  def next_token(offset_B, weights_BV):
    return pick(next_keys_BN[jnp.arange(len(offset_B)), offset_B], weights_BV)

  def draft_token(offset, q_BV):
    if coupled:
      return next_token(jnp.full_like(lengths_B, offset), q_BV)
    return pick(keys_KB2[offset, :, 0], q_BV)

  def children(parents_BM, depth, q_BMV, count):
    def own(parent_B, q_BV):
      keys_B2 = next_keys_BN[:, depth]
      if not coupled:
        keys_B2 = _fold(window_B2[:, 0], parent_B + 1)
      best_BX, tokens_BX = largest(_race(keys_B2, q_BV), count)
      return tokens_BX, best_BX > 0

    return jax.vmap(own, 1, 1)(parents_BM, q_BMV)

  uniform = lambda key: jax.random.uniform(key, (), jnp.result_type(float))
  accept_BK = jax.vmap(jax.vmap(uniform), 1)(keys_KB2[..., 1])
  return types.Noise(accept_BK, draft_token, next_token, children)


def draw(sampling: types.Sampling, keys_B: Array, weights_BV: Array) -> Array:
  """Draws one token for each row from unnormalised weights.

  Takes the largest w / E, where E are independent exponentials (an exponential
  race). When no row samples, every row of weights is one-hot up to scale, and
  no noise is drawn.
  """
  arrivals = lambda: _race(keys_B, weights_BV)
  scores_BV = of_greedy(sampling, lambda: weights_BV, arrivals)
  best_B1 = jnp.max(scores_BV, -1, keepdims=True)
  return first_of(scores_BV, best_B1)[:, 0]


def _race(keys_B: Array, weights_BV: Array) -> Array:
  size, dtype = weights_BV.shape[-1], weights_BV.dtype
  return weights_BV / jax.vmap(lambda key: exponential(key, size, dtype))(
    keys_B
  )


def largest(x: Array, count: int) -> tuple[Array, Array]:
  """Finds the largest (values, indices) on the last axis, descending: [..., X].

  Of equals the first comes first. For few of many: top_k on CPU; elsewhere,
  where it sorts all, a pass for each.
  """
  top_k = functools.partial(jax.lax.top_k, k=count)
  passes = functools.partial(_largest_by_passes, count=count)
  value, index = jax.lax.platform_dependent(x, cpu=top_k, default=passes)
  return value, index


def _largest_by_passes(x, *, count):
  index = jnp.arange(x.shape[-1]).reshape((1,) * (x.ndim - 1) + (-1,))

  def take(x, _):
    best = jnp.max(x, -1, keepdims=True)
    first = first_of(x, best)
    left = jnp.where(index == first, -jnp.inf, x)
    return left, (best[..., 0], first[..., 0])

  _, found = jax.lax.scan(take, x, length=count)
  return [jnp.moveaxis(x, 0, -1) for x in found]


def exponential(key: Array, size: int, dtype) -> Array:
  """Draws Exponential(1) variates, [size]; a larger size only appends to them.

  Uses all 32 bits, so that small values have full resolution: a token with
  probability 1e-7 wins only with a small one. With 23-bit uniforms the tail of
  a flat distribution is drawn too rarely (total variation 2.6e-3, V = 49,152).
  """
  u = (bits(key, size).astype(dtype) + 0.5) * 2.0**-32
  # float32 rounds the largest bits to u = 1, an infinite arrival time.
  return -jnp.log1p(-jnp.minimum(u, 1 - 2.0**-24).astype(dtype))


def bits(key: Array, size: int) -> Array:
  """Computes jax.random.bits(key, (size,)), uint32, for threefry keys.

  The same bits, with the rounds unrolled so that XLA fuses them into one loop:
  0.10 ms instead of 0.50 for V = 49,152 on CPU.
  """
  u32 = jnp.uint32
  key_2 = jax.random.key_data(key)
  keys = (key_2[0], key_2[1], key_2[0] ^ key_2[1] ^ u32(0x1BD11BDA))
  x, y = jnp.full(size, keys[0]), jnp.arange(size, dtype=u32) + keys[1]
  for i in range(5):
    for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
      x += y
      y = x ^ ((y << u32(turn)) | (y >> u32(32 - turn)))
    x += keys[(i + 1) % 3]
    y += keys[(i + 2) % 3] + u32(i + 1)
  return x ^ y
