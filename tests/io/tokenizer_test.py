"""Text, streams, chat templates and the same-tokenizer check."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers

from specdec_jax.io import gguf_file, gguf_tokenizer, sources, tokenizer

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


def test_byte_fallback_needs_room():
  with pytest.raises(ValueError, match='256 ids or more, not 255'):
    tokenizer.from_bytes(255, 'x')


def test_stream_never_shows_half_a_character():
  t = tokenizer.from_bytes(512, 'x')
  stream = t.stream()
  pieces = [stream.push([i]) for i in t.encode(TEXT)]
  assert ''.join(pieces) == TEXT
  assert all('\ufffd' not in p for p in pieces)
  assert '' in pieces
  assert stream.finish() == ''


def test_stream_finish_shows_what_was_cut():
  t = tokenizer.from_bytes(512, 'x')
  stream = t.stream()
  cut = t.encode('a🙂')[:-1]
  assert stream.push(cut) == 'a'
  assert set(stream.finish()) == {'\ufffd'}
  assert stream.finish() == ''


def test_stream_equals_decode_for_random_ids():
  t = tokenizer.from_bytes(512, 'x')
  rng = np.random.default_rng(0)
  for _ in range(50):
    ids = rng.integers(0, 258, 40).tolist()
    stream = t.stream()
    text = ''.join(stream.push(part) for part in np.array_split(ids, 7))
    assert text + stream.finish() == t.decode(ids)


def test_a_byte_that_is_no_character_does_not_end_a_stream():
  """As of Llama 2: bytes stand for what the vocabulary has no token for."""
  words = {f'<0x{byte:02X}>': byte for byte in range(256)} | {'▁the': 256}
  inner = tokenizers.Tokenizer(
    tokenizers.models.BPE(words, [], byte_fallback=True)
  )
  d = tokenizers.decoders
  inner.decoder = d.Sequence([d.Replace('▁', ' '), d.ByteFallback(), d.Fuse()])
  stream = tokenizer.Tokenizer('x', inner).stream()
  text = stream.push([0x41, 0xFF, 256, 256]) + stream.finish()
  assert text == 'A\ufffd the the'


def test_padding_ids_decode_to_nothing():
  t = tokenizer.from_bytes(512, 'x')
  assert t.decode([104, 105, 400]) == 'hi'


def test_special_tokens_in_text_become_ids(tiny):
  t = wrap(tiny.byte_tokenizer(), eos_ids=(259,))
  ids = t.encode('<|im_start|>hello<|im_end|>')
  assert ids[0] == 258 and ids[-1] == 259 and ids[1] == 257
  assert t.decode(ids) == 'hello'
  assert t.decode(ids, special=True) == '<|im_start|>hello<|im_end|>'


def test_bos_is_added_once(tiny):
  t = wrap(tiny.byte_tokenizer(), bos_id=258, add_bos=True)
  assert t.encode('hi')[0] == 258
  assert t.encode('<|im_start|>hi') == t.encode('hi')
  assert t.encode('') == [258]
  assert wrap(tiny.byte_tokenizer(), bos_id=258).encode('') == []


def test_special_ids_must_be_tokens(tiny):
  with pytest.raises(ValueError, match='special id 999 is no token; ids are 0'):
    wrap(tiny.byte_tokenizer(), eos_ids=(999,))


def test_check_same_accepts_other_paddings_and_ends(tiny):
  a = wrap(tiny.byte_tokenizer(), eos_ids=(259,))
  b = wrap(tiny.byte_tokenizer(), eos_ids=(259, 258), chat_template='x')
  tokenizer.check_same(a, b)
  assert a.fingerprint() == b.fingerprint()


def test_check_same_names_the_first_difference(tiny):
  a = wrap(tiny.byte_tokenizer(), eos_ids=(259,))
  b = wrap(tiny.byte_tokenizer(('<|im_start|>', '<eos>')), eos_ids=(259,))
  with pytest.raises(ValueError, match=r"id 259 is '<\|im_end\|>'.*'<eos>'"):
    tokenizer.check_same(a, b)
  assert a.fingerprint() != b.fingerprint()
  c = wrap(tiny.byte_tokenizer(('<|im_start|>',)), eos_ids=(258,))
  with pytest.raises(ValueError, match=r"id 259 is '<\|im_end\|>'.*unused"):
    tokenizer.check_same(a, c)


def test_check_same_names_special_ids(tiny):
  a = wrap(tiny.byte_tokenizer(), eos_ids=(259,), bos_id=258, add_bos=True)
  b = dataclasses.replace(a, eos_ids=(258,))
  with pytest.raises(
    ValueError, match='end .eos. id is 259 .* 258 for the dra'
  ):
    tokenizer.check_same(a, b)
  b = dataclasses.replace(a, add_bos=False)
  with pytest.raises(ValueError, match='first .bos. id is 258 .*and None'):
    tokenizer.check_same(a, b)
  assert a.fingerprint() != b.fingerprint()


CHAT = [{'role': 'user', 'content': 'hello'}]


def chat(template, **changes):
  t = tokenizer.from_bytes(512, 'x')
  return dataclasses.replace(t, chat_template=template, **changes).chat(CHAT)


def test_chat_template_is_rendered_as_transformers_does():
  template = """{{ bos_token }}
  {%- for m in messages %}
    {% if m.role == 'user' %}
