"""Sources of text, tokenizers trained on them, rows of tokens."""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys
import types
from pydoc_data import topics

import numpy as np
import pytest
import tokenizers

from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.train import text

UNICODE = (
  'naïve Ωμέγα 日本語 🙂👩‍👩‍👧 \u2028 \x00 e\u0301\t\r\n  "quoted"  \ufffd'
)


def corpus(*documents, sources=()):
  return text.Corpus('here', documents, '', sources)


def write(tmp_path, name, content):
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  content = content.encode() if isinstance(content, str) else content
  path.write_bytes(content)
  return str(path)


def test_the_manual_then_the_library_while_there_is_room(monkeypatch):
  prose, c = (text.read(x) for x in ('stdlib:prose', 'stdlib'))
  assert prose.documents == tuple(topics.topics.values())
  joined = '\0'.join(prose.documents).encode()
  assert prose.sha256 == hashlib.sha256(joined).hexdigest()
  manual = len(topics.topics)
  sources = c.documents[manual:]
  assert c.documents[:manual] == prose.documents
  read = lambda module: pathlib.Path(module.__file__).read_bytes().decode()
  assert read(argparse) in sources
  # Not the manual again, not what is installed, not this computer's settings.
  assert read(topics) not in sources
  assert not any('build_time_vars = {' in d for d in sources)
  assert 4e6 < sum(map(len, sources)) <= 8e6
  monkeypatch.setattr(text, '_MOST_CHARACTERS', 300_000)
  some = text.read('stdlib').documents
  assert some == c.documents[: len(some)]
  sizes = [len(d) for d in c.documents[manual : len(some) + 1]]
  assert sum(sizes[:-1]) <= 300_000 < sum(sizes)


@pytest.mark.parametrize('name', ['a.md', 'A.TXT'])
def test_a_file_is_one_document_or_several(tmp_path, name):
  source = write(tmp_path, name, '\ufeffone\r\n\r\ntwo é\n')
  assert text.read(source)[:2] == (source, ('one\r\n\r\ntwo é\n',))
  end = '<|endoftext|>'
  write(tmp_path, name, f'one{end} two\n{end}\n{end}three{end}')
  assert text.read(source).documents == ('one', ' two\n', 'three')


def test_a_field_of_objects(tmp_path):
  lines = ['{"t": "one\u2028", "id": 1}', '', '{"t": ["two", "three"]}', '']
  source = write(tmp_path, 'a.jsonl', '\n'.join(lines))
  documents = text.read(source, field='t').documents
  assert documents == ('one\u2028', 'two\n\nthree')


@pytest.fixture
def datasets(monkeypatch):
  """A package `datasets` in which every data set has the same rows."""
  module = types.ModuleType('datasets')
  module.asked = []
  module.exceptions = types.SimpleNamespace(DatasetsError=KeyError)

  def load_dataset(path, name=None, *, split=None):
    module.asked.append((path, name, split))
    if split == 'no':
      raise ValueError('no such split\nand a page more')
    return [{'text': x} for x in ('one', '', 'two')]

  module.load_dataset = load_dataset
  monkeypatch.setitem(sys.modules, 'datasets', module)
  return module


