"""Prompts: generated questions, those of a user, those of a teacher."""

import dataclasses
import json
import logging
import re
import types

import numpy as np
import pytest
import tokenizers

from configs import distill
from specdec_jax import build, requests
from specdec_jax.bench import prompts as bench_prompts
from specdec_jax.distill import prompts as prompts_lib
from specdec_jax.distill import settings, teacher
from specdec_jax.io import tokenizer as tokenizer_lib

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')
TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


def data(**changes) -> settings.Data:
  few = dict(prompts=8, held_out=2, length=64, prompt_tokens=24, batch=64)
  section = distill.get_config('tiny').data.to_dict()
  return settings.Data(**section | few | changes)


def made(s, target) -> list[list[int]]:
  """All prompts, the held-out ones first."""
  found = prompts_lib.make(s, target)
  assert found.texts is None
  assert (len(found.kept), len(found.held_out)) == (s.prompts, s.held_out)
  return [x.tokens for x in found.held_out + found.kept]


def asker(template, **options):
  target = build.load('random:tiny', **options)
  own = dataclasses.replace(target.tokenizer, chat_template=template)
  return dataclasses.replace(target, tokenizer=own)


def test_generated_questions():
  asked = prompts_lib.generated(3000, 0)
  assert prompts_lib.generated(50, 0) == asked[:50]
  assert prompts_lib.generated(50, 1) != asked[:50]
  assert len(set(asked)) == 3000
  for question in asked:
    assert not re.search(r'[{}]', question.replace('"', '')), question
    assert question[0] == question[0].upper() and '  ' not in question
  for start in ('Explain', 'Write a short story', 'Write a Python function'):
    assert any(q.startswith(start) for q in asked), start
  code, maths = (prompts_lib.generated(99, 0, x) for x in ('code', 'maths'))
  assert len(code) == len(maths) == 99 and not set(code) & set(maths)
  assert all(re.search('function|program|class|comments', x) for x in code)
  assert all(re.search('[0-9]', x) for x in maths)
  # None that the benchmark measures with.
  assert not {p.turns[0] for p in bench_prompts.builtin()} & set(asked)


def test_more_questions_than_there_are_are_refused(monkeypatch):
  forms = prompts_lib._forms() | {'kinds': [dict(share=1, forms='Why {a}?')]}
  monkeypatch.setattr(prompts_lib, '_forms', lambda: forms)
  with pytest.raises(ValueError, match='questions has 38 questions shorter'):
    prompts_lib.make(data(prompts=90), build.load('random:tiny'))


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
    prompts_lib.make(dataclasses.replace(s, prompts=11), target)


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
  found = prompts_lib.make(s, target)
  assert len({tuple(x.source) for x in found.kept + found.held_out}) == 3
  with pytest.raises(ValueError, match='has 3 questions .* of 4'):
    prompts_lib.make(dataclasses.replace(s, prompts=3), target)


@pytest.mark.slow
def test_a_teacher_asks_its_own_questions(tmp_path):
  s = data(source='magpie', folder=str(tmp_path / 'one'))
  target = asker(TEMPLATE)
  prompts = made(s, target)
  words = [target.tokenizer.decode(x) for x in prompts]
  assert len(set(words)) == 10
  # Each ended by itself, after at most 24 ids, in the place of the user.
  assert all(x[0] == '<' and x[-1] == '>' and x[1:-1].strip() for x in words)
  tokens = np.load(tmp_path / 'one/questions/0/tokens.npy')
  spans = np.load(tmp_path / 'one/questions/0/spans.npy')
  assert (spans[:, 0] == 1).all() and spans.max() <= 25
  ended = tokens[np.arange(len(tokens)), spans[:, 1] - 1]
  ended = np.isin(ended, target.tokenizer.eos_ids)
  assert 10 <= ended.sum() < len(tokens)
  # Another dtype of the teacher asks other questions.
  with pytest.raises(ValueError, match='holds answers with other dtype;'):
    prompts_lib.make(s, asker(TEMPLATE, dtype='bfloat16'))
  # The batch changes none, more are the same and then more, a seed all.
  again = dataclasses.replace(s, folder=str(tmp_path / 'two'), batch=256)
  assert made(again, target) == prompts
  more = dataclasses.replace(s, prompts=int(ended.sum()) + 20)
  longer = made(more, target)
  assert longer[:10] == prompts
  other = dataclasses.replace(again, folder=str(tmp_path / 'three'), seed=1)
  assert not set(map(tuple, made(other, target))) & set(map(tuple, longer))


