"""Files of prompts to files of answers, with an engine that is a function."""

import json
import types

import numpy as np
import pytest

from configs import pair
from specdec_jax import api, completion, settings
from specdec_jax import types as decode_types
from specdec_jax.bench import prompts
from specdec_jax.drafters import method
from specdec_jax.io import tokenizer
from specdec_jax.serve import batch

ROWS = (
  {'prompt': 'Hello'},
  {'turns': ['one', 'two', 'three'], 'id': 'a/b'},
  {'tokens': [5, 6, 7], 'id': 12},
  {'prompt': 'more'},
  {'turns': ['first', 'second']},
  {'messages': [{'role': 'system', 'content': 'S'}], 'id': 'talk'},
)
METRICS = {'emitted_tokens': 4, 'target_calls': 2}


def answer(text, tokens, why):
  return completion.Completion(
    text, tokens, [], finish_reason=why, metrics=METRICS
  )


def reply(items, each):
  """Each answer is a function of its item alone, and ends with eos."""
  out = []
  for tokens, number, *_ in items:
    new = [97 + (sum(tokens) + number + i) % 26 for i in range(3)]
    text = bytes(new).decode()
    out.append(answer(text, [*new, 256], 'stop'))
  return out


class World:
  """One run's inputs, in a folder; fields may be changed between runs."""

  def __init__(self, folder):
    self.input, self.output = folder / 'in.jsonl', folder / 'out.jsonl'
    self.prompts(ROWS)
    self.config = pair.get_config('tiny')
    self.target = types.SimpleNamespace(
      digest='d0',
      draft_ids=(),
      ids=258,
      context=128,
      label='fake',
      start=None,
      tokenizer=tokenizer.from_bytes(512, 'bytes'),
    )
    self.target.params = {'w': np.zeros(2)}
    self.engine = types.SimpleNamespace(
      target=self.target,
      draft=None,
      parts=(),
      weights=decode_types.Weights(self.target.params, self.target.params),
    )
    self.wanted = completion.Settings(max_new_tokens=8)
    self.ask, self.chat, self.rows, self.asked = reply, True, 2, []
    self.each = {}  # what was asked of the items, by number
    self.order = lambda found: reversed([*found])  # in which answers end

  def prompts(self, rows):
    self.input.write_text('\n'.join(map(json.dumps, rows)))

  def run(self):
    digest = batch.digest(self.config, self.engine)
    found = prompts.read(self.input, completion.EACH)
    how = self.chat, self.wanted, self.rows, digest
    task = batch.Run(found, self.engine, *how)
    batch.check(task, str(self.input))
    return batch.write(self.output, task, batch.begun(self.output, task))

  def answers(self, engine, asked, rows):
    items, each = zip(*asked, strict=True)
    assert rows == self.rows
    self.asked += items
    self.each |= zip([x.number for x in items], each, strict=True)
    return self.order(enumerate(self.ask(items, each)))

  def lines(self):
    """By id, as they stand in the file."""
    rows = map(json.loads, self.output.read_text().splitlines())
    return {row['id']: row for row in rows}


@pytest.fixture
def world(tmp_path, monkeypatch):
  world = World(tmp_path)
  monkeypatch.setattr(api, 'answers', world.answers)
  return world


def test_every_form_as_it_ends(world):
  done = world.run()
  rows = world.lines()
  # Conversations of several turns last longer.
  assert [*rows] == ['talk', '3', '12', '0', '4', 'a/b']
  listed = [x for x, row in rows.items() if type(row['text']) is list]
  assert listed == ['4', 'a/b']
  names = ('text', 'tokens', 'finish_reason', 'metrics')
  assert [len(rows['a/b'][name]) for name in names] == [3] * 4
  (plain,) = reply([([5, 6, 7], 12)], ())
  row = rows['12']
  assert row['text'] == plain.text and row['metrics'] == METRICS
  assert row['tokens'] == list(plain.tokens)
  titles = '0', 'a/b', 'a/b, turn 2', 'a/b, turn 3', '12', '3', '4', '4, turn 2'
  assert {*done} == {*titles, 'talk'}


def test_turns_follow_the_answers_before(world):
  """A chat without a template reads as it does in bench.py and the API."""
  world.run()
  asked = {item.number: bytes(item.tokens).decode() for item in world.asked}
  assert asked[0] == 'User: Hello\nAssistant:'
  first, second = world.lines()['a/b']['text'][:2]
  third = f'User: one\nAssistant: {first}\nUser: two\nAssistant: {second}\n'
  number = batch.request_number('a/b', 2)
  assert asked[number] == f'{third}User: three\nAssistant:'
  assert asked[12] == '\x05\x06\x07'  # Ids are passed through.
  talk = batch.request_number('talk', 0)
  assert asked[talk] == 'System: S\nAssistant:'


