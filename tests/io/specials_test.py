"""What the files beside tokenizer.json add: golden values of transformers 5.24.

Each case was given to its AutoTokenizer as a folder whose tokenizer.json has
256 bytes and the tokens named here, from id 256 on.
"""

import json

import pytest
import tokenizers

from tests.io import stream_test, tiny

S, E = '<|s|>', '<|e|>'


def read(folder, have, settings, **more):
  """Of a folder whose tokenizer.json has bytes and these tokens."""
  inner = tiny.byte_tokenizer(have, ())
  return tiny.tokenizer_of(folder, inner, settings, **more)


def entry(text, **flags):
  usual = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)
  return {'content': text, **usual, 'special': True, **flags}


NAMED = dict(bos_token=S, eos_token=E)
USUAL, APART = [64, 257, 65], [64, 27, 91, 68, 91, 29, 65]
decoder = lambda tokens: dict(
  added_tokens_decoder={str(i): entry(text) for i, text in tokens.items()}
)
# Of tokenizer.json, other files: 'a<|e|>b' as ids, eos, ids in all, tokens
# from id 256 on with those that are special marked.
CASES = {
  'all there': ([S, E], NAMED, {}, USUAL, 257, [S, E]),
  'decoder': ([S], NAMED | decoder({257: E}), {}, USUAL, 257, [S, E]),
  'named alone': ([S], NAMED, {}, USUAL, 257, [S, E]),
  # Ids follow tokenizer.json, in the order that the file gives them.
  'order': (
    [S], NAMED | decoder({258: E, 257: '<x>'}), {},
    [64, 258, 65], 258, [S, '<x>', E],
  ),
  'gap': ([S], NAMED | decoder({270: E}), {}, USUAL, 257, [S, E]),
  'taken id': (
    [S, E, '<x>'], dict(bos_token=S) | decoder({258: '<y>'}), {},
    USUAL, None, [S, E, '<x>', '<y>'],
  ),
  'a word': ([S], dict(bos_token=S, eos_token='a'), {}, APART, 64, [S]),
  'extra list': (
    [S, E], NAMED | dict(extra_special_tokens=['<x>', '<y>']), {},
    USUAL, 257, [S, E, '<x>', '<y>'],
  ),
  'additional list': (
    [S, E], NAMED | dict(additional_special_tokens=['<x>']), {},
    USUAL, 257, [S, E, '<x>'],
  ),
  'extra dict': (
    [S, E], NAMED | dict(extra_special_tokens={'image_token': '<x>'}), {},
    USUAL, 257, [S, E, '<x>'],
  ),
  # unk, sep, pad, cls, mask: not in the order of the file.
  'more names': (
    [S, E], NAMED | dict(mask_token='<m>', pad_token='<p>', unk_token='<u>'),
    {}, USUAL, 257, [S, E, '<u>', '<p>', '<m>'],
  ),
  'a map alone': ([S], {}, {'special_tokens_map': NAMED}, USUAL, 257, [S, E]),
  'a map before settings': (
    [S, E, '<f>'], dict(eos_token=S),
    {'special_tokens_map': {'eos_token': '<f>'}}, USUAL, 258, [S, E, '<f>'],
  ),
  'a map after a decoder': (
    [S, E, '<f>'], dict(eos_token=S) | decoder({256: S}),
    {'special_tokens_map': {'eos_token': '<f>'}}, USUAL, 256, [S, E, '<f>'],
  ),
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_added_tokens_are_those_of_transformers(tmp_path, case):
  have, settings, more, ids, eos, tokens = CASES[case]
  t = read(tmp_path, have, settings, **more)
  assert t.encode('a<|e|>b') == ids
  assert t.eos_ids == (() if eos is None else (eos,))
  assert t.tokens()[256:] == tokens and t.size == 256 + len(tokens)
  if eos is not None:
    assert t.decode([65, eos]) == 'b'  # special: it has no text


def test_flags_and_kinds_of_added_tokens(tmp_path):
  flags = lambda t: {
    i: (x.special, x.lstrip, x.rstrip, x.normalized)
    for i, x in t.inner.get_added_tokens_decoder().items()
    if i > 256
  }
  settings = dict(added_tokens_decoder={'257': entry(E, lstrip=True)})
  t = read(tmp_path / 'flags', [S, E], NAMED | settings)
  assert flags(t) == {257: (True, True, False, False)}
  settings = dict(added_tokens_decoder={'257': entry(E, special=False)})
  t = read(tmp_path / 'kind', [S, E], dict(bos_token=S) | settings)
  assert flags(t) == {257: (False, False, False, False)}


@pytest.mark.parametrize(
  'decoder, text',
  [
    (None, 'x'),
    ({}, 'x<|e|>'),
    ({'257': entry(E, special=False)}, 'x'),
    ({'256': entry(S)}, 'x<|e|>'),
  ],
)
def test_a_named_token_that_tokenizer_json_calls_a_word(
  tmp_path, decoder, text
):
  """It is special, unless there is an added_tokens_decoder without it."""
  more = {} if decoder is None else {'added_tokens_decoder': decoder}
  content = json.loads(tiny.byte_tokenizer([S, E], ()).to_str())
  content['added_tokens'][1]['special'] = False
  inner = tokenizers.Tokenizer.from_str(json.dumps(content))
  t = tiny.tokenizer_of(tmp_path, inner, NAMED | more)
  assert t.eos_ids == (257,) and t.decode([87, 257]) == text


def test_the_end_of_a_turn_is_no_word(tmp_path):
  """Ends by their text have none in a reply, and keep ids and other flags."""
  end = '<|im_end|>'
  more = entry(end, special=False, lstrip=True), entry('<x>', special=False)
  given = dict(
    added_tokens_decoder=dict(zip(('257', '258'), more, strict=True))
  )
  t = read(tmp_path, [S], {'bos_token': S} | given)
  assert t.eos_ids == (257,) and t.tokens()[256:] == [S, end, '<x>']
  assert t.encode(f'a {end}<x>') == [64, 257, 258]
  assert t.decode([64, 257, 258]) == 'a<x>'


IDS = 'added tokens must be ids with objects'


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'added_tokens_decoder': 3}, IDS),
    ({'added_tokens_decoder': {'x': entry(E)}}, IDS),
    ({'added_tokens_decoder': {'257': 'x'}}, IDS),
    ({'added_tokens_decoder': {'257': {'content': None}}}, IDS),
    ({'added_tokens_decoder': {'257': entry(E, lstrip='no')}}, 'true or false'),
    ({'split_special_tokens': True}, 'json: split_special_tokens is not su'),
  ],
)
def test_settings_that_are_refused(tmp_path, settings, message):
  with pytest.raises(ValueError, match=message):
    read(tmp_path, [S], settings)


