"""A tiny server: random weights, lookup drafts under coupled, three rows."""

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
  """Two log-probabilities are kept of each token; the likeliest are ASCII."""
  plain = specdec_jax.load('random:tiny', kernels='xla')
  words = dataclasses.replace(plain.tokenizer, chat_template=TEMPLATE)
  ascii = dict(plain.params, head=plain.params['head'].at[:, 128:].set(0))
  target = dataclasses.replace(plain, tokenizer=words, params=ascii)
  options = build.default_options(logprobs=logprobs, widths=(0,))
  how = dict(gamma=GAMMA, rule='coupled', options=options)
  return build.engine(target, 'lookup', **how)


def served(logprobs: int = 2) -> protocol.Served:
  return protocol.Served(NAME, engine(logprobs), LENGTH, WAITING)


def rows(kind: type[pool.Pool] = pool.Pool, **more) -> pool.Pool:
  stops = len(engine().target.tokenizer.eos_ids) + protocol.STOPS
  sizes = dict(length=LENGTH + GAMMA, sources=LENGTH, stops=stops, **more)
  return kind.of(engine(), rows=(1, ROWS), **sizes)
