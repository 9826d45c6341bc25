"""Texts that the rows' models learn from: pairs, sentences and functions."""

import gzip

import pytest

from experiments import texts
from specdec_jax.bench import prompts as prompts_lib


def captions(folder, name, en, de):
  for language, lines in (('en', en), ('de', de)):
    text = '\n'.join(lines) + '\n'
    path = folder / f'{name}.{language}.gz'
    path.write_bytes(gzip.compress(text.encode()))


def test_captions_are_pairs_and_no_caption_is_in_both_parts(tmp_path):
  captions(tmp_path, 'test_2016_flickr', ['a', 'b'], ['A', 'B'])
  captions(tmp_path, 'train', ['c', 'a', 'd'], ['C', 'X', 'B'])
  names = texts.TEST, texts.TRAIN
  test, train = (texts.pairs(str(tmp_path), x) for x in names)
  assert test[1] == {'en': 'b', 'de': 'B'}
  assert texts.apart(train, test) == [{'en': 'c', 'de': 'C'}]
  captions(tmp_path, 'train', ['c', 'a', 'd'], ['C', 'X'])
  with pytest.raises(ValueError, match='train has 3 lines of English and 2 of'):
    texts.pairs(str(tmp_path), 'train')
  with pytest.raises(ValueError, match='--multi30k=/nowhere: train.en.gz'):
    texts.pairs('/nowhere', 'train')


def test_sentences_of_docstrings_are_texts(tmp_path):
  long = 'Returns what it was given, ' * 4 + '\n  and nothing else.'
  source = f'def f():\n  """Short.\n\n  {long}\n\n  {long[:-1]}\n  """\n'
  for name in ('one.py', 'tests/two.py', 'three.txt'):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
  (tmp_path / 'four.py').write_text('def (')
  found = [*texts.docstrings(tmp_path)]
  assert found == [' '.join(long.split())]
  manual = [x.turns[0] for x in prompts_lib.manual()]
  assert 1000 < len(manual) == len(set(manual))
  kept = texts.apart(
    [{'text': manual[0]}, {'text': 'a'}], [{'text': manual[0]}]
  )
  assert kept == [{'text': 'a'}]


FUNCTION = """
def spread_out(x):
  \'\'\'Says how far apart the values are.

  More of it.
  \'\'\'
  return max(x) - min(x)
"""


def test_functions_are_summed_up_by_the_first_line_of_their_docstring(tmp_path):
  more = 'def a():\n  """Too short."""\n  return 1\n'
  more += 'def b():\n  """Returns nothing whatever it is given."""\n'
  (tmp_path / 'one.py').write_text(FUNCTION + more)
  (tmp_path / 'two').mkdir()
  (tmp_path / 'two/x.py').write_text(FUNCTION.replace('max', 'abs'))
  code = 'def spread_out(x):\n  return max(x) - min(x)'
  summary = 'Says how far apart the values are.'
  first, second = texts.functions(tmp_path)
  assert first == ('one', {'code': code, 'summary': summary})
  assert second[0] == 'two'
  assert texts.name_of(code) == 'spread out'


def test_no_package_function_or_line_is_in_both_parts():
  rows = [
    (f'package{i}', {'code': f'{i} {j}', 'summary': f'{i if j else ""}'})
    for i in range(200)
    for j in range(2)
  ]
  parts = texts.split(rows)
  test, train = parts[texts.HELD], parts[texts.TRAIN]
  seen = lambda part, key: {x[key] for x in part}
  packages = lambda part: {x.split()[0] for x in seen(part, 'code')}
  assert 0 < len(packages(test)) < 30 < len(packages(train))
  assert not packages(test) & packages(train)
  assert not seen(test, 'summary') & seen(train, 'summary')
