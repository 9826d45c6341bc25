"""Text, streams, chat templates and the same-tokenizer check."""

import dataclasses
import json

import pytest
import tokenizers

from specdec_jax import completion, requests
from specdec_jax.io import tokenizer
from tests.io import stream_test, tiny

MERGES = ('h', 'e'), ('he', 'l')
TEXT = 'hello, wörld 123\n\n  he 日本 🙂 end'


def wrap(inner, **changes):
  return tokenizer.Tokenizer('here', inner, **changes)


@pytest.mark.parametrize('vocab', [256, 257, 258, 512])
def test_byte_fallback_is_bytes(vocab):
  t = tokenizer.from_bytes(vocab, 'x')
  assert t.encode(TEXT) == list(TEXT.encode())
  assert t.decode(t.encode(TEXT)) == TEXT
  assert t.size == (256 if vocab < 258 else 258)
  assert t.eos_ids == (() if vocab < 258 else (256,))
  assert t.decode([104, 105, 400]) == 'hi'  # padding has no text
  with pytest.raises(ValueError, match='256 ids or more, not 255'):
    tokenizer.from_bytes(255, 'x')


def test_bos_is_added_once():
  t = wrap(tiny.byte_tokenizer(), bos_id=258, add_bos=True)
  assert t.encode('hi')[0] == 258
  assert t.encode('<|im_start|>hi') == t.encode('hi')
  assert t.encode('') == [258]
  assert wrap(tiny.byte_tokenizer(), bos_id=258).encode('') == []


def test_check_same_accepts_other_paddings_and_ends():
  a = wrap(tiny.byte_tokenizer(), eos_ids=(259,))
  b = wrap(tiny.byte_tokenizer(), eos_ids=(259, 258), chat_template='x')
  tokenizer.check_same(a, b)
  assert a.fingerprint() == b.fingerprint()


def test_check_same_names_the_first_difference():
  a = wrap(tiny.byte_tokenizer(), eos_ids=(259,))
  b = wrap(tiny.byte_tokenizer(merges=(('h', 'e'), ('l', 'l'))))
  with pytest.raises(ValueError, match="id 257 is 'hel' .* and 'll' for the"):
    tokenizer.check_same(a, b)
  assert a.fingerprint() != b.fingerprint()
  # A vocabulary that is longer, even by one token, is another one.
  longer = wrap(tiny.byte_tokenizer((), merges=(*MERGES, ('l', 'o'))))
  for other in (a, wrap(tiny.byte_tokenizer(())).cut_to(300, 'x')):
    with pytest.raises(ValueError, match="id 258 is .*'lo' for the draft"):
      tokenizer.check_same(other, longer)
    with pytest.raises(ValueError, match="id 258 is 'lo' for the target"):
      tokenizer.check_same(longer, other)


def test_added_tokens_of_a_draft_may_be_others():
  """They are called, or used, as the target has them, or not at all."""
  a = wrap(tiny.byte_tokenizer(('<a>', '<b>')))
  others = ('<a>', '<eos>'), ('<b>', '<a>'), ('<a>', '<b>', '<c>'), ('<a>',)
  for specials in others:
    b = wrap(tiny.byte_tokenizer(specials)).cut_to(260 + len(specials), 'x')
    tokenizer.check_same(a, b)
    assert a.fingerprint() != b.fingerprint()
  # But a draft has no row for an id past its own.
  less = wrap(tiny.byte_tokenizer(('<a>',)))
  for b in (less, less.cut_to(259, 'x')):
    with pytest.raises(ValueError, match="id 259 is '<b>' .* and unused for"):
      tokenizer.check_same(a, b)


def test_what_begins_and_ends_a_text_is_the_targets_alone():
  a = wrap(tiny.byte_tokenizer(), eos_ids=(259,), bos_id=258, add_bos=True)
  for changes in (
    dict(eos_ids=(258,)),
    dict(eos_ids=()),
    dict(add_bos=False),
    dict(bos_id=259),
    dict(bos_id=None, add_bos=False),
  ):
    b = dataclasses.replace(a, **changes)
    tokenizer.check_same(a, b)
    tokenizer.check_same(b, a)
    assert a.fingerprint() != b.fingerprint()


