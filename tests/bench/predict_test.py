"""Acceptance on a text, and the prediction made of it."""

import math
import types as python_types

import jax
import numpy as np
import pytest

from specdec_jax import build, decode, metrics, requests, sampling, types
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import predict, records
from specdec_jax.costs import calibration
from specdec_jax.drafters import early_exit, hybrid, lm
from specdec_jax.models import work
from specdec_jax.verify import lenient, reject


def test_alpha_is_read_from_the_first_texts_alone(monkeypatch):
  monkeypatch.setattr(records, 'READ', 2)
  monkeypatch.setattr(
    predict, '_overlap', lambda arm, group, plain: [np.full(3, group)] * 2
  )
  engine = python_types.SimpleNamespace(parts=(), rule=reject.RULE)
  arms = [plan_lib.Arm(x, x, 0, engine) for x in ('plain', 'lm')]
  found = predict.alphas(arms, [0.25, 0.75, 1.0], [None] * 3)
  assert found == {'lm': records.Alpha(0.5, 0.5)}


def test_alpha_is_the_mean_overlap():
  """Chunked over the text = one pass over all of it, in numpy."""
  target = build.load('random:tiny')
  draft = build.load('random:tiny:1')
  e = build.engine(target, draft, gamma=2)
  model = target.model
  tokens = np.random.default_rng(0).integers(0, 256, 40)
  how = dict(new=30, sampling=sampling.Sampling(1.0))
  request = requests.make(requests.items([tokens[:10]], **how), length=48)
  request.tokens_BL[0, :40] = tokens
  options = decode.Options(chunk=16)
  loop = e.loop._replace(rule=lenient.make(0.5), options=options)
  alpha_BL, distance_BL = predict.overlap(
    e.weights, request, loop=loop, q=model
  )
  at_1T = np.arange(40)[None]
  mask_BTS = at_1T[..., None] >= at_1T

  def distribution(params):
    cache = model.init_cache(1, 40)
    text = tokens[None], at_1T, at_1T, mask_BTS
    logits = model.head(params, model.apply(params, *text, cache)[0])
    return np.asarray(jax.nn.softmax(logits))[0]

  p_LV, q_LV = distribution(target.params), distribution(draft.params)
  want = np.minimum(2 * p_LV, q_LV).sum(-1)  # of what it keeps
  np.testing.assert_allclose(alpha_BL[0, 10:40], want[9:39], atol=1e-5)
  # A lossy rule's distance: drafts kept by min(1, p / (l q)), else p - q.
  kept_LV, rest_LV = np.minimum(2 * p_LV, q_LV), np.maximum(p_LV - q_LV, 0)
  emitted_LV = kept_LV + (1 - kept_LV.sum(-1, keepdims=True)) * (
    rest_LV / rest_LV.sum(-1, keepdims=True)
  )
  off = np.abs(emitted_LV - p_LV).sum(-1) / 2
  np.testing.assert_allclose(distance_BL[0, 10:40], off[9:39], atol=1e-5)


