"""Questions of our own: how many, the same ones, none of a benchmark."""

import re

import pytest

from specdec_jax.bench import prompts
from specdec_jax.distill import questions


def test_the_first_of_more_are_the_same():
  assert questions.make(50, 0) == questions.make(400, 0)[:50]
  assert questions.make(50, 0) != questions.make(50, 1)


def test_they_differ_are_filled_in_and_begin_with_a_capital():
  asked = questions.make(2000, 3)
  assert len(set(asked)) == 2000
  for question in asked:
    assert not re.search(r'[{}]', question.replace('"', '')), question
    assert question[0] == question[0].upper() and '  ' not in question


def test_every_kind_of_question_is_asked():
  asked = questions.make(2000, 0)
  for start in ('Explain', 'Write a short story', 'Write a Python function'):
    assert any(q.startswith(start) for q in asked), start


def test_none_is_a_prompt_that_we_measure_with():
  judged = {p.turns[0] for p in prompts.builtin()}
  assert not judged & set(questions.make(3000, 0))


def test_more_than_there_are_is_refused(monkeypatch):
  monkeypatch.setattr(questions, 'KINDS', (('What is {a}?', 1),))
  with pytest.raises(ValueError, match='count=99: only 38 questions'):
    questions.make(99, 0)
