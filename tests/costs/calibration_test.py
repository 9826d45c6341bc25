"""Costs of windows, and adaptive drafting that chooses by them."""

import importlib
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, decode, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, prompts, records
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration, parts
from specdec_jax.drafters import adaptive, early_exit
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import load
from specdec_jax.models import lm
from specdec_jax.verify import reject
from tests import fakes


@pytest.mark.more
def test_costs_by_number_of_drafts(monkeypatch):
  """Widths hold what is not timed; what seems to fall with more is noise."""
  timed = {
    ('verify', 0): 2.0,
    ('verify', 2): 1.5,
    ('verify', 3): 2.5,
    ('verify', 4): 4.0,
    ('lm', 0): 0.0,
    ('lm', 1): 1.0,
    ('lm', 3): 2.0,
  }

  def seconds(walks, rounds):
    assert set(walks) == set(timed)
    return {key: [x + noise for noise in (0, 0, 9)] for key, x in timed.items()}

  monkeypatch.setattr(parts, 'seconds', seconds)
  engine = build.engine(
    load.load('random:tiny'),
    adaptive.Settings(lm_drafter.Settings('random:tiny:1')),
    gamma=3,
    options=build.default_options(widths=(0, 1, 2)),
  )
  assert engine.costs == calibration.measure(engine)
  assert calibration._request(engine, 3).tokens_BL.shape[0] == 3
  np.testing.assert_allclose(engine.costs['verify'], [1, 1, 1.25, 2])
  np.testing.assert_allclose(engine.costs['lm'], [0, 0.5, 0.75, 1])
  # No width between 3 and 9 was timed: the wider one is run.
  found = calibration.Calibration(1.0, {1: 1.0, 3: 1.5, 9: 3.0}, 1.0, {})
  assert calibration.costs(found, 3) == {'verify': [1.0, 1.5, 1.5, 3.0]}


@pytest.mark.parametrize(
  'passes, verify, idle',
  [
    # Two slow cores under load.
    (
      {1: 1.0, 0: 1.1, 2: 0.94, 3: 1.3, 5: 1.2},
      {1: 1.0, 2: 1.1, 3: 1.3, 5: 1.3},
      1.1,
    ),
    ({2: 0.8, 1: 1.0, 0: 0.9}, {1: 1.0, 2: 1.0}, 1.0),
    ({1: 1.0, 5: 0.8}, {1: 1.0, 5: 1.0}, 1.0),
    # In seconds, without a plain step, as adaptive measures.
    ({3: 0.1, 2: 0.3, 0: 0.2}, {2: 0.3, 3: 0.3}, 0.2),
  ],
)
def test_more_tokens_never_cost_less(passes, verify, idle):
  """Of every drafter, in whatever order parts were timed."""
  timed = {('verify', n): x for n, x in passes.items()}
  timed |= {('eagle', n): x for n, x in ((4, 1.4), (2, 0.0), (1, 1.5))}
  timed |= {('lookup', n): x for n, x in enumerate((0.1, 0.0, 0.2))}
  found = calibration._of(0.5, timed)
  assert found.verify == verify and found.idle == idle
  assert found.propose == {
    'eagle': {1: 1.5, 2: 1.5, 4: 1.5},
    'lookup': {0: 0.1, 1: 0.1, 2: 0.2},
  }


def test_a_sample_that_was_as_short_as_an_empty_call_is_measured(monkeypatch):
  """Its steps are a tenth of it, not a billionth of a second."""
  clock = iter([5.0, 4.0, 6.0, 1.0, 1.0, 1.0, 2.0, 3.0, 8.0, 3.0])
  monkeypatch.setattr(parts, 'timed', lambda *_: (next(clock), None))
  walks = {'a': parts.Part(None, 2), 'b': parts.Part(None, 4)}
  found = parts.seconds(walks, range(2))
  assert found == {'a': [0.1, 2.0], 'b': [0.5, 0.5]}


def test_drafting_is_timed_with_as_many_tokens_as_it_is_named_by(monkeypatch):
  """A draft of fewer than the engine's gamma asks for fewer."""
  asked = []

  def along(weights, request, steps, *, loop):
    asked.append((int(steps), request.gamma_B.tolist()))

  monkeypatch.setattr(parts, 'propose_along', along)
  monkeypatch.setattr(parts, 'timed', lambda run, *x: (0.05, run(*x)))
  engine = build.engine(load.load('random:tiny'), 'lookup', gamma=4)
  request = calibration._request(engine, 2)
  (own,) = calibration._methods(engine)
  for count in (0, 1, 4):
    part = calibration._propose(engine, own, count, request)
    part.walk(9)
    assert asked[-1] == (9, [count] * 2)
    # A sample takes a tenth of a second.
    assert part.steps == 2 * calibration.WINDOWS


