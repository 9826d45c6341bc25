"""The prompt reader, the built-in prompts, and the numbers of requests."""

import collections
import json
import pathlib

import pytest

from specdec_jax.bench import prompts
from specdec_jax.bench.prompts import Prompt


def write(folder, *rows) -> pathlib.Path:
  """A JSONL file; a row is a line as it is, or an object."""
  path = folder / 'some.jsonl'
  lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
  path.write_text('\n'.join(lines) + '\n', encoding='utf-8', newline='')
  return path


def message(path) -> str:
  with pytest.raises(ValueError) as error:
    prompts.read(path)
  return str(error.value)


CHAT = [
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': 'Hi'},
]


def test_reads_each_form_in_order(tmp_path):
  reference = {'reference': ['5', {'any': 'thing'}]}
  rows = [
    ({'prompt': 'Bonjour à tous'}, Prompt('0', turns=('Bonjour à tous',))),
    (
      {'turns': ['one', 'two'], 'category': 'chat', 'id': 'a/b'},
      Prompt('a/b', 'chat', ('one', 'two')),
    ),
    (
      {'tokens': [0, 7, 2**31 - 1], 'id': 12},
      Prompt('12', tokens=(0, 7, 2**31 - 1)),
    ),
    ({'messages': CHAT}, Prompt('3', messages=tuple(CHAT))),
    (
      {'question_id': 101, 'category': 'x', 'turns': ['Add.']} | reference,
      Prompt('101', 'x', ('Add.',)),
    ),
  ]
  found = prompts.read(str(write(tmp_path, *(row for row, _ in rows))))
  assert found == [want for _, want in rows]
  assert [x.listed for x in found] == ['turns' in row for row, _ in rows]
  given = ['Bonjour à tous', 'one', found[2].tokens, tuple(CHAT), 'Add.']
  assert [prompt.given for prompt in found] == given


@pytest.mark.parametrize(
  'line, expected',
  [
    ('{"prompt": "a"', 'not JSON'),
    ({}, 'has no prompt: give exactly one of prompt, turns, messages, tokens'),
    ({'messages': CHAT[0]}, 'it must be a list of at least one'),
    ({'messages': ['Hi']}, 'messages[0] is "Hi": it must be an object'),
    ({'messages': [*CHAT, {'role': 'user'}]}, 'messages[2].content is null'),
    ({'prompt': 'a', 'turns': ['b']}, 'has prompt and turns: give exactly one'),
    ({'prompt': 'a', 'temperature': 1}, 'unknown key "temperature": allowed'),
    ({'prompt': ''}, 'prompt is empty'),
    ({'prompt': ['a' * 1000]}, 'aaa...: it must be a text'),
    ({'turns': []}, 'turns is []: it must be a list of at least one'),
    ({'turns': ['a', 3]}, 'turns[1] is 3: it must be a text'),
    ({'tokens': [3, -1]}, 'tokens[1] is -1: it must be a token id'),
    ({'tokens': [True]}, 'tokens[0] is true'),
    ({'prompt': 'a', 'id': 1.5}, 'id is 1.5: it must be a text or an integer'),
    ({'prompt': 'a', 'id': 1, 'question_id': 1}, 'has id and question_id'),
    ({'prompt': 'a', 'category': 5}, 'category is 5: it must be a text'),
    ({'prompt': 'a', 'category': '\ud83d'}, '\\ud83d is half of a UTF-16'),
    ({'prompt': 'a', 'id': '\ude00'}, '\\ude00 is half of a UTF-16'),
    ({'turns': ['a', 'b\ud83d']}, '\\ud83d is half of a UTF-16'),
  ],
)
def test_names_the_malformed_line(tmp_path, line, expected):
  path = write(tmp_path, {'prompt': 'a'}, {'tokens': [1]}, line, {'turns': 'b'})
  text = message(path)
  assert text.startswith(f'{path}:3: ')
  assert expected in text
  assert len(text) < len(str(path)) + 250


@pytest.mark.parametrize(
  'rows',
  [
    ({'id': 7}, {}, {'id': '7'}),
    ({'id': 7}, {}, {'question_id': 7}),
    ({'id': '2'}, {}, {}),  # The third line's index.
  ],
)
def test_duplicate_ids(tmp_path, rows):
  path = write(tmp_path, *[{'prompt': 'x'} | row for row in rows])
  text = message(path)
  assert text.startswith(f'{path}:3: id "') and f'by {path}:1:' in text


def test_a_file_without_prompts(tmp_path):
  assert message(write(tmp_path, ' ')).endswith(
    'give at least one line with a prompt'
  )


def test_builtin_has_equal_categories():
  found = prompts.builtin()
  counts = collections.Counter(prompt.category for prompt in found)
  assert len(counts) == 7 and set(counts.values()) == {4}
  assert len({prompt.id for prompt in found}) == len(found)
  numbers = {prompts.request_number(prompt.id) for prompt in found}
  assert len(numbers) == len(found)


def test_the_manual_is_one_set_of_paragraphs():
  found = prompts.manual()
  texts = [prompt.turns[0] for prompt in found]
  assert len(set(texts)) == len(texts) > 1000
  assert all(80 < len(x) <= 1000 and '\n\n' not in x for x in texts)
  assert prompts.chosen('stdlib:prose') == found[:40] != prompts.manual()[1:41]


@pytest.mark.parametrize('count', [1, 3, 9])
def test_the_first_of_each_category_in_their_order(count):
  every = prompts.builtin()
  mixed = every[::2] + every[1::2]
  some = prompts.first_of_each(mixed, count)
  of = lambda found, category: [p for p in found if p.category == category]
  for category in {p.category for p in every}:
    assert of(some, category) == of(mixed, category)[:count]
  assert some == [p for p in mixed if p in some]


@pytest.mark.parametrize('categories', ['abab', 'aabbbcd', 'a', '', [None] * 5])
def test_halves_share_each_category(categories):
  found = [Prompt(str(i), c, ('x',)) for i, c in enumerate(categories)]
  first, second = prompts.halves(found)
  assert not set(first) & set(second)
  assert sorted(first + second, key=lambda p: int(p.id)) == found
  assert len(first) - len(second) in (0, 1)
  count = lambda half: collections.Counter(p.category for p in half)
  for category in categories:
    assert abs(count(first)[category] - count(second)[category]) <= 1
  assert prompts.halves(tuple(found)) == (first, second)


# 'abc' by hand: SHA-256 of it starts with ba7816bf (FIPS 180-2).
@pytest.mark.parametrize(
  'id, number',
  [
    ('0', 0),
    ('81', 81),
    ('2147483647', 2**31 - 1),
    ('2147483648', 486304448),
    ('abc', 0xBA7816BF >> 1),
    ('007', 827303548),
    ('-7', 1404594579),
    ('٣', 220719763),
  ],
)
def test_request_number(id, number):
  assert prompts.request_number(id) == number
