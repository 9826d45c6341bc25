"""A tiny server: random weights, lookup drafts, three rows."""

import dataclasses
import functools

import specdec_jax
from specdec_jax import build, pool
from specdec_jax.serve import protocol

TEMPLATE = (
  "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
)
NAME, ROWS, LENGTH, GAMMA, WAITING = 'tiny', 3, 61, 3, 6


@functools.cache
def engine(logprobs: int = 2) -> build.Engine:
  """Two log-probabilities are kept of each token."""
  plain = specdec_jax.load('random:tiny')
  words = dataclasses.replace(plain.tokenizer, chat_template=TEMPLATE)
  target = dataclasses.replace(plain, tokenizer=words)
  options = build.default_options(logprobs=logprobs, widths=(0,))
  return build.engine(target, 'lookup', gamma=GAMMA, options=options)


def served(logprobs: int = 2) -> protocol.Served:
  return protocol.Served(NAME, engine(logprobs), LENGTH, WAITING)


def rows(kind: type[pool.Pool] = pool.Pool) -> pool.Pool:
  stops = len(engine().target.tokenizer.eos_ids) + protocol.STOPS
  return kind.of(engine(), rows=ROWS, length=LENGTH + GAMMA, stops=stops)