def test_the_error_between_runs_is_of_the_users_own_where_four_tell_it(
  monkeypatch, tmp_path
):
  """Of each run the mean of its methods; else of all runs that are known."""
  monkeypatch.setattr(calibration, 'RUNS', tmp_path / 'stored/runs.json')
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'own'))
  run = lambda *over: {'over_explained': over}

  def known(stored, own):
    for name, rows in (('stored', stored), ('own', own)):
      (tmp_path / name).mkdir(exist_ok=True)
      (tmp_path / name / 'runs.json').write_text(json.dumps({'runs': rows}))
    calibration.between_runs.cache_clear()
    return calibration.between_runs()

  try:
    # Twice too fast, and as much too slow: off by the logarithm of 2.
    other = [run(2.0), run(1.0, 0.25)]
    assert known(other, []) == (pytest.approx(math.log(2)), 2)
    right = [run(0.5, 2.0)] * 3
    assert known(other, right) == (pytest.approx(math.log(2) * 0.4**0.5), 5)
    assert known(other, [*right, run(1.0)]) == (0.0, 4)
    (tmp_path / 'own/runs.json').unlink()
    calibration.between_runs.cache_clear()
    assert calibration.between_runs()[1] == 2
  finally:
    calibration.between_runs.cache_clear()


def test_a_pass_is_compiled_once_for_all_drafters():
  target = load.load('random:tiny')
  parts.verify_along.clear_cache()
  for draft in ('lookup', early_exit.Settings(exit=1)):
    engine = build.engine(target, draft, gamma=2)
    calibration._verify(engine, calibration._request(engine), 1)
  assert parts.verify_along._cache_size() == 1


@pytest.mark.more
def test_a_benchmark_measures_once_and_adaptive_chooses_by_it(
  monkeypatch,
):
  """Repeats are in plain steps of their own."""
  c = importlib.import_module('configs.pair').get_config('tiny')
  c.decode.methods, c.decode.gammas = ('adaptive', 'lookup'), (1, 2)
  c.adaptive.drafter, c.decode.max_new_tokens = 'lookup', 8
  e = settings_lib.load(settings_lib.settings(c))
  arms = plan_lib.arms(e, measure=False)
  assert [x.engine.costs for x in arms[1:]] == [{}, None, None]
  step, calls = [2.0, 1.0], []

  def seconds(walks, rounds):
    calls.append(set(walks))
    cost = lambda key: 1 + sum(key[1:]) / 4 if key[0] == 'verify' else key[1]
    return {
      key: [x * (1 if key == ('verify', 1) else cost(key)) for x in step]
      for key in walks
    }

  monkeypatch.setattr(parts, 'seconds', seconds)
  plan = plan_lib.make(e, prompts.builtin()[:2])
  request = plan_lib.middle(arms, plan, 8).full
  made, *found = benchmark._calibration(arms, request, 2)
  doc = records.Document({}, None, plan_lib.setting(arms, plan), *found)
  (widths,) = calls
  lookups = {('lookup', n) for n in (0, 1, 2)}
  assert widths == lookups | {('verify', n) for n in (0, 1, 2, 3)}
  assert doc.calibration.step == 1.5 and len(doc.calibration.repeats) == 2
  assert doc.calibration.repeats[0].verify == doc.calibration.verify
  assert doc.costs == {'verify': [1.0, 1.5, 1.75], 'lookup': [0, 1, 2]}
  one = made[1]
  assert one.gamma == 2 and one.engine.costs == doc.costs
  assert one.engine.weights.draft.costs.draft_N.tolist() == [0, 1, 2]
  assert [x.engine for x in made[2:]] == [x.engine for x in arms[2:]]
  # A smaller gamma needs fewer of them.
  settings = adaptive.Settings('lookup', costs=doc.costs)
  less = build.engine(e.target, settings, gamma=1).weights.draft.costs
  assert less.verify_N.tolist() == [1, 1.5]


def test_drafting_that_is_timed_alone_keeps_the_contract():
  """Of features, and of lengths that grow by what is emitted; with rows that
  end at different places, and more steps than there is text."""
  gamma, taps = 2, (0, 1)
  config = fakes.tiny(dtype='float32')

  def init(weights, context, features_BLE):
    assert features_BLE.shape == (*context.tokens_BL.shape, 2 * config.width)
    return context.lengths_B, jnp.ones_like(context.lengths_B)

  def propose(weights, state, context, noise, target_cache):
    token_B = state[1] * (state[0] == context.lengths_B)
    tokens_BK = jnp.stack([token_B] * gamma, 1)
    count_B = jnp.full_like(token_B, gamma)
    return types.Draft(tokens_BK, None, count_B), state, target_cache

  def commit(state, context, outcome, features_BNE):
    assert features_BNE.shape == (2, gamma + 1, 2 * config.width)
    length_B = state[0] + outcome.emitted_B
    live_B = outcome.emitted_B > 0
    return length_B, state[1] * (live_B <= (length_B == context.lengths_B))

  request = fakes.request([[1, 2], [3]], np.array([3, 5]), vocab=13)
  drafter = types.Drafter('mine', gamma, init, propose, commit, taps)
  steps, loop = 12, decode.Loop(lm.make(config), drafter, reject.RULE)
  total = parts.propose_along(
    types.Weights(lm.init(config, 0)), request, jnp.int32(steps), loop=loop
  )
  # Of each row two tokens, which are 1, and their count.
  assert total == steps * 2 * (gamma + gamma)
