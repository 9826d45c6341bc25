"""Tokenizers inside GGUF files."""

import numpy as np
import pytest
import tokenizers

from specdec_jax.io.gguf import container, vocabulary

TEXT = 'hello, wörld 123\n\n  he 日本 🙂 end'


def fake_file(tmp_path, tokens, model='gpt2', **fields):
  prefix = 'tokenizer.ggml.'
  given = {'model': model, 'tokens': tokens, **fields}
  named = {prefix + k: v for k, v in given.items()}
  return container.File(tmp_path / 'm.gguf', named, {})


def bytes_file(tmp_path, pre, **fields):
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens, kinds = [*alphabet, '12', '<e>'], np.array([1] * 257 + [3])
  given = dict(token_type=kinds, merges=['1 2'], eos_token_id=257)
  return fake_file(tmp_path, tokens, pre=pre, **(given | fields))


CUTS = {
  'default': ['x', '.', 'Isn', "'", 't', ' ', '123', '4', ' \n\n', ' y'],
  'gpt-2': ['x', '.', 'Isn', "'t", ' 1234', ' \n\n', ' y'],
  'smollm': ['x', '.', 'Isn', "'t", ' ', '1', '2', '3', '4', ' \n\n', ' y'],
  'qwen2': ['x', '.Isn', "'t", ' ', '1', '2', '3', '4', ' \n\n', ' y'],
  'llama-bpe': ['x', '.Isn', "'t", ' ', '123', '4', ' \n\n', ' y'],
}
SAME = {'refact': 'smollm', 'deepseek-r1-qwen': 'qwen2', 'tekken': 'qwen2'}


@pytest.mark.parametrize('pre', vocabulary.PRE)
def test_gguf_words_are_cut_as_the_families_do(tmp_path, pre):
  t = vocabulary.read(bytes_file(tmp_path, pre), 'here')
  found = t.inner.pre_tokenizer.pre_tokenize_str("x.Isn't 1234 \n\n y")
  words = [word.replace('Ġ', ' ').replace('Ċ', '\n') for word, _ in found]
  cut = CUTS[SAME.get(pre, pre if pre in CUTS else 'llama-bpe')]
  assert words == cut
  ids = t.encode('a 12<e>')  # 12 is a token
  assert ids.count(256) == ('1' not in cut) and ids[-1] == 257
  assert t.decode(t.encode(TEXT)) == TEXT


@pytest.mark.parametrize(
  'text, words',
  [
    ('helloWorld', ['hello', 'World']),
    ('HTTPServer ok', ['HTTPServer', ' ok']),
    ('path//\n\nNext', ['path', '//\n\n', 'Next']),
    ('日本 e\u0301a', ['日本', ' e\u0301a']),
  ],
)
def test_tekken_cuts_before_a_capital_letter(tmp_path, text, words):
  """By hand, from the pattern of Mistral Nemo's tokenizer.json."""
  t = vocabulary.read(bytes_file(tmp_path, 'tekken'), 'here')
  spans = t.inner.pre_tokenizer.pre_tokenize_str(text)
  assert [text[a:b] for _, (a, b) in spans] == words


@pytest.mark.parametrize(
  'pre, bos, whole',
  [
    ('llama-bpe', True, True),
    ('falcon3', True, True),
    ('tekken', True, True),
    ('smaug-bpe', False, False),
    ('qwen2', False, False),
  ],
)
def test_gguf_bos_and_merges_by_pre_tokenizer(tmp_path, pre, bos, whole):
  """What llama.cpp's loader sets for each name, if no field does."""
  file = bytes_file(tmp_path, pre, bos_token_id=257, merges=[])
  file.fields['tokenizer.ggml.tokens'][256] = 'ab'  # no merge leads to it
  t = vocabulary.read(file, 'here')
  assert t.add_bos == bos
  assert (256 in t.encode('ab')) == whole
  said = bytes_file(tmp_path, pre, bos_token_id=257, add_bos_token=not bos)
  assert vocabulary.read(said, 'here').add_bos != bos


@pytest.mark.parametrize('template', ['', '{{ bos_token }}'])
def test_gguf_chats_begin_with_the_bos_that_the_file_adds(tmp_path, template):
  """llama.cpp puts it before what the template wrote, never twice."""
  file = bytes_file(tmp_path, 'llama-bpe', bos_token_id=257)
  file.fields['tokenizer.chat_template'] = (
    template + '{{ messages[0].content }}'
  )
  t = vocabulary.read(file, 'here')
  assert t.encode_chat([dict(role='user', content='!')]) == [257, 0]