[{{ m.content | tojson }}]
    {% endif %}
    {% if loop.last %}{% break %}{% endif %}
  {% endfor %}
{% if add_generation_prompt %}<a>{% endif %}{{ tools is none }}"""
  assert chat(template, specials=(('bos_token', '<s>'),)) == (
    '<s>["hello"]\n<a>True'
  )


def test_chat_without_a_template():
  t = tokenizer.from_bytes(512, 'x')
  assert t.chat(CHAT) == 'User: hello\nAssistant:'
  assert t.chat(CHAT, add_generation_prompt=False) == 'User: hello\n'


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
    chat(template)


def test_messages_are_checked():
  t = tokenizer.from_bytes(512, 'x')
  with pytest.raises(ValueError, match="needs strings 'role' and 'content'"):
    t.chat([{'role': 'user', 'text': 'hello'}])


def folder(tiny, tmp_path, settings=None, **more):
  tiny.byte_tokenizer().save(str(tmp_path / 'tokenizer.json'))
  for name, value in {'tokenizer_config': settings or {}, **more}.items():
    (tmp_path / f'{name}.json').write_text(json.dumps(value))
  return tokenizer.from_folder(tmp_path, 'here')


def test_folder_specials_and_ends(tiny, tmp_path):
  t = folder(
    tiny,
    tmp_path,
    {'eos_token': {'content': '<|im_end|>'}, 'chat_template': 'T'},
    special_tokens_map={'bos_token': '<|im_start|>'},
    generation_config={'eos_token_id': [258, 259]},
    config={'eos_token_id': 0},
  )
  assert t.eos_ids == (259, 258)
  assert (t.bos_id, t.add_bos, t.chat_template) == (258, False, 'T')
  assert dict(t.specials)['bos_token'] == '<|im_start|>'


def test_folder_ends_fall_back_to_config(tiny, tmp_path):
  assert folder(tiny, tmp_path, config={'eos_token_id': 3}).eos_ids == (3,)


def test_folder_add_bos_by_setting_or_by_behaviour(tiny, tmp_path):
  named = {'bos_token': '<|im_start|>'}
  assert not folder(tiny, tmp_path, named).add_bos
  assert folder(tiny, tmp_path, named | {'add_bos_token': True}).add_bos
  inner = tiny.byte_tokenizer()
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|im_start|> $A', special_tokens=[('<|im_start|>', 258)]
  )
  inner.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(named))
  assert tokenizer.from_folder(tmp_path, 'here').add_bos


def test_folder_templates(tiny, tmp_path):
  several = [
    {'name': 'tool_use', 'template': 'U'},
    {'name': 'default', 'template': 'D'},
  ]
  assert folder(tiny, tmp_path, {'chat_template': several}).chat_template == 'D'
  (tmp_path / 'chat_template.jinja').write_text('J')
  assert folder(tiny, tmp_path, {'chat_template': 'T'}).chat_template == 'J'


@pytest.mark.parametrize('eos', [-1, 260, 10**30])
def test_folder_ends_must_be_tokens(tiny, tmp_path, eos):
  with pytest.raises(ValueError, match=f'special id {eos} is no token'):
    folder(tiny, tmp_path, generation_config={'eos_token_id': [258, eos]})


def test_folder_settings_of_odd_types_are_no_settings(tiny, tmp_path):
  t = folder(
    tiny,
    tmp_path,
    {'chat_template': [3, {'name': 'default', 'template': 4}], 'eos_token': []},
  )
  assert (t.chat_template, t.eos_ids) == (None, ())


def test_folder_without_a_tokenizer(tmp_path):
  with pytest.raises(ValueError, match='tokenizer.json: no such file'):
    tokenizer.from_folder(tmp_path, 'here')
  (tmp_path / 'tokenizer.json').write_text('{"model": 3}')
  with pytest.raises(ValueError, match='tokenizer.json: not a tokenizer'):
    tokenizer.from_folder(tmp_path, 'here')


def fake_file(tmp_path, tokens, model='gpt2', **fields):
  prefix = 'tokenizer.ggml.'
  given = {'model': model, 'tokens': tokens, **fields}
  named = {prefix + k: v for k, v in given.items()}
  return gguf_file.File(tmp_path / 'm.gguf', named, {}, None)


def bytes_file(tmp_path, pre, **fields):
  tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + [
    '12',
    '<e>',
  ]
  given = dict(
    token_type=np.array([1] * 257 + [3]),
    merges=['1 2'],
    eos_token_id=257,
  )
  return fake_file(tmp_path, tokens, pre=pre, **(given | fields))


@pytest.mark.parametrize(
  'pre, merged',
  [('gpt-2', 1), ('default', 1), ('smollm', 0), ('qwen2', 0), ('llama-bpe', 1)],
)
def test_gguf_pre_tokenizers(tmp_path, pre, merged):
  t = gguf_tokenizer.read(bytes_file(tmp_path, pre), 'here')
  ids = t.encode('a 12<e>')
  assert ids.count(256) == merged and ids[-1] == 257
  assert t.decode(t.encode(TEXT)) == TEXT


def test_gguf_words_are_cut_as_the_families_do(tmp_path):
  cuts = {}
  for pre in ('smollm', 'qwen2', 'llama-bpe'):
    t = gguf_tokenizer.read(bytes_file(tmp_path, pre), 'here')
    found = t.inner.pre_tokenizer.pre_tokenize_str("x.Isn't 1234 \n\n y")
    cuts[pre] = [word.replace('Ġ', ' ').replace('Ċ', '\n') for word, _ in found]
  assert cuts == {
    'smollm': ['x', '.', 'Isn', "'t", ' ', '1', '2', '3', '4', ' \n\n', ' y'],
    'qwen2': ['x', '.Isn', "'t", ' ', '1', '2', '3', '4', ' \n\n', ' y'],
    'llama-bpe': ['x', '.Isn', "'t", ' ', '123', '4', ' \n\n', ' y'],
  }


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(pre='tekken'), r"pre 'tekken' is not known.*'smollm'"),
    (dict(model='t5'), "model 't5'.*gpt2.*llama"),
    (dict(merges=['1 2', 'nope']), "merge 'nope'"),
    (dict(token_type=np.array([1])), '258 tokens, 1 token types'),
    (dict(eos_token_id=9999), 'eos_token_id is 9999'),
    (dict(merges=None), 'merges is missing'),
    (dict(token_type=3), 'token_type is int; ndarray is needed'),
    (dict(eot_token_id=-1), 'eot_token_id is -1'),
    (dict(bos_token_id=[1]), 'bos_token_id is .1.; ids are 0 to 257'),
  ],
)
def test_gguf_tokenizers_that_are_refused(tmp_path, changes, message):
  file = bytes_file(tmp_path, **({'pre': 'gpt-2'} | changes))
  with pytest.raises(ValueError, match=message):
    gguf_tokenizer.read(file, 'here')


def test_gguf_unused_tokens_are_padding(tmp_path):
  kinds = np.array([1] * 257 + [3, 5, 5])
  file = bytes_file(tmp_path, 'gpt-2', token_type=kinds)
  file.fields['tokenizer.ggml.tokens'].extend(['[PAD258]', '[PAD259]'])
  assert gguf_tokenizer.read(file, 'here').size == 258


def sentencepiece_file(tmp_path, **fields):
  pieces = [
    '▁',
    'h',
    'e',
    'l',
    'o',
    '▁he',
    'll',
    '▁h',
    'he',
    'llo',
    '▁hello',
    'el',
  ]
  tokens = [
    '<unk>',
    '<s>',
    '</s>',
    *[f'<0x{b:02X}>' for b in range(256)],
    *pieces,
  ]
  given = dict(
    token_type=np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces)),
    scores=np.array([0.0] * 259 + [-float(i) for i in range(len(pieces))]),
    bos_token_id=1,
    eos_token_id=2,
    unknown_token_id=0,
  )
  return fake_file(tmp_path, tokens, 'llama', **(given | fields))


def test_gguf_sentencepiece(tmp_path):
  t = gguf_tokenizer.read(sentencepiece_file(tmp_path), 'here')
  name = lambda ids: [t.inner.id_to_token(i) for i in ids]
  # By score: ll (-6), ▁h (-7), then ▁he (-5) once its parts are there, llo, and
  # at last ▁hello.
  assert name(t.encode('hello')) == ['<s>', '▁hello']
  # he scores above el, though both start from the same letters.
  assert name(t.encode('ohel')) == ['<s>', '▁', 'o', 'he', 'l']
  assert name(t.encode('é</s>')) == ['<s>', '▁', '<0xC3>', '<0xA9>', '</s>']
  for text in ('hello hello', TEXT, ' two  spaces'):
    assert t.decode(t.encode(text)) == text
  assert (t.bos_id, t.add_bos, t.eos_ids, t.size) == (1, True, (2,), 271)


def test_gguf_sentencepiece_without_prefix_or_bos(tmp_path):
  file = sentencepiece_file(
    tmp_path, add_space_prefix=False, add_bos_token=False
  )
  t = gguf_tokenizer.read(file, 'here')
  assert [t.inner.id_to_token(i) for i in t.encode('he')] == ['he']
  assert t.decode(t.encode(' he')) == ' he'


def test_gguf_sentencepiece_runs_of_spaces_and_lines_are_tokens(tmp_path):
  """Gemma's: user-defined tokens, stored with the spaces that they mean."""
  file = sentencepiece_file(tmp_path, add_space_prefix=False)
  file.fields['tokenizer.ggml.tokens'].extend(['  ', '\n\n'])
  more = {'token_type': [4, 4], 'scores': [0.0, 0.0]}
  for name, values in more.items():
    full = np.append(file.fields[f'tokenizer.ggml.{name}'], values)
    file.fields[f'tokenizer.ggml.{name}'] = full
  t = gguf_tokenizer.read(file, 'here')
  ids = t.encode('he  l\n\no e')
  pieces = [t.inner.id_to_token(i) for i in ids]
  assert pieces == ['<s>', 'he', '  ', 'l', '\n\n', 'o', '▁', 'e']
  assert t.decode(ids) == 'he  l\n\no e'


def test_gguf_and_folder_tokenizers_agree(tiny, tmp_path):
  c = tiny.config()
  a = sources.open_source(str(tiny.write_folder(tmp_path / 'hf', c))).tokenizer
  b = sources.open_source(
    str(tiny.write_gguf(tmp_path / 'm.gguf', c))
  ).tokenizer
  tokenizer.check_same(a, b)
  for text in (TEXT, '<|im_start|>hello<|im_end|>'):
    ids = a.encode(text)
    assert b.decode(ids) == a.decode(ids)
