"""Speeds from clocks, by hand; and blocks on fake programs."""

import itertools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, requests
from specdec_jax import settings as settings_lib
from specdec_jax import types as types_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts, timing
from tests.bench import bench_test


def runs(decoding_G, prefill_G=(1.0, 2.0), prompts=None):
  """Of batches that emit five tokens in four windows; one prompt each."""
  info = types_lib.empty_info(1, 16, 2, False)._replace(calls_B=np.full(1, 4))
  outputs = [decode.Output(None, None, info)] * len(decoding_G)
  ones_G = np.ones(len(outputs), int)
  prompts_G = ones_G if prompts is None else np.array(prompts)
  counts = 5 * ones_G, prompts_G, np.full(len(outputs), ''), ones_G
  seconds = np.array(decoding_G), np.array(prefill_G)
  return timing.Runs({}, outputs, *counts, *seconds)


def improvement(mine, plain, whole=False):
  runs = {'plain': plain, 'mine': mine}
  return timing.improvements(runs, whole=whole)['mine']


def test_whole_requests_pay_for_the_prefill_of_both_models():
  plain = runs([2.0, 4.0])
  mine = runs([1.0, 2.0], [2.0, 4.0])
  assert improvement(mine, plain).value == pytest.approx(2.0)
  assert improvement(mine, plain, whole=True).value == 1.0
  one = improvement(mine.picked([1]), plain.picked([1]))
  assert one.value == pytest.approx(2.0)
  # Tokens over seconds: 2 and 4 s of decoding for ten tokens.
  assert timing.tok_s(plain) == pytest.approx(10 / 6)
  assert timing.first_token(plain) == pytest.approx((1.5 + 3.0) / 2)
  # Rows of a batch run their windows at once.
  info = plain.outputs[0].info._replace(calls_B=np.array([4, 2]))
  rows = [decode.Output(None, None, info)] * 2
  shared = plain._replace(outputs=rows)
  assert timing.first_token(shared) == timing.first_token(plain)


@pytest.mark.parametrize(
  'prompts, outcome',
  [
    ([8], 'too few'),  # one batch, however many prompts
    ([2, 2], 'too few'),
    ([1] * 5, 'too few'),
    ([4, 1], 'too few'),
    ([4, 2], 'win'),
    ([1] * 6, 'win'),
  ],
)
def test_repeats_are_no_sample_of_prompts(prompts, outcome):
  """However much alike they are, and whatever they say."""
  count = len(prompts)
  each = lambda seconds: runs([seconds] * count, [1.0] * count, prompts)
  found = improvement(each(1.5), each(3.0))
  assert found.value == pytest.approx(2.0) and found.outcome == outcome
  if count > 1:  # Of the others none has six prompts in two batches.
    some = range(count - 1)
    part = improvement(each(1.5).picked(some), each(3.0).picked(some))
    assert part.outcome == 'too few'


def test_categories_are_the_sample_where_there_are_six():
  """Of two prompts each, as if each were one prompt; else prompts are."""
  rng = np.random.default_rng(0)
  plain_G, gain_C = np.exp(rng.normal(size=12) / 9), np.exp(rng.normal(size=6))
  names = np.repeat(list('abcdef'), 2)
  mine_G = plain_G / np.repeat(gain_C, 2)
  each = lambda seconds_G, kind_G: runs(seconds_G, 0 * seconds_G)._replace(
    kind_G=kind_G
  )
  both = lambda kind_G: [each(x, kind_G) for x in (mine_G, plain_G)]
  found = improvement(*both(names))
  # Sums of two, which share their gain.
  sums = [x.reshape(6, 2).sum(1) for x in (mine_G, plain_G)]
  merged = improvement(*(runs(x, 0 * x) for x in sums))
  assert found == pytest.approx(merged)
  alone = improvement(*both(np.array([''] * 12)))
  assert found.width > 1.2 * alone.width
  # Five are too few to be a sample, and prompts without one are their own.
  five = np.where(names == 'f', 'a', names)
  assert improvement(*both(five)) == pytest.approx(alone)
  some = np.where(names > 'd', '', names)  # four, and four prompts
  assert improvement(*both(some)) == pytest.approx(alone)


def fake(name, gamma, ran, taps=()):
  """An arm, and its programs, which say in `ran` what they are asked."""
  engine = types.SimpleNamespace(
    weights=types_lib.Weights((), name),
    options=decode.Options(),
    drafter=types.SimpleNamespace(taps=taps),
  )
  arm = plan_lib.Arm(name, name, gamma, engine)

  def read(weights, request, reading):
    assert weights.draft == () and reading == request.group
    ran.append((name, 'read', reading))
    return taps, reading

  def begin(weights, request, reading):
    assert weights.draft == name and reading == (taps, request.group)
    ran.append((name, 'begin', request.group))
    info = types_lib.empty_info(2, 16, 2, False)
    return decode.State(*[jnp.float32(request.group)] * 5), info

  def finish(weights, request, state, info):
    ran.append((name, 'finish', int(request.gamma_B)))
    assert float(state.cache) == request.group
    jax.tree.map(lambda x: x.delete(), state)  # as what is donated
    return decode.State(np.ones((2, 9)), np.full(2, 3), *[()] * 3), info

  opened = lambda weights, request: request.group
  each = dict(opened=opened, read=read, begin=begin, finish=finish)
  return arm, types.SimpleNamespace(**each)