def test_datasets_are_asked_for(datasets):
  for source, *asked in (
    ('hf:org/na-me.x/train', 'org/na-me.x', None, 'train'),
    ('hf:org/name:20.en/test', 'org/name', '20.en', 'test'),
    ('hf:org/name/train[:1%]', 'org/name', None, 'train[:1%]'),
  ):
    assert text.read(source)[:2] == (source, ('one', 'two'))
    assert datasets.asked.pop() == tuple(asked)
  with pytest.raises(ValueError, match="no text in field 'body'; .* are text"):
    text.read(source, field='body')
  with pytest.raises(ValueError, match='name/no: no such split; the form'):
    text.read('hf:org/name/no')
  sys.modules['datasets'] = None  # not installed
  with pytest.raises(ValueError, match='hf:a/b/train needs datasets: pip'):
    text.read('hf:a/b/train')


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('a.txt', ' \n<|endoftext|>\n', 'a.txt: there is no text in it'),
    ('a.txt', b'one\ntwo\n\xff\n', "a.txt: cannot be read: 'utf-8' codec"),
    ('a.jsonl', '{"text": "one"}\n{"text": ', r'a.jsonl:2: not JSON \('),
    ('a.jsonl', '{"x": 1, "y": 2}', "no text in field 'text'; .* are x, y$"),
    ('a.jsonl', '{"text": [1]}', "a.jsonl:1: no text in field 'text'"),
    ('a.jsonl', '{"text": ""}\n', 'a.jsonl: there is no text in it'),
    ('a.jsonl', '\n{"text": "\\ud83d"}', r'a.jsonl:2: \\ud83d is half of'),
    ('a.pdf', 'one', "a.pdf': allowed are a .txt, .md or .jsonl file"),
    ('', None, 'allowed are a .txt, .md or .jsonl file'),  # a folder
    ('no.txt', None, 'no.txt: cannot be read: .* No such file'),
  ],
)
def test_files_are_checked(tmp_path, name, content, message):
  path = tmp_path / name
  if content is not None:
    write(tmp_path, name, content)
  with pytest.raises(ValueError, match=message):
    text.read(str(path))


def test_held_out_is_a_partition_that_no_order_changes():
  # Each is there twice: were the two on different sides, text would leak.
  documents = [f'document {i}' for i in range(41)] * 2
  rest, held = text.held_out(corpus(*documents), 10)
  assert len(set(held.documents)) == 5
  assert not set(rest.documents) & set(held.documents)
  assert sorted(rest.documents + held.documents) == sorted(documents)
  again = text.held_out(corpus(*documents[::-1]), 10)
  assert set(again[1].documents) == set(held.documents)
  # Not simply every tenth.
  assert set(held.documents) != set(documents[:41:10])
  halves = text.held_out(corpus('a', 'b'), 9)
  assert [len(half.documents) for half in halves] == [1, 1]


def test_a_single_document_is_cut_at_a_line():
  for document, every, rest, held in (
    ('aaa\nbb\nccc\ndd', 3, 'aaa\nbb\n', 'ccc\ndd'),
    ('aaa\nbb\nccc\ndd', 6, 'aaa\nbb\nccc\n', 'dd'),
    ('no line ends', 4, 'no line e', 'nds'),
  ):
    halves = text.held_out(corpus(document), every)
    assert [half.documents for half in halves] == [(rest,), (held,)]
  with pytest.raises(ValueError, match='of 3 characters is too short to hold'):
    text.held_out(corpus('abc'), 4)


def test_merges_by_hand(tmp_path):
  """(a, b) comes four times; then (space, ab) three times."""
  t = text.train_tokenizer(corpus('ab ab', 'ab ab', 'c'), 259, tmp_path)
  assert t.size == 259
  assert t.tokens()[0] == '<|endoftext|>'
  assert t.tokens()[257:] == ['ab', 'Ġab']
  assert len(t.encode('ab ab c')) == 4
  # No pair is left that comes twice.
  assert text.train_tokenizer(corpus('ab ab'), 999, tmp_path).size == 258


@pytest.fixture(scope='module')
def manual():
  documents = text.read('stdlib:prose').documents
  return corpus(*documents[:20])


def test_trained_tokenizers_read_back_and_are_the_same_bytes(manual, tmp_path):
  one, two = tmp_path / 'new/one', tmp_path / 'two'
  t = text.train_tokenizer(manual, 600, one)
  text.train_tokenizer(manual, 600, two)
  names = ['tokenizer.json', 'tokenizer_config.json']
  assert sorted(x.name for x in one.iterdir()) == names
  for name in names:
    assert (one / name).read_bytes() == (two / name).read_bytes()
  again = tokenizer_lib.from_folder(one, 'again')
  tokenizer_lib.check_same(t, again)
  assert (t.size, t.eos_ids, t.bos_id, t.add_bos) == (600, (0,), None, False)
  assert again.eos_ids == (0,)
  for some in (UNICODE, manual.documents[3], ' leading', ''):
    ids = t.encode(some)
    assert t.decode(ids) == some
    assert again.encode(some) == ids
  packed = text.pack(manual, t, 64).reshape(-1)
  whole = t.decode(packed, special=True).rstrip('\ufffd')
  assert text.END.join([*manual.documents, '']).startswith(whole)
  # It learned something: at least two bytes a token.
  assert len(t.encode(manual.documents[3])) < len(manual.documents[3]) / 2