def ends(tmp_path, *texts, kinds=None, **fields):
  """The ends of a reply of a file that has these tokens after <eos>, and what
  a reply of all these tokens shows."""
  tokens = ['a', '<end of text>', *texts]
  file = fake_file(
    tmp_path,
    tokens,
    pre='gpt-2',
    merges=[],
    token_type=np.array([1, 3, *(kinds or [3] * len(texts))]),
    eos_token_id=1,
    **fields,
  )
  t = vocabulary.read(file, 'here')
  assert all(t.encode(tokens[i]) == [i] for i in t.eos_ids)
  shown = t.decode(range(len(tokens))).removeprefix('a')
  return [tokens[i] for i in t.eos_ids], shown


@pytest.mark.parametrize(
  'texts, found',
  [
    # Names that llama.cpp's loader knows; the file's own eos comes first.
    (['<start_of_turn>', '<end_of_turn>'], ['<end_of_turn>']),
    (['<|eom_id|>', '<|eot_id|>'], ['<|eot_id|>', '<|eom_id|>']),
    (['<|im_end|>', '<|endoftext|>'], ['<|im_end|>', '<|endoftext|>']),
    (['<|end|>', '</s>', '<|user|>'], ['<|end|>', '</s>']),
    (['[EOT]', '[INST]'], ['[EOT]']),
    # Of a file of code; of several names the first of its kind.
    (['<|file_sep|>', '<|repo_name|>'], ['<|repo_name|>', '<|file_sep|>']),
    # Where calls are tokens, <|end|> ends a part; where tools answer, </s> is
    # a tag.
    (['<|end|>', '<|return|>', '<|call|>'], ['<|return|>', '<|call|>']),
    (['<|end|>', '<|return|>'], ['<|end|>', '<|return|>']),
    (['</s>', '<|tool_response>'], ['<|tool_response>']),
    (['<|assistant|>', 'eot_id'], []),
  ],
)
def test_gguf_ends_of_a_turn_by_text(tmp_path, texts, found):
  found = ['<end of text>', *found]
  assert ends(tmp_path, *texts) == (found, '')
  # The same where the file calls them words, of either kind.
  words = ''.join(x for x in texts if x not in found)
  for kind in (vocabulary.NORMAL, vocabulary.USER_DEFINED):
    kinds = [kind] * len(texts)
    assert ends(tmp_path, *texts, kinds=kinds) == (found, words)


def test_gguf_fields_name_ends(tmp_path):
  texts = ['<|im_end|>', 'x', 'y', '<|file_sep|>']
  named = dict(eot_token_id=3, fim_sep_token_id=4)
  found, _ = ends(tmp_path, *texts, **named)
  assert found == ['<end of text>', 'x', '<|im_end|>', 'y']


@pytest.mark.parametrize(
  'changes, message',
  [
    (dict(pre='viking'), r"pre 'viking' is not known.*'smollm'"),
    (dict(model='t5'), "model 't5'.*gpt2.*llama"),
    (dict(merges=['1 2', '1 no']), 'merges: .*`no` out of vocabulary'),
    (dict(token_type=np.array([1])), '258 tokens, 1 of token_type'),
    (dict(eos_token_id=9999), 'eos_token_id is 9999'),
    (dict(merges=None), 'merges is missing'),
    (dict(token_type=3), 'token_type is int; ndarray is needed'),
    (dict(bos_token_id=[1]), 'bos_token_id is .1.; ids are 0 to 257'),
  ],
)
def test_gguf_tokenizers_that_are_refused(tmp_path, changes, message):
  file = bytes_file(tmp_path, **({'pre': 'gpt-2'} | changes))
  with pytest.raises(ValueError, match=message):
    vocabulary.read(file, 'here')


@pytest.mark.parametrize(
  'make, absent, stands_for',
  [
    ('bytes', 'pre', 'default'),
    ('bytes', 'token_type', np.ones(258, int)),
    ('bytes', 'add_bos_token', False),
    ('pieces', 'scores', np.zeros(271)),
    ('pieces', 'bos_token_id', 1),
    ('pieces', 'eos_token_id', 2),
    ('pieces', 'unknown_token_id', 0),
    ('pieces', 'add_bos_token', True),
    ('pieces', 'add_space_prefix', True),
  ],
)
def test_an_absent_field_means_what_llama_cpp_takes_it_for(
  tmp_path, make, absent, stands_for
):
  """The defaults of src/llama-vocab.cpp."""
  make = {'bytes': bytes_file, 'pieces': sentencepiece_file}[make]
  how = {} if make is sentencepiece_file else {'pre': 'gpt-2'}
  said = make(tmp_path, **how | {absent: stands_for})
  file = make(tmp_path, **how)
  file.fields.pop(f'tokenizer.ggml.{absent}', None)
  one, two = (vocabulary.read(x, 'here') for x in (file, said))
  facts = lambda t: [
    *(t.eos_ids, t.bos_id, t.add_bos, t.specials),
    *(t.encode(x) for x in (TEXT, "It's 3312 ab\n\n  x", 'hello<e>')),
  ]
  assert facts(one) == facts(two)