def llama2() -> tokenizers.Tokenizer:
  """As Llama 2's tokenizer.json: a space before every run of text."""
  words = ['▁', 'a', 'b', '▁a', '▁b', 'ab', '▁ab', '\n', 'e']
  merges = [('▁', 'a'), ('▁', 'b'), ('a', 'b'), ('▁', 'ab'), ('▁a', 'b')]
  inner, n = stream_test.fallback(words, merges).inner, tokenizers.normalizers
  inner.normalizer = n.Sequence([n.Prepend('▁'), n.Replace(' ', '▁')])
  inner.add_special_tokens(['<unk>'])
  return inner


def test_added_tokens_have_the_order_of_their_ids(tmp_path):
  """Of numbers, not of their spellings, whatever the order in the file."""
  texts = {250 + i: f'<{i}>' for i in (11, 3, 750, 9, 10)}
  t = read(tmp_path, [S, E], NAMED | decoder(texts))
  ids = [t.inner.token_to_id(f'<{i}>') for i in (3, 9, 10, 11, 750)]
  assert ids == [*range(ids[0], ids[0] + 5)]


FILE = [[262, 2, 263], [259, 259, 262], [262, 2, 259, 263]]
NEW = [[262, 2, 261], [259, 262], [262, 2, 263]]
OLD = [[262, 2, 263], [259, 262], [262, 2, 263]]


