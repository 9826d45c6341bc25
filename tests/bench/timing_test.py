"""Speeds from clocks, by hand; and blocks on fake programs."""

import types as python_types
from typing import NamedTuple

import numpy as np
import pytest

from specdec_jax import decode, requests, types
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import timing

NAN = float('nan')


def output(tokens, calls=4, rows=1):
  info = types.empty_info(rows, 16, 2, False)
  origin_BL = np.zeros((rows, 16), np.int8)
  origin_BL[:, :tokens] = types.BONUS
  widths_BN = np.array([[0, 0, calls]] * rows)
  info = info._replace(origin_BL=origin_BL, widths_BN=widths_BN)
  return decode.Output(None, np.zeros(rows), info)


def runs(total_RG, prefill_G=(1.0, 2.0), noise_G=(0.5, 0.5), tokens=5, rows=1):
  total_RG = np.array(total_RG, float)
  return timing.Runs(
    outputs=[output(tokens, rows=rows) for _ in total_RG[0]],
    total_RG=total_RG,
    prefill_G=np.array(prefill_G),
    noise_G=np.array(noise_G),
    prompts=rows * len(total_RG[0]),
  )


def improvement(mine, plain, whole=False):
  runs = {'plain': plain, 'mine': mine}
  return timing.improvements(runs, whole=whole)['mine']


# Prefills of 1 and 2 s, which usually take 1 s more in all: a decode time under
# 1 s is not told from nothing.
@pytest.mark.parametrize(
  'total, speed', [(5, 5.0), (4.5, 10 / 1.5), (4, None), (3, None), (2, None)]
)
def test_a_decode_shorter_than_the_noise_has_no_speed(total, speed):
  mine = runs([[total / 2, total / 2]])
  assert timing.tok_s(mine) == (speed and pytest.approx(speed))
  if speed is None:  # No repeat is left out and the others called.
    found = improvement(mine, runs([[9.0, 9.0]]))
    assert found == (None, None, None)


def test_whole_requests_pay_for_the_prefill_of_both_models():
  plain = runs([[3.0, 6.0]])
  mine = runs([[3.0, 6.0]], prefill_G=(2.0, 4.0))
  assert improvement(mine, plain).value == pytest.approx(2.0)
  assert improvement(mine, plain, whole=True).value == 1.0
  one = improvement(mine.picked([1]), plain.picked([1]))
  assert one.value == pytest.approx(2.0)
  # Tokens over seconds: 1 + 1 s and 2 + 4 s of decoding for ten tokens.
  assert timing.tok_s(plain) == pytest.approx(10 / 6)
  assert timing.first_token(plain) == pytest.approx((1.5 + 3.0) / 2)


def test_a_prompt_with_one_more_repeat_weighs_no_more():
  once = timing.tok_s(runs([[3.0, 6.0]]))
  assert timing.tok_s(runs([[3.0, 6.0], [3.0, NAN]])) == once


@pytest.mark.parametrize(
  'batches, rows, prompts, outcome',
  [
    (1, 8, 8, 'too few'),  # one batch, however many prompts
    (2, 2, 4, 'too few'),  # four prompts
    (5, 1, 5, 'too few'),
    (2, 4, 5, 'too few'),  # five prompts and three copies
    (2, 4, 6, 'win'),
    (2, 3, 6, 'win'),
    (6, 1, 6, 'win'),
  ],
)
def test_repeats_are_no_sample_of_prompts(batches, rows, prompts, outcome):
  """However much alike they are, and whatever they say."""
  each = lambda seconds: runs(
    [[seconds] * batches] * 3, (1.0,) * batches, (0.1,) * batches, rows=rows
  )._replace(prompts=prompts)
  found = improvement(each(2.5), each(4.0))
  assert found.value == pytest.approx(2.0) and found.outcome == outcome
  if batches > 1:  # Of the others none has six prompts in two batches.
    some = range(batches - 1)
    part = improvement(each(2.5).picked(some), each(4.0).picked(some))
    assert part.outcome == 'too few'


def test_all_arms_at_once_and_those_too_short_beside_them():
  seconds = np.linspace(3, 6, 8)
  each = lambda gain, wave: runs(
    [1 + seconds / gain + wave * np.sin(seconds * 9)], (1.0,) * 8, (0.1,) * 8
  )
  plain, some = each(1, 0), {f'x{i}': each(1.3, 0.3 + i / 9) for i in range(3)}
  found = timing.improvements({'plain': plain, 'short': each(99, 0)} | some)
  assert list(found) == ['plain', 'short', 'x0', 'x1', 'x2']
  assert found['plain'] == (1.0, 1.0, 1.0)
  assert found['short'].outcome == 'too short'
  for name in some:
    alone = improvement(some[name], plain)
    assert found[name].value == pytest.approx(alone.value)
    assert alone.width < found[name].width < 2 * alone.width
  sure = timing.improvements({'plain': plain} | some, level=0.99)
  assert sure['x1'].low < found['x1'].low


