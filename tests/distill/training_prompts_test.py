"""Prompts: generated questions, those of a user, rows of a text."""

import dataclasses
import json
import logging
import re

import pytest

from configs import distill
from specdec_jax import build, requests
from specdec_jax.bench import prompts as bench_prompts
from specdec_jax.distill import sections, training_prompts
from specdec_jax.io import tokenizer as tokenizer_lib


def data(**changes) -> sections.Data:
  few = dict(prompts=8, held_out=2, length=64, prompt_tokens=24, batch=64)
  section = distill.get_config('tiny').data.to_dict()
  return sections.Data(**section | few | changes)


def made(s, target) -> list[list[int]]:
  """All prompts, the held-out ones first."""
  found = training_prompts.make(s, target)
  assert found.texts is None
  assert (len(found.kept), len(found.held_out)) == (s.prompts, s.held_out)
  return [x.tokens for x in found.held_out + found.kept]


def test_generated_questions():
  asked = training_prompts.generated(3000, 0)
  assert training_prompts.generated(50, 0) == asked[:50]
  assert training_prompts.generated(50, 1) != asked[:50]
  assert len(set(asked)) == 3000
  for question in asked:
    assert not re.search(r'[{}]', question.replace('"', '')), question
    assert question[0] == question[0].upper() and '  ' not in question
  for start in ('Explain', 'Write a short story', 'Write a Python function'):
    assert any(q.startswith(start) for q in asked), start
  code, maths = (
    training_prompts.generated(99, 0, x) for x in ('code', 'maths')
  )
  assert len(code) == len(maths) == 99 and not set(code) & set(maths)
  assert all(re.search('function|program|class|comments', x) for x in code)
  assert all(re.search('[0-9]', x) for x in maths)
  # None that the benchmark measures with.
  assert not {p.turns[0] for p in bench_prompts.builtin()} & set(asked)


def test_there_may_be_fewer_questions(monkeypatch):
  forms = training_prompts._forms() | {
    'kinds': [dict(share=1, forms='Why {a}?')]
  }
  monkeypatch.setattr(training_prompts, '_forms', lambda: forms)
  assert len(training_prompts.generated(90, 0)) == 38


@pytest.mark.parametrize('field', ['text', 'messages', 'chat'])
def test_chats_are_prompts_up_to_their_last_question(tmp_path, field):
  """With their roles; what was answered then is not the teacher's."""
  target = build.load('random:tiny')
  say = lambda role, text: dict(role=role, content=text)
  answer = say('assistant', 'so')
  asked = [
    [say('system', 'be brief'), say('user', 'a')],
    [say('user', 'a')],
    [say('user', 'a'), answer, say('user', 'b')],
    [say('system', 'a')],
    [say('user', 'long ' * 80)],
  ]
  rows = [[*asked[0], answer], asked[1], [*asked[2], answer, answer]]
  rows += [[*asked[1], answer], [answer], *asked[3:]]
  path = tmp_path / 'a.jsonl'
  key = 'messages' if field == 'text' else field
  rows.insert(1, [])  # is passed over
  path.write_text('\n'.join(json.dumps({key: x, 'id': 3}) for x in rows))
  s = data(source=str(path), field=field, chat=True, prompts=2, held_out=1)
  found = made(s, target)
  want = [target.tokenizer.encode_chat(x) for x in asked[:3]]
  assert sorted(found) == sorted(want)
  less = dataclasses.replace(s, prompts=3)
  with pytest.raises(ValueError, match='has 3 questions .* of 4'):
    made(less, target)
  # They are no text to train on.
  with pytest.raises(ValueError, match='a.jsonl:1: no text .*chat=True'):
    made(dataclasses.replace(s, chat=False), target)
  with pytest.raises(ValueError, match='an encoder reads a text, not messag'):
    made(s, build.load('random:t5_tiny'))
  path.write_text(json.dumps({key: [3, say('user', 'x')]}))
  with pytest.raises(ValueError, match='message 3: must be a dict'):
    made(s, target)


def test_questions_of_a_user_go_through_the_chat_template(tmp_path, caplog):
  asked = [f'what is {i}?' for i in range(12)] + ['why ' * 200]
  path = tmp_path / 'mine.jsonl'
  path.write_text('\n'.join(json.dumps({'prompt': x}) for x in asked))
  s = data(source=str(path), field='prompt', chat=True, prompts=10)
  target = build.load('random:tiny')
  prompts = made(s, target)
  encode = lambda x: requests.encode(target.tokenizer, x, chat=True)
  assert sorted(prompts) == sorted(map(encode, asked[:12]))
  with caplog.at_level(logging.WARNING):
    assert made(s, target) == prompts
  left_out = '1 questions are left out: longer than data.length=64, or empty'
  assert any(left_out in x.message for x in caplog.records)
  with pytest.raises(ValueError, match='has 12 questions shorter .* of 13'):
    training_prompts.make(dataclasses.replace(s, prompts=11), target)


def test_a_paragraph_without_a_token_is_left_out(tmp_path, monkeypatch):
  path = tmp_path / 'mine.txt'
  path.write_text('one two\n\n...\n\nthree four\n\nfive six')
  target = build.load('random:t5_tiny')
  encode = tokenizer_lib.Tokenizer.encode
  monkeypatch.setattr(
    tokenizer_lib.Tokenizer,
    'encode',
    lambda self, text: [] if text == '...' else encode(self, text),
  )
  s = data(source=str(path), chat=False, prompts=2, held_out=1)
  found = training_prompts.make(s, target)
  assert len({tuple(x.source) for x in found.kept + found.held_out}) == 3
  with pytest.raises(ValueError, match='has 3 questions .* of 4'):
    training_prompts.make(dataclasses.replace(s, prompts=3), target)


def test_a_text_and_too_short_a_text(tmp_path):
  path, target = tmp_path / 'short.txt', build.load('random:tiny')
  path.write_text('a few words\n' * 20)
  s = data(source=str(path), length=20, prompt_tokens=8, completions='text')
  prompts = training_prompts.make(s, target)
  rows = prompts.texts['tokens'][:, :8].tolist()
  assert rows == [x.tokens for x in prompts.kept] and len(rows) == 8
  assert len(prompts.held_out) == 2
  assert prompts.texts['counted'].tolist() == [[False] * 8 + [True] * 12] * 8
  s = dataclasses.replace(s, length=32)
  with pytest.raises(ValueError, match='prompts=8 and held_out=2: .* rows'):
    training_prompts.make(s, target)
