"""Drafting from counts: interpolated n-grams of a text, as a language model.

The counts are a tree: a token, what followed it, what followed both. They are a
types.Model, so the `lm` drafter drafts with them as with any other draft.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.drafters import lm


class Counts(NamedTuple):
  """Node v < V is token v; node V + j is the j-th continuation.

  unigram_V: the law of a token, positive everywhere. start_X: where the
  continuations of each node that can have some start, and one more. token_J,
  weight_J: a continuation and its share of the law; what the shares of a node
  leave goes to the context that is one token shorter. A node has at most MOST
  continuations, and they lie together.
  """

  unigram_V: Any
  start_X: Any
  token_J: Any
  weight_J: Any


# Continuations kept of a context, the commonest.
MOST = 32


def count(
  texts: Sequence[np.ndarray], *, order: int, vocab: int, least: int = 2
) -> Counts:
  """Counts n-grams of 1 to `order` tokens; none goes across two texts.

  A context that was seen c times with t different continuations gives each
  count / (c + t), and the rest to the shorter context (Witten and Bell 1991);
  unigrams are counted from 1. Of a context only the MOST commonest
  continuations are kept, of those longer than two tokens only what was seen
  `least` times: what is dropped goes to the shorter context too, so the law
  stays one.

  Raises:
    ValueError: order outside 1 to 4, an id outside the vocabulary, or no text
      of `order` tokens.
  """
  if not 1 <= order <= 4:
    raise ValueError(f'order={order}: allowed are 1 to 4')
  longest = max((len(text) for text in texts), default=0)
  if longest < order:
    raise ValueError(
      f'order={order}: the longest text of the corpus has {longest} tokens; '
      f'give a text of {order} tokens or more'
    )
  tokens_I = np.concatenate([np.asarray(text, np.int64) for text in texts])
  outside = tokens_I[(tokens_I < 0) | (tokens_I >= vocab)]
  if outside.size:
    raise ValueError(
      f'id {outside[0]} is outside the vocabulary of {vocab} tokens'
    )
  # How many tokens of its text an index has before it.
  before_I = np.concatenate([np.arange(len(text)) for text in texts])
  unigram_V = np.bincount(tokens_I, minlength=vocab) + 1.0
  # node_I: of the n - 1 tokens before each index, among the contexts of that
  # length that were kept; -1: none.
  node_I, nodes = np.concatenate([[-1], tokens_I[:-1]]), vocab
  starts = [np.zeros(1, np.int64)]
  tokens, weights = [np.zeros(0, np.int64)], [np.zeros(0)]
  for n in range(2, order + 1):
    node_I = np.where(before_I >= n - 1, node_I, -1)
    sizes, token_J, weight_J, next_I = _continuations(
      node_I, tokens_I, nodes, vocab=vocab, least=least if n > 2 else 1
    )
    starts.append(starts[-1][-1] + np.cumsum(sizes))
    tokens.append(token_J)
    weights.append(weight_J)
    node_I, nodes = np.concatenate([[-1], next_I[:-1]]), len(token_J)
  return Counts(
    (unigram_V / unigram_V.sum()).astype(np.float32),
    np.concatenate(starts).astype(np.int32),
    np.concatenate(tokens).astype(np.int32),
    _rounded_down(np.concatenate(weights)),
  )


def _continuations(node_I, tokens_I, nodes: int, *, vocab: int, least: int):
  """What is kept of the tokens that followed each of the contexts.

  Returns how many each context has, their tokens and shares, and for each index
  which of them it is; -1: none.
  """
  asked_I = node_I >= 0
  keys, inverse, seen = np.unique(
    node_I[asked_I] * vocab + tokens_I[asked_I],
    return_inverse=True,
    return_counts=True,
  )
  parent, token = keys // vocab, keys % vocab
  total = np.bincount(parent, seen, nodes) + np.bincount(
    parent, minlength=nodes
  )
  kept = _commonest(parent, seen) & (seen >= least)
  sizes = np.bincount(parent[kept], minlength=nodes)
  next_I = np.full(len(tokens_I), -1)
  # The kept ones are the next level's contexts, in this order.
  next_I[asked_I] = np.where(kept, np.cumsum(kept) - 1, -1)[inverse]
  return sizes, token[kept], seen[kept] / total[parent[kept]], next_I


def _rounded_down(weight_J):
  """Shares as float16; up, those of one node could add up to more than 1."""
  near_J = weight_J.astype(np.float16)
  below_J = np.nextafter(near_J, np.float16(0))
  return np.where(near_J > weight_J, below_J, near_J)


def _commonest(parent_J, seen_J):
  """Which continuations are among the MOST commonest of their parent's."""
  order = np.lexsort((-seen_J, parent_J))
  sorted_parent = parent_J[order]
  first = np.searchsorted(sorted_parent, sorted_parent)
  kept = np.zeros(len(parent_J), bool)
  kept[order] = np.arange(len(parent_J)) - first < MOST
  return kept