class Asked(NamedTuple):
  limit_B: str
  group: int
  gamma_B: int = 9
  lengths_B: str = 'none'


def fake(name='x', gamma=0):
  engine = python_types.SimpleNamespace(weights=())
  return plan_lib.Arm(name, name, gamma, engine)


def batches(count):
  return [
    plan_lib.Group((requests.Item((1,), g, id=str(g)),), None, Asked('full', g))
    for g in range(count)
  ]


def clocked(monkeypatch, seconds):
  """A program whose clock is seconds(request); and what was asked of it."""
  ran = []

  def timed(call, request):
    ran.append(request)
    return seconds(request), call(request)

  monkeypatch.setattr(timing.parts, 'timed', lambda f, *x: timed(f, x[-1]))
  return (lambda *_: output(3)), ran


def test_blocks_alternate_and_may_end_early():
  """Two arms on two batches, stopped after three blocks."""
  ran = []
  call = lambda name: (
    lambda weights, request: ran.append((name, request)) or output(3)
  )
  arms = [fake('plain'), fake('x', 2)]
  programs = {arm.name: call(arm.name) for arm in arms}
  groups, blocks = batches(2), [(0, 0), (0, 1), (1, 0)]
  found = timing.measure(arms, groups, programs, blocks)
  full = [(name, int(x.gamma_B)) for name, x in ran if x.limit_B == 'full']
  # One program serves several gammas: the request says which.
  assert full == [('plain', 0), ('x', 2), ('x', 2), ('plain', 0)] + [
    *(('x', 2), ('plain', 0))
  ]
  mine = found['x']
  assert np.isnan(mine.total_RG).tolist() == [[False, False], [False, True]]
  assert len(mine.outputs) == mine.prompts == 2
  # Of the second batch nothing is known, not even its prefill.
  first = timing.measure(arms, groups, programs, [(0, 0)])['x']
  assert len(first.outputs) == len(first.prefill_G) == first.prompts == 1
  assert timing.first_token(first) > 0


def test_each_prompt_pays_for_its_own_prefill(monkeypatch):
  """An encoder reads a quarter or all of a source: 1 or 4 s, and 2 of text."""
  reading = {0: 4.0, 1: 4.0, 2: 4.0, 3: 1.0, 4: 1.0, 5: 1.0}
  program, ran = clocked(
    monkeypatch, lambda x: reading[x.group] + 2.0 * (x.limit_B == 'full')
  )
  blocks = [(0, g) for g in reading]
  found = timing.measure([fake()], batches(6), {'x': program}, blocks)['x']
  assert found.prefill_G.tolist() == list(reading.values())
  assert timing.tok_s(found) == pytest.approx(3 / 2)
  # It takes more than an eighth of the time: once, but for the first prompt.
  none = [x.group for x in ran[1:] if x.limit_B == 'none']
  assert none == [0, 0, 0, 1, 2, 3, 4, 5]


def test_short_prefills_are_timed_often_and_the_fastest_counts(monkeypatch):
  """A slow one would make decoding look fast; how slow is the noise."""
  fills = iter([1.0] + [1.5, 1.0, 1.2] * 2)
  clock = lambda x: 33.0 if x.limit_B == 'full' else next(fills)
  program, ran = clocked(monkeypatch, clock)
  blocks = [(r, g) for r in range(2) for g in range(2)]
  found = timing.measure([fake()], batches(2), {'x': program}, blocks)['x']
  assert found.prefill_G.tolist() == [1.0, 1.0]
  assert found.noise_G.tolist() == pytest.approx([0.2, 0.2])
  assert timing.tok_s(found) == pytest.approx(6 / 64)
  assert len([x for x in ran if x.limit_B == 'none']) == 1 + 2 * 3


def test_a_long_prefill_is_timed_once_in_each_repeat(monkeypatch):
  program, ran = clocked(monkeypatch, lambda x: 3.0 + (x.limit_B == 'full'))
  blocks = [(r, g) for r in range(4) for g in range(2)]
  timing.measure([fake()], batches(2), {'x': program}, blocks)
  assert [x.group for x in ran if x.limit_B == 'none'] == [0] * 4 + [1] * 3