def test_a_conversation_goes_on_after_answers_that_ended(tmp_path):
  target, folder = asker(TEMPLATE), tmp_path / 'answers'
  stop, first = target.tokenizer.eos_ids[0], target.tokenizer.encode('<hello>')
  start, n = len(first), 12
  tokens = np.full((n, 64), 7, np.int32)
  tokens[:, :start] = first
  spans = np.full((n, 2), [start, start + 3])
  tokens[:, start + 2] = stop
  tokens[1, start + 2] = 8  # not ended
  spans[2] = start, start  # left out
  spans[n - 1] = 0  # not answered yet
  folder.mkdir()
  np.save(folder / 'tokens.npy', tokens)
  np.save(folder / 'spans.npy', spans)
  facts = folder / teacher.FACTS
  facts.write_text(json.dumps({'teacher': target.digest}))
  s = data(source=str(folder), prompts=7, length=192)
  asked = prompts_lib._forms()['lists']['next_turns']
  decode = target.tokenizer.decode
  answer = decode([*first, 7, 7])
  for prompt in made(s, target):
    words = decode(prompt)
    assert words.startswith(answer) and words.count('<') == 2
    assert words[len(answer) :].strip('<>') in asked
  with pytest.raises(ValueError, match='has 9 questions shorter'):
    prompts_lib.make(dataclasses.replace(s, prompts=8), target)
  text = dataclasses.replace(s, completions='text')
  with pytest.raises(ValueError, match='questions come without answers'):
    prompts_lib.answers(text, target, prompts_lib.make(s, target), ())
  facts.write_text(json.dumps({'teacher': 'another'}))
  with pytest.raises(ValueError, match='answers of another teacher than'):
    prompts_lib.make(s, target)


def chatting(pieces: bool, template: str, **changes):
  """A tokenizer that puts <s> before texts; pieces: as of Llama 2."""
  d, norm = tokenizers.decoders, tokenizers.normalizers
  letters = [chr(i) for i in range(32, 127)] + ['▁', '\n']
  vocab = {x: i for i, x in enumerate([*letters, '▁a', '▁n'])}
  merges = [('▁', 'a'), ('▁', 'n')]
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  inner.decoder = d.Fuse()
  if pieces:
    inner.normalizer = norm.Sequence(
      [norm.Prepend('▁'), norm.Replace(' ', '▁')]
    )
    inner.decoder = d.Sequence([d.Replace('▁', ' '), d.Fuse()])
  inner.add_special_tokens(['<s>', '<e>', '<h>'])
  bos = inner.token_to_id('<s>')
  known = dict(bos_id=bos, add_bos=True, specials=(('bos_token', '<s>'),))
  return tokenizer_lib.Tokenizer(
    'here', inner, chat_template=template, **known | changes
  )


# With and without bos; with a special token, a space, a line around words.
TEMPLATES = (
  '{{ bos_token }}{% for m in messages %}<h>{{ m.role }}<h>{{ m.content }}<e>'
  '{% endfor %}{% if add_generation_prompt %}<h>assistant<h>{% endif %}',
  '{% for m in messages %}<h>{{ m.content }} <e>\n{% endfor %}',
  '{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}\na:',
)


@pytest.mark.parametrize('gguf', [False, True])
@pytest.mark.parametrize('pieces', [False, True])
@pytest.mark.parametrize('template', TEMPLATES)
def test_a_turn_that_goes_on_is_encoded_with_what_is_before(
  template, pieces, gguf
):
  """Joined, the parts are the ids of the whole conversation."""
  t = chatting(pieces, template, chat_bos=gguf)
  target = types.SimpleNamespace(tokenizer=t, label='here')
  turns = [
    dict(role='user', content='the words of a user'),
    dict(role='assistant', content='an answer'),
    dict(role='user', content='next?'),
  ]
  text, whole = t.chat(turns), t.encode_chat(turns)
  before, after = prompts_lib._template(
    types.SimpleNamespace(source='x'), target, 'next?'
  )
  answered = t.split_chat(text, text.index('an answer') + len('an answer'))[0]
  assert [*answered, *after] == whole
  assert whole[: len(before)] == before
  assert whole.count(t.bos_id) <= 1
  assert t.bos_id not in after
  # The opening ends before the user's words, or the space that begins them.
  opened = t.decode(whole[len(before) :], special=True)
  assert opened.lstrip().startswith('the words of a user')


@pytest.mark.parametrize(
  ('template', 'changes', 'why'),
  [
    (None, {}, 'tiny .random weights. has no chat template'),
    ('always the same', {}, 'has no chat template with a place'),
    (TEMPLATE, dict(prompt_tokens=63), 'must be above prompt_tokens=63 and 1'),
    (TEMPLATE, dict(prompt_tokens=1), 'only 0 of 10 questions; the last 256'),
  ],
)
def test_a_teacher_that_cannot_ask(template, changes, why, tmp_path):
  s = data(source='magpie', folder=str(tmp_path), **changes)
  with pytest.raises(ValueError, match=why):
    prompts_lib.make(s, asker(template))


def test_a_text_and_too_short_a_text(tmp_path):
  path, target = tmp_path / 'short.txt', build.load('random:tiny')
  path.write_text('a few words\n' * 20)
  s = data(source=str(path), length=20, prompt_tokens=8, completions='text')
  prompts = prompts_lib.make(s, target)
  rows = prompts.texts.tokens[:, :8].tolist()
  assert rows == [x.tokens for x in prompts.kept] and len(rows) == 8
  assert len(prompts.held_out) == 2
  answers = prompts_lib.answers(s, target, prompts, ())
  assert answers is prompts.texts
  assert answers.spans.tolist() == [[8, 20]] * 8
  s = dataclasses.replace(s, length=32)
  with pytest.raises(ValueError, match='prompts=8 and held_out=2: .* rows'):
    prompts_lib.make(s, target)
