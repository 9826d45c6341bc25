"""Request.gamma_B: fewer drafts than the program's gamma, and none at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, debug, decode, types
from specdec_jax.certify import base, load
from specdec_jax.drafters import lm
from specdec_jax.verify import coupled, reject
from tests import fakes

V, NEW, L = 13, 12, 32
MOST = np.array([2, 2, 0, 2, 5, 1], np.int32)
ASKED = dict(temperature=[0.0, 0.9, 0.8, 1.2, 0.7, 0.9], top_p=0.95, seed=3)


def requests(world):
  prompts = fakes.prompts(len(MOST), vocab=V, seed=1)
  return base.make_request(world, prompts, NEW, length=L, **ASKED)


@pytest.mark.more
@pytest.mark.parametrize(
  'name, rule',
  [
    ('lookup', 'reject'),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('lm', 'reject'),
        ('ngram', 'coupled'),
        ('eagle', 'block'),
        ('early_exit', 'block'),
        ('self', 'block'),
      )
    ),
  ],
)
def test_a_smaller_gamma_by_its_cap(x64, name, rule):
  """The tokens are those of a program made for that gamma."""
  world = base.transformers(V)
  capped, own = (
    base.run(world, base.Pair(build.RULES[rule], *drafting), request)
    for drafting, request in (
      (load.RECIPES[name](world, 5), requests(world)._replace(gamma_B=MOST)),
      (load.RECIPES[name](world, 2), requests(world)),
    )
  )
  texts = zip(*map(base.texts, (capped, own)), strict=True)
  for row, (one, two) in enumerate(texts):
    assert one == two or MOST[row] != 2
  most_B = (capped.info.proposed_BK > 0).sum(1)
  assert (most_B <= MOST).all() and most_B[MOST > 0].any()
  plain = base.plain(world, requests(world))
  for row in range(len(MOST)):
    if rule == 'coupled' or MOST[row] == 0:
      assert base.texts(capped)[row] == plain[row]


def counted(model: types.Model, calls: list) -> types.Model:
  def apply(*args, **named):
    jax.debug.callback(lambda: calls.append(1))
    return model.apply(*args, **named)

  return model._replace(apply=apply)


@pytest.mark.more
def test_a_cap_of_0_costs_no_pass_of_the_draft():
  model, calls = fakes.table_model(V), []
  drafter = lm.make(counted(model, calls), gamma=3)
  params = types.Weights(
    jnp.asarray(fakes.table(0, V)), jnp.asarray(fakes.table(1, V))
  )
  programs = decode.programs(model, drafter, reject.RULE)
  counts = []
  for most in ([0, 0], [0, 2], [3, 3]):
    request = fakes.request([[1, 2]] * 2, 6, vocab=V, length=L)
    request = request._replace(gamma_B=np.int32(most))
    jax.block_until_ready(programs.generate(params, request))
    jax.effects_barrier()
    counts.append(len(calls))
    calls.clear()
  assert counts[0] == 0
  assert 0 < counts[1] < counts[2]


@pytest.mark.more
@pytest.mark.parametrize('name', ['lm', 'eagle', 'dflash'])
@pytest.mark.parametrize('skipped, beside', [(1, 3), (7, 3), (30, 3), (30, 0)])
def test_a_draft_catches_up(x64, name, skipped, beside):
  """After windows without drafts it proposes what a fresh one would.

  beside: the most drafts of a row in the same batch, in those windows.
  """
  world = base.transformers(V)
  drafter, params = load.RECIPES[name](world, 3)
  programs = decode.programs(world.target, debug.watched(drafter), coupled.RULE)
  weights = types.Weights(world.weights.target, params)
  make = lambda: base.make_request(
    world, [[1, 2], [3], [4, 5, 6]], 50, length=64, temperature=0.9
  )
  off = make()._replace(gamma_B=np.array([0, 0, beside], np.int32))

  def step(state, info, request):
    state, info = programs.step(weights, request, state, info)
    inner, draft, _ = state.drafter
    return state._replace(drafter=inner), info, draft

  state, info = programs.start(weights, off)
  for _ in range(skipped):
    state, info, _ = step(state, info, off)
  again = make()._replace(
    tokens_BL=np.array(state.tokens_BL), lengths_B=np.array(state.lengths_B)
  )
  _, _, one = step(state, info, make())
  _, _, two = step(*programs.start(weights, again), make())
  assert one.count_B.tolist() == two.count_B.tolist() == [3] * 3
  np.testing.assert_array_equal(one.tokens_BK, two.tokens_BK)
  np.testing.assert_allclose(one.q_BKV, two.q_BKV, rtol=0, atol=1e-9)
