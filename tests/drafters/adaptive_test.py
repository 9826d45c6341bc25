"""What adaptive chooses, and what hybrid takes from whom."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.costs import scripted
from specdec_jax.drafters import adaptive, hybrid, lm, lookup, method
from specdec_jax.verify import coupled, reject
from tests import fakes

V, L, K, NEW = 40, 128, 4, 100
MODEL, TABLE = fakes.table_model(V), fakes.table(0, V)
COSTS = adaptive.Costs(
  np.float32([1, 1.1, 1.2, 1.5, 1.6]), np.float32([0, 0.1, 0.2, 0.3, 0.4])
)


def best(alpha: float, most: int) -> int:
  """The number of drafts with the most tokens for its cost."""
  cost = COSTS.verify_N + COSTS.draft_N
  rate = [
    sum(alpha**i for i in range(j + 1)) / cost[j] for j in range(most + 1)
  ]
  return int(np.argmax(rate))


def script(rows, found=K):
  """weights.draft of costs.scripted."""
  return np.zeros((rows, L), np.int32), np.full((rows, L), found)


def proposed(drafter, own, state, temperature, gamma=K):
  """What drafter.propose returns after [1, 2] in each row."""
  rows = len(temperature)
  shape = dict(vocab=V, length=L, temperature=temperature)
  request = fakes.request([[1, 2]] * rows, 9, **shape)
  live_B, given = jnp.ones(rows, bool), map(jnp.asarray, request[:2])
  context = decode.context_of(drafter, request, *given, live_B)
  context = context._replace(gamma_B=jnp.full(rows, gamma))
  return drafter.propose(types.Weights((), own), state, context, None, ())


def counts(tried, accepted, most, shared=False, live=True, levels=()):
  whole_B = np.zeros(len(tried), bool)
  state = adaptive.State(
    (), jnp.float32(tried), jnp.float32(accepted), None, None
  )
  context = types.Context(*[None] * 5)._replace(
    gamma_B=jnp.array(most | 0 * whole_B), live_B=whole_B | live
  )
  cost_BN = np.stack([COSTS.verify_N + COSTS.draft_N] * len(tried))
  drafter = scripted.make(gamma=K)._replace(tree=levels)
  rest = context, cost_BN, whole_B | shared
  return adaptive._best(drafter, state, *rest).tolist()


def test_the_count_has_the_most_tokens_for_its_cost():
  tried = np.array([0, 1, 5, 5, 20, 20, 20, 3])
  accepted = np.array([0, 0, 0, 5, 20, 10, 3, 1])
  weight = adaptive.WEIGHT
  alpha = (accepted + weight * adaptive.PRIOR) / (tried + weight)
  for most in range(K + 1):
    wanted = [best(x, most) for x in alpha]
    assert counts(tried, accepted, most) == wanted
  assert len(set(wanted)) > 2


def test_a_tree_is_cut_into_whole_levels():
  """A level counts as one draft, whatever it holds."""
  rows = [0, 20, 20, 20, 20], [0, 20, 20, 20, 0]
  most = np.array([4, 4, 3, 1, 4])
  assert counts(*rows, most, levels=(2, 1, 1)) == [2, 4, 3, 0, 0]


def test_rows_that_share_take_one_count_and_heed_all_live_ones():
  rows = [20, 20], [0, 20]
  assert counts(*rows, K) == [0, K]
  for live in (True, False):
    both = counts(*rows, K, True, np.array([True, live]))
    assert both == [K if live else 0] * 2
  # One row of eight has drafts: seven would wait for it, whoever they are.
  one = [20] * 8, [20] * 8, np.array([K] + [0] * 7)
  assert counts(*one) == [K] + [0] * 7
  assert counts(*one, True) == counts(*one, np.arange(8) == 0) == [0] * 8


def test_only_greedy_rows_go_by_the_costs_of_few():
  """A sampled text would show how many are decoded beside it."""
  free = adaptive.Costs(np.ones(K + 1), np.zeros(K + 1))
  dear = adaptive.Costs(np.ones(K + 1), np.float32([0, 9, 9, 9, 9]))
  drafter = adaptive.make(scripted.make(gamma=K))
  none_B = jnp.zeros(2)
  for few, wanted in (({}, [0, 0]), ({2: free}, [K, 0]), ({1: free}, [0, 0])):
    own = adaptive.Params(script(2), dear, few)
    state = adaptive.State((), none_B, none_B, jnp.ones(2, bool), none_B)
    draft, *_ = proposed(drafter, own, state, [0.0, 0.9])
    assert draft.count_B.tolist() == wanted


def test_what_a_window_teaches():
  """Drafts up to the first that is refused were tested; older windows count
  less; a lookup that found nothing learns nothing, and forgets nothing."""
  drafter = adaptive.make(scripted.make(gamma=K))
  asked_B = np.array([True, True, True, False])
  verified_B, accepted_B = np.array([4, 4, 0, 0]), np.array([1, 4, 0, 0])
  old = jnp.float32([10, 10, 10, 10])
  state = adaptive.State((), old, old / 2, asked_B, old)
  outcome = types.Outcome(*[None] * len(types.Outcome._fields))._replace(
    accepted_B=accepted_B, verified_B=verified_B
  )
  new = drafter.commit(state, None, outcome, None)
  d = adaptive.DECAY
  tried = [10 * d + 2, 10 * d + 4, 10 * d, 10]
  accepted = [5 * d + 1, 5 * d + 4, 5 * d, 5]
  both = [new.tried_B, new.accepted_B]
  np.testing.assert_allclose(both, [tried, accepted], rtol=1e-6)


WORTH = (0.9, 0.5, 0.2, 0.1)
VERIFY = jnp.array([1, 1.2, 1.5, 1.7, 2.0])


def of_worth(drafting):
  """(drafts asked for, state, Draft, State) of a window of three rows, whose
  worth held, half of it, a tenth of it; drafting: its costs."""
  right, asked = scripted.make(gamma=K), []

  def propose(weights, state, context, *rest):
    asked.append(context.gamma_B.tolist())
    draft, *more = right.propose(weights, state, context, *rest)
    worth_BK = jnp.tile(jnp.array(WORTH), (3, 1))
    return draft._replace(marks={'worth_BK': worth_BK}), *more

  drafter = adaptive.make(right._replace(tree=(K, 1), propose=propose))
  own = adaptive.Params(script(3), adaptive.Costs(VERIFY, jnp.array(drafting)))
  hoped_B, accepted_B = jnp.array([9.0, 19, 59]), jnp.array([9.0, 9, 5])
  state = adaptive.State((), accepted_B + 3, accepted_B, hoped_B > 0, hoped_B)
  draft, new, _ = proposed(drafter, own, state, [0.9] * 3)
  return asked, state, draft, new


def test_drafts_of_known_worth_are_tested_while_they_pay():
  """By worth, as far as it held in the row; a window of none has failed."""
  _, state, draft, new = of_worth([0, 0.1, 0.1, 0.1, 0.1])
  rates = [
    [(1 + fair * sum(WORTH[:j])) / VERIFY[j] for j in range(K + 1)]
    for fair in (1.0, 0.5, 0.1)
  ]
  assert draft.count_B.tolist() == [int(np.argmax(x)) for x in rates]
  assert draft.count_B.tolist() == [2, 1, 0]
  d = adaptive.DECAY
  np.testing.assert_allclose(
    new.hoped_B, [9 * d + 1.4, 19 * d + 0.9, 59], rtol=1e-6
  )
  np.testing.assert_allclose(new.tried_B - state.tried_B, [0, 0, 1])


@pytest.mark.parametrize('all_cost, wanted', [(0.1, K), (2.0, 0)])
def test_drafts_of_known_worth_are_drafted_all_or_none(all_cost, wanted):
  """Three would pay best, and two where all cost 2; but all are drafted."""
  asked, *_ = of_worth([0, 0.1, 0.1, 0.1, all_cost])
  assert asked == [[wanted] * 3]


@pytest.mark.parametrize(
  'asked, found, counts',
  [(K, K, True), (K, 0, False), (0, 0, False)],
  ids=['drafted', 'found nothing', 'not asked'],
)
def test_which_windows_count(asked, found, counts):
  own = adaptive.Params(script(1, found), COSTS)
  drafter = adaptive.make(scripted.make(gamma=K))
  full = jnp.float32([20.0])
  state = adaptive.State((), full, full, full > 0, full)
  draft, state, _ = proposed(drafter, own, state, [0.0], asked)
  assert draft.count_B.tolist() == [found]
  assert state.asked_B.tolist() == [counts]


def test_costs_come_from_a_file_of_their_own_or_of_a_benchmark(tmp_path):
  costs, path = {'verify': [1, 2], 'lm': [0, 1]}, tmp_path / 'costs.json'
  for content in (costs, {'costs': costs, 'entries': []}):
    path.write_text(json.dumps(content))
    assert adaptive._read(path) == costs == adaptive._read(costs)
  for wrong in ('[]', '{}', '{"costs": {}}', '{'):
    path.write_text(wrong)
    with pytest.raises(ValueError, match=str(path)):
      adaptive._read(path)


def test_each_part_of_a_hybrid_has_its_own_costs():
  parts = [
    method.Method(lookup.make(gamma=K), 'of lookup'),
    method.Method(lm.make(MODEL, gamma=K), 'of lm'),
  ]
  costs = {'verify': [1, 2, 3, 4, 5, 6], 'lookup': [0] * 5, 'lm': [*range(5)]}
  found = adaptive.params(parts, costs)
  assert [x.inner for x in found] == ['of lookup', 'of lm']
  for own, name in zip(found, ('lookup', 'lm'), strict=True):
    assert own.costs.verify_N.tolist() == costs['verify'][: K + 1]
    assert own.costs.draft_N.tolist() == costs[name]
  few = adaptive.params(parts, costs | {'few': {'2': costs | {'lm': [9] * 5}}})
  assert few[1].few[2].draft_N.tolist() == [9] * 5
  for wrong in ([0] * 4, [0, 1, 2, 3, -1], [0, 1, 2, 3, np.inf]):
    with pytest.raises(ValueError, match='costs: lm is .* want 5 numbers'):
      adaptive.params(parts, costs | {'lm': wrong})


@pytest.mark.more
@pytest.mark.parametrize('right', [False, True])
def test_a_right_script_is_drafted_whole_and_a_wrong_one_hardly(right):
  """Where nothing is accepted most windows are plain; else all are whole."""
  request = fakes.request([[1, 2]], NEW, vocab=V, length=L)
  plain = decode.programs(MODEL, decode.PLAIN, reject.RULE)
  text = np.array(plain.generate(types.Weights(TABLE), request).tokens_BL)
  script = text if right else fakes.adversary(text, V)
  own = adaptive.Params((script, np.full_like(text, K)), COSTS)
  drafter = adaptive.make(scripted.make(gamma=K))
  options = decode.Options(widths=(0, 1, 2))
  programs = decode.programs(MODEL, drafter, reject.RULE, options)
  out = programs.generate(types.Weights(TABLE, own), request)
  np.testing.assert_array_equal(out.tokens_BL[:, : 2 + NEW], text[:, : 2 + NEW])
  (widths_N,) = np.array(out.info.widths_BN)
  if right:  # the first is a guess
    assert widths_N[K] == out.info.calls_B[0] - 1
    return
  assert widths_N[0] > 0.8 * NEW
  assert widths_N[1:].any()  # it tries again
  lost = widths_N @ (COSTS.verify_N + COSTS.draft_N) / NEW - 1
  assert lost < 0.03 + 3 / NEW  # the first tries count more in so few windows


@pytest.mark.more
def test_hybrid_takes_lookup_where_it_matches_and_else_the_other():
  """Row by row; a window of lookup has a certain q, one of lm its own.

  It says which of them a source gave.
  """
  drafter = hybrid.make(lookup.make(gamma=K), lm.make(MODEL, gamma=K))
  weights = types.Weights((), ((), jnp.asarray(TABLE)))
  texts = [[5, 6, 7, 8, 9, 5, 6], [1, 2, 3], [1, 2, 3]]
  request = fakes.request(texts, 9, vocab=V, length=32, temperature=1.0)
  context = decode.context_of(
    drafter, request, *map(jnp.asarray, request[:2]), jnp.ones(3, bool)
  )
  source = np.array([[2, 3, 1, 1, 1, 1]] * 3), np.array([0, 0, 6])
  context = context._replace(source=types.Source(*source))
  noise = types.Noise(None, lambda _, q_BV: jnp.argmax(q_BV, -1), None)
  state = drafter.init(weights, context, None)
  draft, state, _ = drafter.propose(weights, state, context, noise, ())
  assert state.first_B.tolist() == [True, False, True]
  assert draft.marks['sourced_B'].tolist() == [False, False, True]
  assert draft.count_B.tolist() == [K, K, K]
  assert draft.marks['second_B'].tolist() == [False, True, False]
  assert draft.tokens_BK[0].tolist() == [7, 8, 9, 5]
  top_BK = np.take_along_axis(
    np.array(draft.q_BKV), np.array(draft.tokens_BK)[..., None], -1
  )[..., 0]
  assert (top_BK[0] == 1).all() and (top_BK[1] < 1).all()
  np.testing.assert_allclose(draft.q_BKV.sum(-1), 1, rtol=1e-6)


def test_windows_for_which_the_second_drafts_are_counted():
  """By their room, as all: those of a batch in which it does for any row."""
  text = np.zeros((2, L), np.int32)
  found, none = np.full((2, L), 2), np.array([[1] * L, [0] * L])
  weights = types.Weights(TABLE, ((text, none), (text, found)))
  drafter = hybrid.make(*[scripted.make(gamma=K)] * 2)
  options = decode.Options(widths=(0, 1, 2))
  programs = decode.programs(MODEL, drafter, reject.RULE, options)
  shape = dict(vocab=V, length=L, temperature=1.0)
  for new in ([9, 0], [9, 4]):
    request = fakes.request([[1, 2]] * 2, 9, **shape)
    request = request._replace(limit_B=2 + np.array(new))
    info = programs.generate(weights, request).info
    of_two = int(info.calls_B[1])  # then the first row is alone
    alone = int(info.calls_B[0]) - of_two
    assert info.second_BN.tolist() == [[0, 0, of_two, 0, 0]] * 2
    assert info.widths_BN[0].tolist() == [0, alone, of_two, 0, 0]


def test_drafters_that_cannot_take_turns_are_refused():
  other = lm.make(MODEL, gamma=K + 1)
  with pytest.raises(ValueError, match='hybrid of lookup'):
    hybrid.make(lookup.make(gamma=K), other)


@pytest.mark.more
@pytest.mark.parametrize('rule', [reject.RULE, coupled.RULE])
def test_what_may_depend_on_the_batch(rule):
  """How many a greedy row drafts: never its text, nor anything of another."""
  own = adaptive.Params(TABLE + fakes.table(1, V, scale=1), COSTS)
  both = lookup.make(gamma=K), lm.make(MODEL, gamma=K)
  drafter = hybrid.make(*map(adaptive.make, both))
  programs = decode.programs(MODEL, drafter, rule)
  weights = types.Weights(TABLE, (adaptive.Params((), COSTS), own))
  warm = np.array([0, 0.9, 0, 0.9, 0.9, 0.9])
  request = fakes.request(
    *(fakes.prompts(6, vocab=V), 40), vocab=V, length=64, temperature=warm
  )
  together, same = programs.generate(weights, request), []
  for row in range(6):
    limit_B = np.where(np.arange(6) == row, request.limit_B, request.lengths_B)
    alone = programs.generate(weights, request._replace(limit_B=limit_B))
    np.testing.assert_array_equal(alone.tokens_BL[row], together.tokens_BL[row])
    counts = (x.info.proposed_BK[row] for x in (alone, together))
    same.append(np.array_equal(*counts))
  assert np.array(same)[warm > 0].all() and not all(same)
  plain = decode.programs(MODEL, decode.PLAIN, rule)
  wanted = fakes.texts(plain.generate(types.Weights(TABLE), request))
  for row in np.flatnonzero((warm == 0) | rule.coupled):
    assert fakes.texts(together)[row] == wanted[row]
