"""Fake models and drafters for which the right answer is known exactly."""

import functools

import jax
import numpy as np

from specdec_jax import decode, requests, types
from specdec_jax.certify import base
from specdec_jax.certify import table_model as tables
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.verify import reject

table_model, table, row_of = tables.make, tables.table, tables.row_of
prefix_hash = tables.prefix_hash
ragged, texts = base.ragged, base.texts


@functools.cache
def table_text():
  """A table of 40 ids and its greedy text: 14 tokens after [1, 2], in 40 slots.

  The first ten tokens differ, so that each may be a stop id.
  """
  model = table_model(40)
  plain = decode.programs(model, decode.PLAIN, reject.RULE)
  asked = request([[1, 2]], 14, vocab=40, length=40)
  for seed in range(100):
    params = table(seed, 40, hashes=7, scale=3)
    out = plain.generate(types.Weights(params), asked)
    text = np.asarray(out.tokens_BL)[0]
    if len(set(text[2:12].tolist())) == 10:
      return params, text
  raise AssertionError('no such table')


def adversary(text, vocab: int):
  """A script that is wrong everywhere."""
  return (np.asarray(text) + 1) % vocab


def request(prompts, new, *, vocab, request=None, **settings):
  """requests.make of prompts of these ids; settings: as base.make_request."""
  assert all(0 <= x < vocab for prompt in prompts for x in prompt)
  return base.request_of(requests.items(prompts, request), new, **settings)


def prompts(rows, *, vocab, seed=0, longest=6):
  """Ragged random prompts of 1 to `longest` tokens."""
  rng = np.random.default_rng(seed)
  return [
    rng.integers(0, vocab, 1 + (b * 3 + 1) % longest).tolist()
    for b in range(rows)
  ]


def pad(texts_, length: int, fill=0):
  out = np.full((len(texts_), length), fill, np.int32)
  for row, text in zip(out, texts_, strict=True):
    row[: len(text)] = text
  return out


def run_steps(programs, weights, req, *, look=None):
  """generate, driven from Python; look(state, info) after every step."""
  state, info = programs.start(weights, req)
  while np.asarray(state.live_B).any():
    state, info = programs.step(weights, req, state, info)
    if look is not None:
      look(state, info)
  return decode.Output(state.tokens_BL, state.lengths_B, info), state


# Switches of the architecture, as GPT-2 has them, as Gemma does (but for layers
# without RoPE), and as OLMo 2 does.
GPT = model_config.GPT
GEMMA = dict(
  windows=(3, 0), local_rope_theta=100.0, post_norm=True, qk_norm=True,
  rotated=(True, False, True),
)  # fmt: skip
OLMO2 = dict(pre_norm=False, post_norm=True, qk_norm=True, joint_qk_norm=True)


def tiny(**changes):
  """Settings of a transformer that compiles in seconds, float64."""
  sizes = dict(width=16, heads=2, kv_heads=1, head_dim=8, mlp=24, vocab=13)
  sizes |= dict(context=256, dtype='float64')
  return model_config.sized('tiny', **sizes | changes)


def wild(config, seed):
  """Random weights whose greedy text does not repeat one token for ever."""
  return jax.tree.map(lambda x: 3 * x, lm.init(config, seed))


def matmul_flops(jaxpr, turns) -> int:
  """2 x multiplications of every dot_general, scans counted by length.

  turns: how often the body of each while loop with some is counted.
  """
  total = 0
  for eqn in jaxpr.eqns:
    name, params = eqn.primitive.name, eqn.params
    if name == 'dot_general':
      (over, _), _ = params['dimension_numbers']
      shape = eqn.invars[0].aval.shape
      inner = np.prod([shape[i] for i in over], dtype=int)
      total += 2 * int(np.prod(eqn.outvars[0].aval.shape)) * int(inner)
      continue
    inners = [getattr(x, 'jaxpr', x) for x in params.values()]
    own = sum(matmul_flops(x, turns) for x in inners if hasattr(x, 'eqns'))
    times = params.get('length', 1) if name == 'scan' else 1
    total += own * (next(turns) if own and name == 'while' else times)
  return total
