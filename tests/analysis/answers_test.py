"""Files of prompts to files of answers, with an engine that is a function."""

import json
import os
import signal

import pytest

from configs import pair
from specdec_jax import requests, settings
from specdec_jax.analysis import answers, output_file
from specdec_jax.bench import prompts
from tests.analysis import answering


@pytest.fixture
def world(tmp_path):
  return answering.World(tmp_path)


def handlers():
  return [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]


def test_every_form_in_order(world):
  done = world.run()
  rows = [json.loads(x) for x in world.output.read_text().splitlines()]
  assert [row['id'] for row in rows] == ['0', 'a/b', '12', '3', '4']
  assert all(tuple(row) == output_file.KEYS for row in rows)
  assert [type(row['text']) for row in rows] == [str, list, str, str, list]
  assert [len(rows[1][k]) for k in output_file.KEYS[1:]] == [3] * 4
  assert (
    rows[0]['finish_reason'] == 'stop'
    and rows[0]['metrics'] == answering.SUMMARY
  )
  (plain,) = answering.ask([(list(b'Hello'), 0)])
  assert rows[0]['text'] == plain.text
  assert rows[0]['tokens'] == list(plain.tokens)
  assert rows[2]['tokens'] == list(answering.ask([([5, 6, 7], 12)])[0].tokens)
  assert (done['lines'], done['written'], done['skipped']) == (5, 5, 0)
  # Eight answers: counts are added, ratios are of the sums.
  assert done['tokens'] == 32 and done['metrics']['target_calls'] == 16
  assert done['metrics']['block_efficiency'] == 2
  assert done['metrics']['acceptance_per_position'] == [1 / 2, 1 / 2]


def test_one_turn_is_answered_in_the_form_it_was_asked(tmp_path):
  world = answering.World(tmp_path, [{'prompt': 'x'}, {'turns': ['x']}])
  world.run()
  rows = [json.loads(x) for x in world.output.read_text().splitlines()]
  for key in output_file.KEYS[1:]:
    assert not isinstance(rows[0][key], list) or key == 'tokens'
    assert len(rows[1][key]) == 1
  assert rows[1]['metrics'] == [rows[0]['metrics']]


def test_turns_follow_the_answers_before(world):
  world.run()
  row = json.loads(world.output.read_text().splitlines()[1])
  first, second = row['text'][:2]
  # By hand: no eos id between, a newline before each turn.
  raw = f'one{first}\ntwo{second}\nthree'
  number = answers.request_number('a/b', 2)
  third = requests.Item(list(raw.encode()), number)
  assert [third] in world.jobs


def test_chat_template_and_raw(world):
  world.target = answering.target(template=answering.TEMPLATE)
  world.run()
  rows = [json.loads(x) for x in world.output.read_text().splitlines()]
  asked = [(bytes(t), n) for jobs in world.jobs for t, n, *_ in jobs]
  assert (b'<u>Hello<a>', 0) in asked
  assert (bytes([5, 6, 7]), 12) in asked  # Ids are passed through.
  answer = rows[4]['text'][0]
  text = f'<u>first<a>{answer}<u>second<a>'.encode()
  assert (text, answers.request_number('4', 1)) in asked


def test_request_numbers():
  number = answers.request_number
  assert number('12', 0) == 12 and number('x', 0) == prompts.request_number('x')
  numbers = [number(i, t) for i in ('0', '12', 'x') for t in range(4)]
  assert len(set(numbers)) == 12
  # No first turn has a later turn's number, and uint32 holds both.
  assert all(2**31 <= number(i, t) < 2**32 for i in ('0', 'x') for t in (1, 2))
  assert number('0', 1) == 2**31 + prompts.request_number('0\n1')


@pytest.mark.parametrize('rows', [1, 3, 5])
def test_batch_size_changes_nothing(world, tmp_path_factory, rows):
  world.run()
  other = answering.World(tmp_path_factory.mktemp('other'))
  other.rows = rows
  other.run()
  assert other.output.read_bytes() == world.output.read_bytes()


# Inside line 1, at its end, inside line 2 of the batch, and in the last line.
@pytest.mark.parametrize(
  'lines, extra', [(0, 9), (1, 0), (1, 1), (3, 5), (4, 9)]
)
@pytest.mark.parametrize('rows', [2, 3])
def test_goes_on_where_it_stopped(world, lines, extra, rows):
  world.run()
  whole = world.files()
  kept = whole['out.jsonl'].split(b'\n')
  start = b''.join(x + b'\n' for x in kept[:lines]) + kept[lines][:extra]
  world.output.write_bytes(start)
  world.rows, world.jobs = rows, []
  done = world.run()
  assert world.files() == whole
  assert (done['skipped'], done['written']) == (lines, 5 - lines)
  # The batch that the end was in is done whole, those before it not at all.
  first = sum(len(jobs) for jobs in world.jobs if jobs[0].number < 2**31)
  assert first == 5 - lines // rows * rows