def test_words_without_a_rule_are_said(tmp_path, caplog):
  """A default may cut words as the model never saw them."""
  for pre in ('', 'default'):
    vocabulary.read(bytes_file(tmp_path, pre), 'here')
    assert ('no tokenizer.ggml.pre' in caplog.text) == (not pre)
    caplog.clear()


@pytest.mark.parametrize('kind, ends', [(3, 11), (1, None)])
def test_gguf_ids_of_falcon_need_no_field(tmp_path, kind, ends):
  """llama.cpp takes 11 for both, which in other vocabularies is a word."""
  kinds = np.array([1] * 11 + [kind] + [1] * 246)
  file = bytes_file(tmp_path, 'gpt-2', token_type=kinds)
  del file.fields['tokenizer.ggml.eos_token_id']
  t = vocabulary.read(file, 'here')
  assert t.eos_ids == (() if ends is None else (ends,)) and t.bos_id == ends


def test_gguf_unused_tokens_are_padding(tmp_path):
  kinds = np.array([1] * 257 + [3, 5, 5])
  file = bytes_file(tmp_path, 'gpt-2', token_type=kinds)
  file.fields['tokenizer.ggml.tokens'].extend(['[PAD258]', '[PAD259]'])
  assert vocabulary.read(file, 'here').size == 258


def sentencepiece_file(tmp_path, **fields):
  pieces = '▁ h e l o ▁he ll ▁h he llo ▁hello el'.split()
  bytes_ = [f'<0x{b:02X}>' for b in range(256)]
  tokens = ['<unk>', '<s>', '</s>', *bytes_, *pieces]
  given = dict(
    token_type=np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces)),
    scores=np.array([0.0] * 259 + [-float(i) for i in range(len(pieces))]),
    bos_token_id=1,
    eos_token_id=2,
    unknown_token_id=0,
  )
  return fake_file(tmp_path, tokens, 'llama', **(given | fields))


@pytest.mark.parametrize('kind', [3, 1, 4])
def test_gguf_sentencepiece(tmp_path, kind):
  file = sentencepiece_file(tmp_path)
  file.fields['tokenizer.ggml.token_type'][2] = kind  # of </s>
  t = vocabulary.read(file, 'here')
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


@pytest.mark.parametrize(
  'fields, kind, bos, ends',
  [
    ({}, 3, 1, (2,)),
    (dict(bos_token_id=0), 3, 0, (2,)),
    (dict(eos_token_id=5), 3, 1, (5, 2)),  # </s> ends a reply by its text
    ({}, vocabulary.UNUSED, None, (2,)),
  ],
)
def test_gguf_sentencepiece_ids_without_a_field(
  tmp_path, fields, kind, bos, ends
):
  """llama.cpp's loader takes <unk>, <s> and </s> for 0 to 2."""
  file = sentencepiece_file(tmp_path)
  file.fields['tokenizer.ggml.token_type'][1] = kind
  for name in ('bos', 'eos', 'unknown'):
    del file.fields[f'tokenizer.ggml.{name}_token_id']
  file.fields.update({f'tokenizer.ggml.{x}': i for x, i in fields.items()})
  t = vocabulary.read(file, 'here')
  assert (t.bos_id, t.eos_ids) == (bos, ends)
  assert t.encode('h')[:-1] == ([] if bos is None else [bos])
  assert dict(t.specials)['unk_token'] == '<unk>'


def test_gguf_sentencepiece_of_fewer_tokens_than_usual(tmp_path):
  file = fake_file(
    tmp_path, ['a', 'b'], 'llama', scores=np.zeros(2), add_space_prefix=False
  )
  t = vocabulary.read(file, 'here')
  assert (t.bos_id, t.eos_ids, t.encode('b')) == (1, (), [1])


def test_gguf_sentencepiece_runs_of_spaces_and_lines_are_tokens(tmp_path):
  """Gemma's: user-defined tokens, stored with the spaces that they mean."""
  no = dict(add_space_prefix=False, add_bos_token=False)
  file = sentencepiece_file(tmp_path, **no)
  file.fields['tokenizer.ggml.tokens'].extend(['  ', '\n\n'])
  more = {'token_type': [4, 4], 'scores': [0.0, 0.0]}
  for name, values in more.items():
    full = np.append(file.fields[f'tokenizer.ggml.{name}'], values)
    file.fields[f'tokenizer.ggml.{name}'] = full
  t = vocabulary.read(file, 'here')
  ids = t.encode('he  l\n\no e')
  pieces = [t.inner.id_to_token(i) for i in ids]
  assert pieces == ['he', '  ', 'l', '\n\n', 'o', '▁', 'e']
  assert t.decode(ids) == 'he  l\n\no e'
