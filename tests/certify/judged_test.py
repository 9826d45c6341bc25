"""What promises print and let pass, on numbers made by hand."""

import types as python_types

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.certify import (
  base,
  counted,
  identity,
  invariance,
  load,
)
from specdec_jax.drafters import eagle, medusa
from specdec_jax.verify import chain, reject


def test_one_count_of_what_cannot_come_is_enough():
  """Among cells of seldom ones, too, which are pooled."""
  p = np.array([0.6, 0.3995, 0.0005, 0.0])
  assert counted.chi_square([600, 399, 1, 0], p) > 0.5
  assert counted.chi_square([600, 399, 0, 1], p) == 0


def test_the_bound_of_a_rate_is_of_distinct_requests():
  figure = base.none_of(300, 'texts differ', 30, 'requests', '')
  assert '0 of 300 texts differ, at 30 distinct requests' in figure.reached
  assert 'under 1.0e-01 of them' in figure.reached
  # Programs of one world read the same texts.
  runs = [('tables', 8), ('tables', 3), ('transformer', 1)]
  assert identity._positions(runs) == 9 * identity.NEW


def test_texts_in_another_order_are_of_other_rows():
  cases = [(i, [i]) for i in range(6)]
  right = lambda cases, new=16, **_: [
    [*prompt, *[n] * new] for n, prompt in cases
  ]
  wanted = right(cases)
  found = invariance._arrangements(right, cases, wanted, 'x', alone=True)
  assert found == 3 * len(cases)

  def by_row(cases, new=16, **_):
    return [[*x, *[row] * new] for row, (_, x) in enumerate(cases)]

  with pytest.raises(base.Broken, match='another order'):
    invariance._arrangements(by_row, cases, by_row(cases), 'x', alone=False)


def test_a_text_ends_at_its_first_stop_or_at_its_limit():
  tokens_BL = np.array([[1, 5, 6, 7, 0, 0]] * 6)
  ends_B = np.array([4, 4, 3, 3, 4, 2])
  limits_B = np.array([4, 5, 4, 4, 4, 5])
  stops_BX = np.array([[-1], [7], [6], [-1], [6], [1]])
  request = python_types.SimpleNamespace(
    lengths_B=np.full(6, 1), limit_B=limits_B, stop_BX=stops_BX
  )
  out = decode.Output(tokens_BL, ends_B, None)
  # It goes on after its stop id; or is short, of which one is in the prompt.
  assert invariance._ends_well(out, request).tolist() == [
    *(True, True, True),
    *(False, False, False),
  ]


@pytest.mark.parametrize('supplied', [(), ('rule',)])
def test_one_of_the_targets_own_drafts_may_not_be_refused(
  supplied, monkeypatch
):
  world = base.tables(3)
  request = base.make_request(world, [[1]], 2)
  tried_BK = np.array([[3, 2]])
  info = types.empty_info(1, 4, 2, 0)._replace(tried_BK=tried_BK)
  pair = base.Pair(reject.RULE, *load.RECIPES['lm'](world, 2))
  subject = base.Subject([reject.RULE], {}, supplied=supplied)
  run = lambda accepted_BK: monkeypatch.setattr(
    base,
    'run',
    lambda *_: decode.Output(
      None, None, info._replace(accepted_BK=np.array(accepted_BK))
    ),
  )
  accepted = lambda: identity._accepted(subject, world, pair, request, 'x')
  run([[3, 2]])
  assert accepted().tolist() == [10, 10]
  run([[3, 1]])
  if supplied:
    assert accepted().tolist() == [10, 8]
    return
  with pytest.raises(base.Broken, match=r'own drafts are refused.*\[0, 1\]'):
    accepted()


def test_ragged_windows_are_of_every_length():
  """Of short texts; of others six in a row have no draft."""
  gamma, B = 3, 64

  def propose(weights, state, context, noise, cache):
    asked_B = context.gamma_B
    return types.Draft(None, None, jnp.full(B, gamma)), asked_B, cache

  drafter = base.ragged(types.Drafter('x', gamma, None, propose, None))
  rng = np.random.default_rng(0)
  context = types.Context(
    jnp.asarray(rng.integers(0, 5, (B, 32))),
    jnp.arange(B) % 26 + 1,
    jnp.ones(B, bool),
    None,
    jnp.where(jnp.arange(B) < 52, gamma, 1),
  )
  draft, asked_B, _ = drafter.propose((), (), context, None, None)
  count_B, lengths_B = np.asarray(draft.count_B), np.asarray(context.lengths_B)
  idle_B = (lengths_B >= 10) & (lengths_B < 16)
  assert not count_B[idle_B].any()
  assert {*count_B[~idle_B][:40]} == {0, 1, 2, 3} and max(count_B[52:]) == 1
  np.testing.assert_array_equal(count_B, asked_B)


@pytest.mark.parametrize('vocab', [2, 3, 5])
def test_drafters_of_few_ids_can_draft_two(vocab):
  """What is certain is lawful, whatever is reported."""
  world = base.tables(vocab)
  ids = eagle.random_layer(world)[1]['ids']
  heads = medusa.random_heads(world, 1)[0].ids
  assert len({*ids.tolist()}) == heads == max(2, vocab - 1)


def test_a_quarter_of_the_counted_rows_is_capped():
  """Those of each of two prompts, in turns: at 0 to gamma - 1."""
  drafts_B = counted._caps(64, 4)
  for mine_B in (drafts_B[::2], drafts_B[1::2]):
    counts = np.bincount(mine_B, minlength=5)
    assert counts.tolist() == [2, 2, 2, 2, 24]
  assert not counted._caps(8, 0).any()


@pytest.mark.more
def test_a_bias_of_capped_windows_alone_is_counted(monkeypatch):
  """Of a rule that keeps all of them, and draws: nothing enumerates it."""

  def verify(noise, draft, p_BNV):
    noise.next(draft.count_B, p_BNV[:, 0])
    verdict, count_B = reject.verify(noise, draft, p_BNV), draft.count_B
    capped_B = count_B < draft.tokens_BK.shape[1]
    all_BV = chain.row(p_BNV, count_B)
    return types.Verdict(
      jnp.where(capped_B, count_B, verdict.accepted_B),
      jnp.where(capped_B[:, None], all_BV, verdict.weights_BV),
    )

  rule = types.Rule('drawn', verify)
  subject = base.Subject([rule], {'lm': load.RECIPES['lm']})
  monkeypatch.setattr(
    counted, '_cells', lambda *_, **__: [(rule, 'lm', 2, 3, None)]
  )
  with pytest.raises(base.Broken, match='do not follow the target'):
    counted.tables(subject, 2**15)
  monkeypatch.setattr(counted, '_caps', lambda rows, gamma: gamma)
  assert counted.tables(subject, 2**15)
