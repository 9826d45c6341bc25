"""What fits into the minutes, without a model and without waiting."""

import io
import json
import pathlib
import re

import numpy as np
import pytest

from specdec_jax import printing, program, requests
from specdec_jax import sampling as sampling_lib
from specdec_jax import settings as settings_lib
from specdec_jax.bench import budget, records, tables
from specdec_jax.bench import plan as plan_lib

SPEED = budget.Speed(1.0, 4.0, 10.0, 2, {'lm': 1.0, 'lookup': 1.0}, 2, 3.0)


@pytest.fixture(autouse=True, name='now')
def _now(monkeypatch):
  """A process that has just begun."""
  now = [0.0]
  monkeypatch.setattr(program, 'elapsed', lambda: now[0])
  return now


def plan(prompts=14, tokens=64, repeats=5, batch_size=1):
  items = tuple(
    requests.Item((1,), i, str(i), 'abcdefg'[i * 7 // prompts])
    for i in range(prompts)
  )
  sampling = sampling_lib.Sampling()
  bench = settings_lib.Bench('', repeats, 0, 0, batch_size, True, True)
  return plan_lib.Plan(items, items, tokens, 128, sampling, bench)


def fit(seconds, **changes):
  return budget.fit(plan(**changes), SPEED, budget.Clock(seconds))


@pytest.mark.parametrize('given', [140, 200, 500, 1500, 4000, 20_000, 10**6])
@pytest.mark.parametrize('batch_size', [1, 4])
def test_the_calibration_prompts_leave_half_of_the_time(given, batch_size):
  p = fit(given, batch_size=batch_size)
  count = -(-len(p.calibration) // batch_size)
  took = count * SPEED.calibration(p.max_new_tokens)
  least = 6 if batch_size == 1 else 4  # all batches
  if p.max_new_tokens > 8:
    assert took + least * SPEED.test(p.max_new_tokens) <= given
    assert took <= given / 2 and (count <= 7 or took <= given / 4)
  assert 4 <= count
  # Test prompts are not cut: they are run until the time is over. What is not
  # needed to predict is judged.
  assert len(p.test) + len(p.calibration) == 28 and p.bench.repeats == 5
  assert not set(p.test[14:]) & set(p.calibration)
  if given == 10**6:
    assert (len(p.calibration), p.max_new_tokens) == (14, 64)


def test_little_time_has_short_answers_before_it_has_few_prompts():
  long, short, least = (fit(x) for x in (4000, 1600, 40))
  assert (long.max_new_tokens, short.max_new_tokens) == (64, 32)
  # The first few prompts are of many categories.
  assert len({x.category for x in short.test[:7]}) == 7
  assert (least.max_new_tokens, len(least.calibration)) == (8, 4)
  assert budget.fit(plan(), SPEED, budget.UNLIMITED) == plan()


def test_too_little_time_is_refused_with_how_much_there_must_be():
  with pytest.raises(ValueError, match='minutes=1: a few short answers') as e:
    budget.check(plan(), SPEED, budget.clock(1))
  needs, all = map(float, re.findall('([0-9.]+) with', str(e.value)))
  budget.check(plan(), SPEED, budget.clock(needs + 0.1))
  with pytest.raises(ValueError, match='minutes'):
    budget.check(plan(), SPEED, budget.clock(0.8 * needs))
  assert needs < all
  budget.check(plan(), SPEED, budget.UNLIMITED)
  # Plain decoding compiles no drafter, and no calibration prompt is run.
  plain = SPEED._replace(factors={}, drafters=0, read=0, fills=1.0)
  least = plain.closing() + 6 * plain.test(8)
  budget.check(plan(), plain, budget.Clock(least / 1.1 + 1))
  assert plain.calibration(64) == 0


def test_the_slowest_methods_are_left_out_before_prompts_are():
  arms = [arm(f'{x} g=1') for x in ('plain', 'lm', 'lookup', 'eagle')]
  factors = {'lm g=1': 3.0, 'lookup g=1': 1.0, 'eagle g=1': 2.0}
  speed = SPEED._replace(factors=factors, drafters=3, read=3)
  of = lambda seconds: budget.afford(arms, plan(), speed, budget.Clock(seconds))
  needs = speed.least(plan())
  assert of(needs + 1) == (speed, {})
  left, out = of(needs - 1)
  assert [*out] == ['lm g=1'] and left.least(plan()) < needs
  assert [*left.factors] == ['lookup g=1', 'eagle g=1']
  assert (left.drafters, left.read) == (2, 2)
  left, out = of(1)
  assert [*left.factors] == ['lookup g=1'] and [*out] == ['lm g=1', 'eagle g=1']


def test_what_is_expected_of_the_time_that_is_left():
  """Methods that are as fast as predicted, twice as fast as plain decoding."""
  gains = dict.fromkeys(('lm g=1', 'lookup g=1'), np.full(3, 2.0))
  given = [*map(arm, gains)], plan(), SPEED

  def at(seconds):
    found, width = budget.expected(*given, gains, budget.Clock(seconds))
    return len(found.test), found.bench.repeats, width

  one = 1.15 * 64 * (1 + 0.5 + 0.5) + 4.0 * 3.0
  one += 2 * (1.5 * 4.0 + 64 / 3)  # alpha of both
  assert at(9.5 * one) == (9, 1, 0.0) and at(28.5 * one) == (14, 2, 0.0)
  assert at(1.0) == (1, 1, None)
  free = budget.expected(*given, {}, budget.UNLIMITED)
  assert free == (plan(), None)


def test_the_width_to_expect_is_of_batches_where_rows_share_them():
  """14 prompts in 4 batches: their gains differ less than those of prompts."""
  some = np.exp([0.0, 0.2, 0.1, 0.1])

  def of(arms=1, each=some, **changes):
    gains = {f'lm g={x}': each for x in range(arms)}
    given = [*map(arm, gains)], plan(**changes), SPEED, gains
    return budget.expected(*given, budget.UNLIMITED)[1]

  # Student's t with 3 degrees of freedom is 3.182; of 7 categories 6 are left,
  # 2.447, and 3.521 at 0.05 / 4.
  assert of(batch_size=4) == pytest.approx(3.182 * 0.0816 / 2, rel=1e-3)
  for arms, t in ((1, 2.447), (4, 3.521)):
    assert of(arms) == pytest.approx(t * 0.0816 / 7**0.5, rel=1e-3)
  assert of(prompts=5) is of(batch_size=16) is of(each=some[:1]) is None


def arm(name):
  drafter, gamma = name.split(' g=')
  return plan_lib.Arm(name, drafter, int(gamma), None)


def told_of(value, low, high):
  return records.Prediction(value, 1.0, value, low, high)


@pytest.mark.parametrize(
  'predicted, out',
  [
    (
      {
        'lm g=1': (1.2, 1.1, 1.3),  # all below gamma 4
        'lm g=2': (1.4, 1.2, 1.6),  # may be the best
        'lm g=4': (1.5, 1.3, 1.7),
        'lookup g=1': (0.9, 0.8, 0.98),  # all below plain decoding
        'lookup g=2': (0.9, 0.7, 1.1),
        'eagle g=1': (0.5, None, None),  # not known
      },
      {
        'lm g=1': '1.10x to 1.30x, lm g=4 1.50x',
        'lookup g=1': '0.80x to 0.98x',
      },
    ),
    (  # the best of those that are slower stays
      {'lm g=1': (0.8, 0.7, 0.9), 'lookup g=1': (0.6, 0.5, 0.7)},
      {'lookup g=1': '0.50x to 0.70x'},
    ),
    ({}, {}),  # of one prompt
  ],
)
def test_arms_that_cannot_win_are_left_out_with_the_reason(predicted, out):
  arms = [plan_lib.Arm('autoregressive', 'autoregressive', 0, None)]  # pyright: ignore
  arms += map(arm, predicted or ['lm g=1'])
  told = {name: told_of(*x) for name, x in predicted.items()}
  assert budget.left_out(arms, told) == out


def test_shares_of_a_clock(now):
  now[0] = 100.0
  clock = budget.clock(5)
  assert clock.left() == 200 and clock.share(0.25).left() == 50
  # What the minutes do not count.
  assert clock.later(5).left() == 205 and not budget.UNLIMITED.later(5).limited
  assert not budget.clock(0).limited and budget.clock(0).share(0.5).left() > 1e9


@pytest.mark.parametrize(
  'groups, repeats, seconds, after, ran',
  [
    (3, 2, 45, 0, [(0, 0), (0, 1), (0, 2), (1, 0)]),
    (3, 2, -55, 0, [(0, 0)]),  # one is always run
    # Time is left for what a group takes afterwards, once.
    (6, 3, 52, 5, [(0, 0), (0, 1), (0, 2)]),
    (2, 3, 52, 5, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    (12, 1, 142, 5, [(0, g) for g in range(10)]),  # the first eight alone
  ],
)
def test_blocks_leave_time_for_what_each_group_takes_afterwards(
  now, groups, repeats, seconds, after, ran
):
  done = []
  for block in budget.blocks(groups, repeats, budget.Clock(seconds), after):
    done.append(block)
    now[0] += 10
  assert done == ran


def test_timing_the_parts_takes_a_tenth_of_the_time():
  slow = budget.Speed(0.25, 1.0, 10.0, 1, {'lm': 1.0}, 1, 2.0)
  windows, repeats = budget.windows(slow, 2, budget.Clock(600.0))
  each = 1.2 * 0.25 * (2 + 1 + 1)
  assert 30 < (repeats + 1) * windows * each <= 60
  assert budget.windows(slow, 2, budget.UNLIMITED)[0] == 64


class Terminal(io.StringIO):
  isatty = lambda self: True


def test_a_terminal_ends_in_words_and_a_pipe_in_json(monkeypatch, tmp_path):
  document, path = {'a': 1.0, 'b': None}, tmp_path / 'results/bench.json'
  for kind, last in ((Terminal, 'It is so.'), (io.StringIO, '{"a":1.0,"b":nu')):
    monkeypatch.setattr('sys.stdout', out := kind())
    tables.close(['It is so.'], document, printing.console(), path)
    end = out.getvalue().strip().splitlines()[-1]
    assert end.strip().startswith(last)
    assert json.loads(path.read_text()) == document
    monkeypatch.setattr('sys.stdout', out := kind())
    printing.result(document, 'It is so.')
    assert out.getvalue().startswith(last)


def test_no_program_prints_json_on_a_terminal():
  root = pathlib.Path(__file__).parents[2]
  for folder in ('scripts', 'experiments', 'specdec_jax'):
    for path in (root / folder).rglob('*.py'):
      code = path.read_text().replace('printing.compact', 'compact')
      if path.name != 'printing.py':
        assert not re.search(r'print\((compact|json\.dumps)\(', code), path


def test_progress_in_a_log(capsys, monkeypatch):
  # The first letter takes a minute, in which something compiles.
  now = iter([0.0, 60.0, 64.0, 68.0, 80.0, 84.0])
  monkeypatch.setattr(printing.time, 'monotonic', lambda: next(now))
  assert list(printing.track('abcde', 'letters')) == [*'abcde']
  said = ['letters: 0 of 5', 'letters: 2 of 5, 12 s left']
  assert capsys.readouterr().err.splitlines() == [
    *said,
    'letters: 4 of 5, 7 s left',
  ]
  assert [printing.time_text(x) for x in (59, 125, 7300)] == [
    *('59 s', '2 min 05 s', '2 h 01 min')
  ]
