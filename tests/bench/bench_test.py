"""The whole benchmark on tiny models; its numbers must agree, not be fast."""

import importlib
import json
import math
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, decode, requests, runtime, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import (
  benchmark,
  identity,
  metrics,
  predict,
  prompts,
  timing,
)
from specdec_jax.bench import plan as plan_lib
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
    plan_lib.arms(e),
    plan_lib.of(e, chosen, sizes),
    track=lambda items, text: items,
    console=runtime.console(),
  )
  good = benchmark.finish(doc, config, None, runtime.console())
  printed = capsys.readouterr().out
  return good, doc, printed


@pytest.mark.slow
def test_end_to_end(capsys):
  # The draft is the target itself: everything it proposes is accepted.
  config = settings(draft={'source': 'random:tiny'})
  good, doc, printed = run(config, capsys, sizes=(2,))
  assert good
  assert max(map(len, printed.splitlines()[:-1])) <= 120
  plain, lm, lookup = doc.rows
  names = ['autoregressive', 'lm g=2', 'lookup g=2']
  assert [r.name for r in doc.rows] == names
  assert plain.counts.block_efficiency == 1
  assert plain.improvement.median in (1, None)  # None: too short
  assert plain.arithmetic_factor == 1
  assert math.isclose(lm.alpha.alpha, 1, rel_tol=1e-5)
  # But for windows cut by length.
  assert lm.counts.draft_acceptance_rate > 0.6
  assert lm.cost_coefficient > 0
  for row in doc.rows:
    c = row.counts
    assert c.emitted_tokens == plain.counts.emitted_tokens
    assert sum(c.accepted_histogram) == c.target_calls
  for row in (lm, lookup):
    assert row.audit.findings == () and row.audit.requests == 4
    for p in (row.predicted, row.explained):
      assert math.isclose(p.improvement, p.tokens / p.window_cost)
      assert math.isclose(p.by_gamma[2], p.improvement)
    assert math.isclose(row.explained.tokens, row.counts.block_efficiency)
  assert lm.predicted.wide == 1
  assert lookup.explained.wide == lookup.wide_share
  assert lm.memory.draft == lm.memory.target > 0
  assert lookup.memory.draft == 0
  assert doc.calibration.verify[1] == 1
  (wide,) = doc.crossover
  assert wide.batch_size == 2 and not wide.failed
  assert wide.rows[1].audit.findings == () and wide.rows[1].audit.requests == 2
  assert 'Checked 12 texts' in printed  # (4 + 2) prompts, two methods
  assert set(doc.largest_batch) == set(doc.best_gamma) == {'lm', 'lookup'}
  assert doc.ceiling.gb_s['float32']['best'] > 0
  last = json.loads(printed.splitlines()[-1])
  assert last['verdict'] and last['rows'][1]['name'] == 'lm g=2'
  assert last['rows'][2]['audit']['compared'] == list(lookup.audit.compared)


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
  row = doc.rows[1]
  assert row.audit.promised == 'tokens' and row.audit.bugs == 0
  assert 0 <= row.alpha.alpha <= row.alpha.alpha_where_proposed <= 1
  assert row.inter_token == (None, None)


