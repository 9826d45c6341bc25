"""The whole benchmark on tiny models; its numbers must agree, not be fast."""

import importlib
import json
import math
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, decode, requests, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import (
  acceptance,
  benchmark,
  calibrate,
  identity,
  metrics,
  predict,
  prompts,
  report,
  timing,
)
from specdec_jax.certify import table_model
from specdec_jax.drafters import lm, lookup
from specdec_jax.verify import lenient, reject

pytestmark = pytest.mark.usefixtures('compile_in_less_time')


def settings(name='pair', **changes):
  c = importlib.import_module(f'configs.{name}').get_config('tiny')
  c.decode.gammas = (2,)
  c.decode.max_new_tokens = 8
  c.bench.prompts_per_category = 1
  c.bench.prompt_tokens = 20
  c.bench.windows = 4
  c.update(changes)
  return c


def run(config, capsys, sizes=()):
  e = settings_lib.from_config(config)
  chosen = prompts.builtin()[:16]
  doc = benchmark.run(
    settings_lib.arms(e),
    settings_lib.plan(e, chosen, sizes),
    track=lambda items, text: items,
    show=report.show,
  )
  good = report.finish(doc)
  printed = capsys.readouterr().out
  return good, json.loads(printed.splitlines()[-1]), printed


@pytest.mark.slow
def test_end_to_end(capsys):
  # The draft is the target itself: everything it proposes is accepted.
  config = settings(draft={'source': 'random:tiny'})
  good, doc, printed = run(config, capsys, sizes=(2,))
  assert good
  assert max(map(len, printed.splitlines()[:-1])) <= 120
  plain, lm, lookup = doc['rows']
  assert [r['name'] for r in doc['rows']] == [
    'autoregressive',
    'lm g=2',
    'lookup g=2',
  ]
  assert plain['block_efficiency'] == 1
  assert plain['improvement']['median'] in (1, None)  # None: too short
  assert plain['arithmetic_factor'] == 1
  assert math.isclose(lm['alpha']['alpha'], 1)
  assert lm['draft_acceptance_rate'] > 0.6  # but for windows cut by length
  assert lm['cost_coefficient'] > 0
  for row in doc['rows']:
    assert row['emitted_tokens'] == plain['emitted_tokens']
    assert sum(row['accepted_histogram']) == row['target_calls']
    assert math.isclose(
      row['block_efficiency'],
      row['emitted_tokens'] / row['target_calls'],
      rel_tol=1e-4,
    )
  for row in (lm, lookup):
    assert row['audit']['differing'] == 0
    assert row['audit']['requests'] == 4
    for p in (row['predicted'], row['explained']):
      assert math.isclose(
        p['improvement'], p['tokens'] / p['window_cost'], rel_tol=1e-4
      )
      assert math.isclose(p['by_gamma']['2'], p['improvement'], rel_tol=1e-4)
    assert math.isclose(
      row['explained']['tokens'], row['block_efficiency'], rel_tol=1e-4
    )
  assert lm['predicted']['wide'] == 1
  assert lookup['explained']['wide'] == lookup['wide_share']
  assert lm['memory']['draft'] == lm['memory']['target'] > 0
  assert lookup['memory']['draft'] == 0
  assert doc['calibration']['verify']['1'] == 1
  assert [x['batch_size'] for x in doc['crossover']] == [2]
  wide = doc['crossover'][0]['rows']
  assert wide['lm g=2']['audit']['differing'] == 0
  assert wide['lm g=2']['audit']['requests'] == 2
  assert not any(row['broken'] for row in wide.values())
  assert 'Checked 12 texts' in printed  # (4 + 2) prompts, two methods
  assert set(doc['largest_batch']) == {'lm', 'lookup'}
  assert set(doc['best_gamma']) == {'lm', 'lookup'}
  assert doc['ceiling']['gb_s']['float32']['best'] > 0
  assert doc['verdict']