@pytest.mark.parity
def test_trained_tokenizers_are_read_by_transformers(manual, tmp_path):
  transformers = pytest.importorskip('transformers')
  ours = text.train_tokenizer(manual, 600, tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
  assert theirs.eos_token_id == 0 and len(theirs) == 600
  for some in (UNICODE, manual.documents[3], 'a , b .', f'a{text.END}b'):
    assert theirs(some)['input_ids'] == ours.encode(some)
    assert theirs.decode(ours.encode(some)) == some


def test_rows_by_hand():
  t = tokenizer_lib.from_bytes(258, 'bytes')
  rows = text.pack(corpus('abc', 'de', '', 'f'), t, 3)
  assert rows.dtype == np.int32
  assert rows.tolist() == [[97, 98, 99], [256, 100, 101], [256, 256, 102]]
  begun = dataclasses.replace(t, add_bos=True)
  rows = text.pack(corpus('a', 'b'), begun, 3).tolist()
  assert rows == [[257, 97, 256], [257, 98, 256]]


def test_rows_are_checked():
  t = tokenizer_lib.from_bytes(258, 'bytes')
  with pytest.raises(ValueError, match='7 tokens are less than one row of l'):
    text.pack(corpus('abc', 'de'), t, 8)
  endless = tokenizer_lib.Tokenizer('x', tokenizers.Tokenizer(t.inner.model))
  with pytest.raises(ValueError, match='x: has no end-of-text token'):
    text.pack(corpus('abc'), endless, 2)


# --- pairs -------------------------------------------------------------------


def test_pairs_of_two_fields(tmp_path, datasets):
  lines = ['{"en": "a dog", "de": "ein Hund"}', '{"de": "", "en": ""}']
  source = write(tmp_path, 'a.jsonl', lines[0])
  found = text.read(source, field='de', source_field='en')
  assert found[:2] == (source, ('ein Hund',)) and found.sources == ('a dog',)
  assert found.sha256 != text.read(source, field='de').sha256
  found = text.read('numbers', field='words', source_field='digits')
  assert len(found.documents) == 10_000
  assert (found.sources[409], found.documents[409]) == ('409', 'nine zero four')
  write(tmp_path, 'a.jsonl', '\n'.join(lines))
  for path, fields, message in (
    (source, ('de', 'en'), r"a.jsonl:2: an empty text; .* \('en'\) and a ta"),
    (source, ('de', 'fr'), "a.jsonl:1: no text in field 'fr'; .* are en, de$"),
    (source, ('fr', 'en'), "a.jsonl:1: no text in field 'fr'; .* are en, de$"),
    ('stdlib', ('de', 'en'), "'stdlib': source_field='en' is of rows; give a"),
    ('hf:a/b/train', ('text', 'text'), 'b/train:1: an empty text; a pair'),
  ):
    with pytest.raises(ValueError, match=message):
      text.read(path, field=fields[0], source_field=fields[1])


def test_pairs_stay_together_and_one_source_on_one_side():
  sources = tuple(f's{i % 20}' for i in range(60))
  documents = [f'{s} t{i}' for i, s in enumerate(sources)]
  parts = text.held_out(corpus(*documents, sources=sources), 5)
  assert [len(x.documents) for x in parts] == [48, 12]
  assert not set(parts[0].sources) & set(parts[1].sources)
  for part in parts:
    joined = zip(part.sources, part.documents, strict=True)
    assert all(d.split()[0] == s for s, d in joined)
  with pytest.raises(ValueError, match='of 3 characters is too short to hold'):
    text.held_out(corpus('a', 'b', sources=('one', 'one')), 2)


def test_the_tokenizer_of_pairs_has_the_ids_of_t5(tmp_path):
  some = corpus('ab ab', 'ab', sources=('xy xy', 'xy xy'))
  t = text.train_tokenizer(some, 280, tmp_path)
  assert t.tokens()[:2] == ['<pad>', '</s>'] and t.eos_ids == (1,)
  assert {'ab', 'xy', 'Ġxy'} <= set(t.tokens())
  # Those who add special tokens get the end behind a text.
  assert t.inner.encode('ab').ids == [*t.encode('ab'), 1]


def test_rows_of_pairs_by_hand(caplog):
  t = tokenizer_lib.from_bytes(258, 'bytes')
  some = corpus('ab', 'cdef', 'g', sources=('x', 'yz', 'uvwxy'))
  rows = text.pair_rows(some, t, 7, 5, 4)
  assert {x.dtype.name for x in rows.values()} == {'int32', 'bool'}
  assert rows['tokens'].tolist() == [
    [7, 97, 98, 256, 0],
    [7, 99, 100, 101, 102],  # cut: it has no end to learn
    [7, 103, 256, 0, 0],
  ]
  assert rows['counted'].astype(int).tolist() == [
    [0, 1, 1, 1, 0],
    [0, 1, 1, 1, 1],
    [0, 1, 1, 0, 0],
  ]
  assert rows['source'].tolist() == [
    [120, 256, 0, 0],
    [121, 122, 256, 0],
    [117, 118, 119, 256],
  ]
  assert rows['source_length'].tolist() == [2, 3, 4]
  said = '2 of 3 pairs are longer than length=5 or source_length=4: cut'
  assert caplog.messages == [said]
  text.pair_rows(some, t, 7, 6, 6)
  assert caplog.messages == [said]


def test_what_was_recorded_is_learned_from_id_by_id(tmp_path):
  """Ends included; under another tokenizer its text is what counts."""
  t, other = (tokenizer_lib.from_bytes(x, 'bytes') for x in (512, 300))
  other = dataclasses.replace(other, eos_ids=(257,))
  half, whole, cut = [*b'Hi', 0xE4], [*b'ab', 256], [*b'abc']
  row = lambda ids: {
    'text': t.decode(ids, special=True),
    'specdec_jax': {'text': ids, 'tokenizer': t.fingerprint()},
  }
  rows = [*map(row, (half, whole, cut)), {'text': 'plain'}]
  source = write(tmp_path, 'a.jsonl', '\n'.join(map(json.dumps, rows)))
  found = text.read(source)
  plain = [*b'plain', 256]
  packed = text.pack(found, t, 15).reshape(-1).tolist()
  assert packed == [*half, *whole, *cut, *plain]
  parts = text.held_out(found, 2)
  ids = [part.ids(x, t) for part in parts for x in part.documents]
  assert sorted(ids) == sorted([half, whole, cut, plain])
  anew = text.pack(found, other, 5).reshape(-1).tolist()
  assert anew[:6] == [*'Hi\ufffd'.encode(), 257]
  # What spells its end has no other.
  assert corpus().ids('ab<eos>', t) == whole


def test_recorded_pairs_have_the_ends_that_were_said(tmp_path):
  t = tokenizer_lib.from_bytes(512, 'bytes')
  own = {'source': [*b'in', 256], 'tokenizer': t.fingerprint()}
  rows = [
    {
      'source': 'in<eos>',
      'text': t.decode(ids, special=True),
      'specdec_jax': own | {'text': ids},
    }
    for ids in ([*b'out', 256], [*b'cut'])
  ]
  source = write(tmp_path, 'a.jsonl', '\n'.join(map(json.dumps, rows)))
  found = text.pair_rows(text.read(source, source_field='source'), t, 7, 6, 4)
  assert found['source'].tolist() == [[*b'in', 256, 0]] * 2
  assert found['source_length'].tolist() == [3, 3]
  assert found['tokens'].tolist() == [[7, *b'out', 256, 0], [7, *b'cut', 0, 0]]
  assert found['counted'].sum(1).tolist() == [4, 3]