def test_a_sentencepiece_file_gives_sentencepieces_ids():
  t = tokenizer.from_folder(tiny.GOLDEN / 'spiece', 'here')
  texts, wanted = json.loads((tiny.GOLDEN / 'spiece/ids.json').read_text())
  assert [t.encode(text) for text in texts] == wanted
  assert t.decode([*t.encode('the cat  sat'), 1]) == 'the cat sat'
  score = json.loads(t.inner.to_str())['model']['vocab'][3]
  assert score == ['▁', pytest.approx(-2.4412267)]
  # T5's order: the marks of spans come last, the first one at the end.
  assert t.tokens()[:3] == ['<pad>', '</s>', '<unk>'] and t.eos_ids == (1,)
  assert t.tokens()[-100:] == [f'<extra_id_{99 - i}>' for i in range(100)]
  assert t.encode('<extra_id_0>')[-1] == t.size - 1 == len(t.tokens()) - 1


@pytest.mark.parametrize('end', [0, 3, 1000, -2])
def test_a_damaged_sentencepiece_file_is_named(tmp_path, end):
  whole = (tiny.GOLDEN / 'spiece/spiece.model').read_bytes()
  (tmp_path / 'spiece.model').write_bytes(whole[:end])
  with pytest.raises(ValueError, match='spiece.model: not a sentencepiece f'):
    tokenizer.from_folder(tmp_path, 'here')


CHAT = [{'role': 'user', 'content': 'hello'}]


def said(template, *messages):
  """What a template makes of messages, each a dict or (role, content)."""
  t = tokenizer.from_bytes(512, 'x')
  t = dataclasses.replace(t, chat_template=template)
  pair = lambda role, content: dict(role=role, content=content)
  return t.chat([x if isinstance(x, dict) else pair(*x) for x in messages])


MARKED = """{% for m in messages %}
  {% generation %}
    {{ m.content }}
  {% endgeneration %}
{% endfor %}
end"""
LOOP = """{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}
{%- if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"""


@pytest.mark.parametrize(
  'template, wanted',
  [
    (MARKED, '    hi\n    yo\nend'),
    (
      '{%- for m in messages -%}\n {%- generation -%}\n {{ m.content }}\n'
      ' {%- endgeneration -%}\n{%- endfor -%}\n.',
      'hiyo.',
    ),
    # What is set in it ends with it.
    (
      '{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}'
      '{{ x is defined }}',
      '1False',
    ),
    ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
    ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
    ('{{ [1, 2] | tojson(indent=1) }}', '[\n 1,\n 2\n]'),
    ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
    ("{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}", '{"a":[1,2]}'),
    (LOOP, '02'),
    ('{{ tools is none }}{{ documents is none }}', 'TrueTrue'),
    (
      '{{ add_generation_prompt }}{{ enable_thinking is defined }}',
      'TrueFalse',
    ),
    ('{% set n = namespace(i=1) %}{% set n.i = n.i + 1 %}{{ n.i }}', '2'),
    ("{{ strftime_now('%Y') | length }}", '4'),
    ("{{ 'a,b'.split(',')[-1] }}{{ messages[0]['content'] | upper }}", 'bHI'),
  ],
)
def test_templates_render_as_in_transformers(template, wanted):
  """Golden: apply_chat_template of transformers 5.24."""
  # All that is said, behind it: a message without a trace is refused.
  template += '{% for m in messages %}{{ m.content }}{% endfor %}'
  found = said(template, ('user', 'hi'), ('assistant', 'yo'))
  assert found == f'{wanted}hiyo'


def chatting(template, **changes):
  """A tokenizer that puts bos (256) before texts."""
  inner = tiny.byte_tokenizer(('<s>', '<e>'))
  known = dict(bos_id=258, add_bos=True, specials=(('bos_token', '<s>'),))
  return wrap(inner, chat_template=template, **known | changes)


@pytest.mark.parametrize(
  'template, folder, gguf',
  [
    # transformers adds nothing to a rendered chat, llama.cpp the file's bos.
    ('{{ messages[0].content }}', '', '<s>'),
    ('{{ bos_token }}{{ messages[0].content }}', '<s>', '<s>'),
    # Without a template a conversation is a text like others.
    (None, '<s>', '<s>'),
  ],
)
def test_who_puts_bos_before_a_chat(template, folder, gguf):
  for chat_bos, first in ((False, folder), (True, gguf)):
    t = chatting(template, chat_bos=chat_bos)
    text = t.decode(t.encode_chat(CHAT), special=True)
    assert text == first + t.chat(CHAT).removeprefix('<s>')
    assert requests.encode(t, 'hello', chat=True) == t.encode_chat(CHAT)
    # A text begins with bos, whatever the template.
    assert requests.encode(t, 'hello', chat=False)[0] == 258


