"""A model whose joint distribution is known exactly.

The next token depends on the last token and on a hash of all visible tokens,
read through the cache: a missing, stale or misplaced slot changes the hash.
"""

import functools

import jax.numpy as jnp
import numpy as np

from specdec_jax import types

DEPTH, CONTEXT = 2, 512
# Prompts by vocabulary size.
PROMPT = {2: [1, 0, 1], 3: [1, 2, 0], 4: [1, 2, 0]}


@functools.cache
def make(vocab: int, *, encoder: bool = False) -> types.Model:
  """Makes a types.Model; params are logits_RVV: prefix hash, last token.

  Each of its two layers caches tokens + 1. After the first the hash is off by
  one, which gives other probabilities. Layer i's tap is (hash, last, position,
  i), with the last layer's hash. An embedding, (token + 1, position, 1, 1), is
  as wide as a tap; the model itself does not look at it. An encoder adds the
  source's hash, read from the cache.
  """

  def init_cache(rows, slots):
    return tuple(jnp.zeros((rows, slots), jnp.int32) for _ in range(DEPTH))

  def apply(
    params,
    tokens_BT,
    slots_BT,
    positions_BT,
    mask_BTS,
    cache,
    *,
    taps=(),
    layers=(0, None),
    residual_BTD=None,
    at_BS=None,
  ):
    B, S = cache[0].shape
    row_B1 = jnp.arange(B)[:, None]
    places_XS = jnp.arange(S)[None] if at_BS is None else at_BS
    cache, hidden_BTD = list(cache), residual_BTD
    part = range(DEPTH)[slice(*layers)]
    hash_BT = jnp.zeros_like(tokens_BT)
    for i in part:
      # Deeper layers know the tokens from the residual stream only.
      token_BT = tokens_BT if hidden_BTD is None else hidden_BTD[..., 1]
      written_BT = (token_BT + 1).astype(jnp.int32)
      cache[i] = cache[i].at[row_B1, slots_BT].set(written_BT, mode='drop')
      if i == part[-1]:  # nothing looks at the others
        weighed_BS = cache[i] * (3 * places_XS + 1)
        seen_BTS = jnp.where(mask_BTS, weighed_BS[:, None], 0)
        hash_BT = jnp.sum(seen_BTS, -1) + (i < DEPTH - 1)
        for store_BI in cache[DEPTH:]:
          hash_BT += jnp.sum(store_BI, 1, keepdims=True)
      hidden_BTD = jnp.stack([hash_BT, token_BT], -1)
    tapped = tuple(
      jnp.stack(
        [hash_BT, tokens_BT, positions_BT, jnp.full_like(tokens_BT, i)], -1
      ).astype(float)
      for i in taps
    )
    return hidden_BTD, tapped, tuple(cache)

  def head(params, hidden):
    return params[hidden[..., 0] % params.shape[0], hidden[..., 1]]

  encode = _encode if encoder else None
  model = types.Model(apply, head, init_cache, vocab, CONTEXT, _embed, encode)
  return model._replace(compact=_compact)


def _compact(cache, from_BK, to_BK):
  row_B1 = jnp.arange(len(from_BK))[:, None]
  move = lambda x_BS: x_BS.at[row_B1, to_BK].set(
    x_BS.at[row_B1, from_BK].get(mode='clip'), mode='drop'
  )
  return *map(move, cache[:DEPTH]), *cache[DEPTH:]


def _encode(params, source: types.Source, cache):
  del params
  tokens_BI, lengths_B = source
  at_1I = jnp.arange(tokens_BI.shape[1])[None]
  kept_BI = jnp.where(at_1I < lengths_B[:, None], tokens_BI + 1, 0)
  return *cache, kept_BI * (2 * at_1I + 1)


def _embed(params, tokens_BT, positions_BT):
  del params
  one_BT = jnp.ones_like(tokens_BT)
  parts = (tokens_BT + 1, positions_BT, one_BT, one_BT)
  return jnp.stack(parts, -1).astype(float)


def prefix_hash(prefix) -> int:
  return sum((int(x) + 1) * (3 * i + 1) for i, x in enumerate(prefix))


def given(p_RVV, source):
  """Shifts the table by a source's hash, which goes into every other one."""
  shift = sum((x + 1) * (2 * i + 1) for i, x in enumerate(source))
  return np.roll(p_RVV, -shift, 0)


def table(seed, vocab, *, hashes=5, scale=1.5):
  """Draws a table model's logits_RVV: [hash, last token, next token]."""
  rng = np.random.default_rng(seed)
  return scale * rng.normal(size=(hashes, vocab, vocab)).astype(
    np.dtype(jnp.result_type(float))
  )


def probabilities(
  logits_V, temperature: float, top_k: int = 0, top_p: float = 1, slack=0.0
):
  """Applies temperature, top-k and top-p by sorting, in float64; tied stay.

  The oracle of sampling.probabilities, with which it shares no code.

  temperature: 0 is greedy. top_k, top_p: 0 and 1 for no limit. slack: added to
  top_p, for rows where rounding decides.
  """
  x = np.asarray(logits_V, np.float64)
  if temperature < 1e-5:
    return (np.arange(len(x)) == np.argmax(x)).astype(float)
  z = (x - x.max()) / temperature
  if 0 < top_k < len(z):
    z = np.where(z >= np.sort(z)[::-1][top_k - 1], z, -np.inf)
  p = np.exp(z) / np.exp(z).sum()
  if top_p < 1:
    down = np.sort(p)[::-1]
    mass = np.cumsum(down)
    # Tied tokens stay or go together: the mass of {p >= t} counts all of them.
    last = np.array([mass[down >= t][-1] for t in down])
    enough = np.flatnonzero(last >= top_p + slack)
    t = down[enough[0]] if len(enough) else 0
    p = np.where(p >= t, p, 0)
  return p / p.sum()


def warped(logits_RVV, **settings) -> np.ndarray:
  """Computes a table's probabilities under sampling settings, float64."""
  return np.apply_along_axis(probabilities, -1, logits_RVV, **settings)


def row_of(params, prefix):
  """Picks the table's row after a prefix."""
  return np.asarray(params)[prefix_hash(prefix) % len(params), prefix[-1]]


def joint_distribution(p_RVV, prompt, n: int):
  """Computes the exact joint p of n tokens after a prompt, [V] * n, float64."""
  p_RVV = np.asarray(p_RVV, np.float64)
  p_RVV = p_RVV / p_RVV.sum(-1, keepdims=True)
  V = p_RVV.shape[-1]
  # X: every text so far, as its hash, last token and probability.
  hash_X, last_X = np.array([prefix_hash(prompt)]), np.array(prompt[-1:])
  out_X = np.ones(1)
  for i in range(len(prompt), len(prompt) + n):
    p_XV = p_RVV[hash_X % len(p_RVV), last_X]
    out_X = (out_X[:, None] * p_XV).ravel()
    hash_X = np.add.outer(hash_X, (np.arange(V) + 1) * (3 * i + 1)).ravel()
    last_X = np.tile(np.arange(V), len(last_X))
  return out_X.reshape((V,) * n)
