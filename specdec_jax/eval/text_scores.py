"""What models say of the tokens of a text, teacher-forced.

They read the text in one pass of chunks; nothing is drafted or drawn.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specdec_jax import decode, types, windows
from specdec_jax import sampling as sampling_lib

Array = jax.Array


def read(
  request: decode.Request,
  readers: Sequence[tuple[types.Model, types.Params]],
  columns: Callable[..., Sequence[Array]],
  *,
  chunk: int,
) -> list[Array]:
  """Reads a text and gathers numbers about each of its tokens, inside a jit.

  request: the prompts with the text after them; limit_B is where it ends.
  columns(index_T, *logits_BTV) -> arrays [B, T] about the tokens at index_T,
  from the logits that each reader predicts them with. Returns each as [B, L];
  index 0 and indices outside the text hold garbage.
  """
  B, L = request.tokens_BL.shape

  def logits(model, params, cache, index_T):
    hidden_BTD, _, cache = windows.read(
      model,
      params,
      at(request.tokens_BL, index_T),
      jnp.full((B,), index_T[0]),
      cache,
      slots=L,
      keep_BT=jnp.broadcast_to(index_T < L, (B, chunk)),
    )
    return model.head(params, hidden_BTD), cache

  def step(start, caches):
    index_T = start + jnp.arange(chunk)
    found = [
      logits(*reader, cache, index_T)
      for reader, cache in zip(readers, caches, strict=True)
    ]
    said = columns(index_T + 1, *(x for x, _ in found))
    return said, [cache for _, cache in found]

  put = jax.lax.dynamic_update_slice_in_dim

  def body(carry):
    start, caches, out = carry
    said, caches = step(start, caches)
    out = [
      put(old_BP, new_BT.astype(old_BP.dtype), start + 1, axis=1)
      for old_BP, new_BT in zip(out, said, strict=True)
    ]
    return start + chunk, caches, out

  caches = [model.init_cache(B, L) for model, _ in readers]
  count = len(jax.eval_shape(step, jnp.int32(0), caches)[0])
  # Room for the last chunk to end past L: a clamped update would shift it.
  out = [jnp.zeros((B, L + chunk + 1)) for _ in range(count)]
  _, _, out = jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(request.limit_B) - 1,
    body,
    (jnp.int32(0), caches, out),
  )
  return [x_BP[:, :L] for x_BP in out]


def at(x_BL: Array, index_T: Array) -> Array:
  """Columns of x_BL, [B, T]; past its end the last one."""
  return x_BL.at[:, index_T].get(mode='clip')


def of(p_BTV: Array, tokens_BT: Array) -> Array:
  """The probability of each token under its own row: [B, T]."""
  return jnp.take_along_axis(p_BTV, tokens_BT[..., None], -1)[..., 0]


@functools.partial(
  jax.jit, static_argnames=('target', 'draft', 'chunk', 'leniences')
)
def scores(
  weights: types.Weights,
  request: decode.Request,
  *,
  target: types.Model,
  draft: types.Model,
  chunk: int,
  leniences: tuple[float, ...],
) -> Array:
  """p(x), q(x) of the token x at each index, and the overlaps there.

  request: as read takes it. Returns [B, L, 2 + X]: last,
  sum_y min(p(y) / l, q(y)) for every lenience l.
  """

  def columns(index_T, *logits):
    p_BTV, q_BTV = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    tokens_BT = at(request.tokens_BL, index_T)
    overlaps = [jnp.sum(jnp.minimum(p_BTV / l, q_BTV), -1) for l in leniences]
    return [of(p_BTV, tokens_BT), of(q_BTV, tokens_BT), *overlaps]

  readers = (target, weights.target), (draft, weights.draft)
  return jnp.stack(read(request, readers, columns, chunk=chunk), -1)