def test_half_of_a_surrogate_pair_is_one_sentence():
  t = chatting('{{ messages[0].content }}')
  half = 'cut \ud83d here'
  why = r'\\ud83d is half of a UTF-16 surrogate pair, which is no character'
  for door in (
    lambda: t.encode(half),
    lambda: t.encode_chat([dict(role='user', content=half)]),
    lambda: requests.encode(t, half, chat=False),
    lambda: requests.encode(t, half, chat=True),
    lambda: completion.Settings(stop=['fine', half]),
    lambda: completion.Settings(stop=half),
  ):
    with pytest.raises(ValueError, match=why) as error:
      door()
    assert str(error.value).isprintable()


def test_chat_without_a_template():
  assert said(None, *CHAT) == 'User: hello\nAssistant:'


@pytest.mark.parametrize(
  'template, message',
  [
    ("{{ raise_exception('roles must alternate') }}", 'roles must alternate'),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'unsafe'),
    ('{{ messages.append(1) }}', 'unsafe|not safely'),
    ('{{ cycler.__init__.__globals__.os.system("id") }}', 'unsafe'),
    ('{{ "a" + 1 }}', 'chat template'),
    ('{{ 1 / 0 }}', 'division'),
    ('{% for i in range(10000000) %}{% endfor %}', 'Range too big'),
    ('{% if %}', 'chat template'),
    ('{{ nothing.at_all }}', 'undefined'),
  ],
)
def test_templates_are_fenced_in(template, message):
  with pytest.raises(ValueError, match=message):
    said(template, *CHAT)


def folder(tmp_path, settings=None, **more):
  inner = tiny.byte_tokenizer()
  return tiny.tokenizer_of(tmp_path, inner, settings, **more)


def test_odd_settings_of_a_folder_are_passed_over(tmp_path):
  odd = {'chat_template': [3, {'name': 'default', 'template': 4}]}
  t = folder(tmp_path, odd | {'eos_token': []}, config={'eos_token_id': 3})
  assert (t.chat_template, t.eos_ids) == (None, (3, 259))


def test_folder_adds_bos_where_the_post_processor_does(tmp_path):
  """transformers 5.24 drops add_bos_token where there is a tokenizer.json."""
  named = {'bos_token': '<|im_start|>'}
  assert not folder(tmp_path, named).add_bos
  assert not folder(tmp_path, named | {'add_bos_token': True}).add_bos
  inner = tiny.byte_tokenizer()
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|im_start|> $A', special_tokens=[('<|im_start|>', 258)]
  )
  for settings in (named, named | {'add_bos_token': False}, {}):
    t = tiny.tokenizer_of(tmp_path, inner, settings)
    assert t.add_bos and t.bos_id == 258 and t.encode('h')[0] == 258
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|im_end|> <|im_start|> $A',
    special_tokens=[('<|im_start|>', 258), ('<|im_end|>', 259)],
  )
  with pytest.raises(ValueError, match='json: 2 tokens before a text; allowed'):
    tiny.tokenizer_of(tmp_path, inner)


def test_folder_templates(tmp_path):
  several = [
    {'name': 'tool_use', 'template': 'U'},
    {'name': 'default', 'template': 'D'},
  ]
  assert folder(tmp_path, {'chat_template': several}).chat_template == 'D'
  why = 'chat templates tool_use, and none is the "default"; write'
  with pytest.raises(ValueError, match=why):
    folder(tmp_path, {'chat_template': several[:1]})
  (tmp_path / 'chat_template.jinja').write_text('J')
  assert folder(tmp_path, {'chat_template': 'T'}).chat_template == 'J'


@pytest.mark.parametrize('eos', [-1, 260, 10**30])
def test_folder_ends_must_be_tokens(tmp_path, eos):
  with pytest.raises(ValueError, match=f'special id {eos} is no token'):
    folder(tmp_path, generation_config={'eos_token_id': [258, eos]})


def test_folder_without_a_tokenizer(tmp_path):
  with pytest.raises(ValueError, match='no tokenizer.json; of tokenizer.model'):
    tokenizer.from_folder(tmp_path, 'here')
  (tmp_path / 'tokenizer.json').write_text('{"model": 3}')
  with pytest.raises(ValueError, match='tokenizer.json: not a tokenizer'):
    tokenizer.from_folder(tmp_path, 'here')


TURN = '<{{ m.role }}>{{ m.content }}'


def of(*roles, other=''):
  """A template that writes turns of these roles, and `other` for the others."""
  head = f'{{% for m in messages %}}{{% if m.role in {[*roles]} %}}'
  return f'{head}{TURN}{{% else %}}{other}{{% endif %}}{{% endfor %}}.'