def test_an_encoder_reads_the_prompt_itself(world):
  world.target.start = 0
  world.prompts([{'prompt': 'Hello', 'id': 3}])
  world.run()
  (item,) = world.asked
  assert item.tokens == (0,) and item.source == [*b'Hello', 256]


def test_a_line_may_have_settings_of_its_own(world):
  own = dict(
    max_new_tokens=3, temperature=0.5, seed=9, stop=['x'], stop_ids=[1]
  )
  own |= dict(top_k=4, top_p=0.9, prediction='ab')
  assert own.keys() == {*completion.EACH}
  world.prompts([{'prompt': 'Hello'}, {'turns': ['one', 'two'], **own}])
  world.run()
  numbers = [batch.request_number('1', turn) for turn in (0, 1)]
  assert [world.each[x] for x in numbers] == [completion.Settings(**own)] * 2
  assert world.each[0] == world.wanted
  guesses = {x.number: x.prediction for x in world.asked}
  assert guesses[0] == () and guesses[numbers[1]] == [*b'ab']
  # An answer that was asked for otherwise is no answer to this.
  for change in (dict(seed=8), dict(stop=['y'])):
    world.prompts(
      [{'prompt': 'Hello'}, {'turns': ['one', 'two'], **own | change}]
    )
    with pytest.raises(ValueError, match='was answered with another prompt'):
      world.run()


def test_request_numbers():
  number = batch.request_number
  assert number('12', 0) == 12 and number('x', 0) == prompts.request_number('x')
  numbers = [number(i, t) for i in ('0', '12', 'x') for t in range(4)]
  assert len(set(numbers)) == 12
  # No first turn has a later turn's number, and uint32 holds both.
  assert all(2**31 <= number(i, t) < 2**32 for i in ('0', 'x') for t in (1, 2))


# Inside line 1, at its end, inside line 2, and in the last line.
@pytest.mark.parametrize(
  'lines, extra', [(0, 9), (1, 0), (1, 1), (3, 5), (5, 9), (6, 0)]
)
@pytest.mark.parametrize('together', [1, 32])
def test_goes_on_where_it_stopped(world, lines, extra, together, monkeypatch):
  world.run()
  before = world.output.read_bytes()
  kept = before.split(b'\n')
  start = b''.join(x + b'\n' for x in kept[:lines]) + kept[lines][:extra]
  world.output.write_bytes(start)
  world.asked = []
  monkeypatch.setattr(batch, '_TOGETHER', together)
  world.run()
  after = world.output.read_bytes()
  assert sorted(after.splitlines()) == sorted(before.splitlines())
  # Nothing that is there is asked again.
  assert sum(item.number < 2**31 for item in world.asked) == 6 - lines


def test_prompts_may_be_added_and_what_changes_no_answer_may_change(world):
  world.prompts(ROWS[:3])
  world.run()
  world.prompts(ROWS)
  world.config.bench.batch_size, world.config.mesh.data = 7, 2
  assert {*world.run()} == {'3', '4', '4, turn 2', 'talk'}


def drafted(x):
  """Weights of a drafter that is no model: counts, or heads."""
  return decode_types.Weights({}, {'counts': np.full(3, x)})


def test_the_drafters_own_weights_are_in_the_digest(world):
  """Not those that it shares with the target, nor the costs of adaptive."""
  digest = lambda: batch.digest(world.config, world.engine)
  plain = digest()  # the target's own weights draft
  world.engine.weights = decode_types.Weights(world.target.params)
  assert digest() == plain
  world.engine.weights = drafted(1)
  one = digest()
  world.engine.weights = drafted(2)
  assert len({plain, one, digest()}) == 3
  world.engine.parts = [method.Method(None, {'counts': np.full(3, 1)})]
  want = digest()
  world.engine.weights = drafted(3)
  assert digest() == want != plain


