"""Drafts with a text's bigram counts, smoothed with unigrams. The counts are a
types.Model, so drafters.lm drafts with them as with any model."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, hosts, types
from specdec_jax.drafters import branch, lm, method
from specdec_jax.io import load
from specdec_jax.io.published import draft_file

make = functools.partial(lm.make, name='ngram')

MOST = 32  # continuations stored of each token, the commonest ones


@dataclasses.dataclass(frozen=True)
class Settings(method.Stopping):
  source: str | os.PathLike = fields.setting(
    '', needed=draft_file.FORMS['ngram']
  )


class Counts(NamedTuple):
  """A text's bigram probabilities, for the M commonest continuations.

  unigram_V: each token's probability, positive everywhere.
  next_VM: the commonest tokens after each token.
  weight_VM: their probabilities, 0 where there are fewer than M; a row's
    remaining probability is spread as unigram_V.
  """

  unigram_V: Any
  next_VM: Any
  weight_VM: Any


def for_target(
  target: load.LanguageModel, settings: Settings, *, gamma: int, chunk: int
) -> method.Method:
  """Drafts with counts from a file, made with the target's tokenizer."""
  whole = target.layout and target.layout.sharding()
  fit = lambda arrays, about: hosts.put(Counts(**arrays), whole)
  counts = draft_file.fitted('ngram', settings.source, target, fit)
  q = model(target.model.vocab, ids=target.ids)
  drafter = make(
    q,
    gamma=gamma,
    min_confidence=settings.min_confidence,
    chunk=chunk,
    levels=branch.levels_of(settings.tree),
  )
  return method.Method(drafter, counts, q)


def recipe(world, gamma: int):
  """Makes a drafter for the certificate; windows often stop before gamma."""
  text = np.arange(600) ** 2 // 7 % world.vocab
  q = model(world.target.vocab, ids=world.vocab)
  drafter = make(q, gamma=gamma, min_confidence=0.3)
  return drafter, count([text], order=2, vocab=world.vocab)


def count(texts: Sequence[Sequence[int]], *, order: int, vocab: int) -> Counts:
  """Counts texts' bigrams (unigrams alone for order 1); none spans two texts.

  Witten-Bell smoothing (1991): after a token that was followed c times, by t
  different tokens, each of them has the probability count / (c + t), and the
  unigrams the rest. Unigram counts start from 1. Raises ValueError if no text
  has `order` tokens, or for an id outside the vocabulary.
  """
  assert order in (1, 2), order
  if max(map(len, texts), default=0) < order:
    raise ValueError(f'want a text of {order} tokens or more')
  # 64 bits: a pair's number is up to vocab ** 2, whatever type the ids have.
  text_ids = [np.asarray(x, np.int64) for x in texts]
  tokens_I = np.concatenate(text_ids)
  outside = tokens_I[(tokens_I < 0) | (tokens_I >= vocab)]
  if outside.size:
    raise ValueError(
      f'id {outside[0]} is outside the vocabulary of {vocab} tokens'
    )
  unigram_V = np.bincount(tokens_I, minlength=vocab) + 1.0
  pairs = [np.zeros(0, np.int64)]
  if order == 2:
    pairs += [x[:-1] * vocab + x[1:] for x in text_ids]
  keys, seen = np.unique(np.concatenate(pairs), return_counts=True)
  first, then = keys // vocab, keys % vocab
  total_V = np.bincount(first, seen, vocab) + np.bincount(first, None, vocab)
  common = np.lexsort((-seen, first))
  first, then, seen = first[common], then[common], seen[common]
  rank = np.arange(len(first)) - np.searchsorted(first, first)
  kept = rank < MOST
  at = first[kept], rank[kept]
  next_VM = np.zeros((vocab, min(MOST, rank.max(initial=-1) + 1)), np.int32)
  weight_VM = np.zeros(next_VM.shape, np.float32)
  next_VM[at] = then[kept]
  weight_VM[at] = (seen / total_V[first])[kept]
  return Counts(np.float32(unigram_V / unigram_V.sum()), next_VM, weight_VM)


@functools.lru_cache(maxsize=64)
def model(vocab: int, *, ids: int) -> types.Model:
  """Returns the counts as a model: params are Counts, a hidden state a token.
  Of `vocab` logits, those past `ids` are -inf."""

  def apply(params, tokens_BT, slots, positions, mask, cache, **more):
    return tokens_BT[..., None], (), cache

  def head(params: Counts, hidden):
    wide = jnp.result_type(float)
    last_R = hidden.reshape(-1)
    unigram_V = jnp.zeros(vocab, wide)
    unigram_V = unigram_V.at[:ids].set(params.unigram_V[:ids].astype(wide))
    weight_RM = params.weight_VM[last_R].astype(wide)
    left_R1 = 1 - jnp.sum(weight_RM, -1, keepdims=True)
    row_R1 = jnp.arange(len(last_R))[:, None]
    q_RV = left_R1 * unigram_V[None]
    q_RV = q_RV.at[row_R1, params.next_VM[last_R]].add(weight_RM)
    return jnp.log(q_RV).reshape(*hidden.shape[:-1], vocab)

  # It depends on the last token only: no cache, and no limit to the context.
  return types.Model(
    apply,
    head,
    init_cache=lambda rows, slots: (),
    vocab=vocab,
    context=1 << 30,
    compact=lambda cache, from_BK, to_BK: cache,
  )