def info_of(hist_N, rows=1, calls=None):
  """Info of windows of gamma 2 that end as hist_N says, `rows` at a time."""
  emitted = sum((k + 1) * n for k, n in enumerate(hist_N))
  windows = sum(hist_N)
  info = types.empty_info(1, 8, 2, False)
  info = info._replace(
    hist_BN=np.array([hist_N]),
    proposed_BK=np.array([[windows] * 2]),
    calls_B=np.full(rows, windows // rows),
    origin_BL=np.pad(
      np.full((1, emitted), types.BONUS), ((0, 0), (0, 64 - emitted))
    ),
    widths_BN=np.array([[0, 0, windows // rows]] * rows),
  )
  return jax.device_get(info)


def output(*args, **kwargs):
  return decode.Output(None, None, info_of(*args, **kwargs))


def parts(verify=1.5, propose=0.5, repeats=()):
  return calibration.Calibration(
    step=2.0,
    verify={1: 1.0, 3: verify},
    idle=1.0,
    propose=dict.fromkeys(('lookup', 'early_exit'), {2: propose}),
    repeats=repeats,
  )


def predicted(e, outputs, costs, batches=0):
  """predict.improvement of windows of gamma 2."""
  arm = plan_lib.Arm('x', '', 2, e)
  return predict.improvement(arm, costs, outputs, batches=batches)


@pytest.fixture
def same_costs(monkeypatch):
  """Runs whose costs are always right, or err by as much as a test wants."""
  found = [1e-9, 10]
  monkeypatch.setattr(calibration, 'between_runs', lambda: found)
  return found


def test_the_interval_is_of_other_prompts_and_of_the_costs(same_costs):
  e = build.engine(build.load('random:tiny'), 'lookup', gamma=2)
  few = [output([4, 1, 1]), output([1, 1, 4])]
  known = predicted(e, few, parts())
  assert known.low is None and known.improvement == pytest.approx(2 / 2)
  steady = parts(repeats=(parts(),))
  two = predicted(e, few, steady, batches=2)
  many = predicted(e, few * 8, steady, batches=16)
  assert two.low < many.low < 1.0 < many.high < two.high
  # To be compared with more prompts is to be compared with a steadier value.
  assert predicted(e, few * 8, steady, batches=64).high < many.high
  # Equal prompts: only the costs are uncertain.
  same = [output([1, 1, 1])] * 4
  assert predicted(e, same, steady, 4).high == pytest.approx(1.0)
  noisy = parts(repeats=(parts(1.4), parts(1.6)))
  assert predicted(e, same, noisy, 4).high > 1.05
  assert predicted(e, few[:1], steady, 4).low is None
  # And what no repeat knows of.
  same_costs[:] = 0.17, 10**9
  sure = predicted(e, same, steady, 4)
  assert sure.high == pytest.approx(math.exp(1.645 * 0.17), rel=1e-3)
  assert sure.low == pytest.approx(1 / sure.high)
  same_costs[1] = 10
  assert predicted(e, same, steady, 4).high > sure.high
  # Of the same prompts: the least and the most by the repeats.
  again = predicted(e, few, noisy)
  assert (again.low, again.high) == pytest.approx((2 / 2.1, 2 / 1.9))
  assert again.improvement == pytest.approx(1.0)


@pytest.mark.parametrize('prompts', [2, 4, 7, 14])
@pytest.mark.parametrize('error, repeat', [(0, 0), (0.17, 0.02), (0.17, 0.2)])
def test_an_interval_holds_where_costs_err_from_run_to_run(
  prompts, error, repeat, monkeypatch, same_costs
):
  """By 17 %, which no repeat of a run's calibration knows of; or not at all."""
  same_costs[0] = error
  gain = lambda arm, x, found, times: (
    times @ found.emitted_G / (times @ found.windows_G) / x.step
  )
  monkeypatch.setattr(predict, 'gain', gain)
  rng, hits = np.random.default_rng(0), 0

  def drawn(count):
    windows_G = np.exp(rng.normal(3, 0.5, count))
    return windows_G * np.exp(0.2 * rng.normal(size=count)), windows_G

  for _ in range(600):
    emitted_G, windows_G = drawn(prompts)
    steps = np.exp(error * rng.normal() + repeat * rng.normal(size=3))
    each = tuple(parts()._replace(step=x) for x in steps)
    costs = parts(repeats=each)._replace(step=float(np.median(steps)))
    found = predict.Counts(emitted_G, windows_G, *[windows_G] * 4)
    value = emitted_G.sum() / windows_G.sum() / costs.step
    x = predict.interval(value, None, costs, found, 14)
    judged = drawn(14)
    hits += x.low <= judged[0].sum() / judged[1].sum() <= x.high
  assert 0.85 <= hits / 600 <= 0.95


def test_rows_that_share_a_batch_are_no_improvement():
  """Plain decoding of three rows emits three tokens a window too."""
  target = build.load('random:tiny')
  e = build.engine(target, 'lookup', gamma=2)
  outputs = {
    'plain': [output([30, 0, 0], rows=3)],
    'x': [output([3, 3, 6], rows=3)],
  }
  arms = [
    plan_lib.Arm('plain', 'plain', 0, e),
    plan_lib.Arm('x', 'lookup', 2, e),
  ]
  found = predict.improvements(arms, parts(propose=0.0), outputs)['x']
  assert math.isclose(found.tokens, 27 / 12)
  assert math.isclose(found.improvement, 27 / 12 / 1.5)


def test_a_window_costs_only_the_layers_that_are_left():
  """Verification after an early exit is predicted without the first layers."""
  target = build.load('random:tiny')
  e = build.engine(target, early_exit.Settings(exit=1), gamma=2)
  found = predicted(e, [output([1, 1, 2])], parts())
  rest = 1 - work.layers_share(target.params, 1)
  assert math.isclose(found.window_cost, 0.5 + rest * 1.5)
  assert math.isclose(found.tokens, 9 / 4)


def test_of_two_drafters_the_second_costs_where_it_drafted():
  target = build.load('random:tiny')
  draft = hybrid.Settings(lm.Settings('random:tiny:1'))
  e = build.engine(target, draft, gamma=2)
  propose = {'lookup': {0: 0.1, 2: 0.1}, 'lm': {0: 0.05, 1: 0.4, 2: 0.5}}
  costs = parts()._replace(propose=propose)
  out = output([4, 4, 4])
  widths = dict(widths_BN=np.array([[3, 6, 3]]))
  widths['second_BN'] = np.array([[0, 2, 1]])
  out = out._replace(info=out.info._replace(**widths))
  # No draft: idle; one or two: v(3), as the loop has no pass over two tokens.
  # The first is asked in all windows, the second drafts in three.
  wanted = 3 * 1 + 9 * 1.5 + 12 * 0.1 + 9 * 0.05 + 2 * 0.4 + 1 * 0.5
  assert math.isclose(predicted(e, [out], costs).window_cost, wanted / 12)


@pytest.mark.parametrize('tree, wanted', [((2,), 0.25), ((2, 1), 0.5)])
def test_of_the_likeliest_nodes_all_are_drafted(tree, wanted):
  """In a window that takes one of them too; in none where there is no room."""
  drafter = types.Drafter('tree', 2, None, None, None, tree=tree)
  costs = parts()._replace(propose={'tree': {0: 0.0, 1: 0.25, 2: 0.5}})
  found = predict._drafting(costs, drafter, np.array([0, 1, 2]))
  assert found.tolist() == [0, wanted, 0.5]


def test_no_window_costs_less_than_a_plain_step():
  """A plain step that was timed on a slow moment promises nothing."""
  e = build.engine(build.load('random:tiny'), 'lookup', gamma=2)
  out = output([2, 2, 2])
  out = out._replace(info=out.info._replace(widths_BN=np.array([[3, 0, 3]])))
  timed = {('verify', 1): 1.0, ('verify', 0): 0.94, ('verify', 3): 0.9}
  noise = calibration._of(2.0, timed | {('lookup', 0): 0.0, ('lookup', 2): 0.0})
  assert predicted(e, [out], noise).window_cost == 1.0


def by_tree(gamma, tree, accepted, propose, around=''):
  """predict.by_size of 10 windows whose own tree is worth 1.9; v(n) is 1.5 for
  three tokens, and 2 for five.

  accepted: of each level, without nodes behind the first, the second, ...
  """
  drafter = types.Drafter('tree', gamma, None, None, None, tree=tree)
  e = python_types.SimpleNamespace(drafter=drafter, parts=around)
  arm = plan_lib.Arm('tree', 'tree', gamma, e)
  costs = parts()._replace(
    verify={1: 1.0, 2: 1.25, 3: 1.5, 5: 2.0}, propose={'tree': propose}
  )
  counts = metrics.summary(info_of([4, 3, 3], calls=10))
  counts = counts._replace(accepted_by_width=accepted)
  return predict.by_size(arm, costs, counts, None, 1.9)


def test_what_smaller_trees_are_worth():
  """6 of 10 windows accept a draft, 2 of them through a second node.

  Half of a level costs half of it.
  """
  given = 4, (2, 1, 1), [[4, 6, 6], [2, 3, 3]], {0: 0, 2: 0.5, 4: 1.5}
  # Where a window is of lookup, no node hangs on another.
  assert not by_tree(*given, around='x')
  tokens = {'1': 14, '2': 16, '1,1': 16, '2,1': 19, '1,1,1': 16, '2,1,1': 19}
  needed = {'1': 1.75, '2': 2, '1,1': 2.5, '2,1': 2.75, '1,1,1': 3.25}
  whole = (10 + 6 + 3) / (2 + 1.5)
  wanted = {k: 1.9 * x / needed.get(k, 3.5) / whole for k, x in tokens.items()}
  found = by_tree(*given)
  assert found == pytest.approx(wanted) and list(found)[-1] == '2,1,1'


def test_what_fewer_of_the_likeliest_nodes_are_worth():
  found = by_tree(2, (2, 1), [[4, 5], [0, 2]], {0: 0, 1: 0.25, 2: 0.5})
  whole = (10 + 5 + 2) / (1.5 + 0.5)
  wanted = {'best:1': 1.9 * (14 / 1.5) / whole, 'best:2': 1.9}
  assert found == pytest.approx(wanted) and [*found] == [*wanted]


def test_what_smaller_gammas_are_worth():
  """Of four windows three accept a draft, and one of them all three."""
  e = build.engine(build.load('random:tiny'), 'lookup', gamma=3)
  arm = plan_lib.Arm('lookup', 'lookup', 3, e)
  costs = parts()._replace(
    verify={1: 1.0, 2: 1.25, 3: 1.5, 4: 2.0}, propose={'lookup': {0: 0, 3: 0.3}}
  )
  counts = metrics.summary(info_of([1, 2, 0, 1], calls=4))
  shares_1N = np.array([[0.0, 0, 0, 1]])
  found = predict.by_size(arm, costs, counts, (shares_1N, shares_1N), 0.9)
  tokens, needed = (7, 8, 9), (1.35, 1.7, 2.3)
  wanted = [
    0.9 * x / y / (9 / 2.3) for x, y in zip(tokens, needed, strict=True)
  ]
  assert found == pytest.approx(dict(zip('123', wanted, strict=True)))


COLUMNS = np.array([0.2, 0.4]), np.array([0.0, 0.1])
fake = python_types.SimpleNamespace


def alphas(monkeypatch, group=None, **engine):
  monkeypatch.setattr(predict, '_overlap', lambda *_: COLUMNS)
  return predict.alphas(
    [
      fake(name='plain'),
      fake(name='x', drafter='x', engine=fake(parts=(), **engine)),
      fake(name='y', drafter='around x', engine=fake(parts=('x',))),
    ],
    [group],
    [None],
  )


OWN = types.Rule('mine', reject.RULE.verify, lossless=False)
KEPT = lenient.make(0.5)._replace(emitted=None)


@pytest.mark.parametrize(
  'rule, want',
  [
    (reject.RULE, (0.3, 0.05)),
    (lenient.make(0.5), (0.3, 0.05)),
    (KEPT, (0.3, None)),
    (OWN, (None, None)),
  ],
)
def test_means_are_over_the_text(monkeypatch, rule, want):
  """None of what a lossy rule does not say of itself."""
  found = alphas(monkeypatch, q=0, rule=rule)
  assert found == {'x': pytest.approx(want)}