@pytest.mark.parametrize(
  'change',
  [
    lambda w: w.prompts([{'turns': ['Hello']}, *ROWS[1:]]),  # another form
    lambda w: w.prompts(ROWS[1:]),
    lambda w: w.config.sampling.update(temperature=0.5),
    lambda w: w.config.bench.update(chat=not w.config.bench.chat),
    lambda w: setattr(w.target, 'digest', 'd1'),
    lambda w: setattr(w.engine, 'weights', drafted(1)),
    lambda w: setattr(w.engine, 'parts', [method.Method(None, np.ones(3))]),
    lambda w: w.output.write_text('{"text": "mine"}\n'),
    lambda w: w.output.write_text('mine, not JSON, without an end'),
  ],
)
def test_what_changes_answers_is_refused(world, change):
  world.run()
  change(world)
  before = world.output.read_bytes()
  with pytest.raises(ValueError, match='out.jsonl:.* or delete out.jsonl'):
    world.run()
  assert world.output.read_bytes() == before


def test_logits_that_are_not_finite_end_one_row_only(world):
  """Once the batch was lost, and a rerun stopped there again."""

  def broken(items, each):
    bad = answer('', [], 'non-finite')
    asked = batch.request_number('a/b', 0)
    return [
      bad if item.number == asked else x
      for item, x in zip(items, reply(items, each), strict=True)
    ]

  world.ask = broken
  done = world.run()
  rows = world.lines()
  assert rows['a/b']['finish_reason'] == ['non-finite'] * 3
  assert [rows[x]['finish_reason'] for x in ('0', '3')] == ['stop'] * 2
  assert [x.finish_reason for x in done.values()].count('non-finite') == 3
  assert not world.run()


def test_no_room_for_a_later_turn(world):
  world.prompts([{'turns': ['a', 'b' * 90]}, {'prompt': 'c'}])
  world.run()
  rows = world.lines()
  assert rows['0']['finish_reason'] == ['stop', 'context']
  assert rows['0']['tokens'][1] == [] and rows['0']['metrics'][1] == {}
  assert rows['1']['finish_reason'] == 'stop'


def test_a_later_turn_that_just_fits_is_answered(world):
  world.prompts([{'turns': ['a', 'b' * 30]}])
  world.run()
  read = max(len(x.tokens) for x in world.asked)
  for room, reasons in ((0, ['stop', 'stop']), (-1, ['stop', 'context'])):
    world.target.context = read + world.wanted.max_new_tokens + room
    world.output.unlink()
    world.run()
    assert world.lines()['0']['finish_reason'] == reasons


def test_an_answer_is_in_the_file_as_soon_as_it_ends(world):
  """Whoever stops the run has the answers that had ended."""

  def interrupted(items, each):
    yield from reply(items, each)[:2]
    assert {*world.lines()} == {'0'}  # 'a/b' has more turns
    raise KeyboardInterrupt

  world.ask, world.order = interrupted, iter
  with pytest.raises(KeyboardInterrupt):
    world.run()


def test_refusals_before_any_work(world, tmp_path):
  for row, expected in (
    ({'tokens': [1, 258]}, "in.jsonl: prompt 'x': token id 258 is outside"),
    ({'prompt': 'a' * 128}, "in.jsonl: prompt 'x': the prompt has 1"),
    ({'turns': ['a', 'b']}, "'x': later turns need bench.chat=True"),
    ({'prompt': 'a', 'top_p': 2}, "in.jsonl: prompt 'x': top_p=2: must be"),
    (
      {'prompt': 'a', 'stop_ids': [258]},
      "prompt 'x': token id 258 is outside",
    ),
    ({'prompt': 'a', 'max_new_tokens': 999}, "'x': max_new_tokens=999: no ro"),
    ({'prompt': 'a', 'min_p': 0.1}, 'in.jsonl:2: unknown key "min_p"'),
  ):
    world.chat = 'turns' not in row
    world.prompts([{'prompt': 'a'}, {'id': 'x'} | row])
    with pytest.raises(ValueError, match=expected):
      world.run()
  for path, expected in (
    (tmp_path, 'cannot be written'),
    (tmp_path / 'no' / 'out.jsonl', 'cannot be written'),
    (world.input, 'is the prompts'),
    ('', 'want --prompts=IN.jsonl and --output=OUT'),
  ):
    with pytest.raises(ValueError, match=expected):
      batch.check_output(str(path), str(world.input))
  assert [p.name for p in tmp_path.iterdir()] == ['in.jsonl']


def test_one_method():
  for methods, gammas, expected in (
    (('lookup', 'lm'), (2, 4), (('lookup',), (2,))),
    ((), (2,), ((), (0,))),
    (('lm',), (0, 3), ((), (0,))),
    (('lm',), (), ((), (0,))),
  ):
    c = pair.get_config('tiny')
    c.decode.methods, c.decode.gammas = methods, gammas
    d = settings.settings(batch.one_method(c)).decode
    assert (d.methods, d.gammas) == expected
