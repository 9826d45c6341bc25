"""What models say of the tokens of a text, teacher-forced.

They read the text in one pass of chunks; nothing is drafted or drawn.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specdec_jax import decode, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.verify import lenient

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
    hidden_BTD, _, cache = forward.read(
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


def judged(
  rule: types.Rule, p_BTV: Array, q_BTV: Array, scores: types.Scores
) -> tuple[Array, Array]:
  """What a rule keeps of one draft, and how far from p it emits: [B, T] each.

  The second is the total variation, 0 for a lossless rule.
  """
  if rule.kept is None:
    kept_BTV = jnp.minimum(p_BTV, q_BTV)
  else:
    kept_BTV = rule.kept(p_BTV, q_BTV, scores)
  kept_BT = jnp.sum(kept_BTV, -1)
  if rule.law is None:
    return kept_BT, jnp.zeros(kept_BT.shape)
  off_BTV = jnp.abs(rule.law(p_BTV, q_BTV, scores) - p_BTV)
  return kept_BT, jnp.sum(off_BTV, -1) / 2


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
  """p(x), q(x) of the token x at each index, and what each lenience does there.

  request: as read takes it. Returns [B, L, 2 + 2 X]: last, for every lenience,
  the mass of the drafts that it keeps, then for every one the total variation
  of what it emits. p or q is NaN where its model's logits are not finite.
  """
  rules = [lenient.make(l) for l in leniences]

  def columns(index_T, *logits):
    p_BTV, q_BTV = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    tokens_BT = at(request.tokens_BL, index_T)
    scored = types.Scores(logits[0], request.sampling)
    kept, distance = zip(
      *(judged(rule, p_BTV, q_BTV, scored) for rule in rules), strict=True
    )
    # A greedy law is a one-hot, whatever the logits are.
    said = [
      jnp.where(jnp.isfinite(jnp.max(x, -1)), of(law, tokens_BT), jnp.nan)
      for x, law in zip(logits, (p_BTV, q_BTV), strict=True)
    ]
    return [*said, *kept, *distance]

  readers = (target, weights.target), (draft, weights.draft)
  return jnp.stack(read(request, readers, columns, chunk=chunk), -1)
