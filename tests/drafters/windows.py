"""What a drafter proposes in the windows of a few texts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import along, debug, decode, forward
from specdec_jax.verify import coupled
from tests import fakes


def asked(new, temperature, *, vocab: int, length: int) -> decode.Request:
  """Rows that end in different windows; the first begins with one token."""
  prompts = [[5], *fakes.prompts(len(new) - 1, vocab=vocab, longest=9)]
  settings = dict(vocab=vocab, length=length, temperature=temperature)
  return fakes.request(prompts, new, **settings)


def proposals(target, drafter, weights, request):
  """(Output, [(row, length before, tokens_K, q_KV, count)] of live windows).

  Under coupled, where texts are plain decoding's.
  """
  options, watched = decode.Options(chunk=8), debug.watched(drafter)
  programs = decode.programs(target, watched, coupled.RULE, options)
  state, info = programs.start(weights, request)
  seen = []
  while np.asarray(state.live_B).any():
    lengths_B, live_B = np.array(state.lengths_B), np.array(state.live_B)
    state, info = programs.step(weights, request, state, info)
    inner, draft, _ = state.drafter
    state = state._replace(drafter=inner)
    if draft.q_BKV is None:
      q_BKV = jax.nn.one_hot(draft.tokens_BK, target.vocab)
      draft = draft._replace(q_BKV=q_BKV)
    found = [np.asarray(x) for x in draft[:3]]
    for b in np.flatnonzero(live_B):
      seen.append((b, lengths_B[b], *(x[b] for x in found)))
  return decode.Output(state.tokens_BL, state.lengths_B, info), seen


def tapped(model, params, tokens_BL, taps, source=None):
  """(hidden states [B, L, D], features [B, L, E]) of a text, in one pass."""
  B, L = tokens_BL.shape
  hidden, found, _ = forward.read(
    *(model, params, jnp.asarray(tokens_BL), jnp.zeros(B, jnp.int32)),
    forward.open_cache(model, params, B, L, source),
    slots=L,
    taps=taps,
  )
  return hidden, forward.concat(found)


@functools.partial(jax.jit, static_argnames='loop')
def q_along(weights, text, *, loop):
  """q of a window's first draft at every token of a text: [B, L, V]."""
  ids = range(loop.target.vocab)
  each = lambda _, q_BTV: [q_BTV[..., v] for v in ids]
  return jnp.stack(along.score(loop, weights, text, each), -1)


def warmed(q, temperature: float) -> np.ndarray:
  """Distributions [..., V] of temperature 1 at another."""
  q = np.asarray(q)
  if not temperature:
    return np.arange(q.shape[-1]) == q.argmax(-1)[..., None]
  q = q ** (1 / temperature)
  return q / q.sum(-1, keepdims=True)
