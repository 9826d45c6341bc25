"""What fits into the minutes, without a model and without waiting."""

import math
import re

import pytest

from specdec_jax import printing, program, requests
from specdec_jax import settings as settings_lib
from specdec_jax.bench import budget
from specdec_jax.bench import plan as plan_lib

SPEED = budget.Speed(1.0, 4.0, 10.0, 2, {'lm': 1.0, 'lookup': 1.0})


def plan(prompts=14, tokens=64, repeats=5, batch_size=1):
  items = tuple(
    requests.Item((1,), i, str(i), 'abcdefg'[i * 7 // prompts])
    for i in range(prompts)
  )
  sampling = settings_lib.Sampling(0.0, 0, 1.0, 0)
  bench = settings_lib.Bench('', repeats, 0, 0, batch_size, True, True)
  return plan_lib.Plan(items, items, tokens, 128, sampling, bench)


def seconds(p, speed=SPEED):
  n, m = (-(-len(x) // p.bench.batch_size) for x in (p.calibration, p.test))
  one = speed.judged(p.max_new_tokens)
  return n * speed.others(p.max_new_tokens) + m * p.bench.repeats * one


@pytest.mark.parametrize('given', [120, 200, 500, 1500, 4000, 20_000, 10**6])
@pytest.mark.parametrize('batch_size', [1, 4])
def test_what_fits_takes_most_of_the_time_and_no_more(given, batch_size):
  whole = plan(batch_size=batch_size)
  p = budget.fit(whole, SPEED, given)
  assert seconds(p) <= given
  assert len(p.test) <= 14 and p.max_new_tokens <= 64 and p.test
  assert p.bench.repeats <= 5
  if given < seconds(whole) and given > 200:
    assert seconds(p) > given / 3
  if given == 10**6:
    assert (len(p.test), len(p.calibration), p.bench.repeats) == (14, 14, 5)


def test_little_time_has_short_answers_before_it_has_few_prompts():
  long, short = (budget.fit(plan(), SPEED, x) for x in (4000, 1200))
  assert (long.max_new_tokens, short.max_new_tokens) == (64, 32)
  assert len(short.test) >= 6 and short.bench.repeats == 1
  # Those few are of many categories.
  assert len({x.category for x in short.test}) == min(7, len(short.test))


def test_nothing_fits_and_no_limit():
  assert budget.fit(plan(), SPEED, 40) is None
  assert budget.fit(plan(), SPEED, math.inf) == plan()
  little = budget.Clock(program.elapsed() + 60)
  with pytest.raises(ValueError, match='one short answer') as e:
    budget.first_fit(plan(), SPEED, little)
  needs = float(re.findall('some ([0-9.]+)', str(e.value))[0])
  enough = budget.Clock(60 * (needs + 0.1))
  assert budget.first_fit(plan(), SPEED, enough).test


def test_shares_of_a_clock(monkeypatch):
  monkeypatch.setattr(program, 'elapsed', lambda: 100.0)
  clock = budget.clock(5)
  assert clock.left() == 200 and clock.share(0.25).left() == 50
  assert not budget.clock(0).limited and budget.clock(0).share(0.5).left() > 1e9
  with pytest.raises(ValueError, match='minutes=-1'):
    budget.clock(-1)


def test_blocks_end_with_the_time(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(program, 'elapsed', lambda: now[0])
  track = lambda items, text: items
  done = []
  for block in budget.blocks(3, 2, budget.Clock(45.0), track):
    done.append(block)
    now[0] += 10
  assert done == [(0, 0), (0, 1), (0, 2), (1, 0)]
  now[0] = 100.0
  late = budget.blocks(3, 2, budget.Clock(45.0), track)
  assert next(late) == (0, 0)  # one is always run


def test_the_calibration_takes_a_tenth_of_the_time():
  clock = budget.Clock(600.0)
  slow = budget.Speed(0.25, 1.0, 10.0, 1, {'lm': 1.0})
  windows, repeats = budget.calibration(slow, 2, clock)
  each = 1.2 * 0.25 * (2 + 1 + 1)
  assert 30 < (repeats + 1) * windows * each <= 60
  assert budget.calibration(slow, 2, budget.UNLIMITED)[0] == 64


def test_the_width_to_expect():
  assert budget.width([0.1], 9, 1) is None
  assert budget.width([0.1, 0.2], 5, 1) is None
  # Student's t with 8 degrees of freedom is 2.306, and 3.206 at 0.05 / 4.
  for arms, t in ((1, 2.306), (4, 3.206)):
    wide = budget.width([0.0, 0.2, 0.1, 0.1], 9, arms)
    assert wide == pytest.approx(t * 0.0816 / 3, rel=1e-3)


def test_progress_in_a_log(capsys, monkeypatch):
  now = iter([0.0, 10.0, 20.0, 30.0])
  monkeypatch.setattr(printing.time, 'monotonic', lambda: next(now))
  assert list(printing.track('abc', 'letters')) == ['a', 'b', 'c']
  assert capsys.readouterr().err == 'letters: 2 of 3, 10 s left\n'
  assert [printing.time_text(x) for x in (59, 125, 7300)] == [
    *('59 s', '2 min 05 s', '2 h 01 min')
  ]
