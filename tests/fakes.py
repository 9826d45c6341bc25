"""Fake models and drafters for which the right answer is known exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, requests, types
from specdec_jax.certify import base
from specdec_jax.certify import table_model as tables
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

table_model, table, row_of = tables.make, tables.table, tables.row_of
joint_distribution = tables.joint_distribution
prefix_hash = tables.prefix_hash
ragged, texts = base.ragged, base.texts


def adversary(text, vocab: int):
  """A script that is wrong everywhere."""
  return (np.asarray(text) + 1) % vocab


@functools.cache
def certain(drafter: types.Drafter, vocab: int) -> types.Drafter:
  """The same proposals with q spelled out as one-hot rows."""

  def propose(weights, state, context, noise, target_cache):
    draft, state, cache = drafter.propose(
      weights, state, context, noise, target_cache
    )
    q_BKV = jax.nn.one_hot(draft.tokens_BK, vocab, dtype=float)
    return draft._replace(q_BKV=q_BKV), state, cache

  return drafter._replace(name='certain', propose=propose)


@functools.cache
def listener(drafter: types.Drafter, taps=(0, 2)) -> types.Drafter:
  """Wraps a drafter; its state collects the features of committed tokens.

  state.features_BLE[:, i] for i < state.known_B is what init and commit said
  of the row's token i.
  """

  def init(weights, context, features):
    known_B = context.lengths_B - 1
    inner = drafter.init(weights, context, None)
    return inner, features, known_B

  def propose(weights, state, context, noise, target_cache):
    inner, *rest = state
    draft, inner, cache = drafter.propose(
      weights, inner, context, noise, target_cache
    )
    return draft, (inner, *rest), cache

  def commit(state, context, outcome, features_BNE):
    inner, features_BLE, known_B = state
    B, N, _ = features_BNE.shape
    L = features_BLE.shape[1]
    index_1N = jnp.arange(N)[None]
    emitted_B1 = outcome.emitted_B[:, None]
    slots_BN = jnp.where(index_1N < emitted_B1, known_B[:, None] + index_1N, L)
    features_BLE = features_BLE.at[jnp.arange(B)[:, None], slots_BN].set(
      features_BNE, mode='drop'
    )
    inner = drafter.commit(inner, context, outcome, None)
    return inner, features_BLE, known_B + outcome.emitted_B

  return types.Drafter(
    'listener', drafter.gamma, init, propose, commit, taps=taps
  )


def request(
  prompts, new, *, vocab, gamma=0, length=None, request=None, **settings
):
  """requests.make with room for everything a test may want."""
  return requests.make(
    requests.items(prompts, request),
    ids=vocab,
    context=10**6,
    max_new_tokens=new,
    gamma=gamma,
    length=length,
    **settings,
  )


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


def tiny(**changes):
  """Settings of a transformer that compiles in seconds, float64."""
  return model_config.sized(
    'tiny',
    **dict(
      depth=2,
      width=16,
      heads=2,
      kv_heads=1,
      head_dim=8,
      mlp=24,
      vocab=13,
      context=256,
      dtype='float64',
    )
    | changes,
  )


def wild(config, seed):
  """Random weights whose greedy text does not repeat one token for ever."""
  return jax.tree.map(lambda x: 3 * x, lm.init(config, seed))


def matmul_flops(jaxpr, turns: int = 1) -> int:
  """2 x multiplications of every dot_general, scans counted by length.

  turns: how often the body of a while loop is counted.
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
    times = {'scan': params.get('length'), 'while': turns}.get(name, 1)
    for inner in params.values():
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        total += times * matmul_flops(inner, turns)
  return total
