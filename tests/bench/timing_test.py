"""Speeds from clocks, by hand; and blocks on fake programs."""

import types as python_types
from typing import NamedTuple

import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.bench import timing

NAN = float('nan')


def output(tokens, calls=4, rows=1):
  info = decode._empty_info(rows, 16, 2, False)
  origin_BL = np.zeros((rows, 16), np.int8)
  origin_BL[:, :tokens] = types.BONUS
  info = info._replace(origin_BL=origin_BL, calls=np.int32(calls))
  return decode.Output(None, np.zeros(rows), info)


def runs(total_RG, prefill_G=(1.0, 2.0), noise_G=(0.5, 0.5), tokens=5, rows=1):
  total_RG = np.array(total_RG, float)
  return timing.Runs(
    outputs=[output(tokens, rows=rows) for _ in total_RG[0]],
    total_RG=total_RG,
    prefill_G=np.array(prefill_G),
    noise_G=np.array(noise_G),
    compile_seconds=0.0,
  )


# Prefills of 1 and 2 s, which usually take 1 s more in all: a decode time under
# 1 s is not told from nothing.
@pytest.mark.parametrize(
  'total, speed', [(5, 5.0), (4.5, 10 / 1.5), (4, None), (3, None), (2, None)]
)
def test_a_decode_shorter_than_the_noise_has_no_speed(total, speed):
  mine = runs([[total / 2, total / 2]])
  assert timing.tok_s(mine) == (speed and pytest.approx(speed))
  if speed is None:  # No repeat is left out and the others called.
    found = timing.improvement(mine, runs([[9.0, 9.0]]))
    assert found == (None, None, None)


def test_whole_requests_pay_for_the_prefill_of_both_models():
  plain = runs([[3.0, 6.0]])
  mine = runs([[3.0, 6.0]], prefill_G=(2.0, 4.0))
  assert timing.improvement(mine, plain).value == pytest.approx(2.0)
  assert timing.improvement(mine, plain, whole=True).value == 1.0
  assert timing.improvement(mine, plain, [1]).value == pytest.approx(2.0)
  # Tokens over seconds: 1 + 1 s and 2 + 4 s of decoding for ten tokens.
  assert timing.tok_s(plain) == pytest.approx(10 / 6)
  assert timing.first_token(plain) == pytest.approx((1.5 + 3.0) / 2)


def test_a_prompt_with_one_more_repeat_weighs_no_more():
  once = timing.tok_s(runs([[3.0, 6.0]]))
  assert timing.tok_s(runs([[3.0, 6.0], [3.0, NAN]])) == once


def test_repeats_of_one_full_batch_give_its_interval():
  plain = runs([[4.0], [5.0], [4.5]], (1.0,), (0.1,), rows=3)
  mine = runs([[2.5], [3.0], [2.75]], (1.0,), (0.1,), rows=3)
  found = timing.improvement(mine, plain)
  assert found.value == pytest.approx(3.5 / 1.75) and found.outcome == 'win'
  one = timing.improvement(runs([[2.5]], (1.0,), (0.1,), rows=3), plain)
  assert one.outcome == 'one prompt'


class Asked(NamedTuple):
  kind: str
  gamma_B: int = 9


def test_blocks_alternate_and_may_end_early():
  """Two arms on two batches, stopped after three blocks."""
  ran = []
  call = lambda name: (
    lambda weights, request: ran.append((name, *request)) or output(3)
  )
  fake = python_types.SimpleNamespace
  arms = [
    fake(name=name, gamma=gamma, engine=fake(weights=()))
    for name, gamma in (('plain', 0), ('x', 2))
  ]
  groups = [
    fake(full=Asked('full'), none=Asked('none'), chunks=1) for _ in range(2)
  ]
  programs = {arm.name: (call(arm.name), 9.0) for arm in arms}
  found = timing.measure(arms, groups, programs, [(0, 0), (0, 1), (1, 0)])
  full = [(name, int(gamma)) for name, kind, gamma in ran if kind == 'full']
  # One program serves several gammas: the request says which.
  assert full == [('plain', 0), ('x', 2), ('x', 2), ('plain', 0)] + [
    *(('x', 2), ('plain', 0))
  ]
  mine = found['x']
  assert np.isnan(mine.total_RG).tolist() == [[False, False], [False, True]]
  assert len(mine.outputs) == 2 and mine.compile_seconds == 9.0
  # Of the second group nothing is known, not even its prefill.
  groups[1] = fake(full=Asked('full'), none=Asked('none'), chunks=2)
  first = timing.measure(arms, groups, programs, [(0, 0)])['x']
  assert len(first.outputs) == len(first.prefill_G) == 1
  assert timing.first_token(first) > 0
  ran = ran[: 6 + 2 + 6]
  # The prefill depends on the number of chunks only: three are enough.
  assert len([x for x in ran if x[1] == 'none']) == 2 + 6