def test_complete_is_nothing_to_do(world):
  world.run()
  before, stamp = world.files(), world.output.stat().st_mtime_ns
  world.jobs = []
  done = world.run()
  assert done['written'] == 0 and done['skipped'] == 5 and not world.jobs
  assert world.files() == before
  assert world.output.stat().st_mtime_ns == stamp
  assert 'nothing to do' in answers.sentence(done)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_after_the_batch(world, number):
  before = handlers()

  def ask_and_stop(jobs):
    if len(world.jobs) == 4:  # The second batch, after the first one's turns.
      os.kill(os.getpid(), number)
    return answering.ask(jobs)

  world.ask = ask_and_stop
  with answers.interrupts() as caught:
    done = world.run(stopped=lambda: caught)
  assert caught == [number.name] and (done['lines'], done['prompts']) == (4, 5)
  assert f'stopped by {number.name} at line 4' in answers.sentence(
    done, *caught
  )
  assert world.output.read_bytes().count(b'\n') == 4
  assert handlers() == before
  world.ask = answering.ask
  assert world.run()['skipped'] == 4


def test_handlers_are_put_back():
  before = handlers()
  with answers.interrupts() as caught:
    assert signal.getsignal(signal.SIGTERM) not in before
  assert caught == []
  assert handlers() == before


def test_a_crash_keeps_the_lines_before(world):
  def crash(jobs):
    if len(world.jobs) == 4:
      raise MemoryError
    return answering.ask(jobs)

  world.ask = crash
  with pytest.raises(MemoryError):
    world.run()
  assert world.output.read_bytes().count(b'\n') == 2
  world.ask = answering.ask
  assert world.run()['skipped'] == 2


@pytest.mark.parametrize(
  'row, expected',
  [
    ({'tokens': [1, 258]}, "in.jsonl:2: prompt 'x': token id 258 is outside"),
    (
      {'prompt': 'a' * 128},
      "in.jsonl:2: prompt 'x': the prompt has 128 tokens",
    ),
    ({'prompt': 'a' * 121}, 'lower it to 7'),
    ({'turns': ['a' * 60, 'b' * 60]}, '2 turns, with max_new_tokens=8'),
  ],
)
def test_prompts_that_do_not_fit(tmp_path, row, expected):
  world = answering.World(
    tmp_path, [{'prompt': 'a'}, {'id': 'x'} | row, {'prompt': 'b'}]
  )
  assert expected in world.refused()
  assert [p.name for p in tmp_path.iterdir()] == ['in.jsonl']


def test_turns_that_just_fit(tmp_path):
  # 55 + 8, a newline, 56 + 8 are 128, the whole context.
  world = answering.World(tmp_path, [{'turns': ['a' * 55, 'b' * 56]}])
  world.run()
  world = answering.World(tmp_path, [{'turns': ['a' * 55, 'b' * 57]}])
  world.output = tmp_path / 'other.jsonl'
  assert 'need 129 tokens and the context holds 128' in world.refused()


def test_no_room_for_a_later_turn(tmp_path):
  # An answer whose text takes more tokens than it had: found when it is there.
  world = answering.World(tmp_path, [{'turns': ['a', 'b']}, {'prompt': 'c'}])
  world.target = answering.target(template=answering.TEMPLATE)
  world.ask = lambda jobs: [
    answers.Answer('\ufffd' * 50, [200], 'length', answering.SUMMARY)
    for _ in jobs
  ]
  world.run()
  rows = [json.loads(x) for x in world.output.read_text().splitlines()]
  assert rows[0]['finish_reason'] == ['length', 'context']
  assert rows[0]['tokens'][1] == [] and rows[0]['metrics'][1] is None
  assert rows[1]['finish_reason'] == 'length'


@pytest.mark.parametrize(
  'batch, prompts_, data, rows', [(8, 3, 1, 3), (2, 5, 1, 2), (3, 9, 2, 4)]
)
def test_rows(batch, prompts_, data, rows):
  assert answers.rows(batch, prompts_, data) == rows


@pytest.mark.parametrize(
  'methods, gammas, expected',
  [
    (('lookup', 'lm'), (2, 4), (('lookup',), (2,))),
    ((), (2,), ((), (0,))),
    (('lm',), (0, 3), ((), (0,))),
    (('lm',), (), ((), (0,))),
  ],
)
def test_one_arm(methods, gammas, expected):
  c = pair.get_config('tiny')
  c.decode.methods, c.decode.gammas = methods, gammas
  d = answers.one_arm(settings.settings(c)).decode
  assert (d.methods, d.gammas) == expected
