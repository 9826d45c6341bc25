"""What target and draft say of the tokens of a text, teacher-forced.

Both read the text in one pass of chunks; nothing is drafted or drawn.
"""

import functools

import jax
import jax.numpy as jnp

from specdec_jax import decode, types, windows
from specdec_jax import sampling as sampling_lib

Array = jax.Array


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

  request: the prompts with the text after them; limit_B is where it ends.
  Returns [B, L, 2 + X]: last, sum_y min(p(y) / l, q(y)) for every lenience l.
  Indices outside the text, and the first, hold garbage.
  """
  B, L = request.tokens_BL.shape
  take = lambda index_T: request.tokens_BL.at[:, index_T].get(mode='clip')

  def law(model, params, cache, index_T):
    hidden_BTD, _, cache = windows.read(
      model,
      params,
      take(index_T),
      jnp.full((B,), index_T[0]),
      cache,
      slots=L,
      keep_BT=jnp.broadcast_to(index_T < L, (B, chunk)),
    )
    logits_BTV = model.head(params, hidden_BTD)
    return sampling_lib.probabilities(logits_BTV, request.sampling), cache

  def body(carry):
    at, target_cache, draft_cache, out_BPX = carry
    index_T = at + jnp.arange(chunk)
    p_BTV, target_cache = law(target, weights.target, target_cache, index_T)
    q_BTV, draft_cache = law(draft, weights.draft, draft_cache, index_T)
    next_BT1 = take(index_T + 1)[..., None]
    columns = [jnp.take_along_axis(x, next_BT1, -1) for x in (p_BTV, q_BTV)]
    columns += [
      jnp.sum(jnp.minimum(p_BTV / l, q_BTV), -1, keepdims=True)
      for l in leniences
    ]
    found_BTX = jnp.concatenate(columns, -1).astype(out_BPX.dtype)
    out_BPX = jax.lax.dynamic_update_slice(out_BPX, found_BTX, (0, at + 1, 0))
    return at + chunk, target_cache, draft_cache, out_BPX

  carry = (
    jnp.int32(0),
    target.init_cache(B, L),
    draft.init_cache(B, L),
    # Room for the last chunk to end past L: a clamped update would shift it.
    jnp.zeros((B, L + chunk + 1, 2 + len(leniences))),
  )
  return jax.lax.while_loop(
    lambda carry: carry[0] < jnp.max(request.limit_B) - 1, body, carry
  )[3][:, :L]