@pytest.mark.parametrize(
  'family, settings, ids, text',
  [
    ('llama', {}, NEW, ' a'),
    ('llama', {'legacy': False}, NEW, ' a'),
    ('llama', {'legacy': True}, OLD, ' a'),
    ('llama', {'legacy': True, 'add_prefix_space': True}, OLD, ' a'),
    (
      'llama',
      {'add_prefix_space': False},
      [[260, 2, 261], [259, 262], [260, 2, 263]],
      '  a',
    ),
    ('smollm3', {}, NEW, ' a'),
    # Of other families, or as another class, the file's own steps.
    ('mistral', {}, FILE, '  a'),
    ('granite', {'legacy': True}, FILE, '  a'),
    ('llama', {'tokenizer_class': 'PreTrainedTokenizerFast'}, FILE, '  a'),
    ('llama', {'tokenizer_class': None}, FILE, '  a'),
  ],
)
def test_where_a_llamas_words_begin(tmp_path, family, settings, ids, text):
  """Golden: AutoTokenizer of transformers 5.24, without added tokens."""
  usual = dict(tokenizer_class='LlamaTokenizerFast', eos_token='</s>')
  config = dict(model_type=family)
  t = tiny.tokenizer_of(tmp_path, llama2(), usual | settings, config=config)
  assert [t.encode(x) for x in ('a</s>b', '  a', 'a</s> b')] == ids
  assert t.encode('é\nb')[-4:] == [198, 172, 266, 261]
  assert t.decode(t.encode('  a')) == text


@pytest.mark.parametrize(
  'family, settings, size, cut',
  [
    ('mistral', {'fix_mistral_regex': True}, 100_001, True),
    ('mistral', {'fix_mistral_regex': True}, 100_000, False),
    ('mistral', {}, 100_001, False),
    ('qwen2', {'fix_mistral_regex': True}, 100_001, False),
  ],
)
def test_mistrals_words_are_cut_where_the_settings_ask(
  tmp_path, family, settings, size, cut
):
  """Of a large vocabulary: before a capital letter, as Tekken does."""
  inner = tiny.byte_tokenizer(())
  ids = inner.get_vocab() | {f'x{i}': i for i in range(258, size - 1)}
  ids['oW'] = size - 1
  inner.model = tokenizers.models.BPE(ids, [('o', 'W')])
  config = dict(model_type=family)
  t = tiny.tokenizer_of(tmp_path, inner, settings, config=config)
  assert (size - 1 in t.encode('helloWorld')) != cut
  assert t.decode(t.encode('helloWorld 日本')) == 'helloWorld 日本'


def test_names_are_variables_of_templates(tmp_path):
  """Special ones under their names; a model's own, too."""
  names = '{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}'
  names += '{{ messages[0].content }}'
  given = dict(pad_token='<p>', image_token='<i>', chat_template=names)
  t = read(tmp_path, [S, E], NAMED | given)
  assert t.chat([dict(role='user', content='x')]) == '<|s|><|e|><p><i>x'


@pytest.mark.parametrize(
  'specials, files, ends',
  [
    # The tokenizer's, those that are listed, then those known by their text.
    (['<eos>', '<x>', '<end_of_turn>'], {}, ['<eos>', '<end_of_turn>']),
    (
      ['<eos>', '<x>', '<|eot_id|>'],
      {'generation_config': {'eos_token_id': [258, 257]}},
      ['<eos>', '<|eot_id|>', '<x>'],
    ),
    (
      ['<eos>', '<x>', '<y>'],
      {'config': {'eos_token_id': [256, 258]}},
      ['<eos>', '<y>'],
    ),
    (
      ['<eos>', '<x>', '<y>'],
      {'config': {'text_config': {'eos_token_id': 257}}},
      ['<eos>', '<x>'],
    ),
    # transformers reads only the first that is there.
    (
      ['<eos>', '<x>', '<y>'],
      {
        'generation_config': {'eos_token_id': 257},
        'config': {'eos_token_id': 258},
      },
      ['<eos>', '<x>'],
    ),
    (['<eos>', '<|end|>', '<|return|>', '<|call|>'], {}, None),
  ],
)
def test_ends_come_from_every_place(tmp_path, specials, files, ends):
  t = read(tmp_path, specials, {'eos_token': '<eos>'}, **files)
  ends = ends or ['<eos>', '<|return|>', '<|call|>']
  assert [t.inner.id_to_token(i) for i in t.eos_ids] == ends


def test_an_end_beyond_the_models_ids_is_left_out(tmp_path):
  t = read(tmp_path, ['<eos>', '<|im_end|>'], {'eos_token': '<eos>'})
  assert t.eos_ids == (256, 257)
  cut = t.cut_to(257, 'here')
  assert (cut.eos_ids, cut.size) == ((256,), 257)
  with pytest.raises(ValueError, match='has 258 ids, the model 256'):
    t.cut_to(256, 'here')  # its own eos