@pytest.mark.slow
def test_sampling(capsys):
  config = settings(
    'smollm2',
    decode={'rule': 'coupled'},
    sampling={'temperature': 0.8},
    lookup={'min_match': 1},
    bench={'stream_prompts': 0, 'batch_size': 2},
  )
  good, doc, _ = run(config, capsys)
  assert good
  row = doc['rows'][1]
  assert row['audit']['promised'] == 'tokens'
  assert row['audit']['bugs'] == 0
  assert 0 <= row['alpha']['alpha'] <= row['alpha']['alpha_where_proposed'] <= 1
  assert row['inter_token'] == {'p50': None, 'p95': None}


def test_sampling_under_another_rule_promises_the_law_only():
  config = settings('smollm2', sampling={'temperature': 0.8})
  e = settings_lib.from_config(config)
  arms, plan = settings_lib.arms(e), settings_lib.plan(e, prompts.builtin()[:2])
  none = {arm.name: [] for arm in arms}
  found = identity.compare(arms, plan, [], none, lambda items, text: items)
  assert found == {'lookup g=2': {'promised': 'in law', 'requests': 0}}


def test_alpha_is_the_mean_overlap():
  """Chunked over the text = one pass over all of it, in numpy."""
  target = build.load('random:tiny')
  draft = build.load('random:tiny:1')
  e = build.engine(target, draft, gamma=2)
  model = build.target_model(target)
  tokens = np.random.default_rng(0).integers(0, 256, 40)
  request = requests.make(
    requests.items([tokens[:10]]),
    ids=256,
    context=512,
    max_new_tokens=30,
    temperature=1.0,
    length=48,
  )
  request.tokens_BL[0, :40] = tokens
  rule = lenient.make(0.5)
  found = acceptance.overlap(
    e.weights,
    request,
    request.tokens_BL,
    request.tokens_BL > -1,
    target=model,
    draft=model,
    rule=rule,
    chunk=16,
  )
  at_T = np.arange(40)
  mask_BTS = (at_T[:, None] >= at_T[None])[None]
  law = lambda params: np.asarray(
    jax.nn.softmax(
      model.head(
        params,
        model.apply(
          params,
          tokens[None],
          at_T[None],
          at_T[None],
          mask_BTS,
          model.init_cache(1, 40),
        )[0],
      )
    )
  )[0]
  p_LV, q_LV = law(target.params), law(draft.params)
  want = np.minimum(p_LV, q_LV).sum(-1)
  np.testing.assert_allclose(found.alpha_BL[0, 10:40], want[9:39], atol=1e-5)
  # A lossy rule's distance: drafts kept by min(1, p / (l q)), else p - q.
  kept_LV, rest_LV = np.minimum(2 * p_LV, q_LV), np.maximum(p_LV - q_LV, 0)
  emitted_LV = kept_LV + (1 - kept_LV.sum(-1, keepdims=True)) * (
    rest_LV / rest_LV.sum(-1, keepdims=True)
  )
  want = kept_LV.sum(-1)
  np.testing.assert_allclose(found.kept_BL[0, 10:40], want[9:39], atol=1e-5)
  off = np.abs(emitted_LV - p_LV).sum(-1) / 2
  np.testing.assert_allclose(found.distance_BL[0, 10:40], off[9:39], atol=1e-5)


def test_work_of_leaving_the_target_early():
  """gamma tokens more through the first layers, and the head for each."""
  target, gamma = build.load('random:tiny'), 3
  e = build.engine(target, 'early_exit', gamma=gamma, exit=1)
  arm = timing.Arm('x', 'early_exit', gamma, e, build.target_model(target))
  params = target.params
  layers = metrics.layers_share(params, 1) * metrics.step_bytes(params)
  head = params['head']
  info = decode._empty_info(1, 8, gamma, False)
  assert benchmark._drafting(arm, (), info) == {
    'parameters': gamma * head.size,
    'bytes': round(gamma * (layers + head.nbytes)),
    'held': 0,
  }
  plain = timing.Arm('y', 'lookup', gamma, build.engine(target, 'lookup'), None)
  assert benchmark._drafting(plain, (), info) == dict(
    parameters=0, bytes=0, held=0
  )