@functools.cache
def model(
  vocab: int, *, order: int, ids: int | None = None, context: int = 1 << 30
) -> types.Model:
  """The counts as a model: params are Counts, the cache holds the tokens.

  hidden is the order - 1 last tokens, -1 before the first one. ids: how many
  ids are real, all if None; the others have logit -inf.
  """
  back = order - 1

  def init_cache(rows: int, slots: int):
    return jnp.zeros((rows, slots), jnp.int32)

  def apply(
    params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, *, taps=()
  ):
    del params, mask_BTS, taps
    row_B1 = jnp.arange(cache.shape[0])[:, None]
    cache = cache.at[row_B1, slots_BT].set(tokens_BT, mode='drop')
    # In a chain of tokens the one before is in the slot before.
    steps = jnp.arange(max(back, 1))[::-1][None, None]
    at_BTX = slots_BT[..., None] - steps
    hidden_BTX = cache.at[row_B1[..., None], at_BTX].get(mode='clip')
    there_BTX = (positions_BT[..., None] >= steps) & (at_BTX >= 0)
    return jnp.where(there_BTX, hidden_BTX, -1), (), cache

  def head(params: Counts, hidden):
    wide = jnp.result_type(float)
    rows = hidden.reshape(-1, hidden.shape[-1])
    q_RV = jnp.zeros((len(rows), vocab), wide)
    q_RV = q_RV.at[:, : len(params.unigram_V)].set(
      params.unigram_V.astype(wide)[None]
    )
    for n in range(2, order + 1):
      q_RV = _interpolate(params, rows[:, rows.shape[1] - (n - 1) :], q_RV)
    real = jnp.arange(vocab)[None] < (vocab if ids is None else ids)
    logits_RV = jnp.log(jnp.where(real, q_RV, 0))
    return logits_RV.reshape(*hidden.shape[:-1], vocab)

  return types.Model(apply, head, init_cache, vocab, context)


def _interpolate(params: Counts, context_RX, shorter_RV):
  """The law after a context, from the law after one token less."""
  V, J = params.unigram_V.shape[0], params.token_J.shape[0]
  if J == 0:
    return shorter_RV

  def children(node_R):
    node_R = jnp.clip(node_R, 0, len(params.start_X) - 2)
    at_RM = params.start_X[node_R][:, None] + jnp.arange(MOST)[None]
    there_RM = at_RM < params.start_X[node_R + 1][:, None]
    return jnp.minimum(at_RM, J - 1), there_RM

  node_R, found_R = context_RX[:, 0], jnp.all(context_RX >= 0, -1)
  for x in range(1, context_RX.shape[1]):
    at_RM, there_RM = children(node_R)
    same_RM = there_RM & (params.token_J[at_RM] == context_RX[:, x, None])
    found_R &= jnp.any(same_RM, -1)
    # At most one matches.
    node_R = V + jnp.max(jnp.where(same_RM, at_RM, 0), -1)
  at_RM, there_RM = children(node_R)
  there_RM &= found_R[:, None]
  weight_RM = jnp.where(there_RM, params.weight_J[at_RM], 0)
  weight_RM = weight_RM.astype(shorter_RV.dtype)
  left_R1 = 1 - jnp.sum(weight_RM, -1, keepdims=True)
  left_R1 = jnp.maximum(left_R1, 0)  # old files have shares rounded up
  token_RM = jnp.where(there_RM, params.token_J[at_RM], shorter_RV.shape[1])
  row_R1 = jnp.arange(len(node_R))[:, None]
  return (left_R1 * shorter_RV).at[row_R1, token_RM].add(weight_RM, mode='drop')


def make(
  counts: types.Model, *, gamma: int, min_confidence: float = 0.0
) -> types.Drafter:
  """gamma tokens a window from model(...); reads weights.draft, the Counts."""
  made = lm.make(counts, gamma=gamma, min_confidence=min_confidence)
  return made._replace(name='ngram')