def test_sampling_under_another_rule_promises_the_law_only():
  config = settings('smollm2', sampling={'temperature': 0.8})
  e = settings_lib.from_config(config)
  arms, plan = plan_lib.arms(e), plan_lib.of(e, prompts.builtin()[:2])
  none = {arm.name: [] for arm in arms}
  found = identity.compare(arms, plan, [], none, lambda items, text: items)
  assert found == {'lookup g=2': identity.Audit('in law', 0)}


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
  found = predict.overlap(
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
  params = target.params
  layers = metrics.layers_share(params, 1) * metrics.step_bytes(params)
  head = params['head']
  info = decode._empty_info(1, 8, gamma, False)
  assert metrics.drafting(e, gamma, (), info) == (
    gamma * head.size,
    round(gamma * (layers + head.nbytes)),
    0,
  )
  lookup = build.engine(target, 'lookup')
  assert metrics.drafting(lookup, gamma, (), info) == (0, 0, 0)


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
  work = {}
  for least in (0.0, 0.5):
    e = build.engine(target, target, gamma=gamma, min_confidence=least)
    work[least] = metrics.drafting(e, gamma, np.zeros(10, np.int8), info)
  passes, size = len(ran) / windows, metrics.step_parameters(target.params)
  step = metrics.step_bytes(target.params) + 10
  held = work[0.0].held
  assert work[0.0] == ((gamma + 1) * size, gamma * step, held)
  assert work[0.5] == (
    round((passes + 1) * size),
    round(passes * step),
    held,
  )


def info_of(hist_N, rows=1, calls=None):
  """Info of windows of gamma 2 that end as hist_N says, `rows` at a time."""
  emitted = sum((k + 1) * n for k, n in enumerate(hist_N))
  windows = sum(hist_N)
  info = decode._empty_info(1, 8, 2, False)
  info = info._replace(
    hist_BN=np.array([hist_N]),
    proposed_BK=np.array([[windows] * 2]),
    calls_B=np.array([windows]),
    origin_BL=np.full((1, emitted), types.BONUS),
    wide=np.int32(windows // rows),
    calls=np.int32(windows // rows),
  )
  return jax.device_get(info)


def predicted(e, alpha=None, info=None, base=1.0):
  """predict.improvement of 9 tokens in 4 windows of gamma 2."""
  model = build.target_model(e.target)
  arm = plan_lib.Arm('x', '', 2, e, model, model)
  calibration = timing.Calibration(
    step=2.0,
    step_spread=0.0,
    verify={1: 1.0, 3: 1.5},
    idle={3: 1.0},
    propose={'x': 1.0},
    c={},
  )
  info = info_of([1, 1, 2]) if info is None else info
  return predict.improvement(arm, calibration, info, base, alpha)


def test_rows_that_share_a_batch_are_no_improvement():
  """Plain decoding of three rows emits three tokens a window too."""
  target = build.load('random:tiny')
  e = build.engine(target, 'lookup', gamma=2)
  outputs = {
    'plain': [decode.Output(None, None, info_of([30, 0, 0], rows=3))],
    'x': [decode.Output(None, None, info_of([3, 3, 6], rows=3))],
  }
  model = build.target_model(target)
  arms = [
    plan_lib.Arm('plain', 'plain', 0, e, model),
    plan_lib.Arm('x', 'lookup', 2, e, model),
  ]
  calibration = timing.Calibration(
    2.0, 0.0, {1: 1.0, 3: 1.5}, {3: 1.0}, {'x': 0.0}, {}
  )
  found = predict.improvements(arms, calibration, outputs, {})['x']
  assert math.isclose(found.tokens, 27 / 12)
  assert math.isclose(found.improvement, 27 / 12 / 1.5)


def test_repeats_of_a_prompt_draw_their_own_noise():
  """Copies that fill a batch would else all emit one text when sampling."""
  e = settings_lib.from_config(
    settings('smollm2', sampling={'temperature': 1.0})
  )
  plain = plan_lib.arms(e)[:1]
  plan = plan_lib.of(e, prompts.builtin()[:2])
  filled = benchmark.filled(plan.judged, 4)
  assert [x.tokens for x in filled] == [plan.judged[0].tokens] * 4
  (group,) = plan_lib.grouper(plain, plan, rows=4)(filled)
  engine = plain[0].engine
  out = engine.programs.generate(engine.weights, group.full)
  texts = timing.texts([group], [jax.device_get(out)])
  assert len({tuple(text) for text in texts}) == 4


def test_a_window_costs_only_the_layers_that_are_left():
  """Verification after an early exit is predicted without the first layers."""
  target = build.load('random:tiny')
  found = predicted(build.engine(target, 'early_exit', gamma=2, exit=1))
  rest = 1 - metrics.layers_share(target.params, 1)
  assert math.isclose(found.window_cost, 0.5 + rest * 1.5)
  assert math.isclose(found.tokens, 9 / 4)
  assert found.improvement_from_alpha is None


def test_the_prediction_from_alpha_is_of_what_the_rule_keeps(monkeypatch):
  overlap = predict.Overlap(
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
  assert alpha == predict.Alpha(
    alpha=pytest.approx(0.3),
    alpha_where_proposed=pytest.approx(0.4),
    kept_where_proposed=pytest.approx(1),
    total_variation=pytest.approx(0.05),
    positions=2,
  )
  target = build.load('random:tiny')
  found = predicted(build.engine(target, target, gamma=2), alpha)
  assert found.improvement_from_alpha == 3 / found.window_cost
  # Of windows that end where the draft is not sure equation 1 knows nothing.
  e = build.engine(target, target, gamma=2, min_confidence=0.3)
  found = predicted(e, alpha)
  assert found.improvement_from_alpha is None
  assert found.improvement > 0


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
  tokens_BL, proposed_BL, _ = predict.propose_along(
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
  arms = plan_lib.arms(e)
  items = tuple(
    requests.Item(tuple(range(1, 4 + i)), i, str(i), 'ab'[i % 2])
    for i in range(5)
  )
  plan = plan_lib.Plan(items, (), 8, e.settings.sampling, batch_size=2)
  groups = plan_lib.grouper(arms, plan)(items)
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
  arm = plan_lib.arms(e)[1]
  plan = plan_lib.of(e, prompts.builtin()[:8])
  programs = decode.programs(
    arm.model,
    arm.engine.drafter,
    arm.engine.rule,
    build.default_options(chunk=16),
  )
  for group in plan_lib.grouper([arm], plan)(plan.judged):
    for request in (group.none, group.first, group.full):
      programs.generate(arm.engine.weights, request)
  assert programs.generate._cache_size() == 1