def test_work_of_drafts_that_stop_early():
  """The passes of a draft model are counted while it decodes."""
  V, gamma, ran = 4, 4, []
  model = table_model.make(V)

  def apply(params, tokens_BT, *args, **named):
    if tokens_BT.shape[1] <= 2:  # not the prompt's chunks
      jax.debug.callback(lambda: ran.append(1))
    return model.apply(params, tokens_BT, *args, **named)

  drafter = lm.make(
    model._replace(apply=apply), gamma=gamma, min_confidence=0.5
  )
  programs = decode.programs(
    model, drafter, reject.RULE, decode.Options(chunk=8)
  )
  request = requests.make(
    requests.items([[1, 2]]),
    ids=V,
    context=512,
    max_new_tokens=99,
    length=128,
    temperature=1.0,
  )
  weights = types.Weights(*(table_model.table(i, V) for i in (0, 1)))
  info = jax.device_get(programs.generate(weights, request).info)
  jax.effects_barrier()
  windows = int(info.calls_B.sum())
  assert windows < len(ran) < gamma * windows
  assert metrics.draft_passes(info) * windows == pytest.approx(len(ran))
  # What the benchmark charges for.
  target = build.load('random:tiny')
  model = build.target_model(target)
  work = {}
  for least in (0.0, 0.5):
    e = build.engine(target, target, gamma=gamma, min_confidence=least)
    arm = timing.Arm('x', 'lm', gamma, e, model, model)
    work[least] = benchmark._drafting(arm, np.zeros(10, np.int8), info)
  passes, size = len(ran) / windows, metrics.step_parameters(target.params)
  step = metrics.step_bytes(target.params) + 10
  assert work[0.0]['parameters'] == (gamma + 1) * size
  assert work[0.0]['bytes'] == gamma * step
  assert work[0.5]['parameters'] == round((passes + 1) * size)
  assert work[0.5]['bytes'] == round(passes * step)
  assert work[0.5]['held'] == work[0.0]['held']


def predicted(e, alpha=None):
  """predict.improvement of 9 tokens in 4 windows of gamma 2."""
  model = build.target_model(e.target)
  arm = timing.Arm('x', '', 2, e, model, model)
  calibration = calibrate.Calibration(
    step=2.0,
    step_spread=0.0,
    verify={1: 1.0, 3: 1.5},
    idle={3: 1.0},
    propose={'x': 1.0},
    c={},
  )
  info = decode._empty_info(1, 8, 2, False)
  info = info._replace(
    hist_BN=np.array([[1, 1, 2]]),
    proposed_BK=np.array([[4, 4]]),
    calls_B=np.array([4]),
    origin_BL=np.full((1, 9), types.BONUS),
    wide=np.int32(4),
    calls=np.int32(4),
  )
  info = jax.device_get(info)
  return predict.improvement(arm, calibration, info, 1.0, alpha)


def test_a_window_costs_only_the_layers_that_are_left():
  """Verification after an early exit is predicted without the first layers."""
  target = build.load('random:tiny')
  found = predicted(build.engine(target, 'early_exit', gamma=2, exit=1))
  rest = 1 - metrics.layers_share(target.params, 1)
  assert math.isclose(found['window_cost'], 0.5 + rest * 1.5)
  assert math.isclose(found['tokens'], 9 / 4)
  assert found['improvement_from_alpha'] is None