@pytest.mark.parametrize(
  'template, wanted',
  [
    # As Qwen 2.5, which passes over others; as Gemma, which refuses them.
    (of('system', 'user'), 'system'),
    (of('system', 'user', other="{{ raise_exception('a') }}"), 'system'),
    (of('system', 'user', 'developer'), 'developer'),
    (of('developer', 'user'), 'developer'),
    (of(other=TURN), 'system'),  # writes whatever role
  ],
)
def test_a_developer_is_the_system_where_no_template_knows_one(
  template, wanted
):
  found = said(template, ('developer', 'Be brief.'), ('user', 'hi'))
  assert found == f'<{wanted}>Be brief.<user>hi.'


@pytest.mark.parametrize(
  'template, roles, lost',
  [
    (of('user'), ('user', 'tool'), 'tool'),
    (of('user'), ('developer', 'user'), 'system'),
    # The first of two systems, and all but the last turn.
    (
      '{% set n = namespace(s="") %}{% for m in messages %}{% if m.role == '
      "'system' %}{% set n.s = m.content %}{% endif %}{% endfor %}{{ n.s }}"
      '{{ messages[-1].content }}',
      ('system', 'system', 'user'),
      'system',
    ),
    ('{{ messages[-1].content }}', ('user', 'assistant', 'user'), 'user'),
  ],
)
def test_a_message_of_which_nothing_is_written_is_refused(
  template, roles, lost
):
  why = f"x: its chat template writes nothing of a message of role '{lost}'"
  with pytest.raises(ValueError, match=why):
    said(template, *[(x, 'same') for x in roles])


def test_a_message_without_a_text_leaves_no_trace_of_one():
  """As Llama 3.1, which writes a call of a tool in place of the content."""
  template = '{% for m in messages %}{% if m.calls %}{{ m.calls }}{% else %}'
  template += TURN + '{% endif %}{% endfor %}'
  call = {'role': 'assistant', 'content': None, 'calls': 'f()'}
  assert said(template, ('user', 'hi'), call) == '<user>hif()'


def test_what_a_template_changes_of_a_message_is_a_trace():
  """As Qwen3, which leaves out what was thought; and an empty turn."""
  template = (
    '{% for m in messages %}<{{ m.role }}>'
    "{{ m.content.split('</think>')[-1] | trim | upper }}{% endfor %}"
  )
  pairs = ('user', 'hi'), ('assistant', '<think>so</think> yo '), ('user', '')
  assert said(template, *pairs) == '<user>HI<assistant>YO<user>'


def test_parts_of_a_content_are_one_text():
  template = of('user', other=TURN)
  part = lambda text: {'type': 'text', 'text': text}
  say = lambda *contents: said(template, *[('user', x) for x in contents])
  assert say([part('a '), part('b')], []) == say('a b', '')
  silent = {'role': 'assistant'}, ('assistant', None)
  assert said(template, *silent) == '<assistant><assistant>.'
  for bad, message in (
    ([{'type': 'image_url', 'image_url': {}}], "content of type 'image_url'"),
    ([part('a'), {'type': 'refusal', 'refusal': 'b'}], "of type 'refusal'"),
    (['a'], "content of type 'a': this model reads text alone"),
    ([{'type': 'text', 'text': 5}], "needs strings 'role' and 'content'"),
    (None, "needs strings 'role' and 'content'"),
  ):
    with pytest.raises(ValueError, match=message):
      say(bad)


def spaced(*, prepend: bool):
  """As of Llama 2, whose encoder puts a space before each part; or Gemma."""
  words = ['▁', '▁▁', 'a', 'b', '▁a', '▁b', ':', '▁▁a']
  merges = [('▁', 'a'), ('▁', 'b'), ('▁', '▁'), ('▁', '▁a')]
  t = stream_test.fallback(words, merges, strip=prepend)
  n = tokenizers.normalizers
  steps = [n.Prepend('▁')] * prepend
  t.inner.normalizer = n.Sequence([*steps, n.Replace(' ', '▁')])
  return dataclasses.replace(t, add_bos=True)


@pytest.mark.parametrize('prepend', [True, False])
def test_ids_are_spelled_so_that_they_come_back(prepend):
  t = spaced(prepend=prepend)
  for given in ('a b', '<s>a: b</s><s>b: a', 'a  b</s>', ''):
    ids = t.encode(given)
    assert t.encode(t.spell(ids)) == ids