class Asked(NamedTuple):
  group: int
  limit_B: int = 9
  lengths_B: int = 1
  gamma_B: int = 9


def batches(count):
  """Of one prompt and its copy."""
  item = lambda g, copy: requests.Item((1,), copy, id=str(g))
  return [
    plan_lib.Group((item(g, 0), item(g, 1)), Asked(g)) for g in range(count)
  ]


def test_blocks_alternate_and_may_end_early(monkeypatch):
  """Two arms on two batches, stopped after three blocks, which take longer and
  longer; a batch with one more repeat weighs no more."""
  ran, clock = [], itertools.count(1.0)
  timed = lambda call, *x: (next(clock), call(*x))
  monkeypatch.setattr(timing.parts, 'timed', timed)
  arms, programs = zip(fake('plain', 0, ran), fake('x', 2, ran), strict=True)
  programs = {arm.name: x for arm, x in zip(arms, programs, strict=True)}
  groups, blocks = batches(2), [(0, 0), (0, 1), (1, 0)]
  found = timing.measure(arms, groups, programs, blocks)
  warm, ran = ran[:5], ran[5:]
  full = [(name, x) for name, what, x in ran if what == 'finish']
  assert [name for name, *_ in warm] == ['plain', 'plain', 'plain', 'x', 'x']
  # One program serves several gammas: the request says which.
  assert full == [('plain', 0), ('x', 2), ('x', 2), ('plain', 0)] + [
    *(('x', 2), ('plain', 0))
  ]
  mine = found['x']
  assert mine.repeats_G.tolist() == [2, 1]
  # After five calls to warm up: the prompts are read in calls 6, 11 and 16.
  assert mine.prefill_G.tolist() == [(6 + 9 + 16 + 17) / 2, 11 + 12]
  assert mine.decoding_G.tolist() == [(10 + 18) / 2, 13]
  assert len(mine.outputs) == 2 and mine.prompts_G.tolist() == [1, 1]
  assert [*mine.answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
  assert all(x.tokens == [1, 1] for x in mine.answers.values())
  assert mine.kind_G.tolist() == ['', '']  # of two rows
  one = mine.picked([1])
  assert one.kind_G.tolist() == [''] and [*one.answers] == [(1, 0), (1, 1)]
  one = [x._replace(items=x.items[:1]) for x in groups]
  named = one[0].items[0]._replace(category='code')
  one[0] = one[0]._replace(items=(named,))
  ended = timing.measure(arms, one, programs, [(0, 0), (0, 1)])['x']
  assert ended.kind_G.tolist() == ['code', '']
  # Of the second batch nothing is known, not even its prefill.
  first = timing.measure(arms, groups, programs, [(0, 0)])['x']
  assert len(first.outputs) == len(first.prefill_G) == 1


def test_prompts_are_read_once_for_all_that_need_the_same(monkeypatch):
  """Arms of one engine go on from one prefill, each from its own copy: what is
  given to a program is gone."""
  seconds = {'begin': 2.0, 'finish': 1.0}
  timed = lambda call, *x: (seconds.get(call.__name__, 4.0), call(*x))
  monkeypatch.setattr(timing.parts, 'timed', timed)
  ran = []
  (plain, one), (small, two) = fake('plain', 0, ran), fake('x g=2', 2, ran)
  large = small._replace(name='x g=4', gamma=4)
  taps, other = fake('y', 3, ran, taps=(1,))
  programs = {'plain': one, 'x g=2': two, 'x g=4': two, 'y': other}
  (group,) = batches(1)
  out = timing.turn((small, plain, taps, large), programs, group)
  names = lambda which: [name for name, what, _ in ran if what == which]
  assert names('read') == ['x g=2', 'y']
  assert names('begin') == ['x g=2', 'plain', 'y']
  assert [x for _, what, x in ran if what == 'finish'] == [2, 0, 3, 4]
  assert [(x.prefill, x.decoding) for x in out.values()] == [(6.0, 1.0)] * 4
  assert list(out) == ['x g=2', 'plain', 'y', 'x g=4']


@pytest.mark.parametrize('rows', [1, 2])
def test_several_programs_make_what_one_does(rows):
  """Also on a mesh, where each takes the shardings of the one before."""
  config = bench_test.settings(('lm',), mesh={'data': rows})
  config.bench.batch_size = rows
  e = settings_lib.load(settings_lib.settings(config))
  plain, arm = plan_lib.arms(e)
  plan = plan_lib.make(e, prompts.builtin()[:2])
  (group,) = plan_lib.groups([plain, arm], plan, plan.test)
  programs = timing.compile_arms([plain, arm], group.full)
  out = timing.turn([plain, arm], programs, group)
  for x in (plain, arm):
    request = plan_lib.capped(x, group.full)
    want = x.engine.programs.generate(x.engine.weights, request)
    jax.tree.map(np.testing.assert_array_equal, out[x.name].output, want)