def test_the_prediction_from_alpha_is_of_what_the_rule_keeps(monkeypatch):
  overlap = acceptance.Overlap(
    *(np.array([[9, 9, x, y]]) for x, y in ((0.2, 0.4), (0.5, 1), (0, 0.1)))
  )
  monkeypatch.setattr(
    predict, '_overlap', lambda *_: (overlap, np.array([[1, 1, 0, 1]]) > 0)
  )
  request = requests.make(
    requests.items([[0, 1]]), ids=4, context=64, max_new_tokens=2, length=4
  )
  fake = python_types.SimpleNamespace
  (alpha,) = predict.alphas(
    [fake(name='plain'), fake(name='x', drafter='x')],
    [fake(full=request, host=request)],
    {'plain': [fake(tokens_BL=request.tokens_BL, lengths_B=np.array([4]))]},
    lambda items, text: items,
  ).values()
  assert alpha == {
    'alpha': pytest.approx(0.3),
    'alpha_where_proposed': pytest.approx(0.4),
    'kept_where_proposed': pytest.approx(1),
    'total_variation': pytest.approx(0.05),
    'positions': 2,
  }
  target = build.load('random:tiny')
  found = predicted(build.engine(target, target, gamma=2), alpha)
  assert found['improvement_from_alpha'] == 3 / found['window_cost']
  # Of windows that end where the draft is not sure equation 1 knows nothing.
  e = build.engine(target, target, gamma=2, min_confidence=0.3)
  found = predicted(e, alpha)
  assert found['improvement_from_alpha'] is None
  assert found['improvement'] > 0


def test_walk_proposes_at_every_prefix():
  tokens = [1, 2, 3, 4, 1, 2, 3, 9, 1, 2, 3]
  request = requests.make(
    requests.items([tokens[:5]]),
    ids=16,
    context=64,
    max_new_tokens=6,
    length=16,
  )
  request.tokens_BL[0, : len(tokens)] = tokens
  drafter = lookup.make(gamma=2, min_match=2, max_match=3)
  tokens_BL, proposed_BL, _ = acceptance.walk(
    types.Weights(()),
    request,
    jnp.int32(6),
    target=table_model.make(16),
    drafter=drafter,
    coupled=False,
  )
  # Index 6 follows [1 2]: 3 came next before; index 7 follows [1 2 3].
  assert np.flatnonzero(proposed_BL[0]).tolist() == [6, 7, 10]
  assert np.asarray(tokens_BL)[0, [6, 7, 10]].tolist() == [3, 4, 3]


def test_groups_keep_categories_apart_and_share_one_shape():
  e = settings_lib.from_config(settings('smollm2', bench={'batch_size': 2}))
  arms = settings_lib.arms(e)
  items = tuple(
    requests.Item(tuple(range(1, 4 + i)), i, str(i), 'ab'[i % 2])
    for i in range(5)
  )
  plan = timing.Plan(items, (), 8, e.settings.sampling, batch_size=2)
  groups = timing.grouper(arms, plan)(items)
  assert [[i.id for i in g.items] for g in groups] == [
    ['0', '2'],
    ['4'],
    ['1', '3'],
  ]
  assert len({g.host.tokens_BL.shape for g in groups}) == 1
  # The row that nobody fills never starts.
  assert groups[1].host.limit_B[1] == groups[1].host.lengths_B[1]
  np.testing.assert_array_equal(
    groups[0].first.limit_B, groups[0].host.lengths_B + 1
  )
  np.testing.assert_array_equal(
    groups[0].none.limit_B, groups[0].host.lengths_B
  )


def test_one_compilation_for_all_limits_and_prompts():
  """No room, room for one token, and the whole are one executable."""
  e = settings_lib.from_config(settings('smollm2'))
  arm = settings_lib.arms(e)[1]
  plan = settings_lib.plan(e, prompts.builtin()[:8])
  programs = decode.programs(
    arm.model,
    arm.engine.drafter,
    arm.engine.rule,
    build.default_options(chunk=16),
  )
  for group in timing.grouper([arm], plan)(plan.judged):
    for request in (group.none, group.first, group.full):
      programs.generate(arm.engine.weights, request)
  assert programs.generate._cache_size() == 1
