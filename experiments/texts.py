"""Texts that the rows' models learn from, as JSONL for the training programs.

python experiments/texts.py --multi30k=DIR --output=DIR
python experiments/texts.py --docstrings --output=DIR

The first writes pairs of English and German captions. DIR has train.en.gz,
train.de.gz and test_2016_flickr's, as in https://github.com/multi30k/dataset
(data/task1/raw). Line i of both is a pair.

The second writes paragraphs of the docstrings of this Python's library and of
what is installed, for drafts of a model that writes titles. None is in Python's
manual, whose titles judge them.
"""

import ast
import gzip
import json
import pathlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from specdec_jax.io import files  # noqa: E402
from specdec_jax.train import text  # noqa: E402

_FOLDER = flags.DEFINE_string('multi30k', '', 'folder of the captions')
_DOCSTRINGS = flags.DEFINE_bool('docstrings', False, 'paragraphs of docstrings')
_OUTPUT = flags.DEFINE_string('output', '', 'folder of train.jsonl and others')
TRAIN, TEST = 'train', 'test_2016_flickr'
_SHORT, _LONG = 80, 1000  # characters of a paragraph
_SKIPPED = {'site-packages', 'test', 'tests', 'idlelib', 'lib2to3'}


def pairs(folder: str, name: str) -> list[dict[str, str]]:
  """The captions {'en', 'de'} of a part.

  Raises:
    ValueError: a file that is not there, or numbers of lines that differ.
  """
  texts = {}
  for language in ('en', 'de'):
    path = pathlib.Path(folder) / f'{name}.{language}.gz'
    try:
      read = gzip.decompress(path.read_bytes()).decode('utf-8')
    except (OSError, EOFError, UnicodeDecodeError) as error:
      raise ValueError(f'--multi30k={folder}: {path.name}: {error}') from error
    texts[language] = read.strip().split('\n')
  counts = {language: len(x) for language, x in texts.items()}
  if len(set(counts.values())) > 1:
    raise ValueError(
      f'--multi30k={folder}: {name} has {counts["en"]} lines of English and '
      f'{counts["de"]} of German; line i of both must be a pair'
    )
  lines = zip(*texts.values(), strict=True)
  return [{'en': en.strip(), 'de': de.strip()} for en, de in lines]


def apart(train, test) -> list[dict[str, str]]:
  """The rows of train that share no text with test."""
  seen = {x for row in test for x in row.values()}
  return [row for row in train if not seen & set(row.values())]


def paragraphs(corpus: text.Corpus) -> list[str]:
  """Those of its documents that are not short, shuffled."""
  found = [x.strip() for y in corpus.documents for x in y.split('\n\n')]
  found = list(dict.fromkeys(x for x in found if len(x) > _SHORT))
  order = np.random.default_rng(0).permutation(len(found)).tolist()
  return [found[i][:_LONG] for i in order]


def docstrings(folder: pathlib.Path) -> Iterator[str]:
  """Paragraphs of the docstrings below a folder that read as sentences."""
  for path in sorted(folder.rglob('*.py')):
    if _SKIPPED & set(path.relative_to(folder).parts):
      continue
    try:
      with warnings.catch_warnings(action='ignore'):
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
      continue  # of another Python, or meant to be wrong
    for node in ast.walk(tree):
      if isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
      ):
        for found in (ast.get_docstring(node) or '').split('\n\n'):
          found = ' '.join(found.split())
          if _SHORT < len(found) < _LONG and found.endswith('.'):
            yield found


def _documented() -> list[dict[str, str]]:
  manual = paragraphs(text.read('stdlib:prose'))
  judged = [{'text': ' '.join(x.split())} for x in manual]
  places = dict.fromkeys(map(sysconfig.get_path, ('stdlib', 'purelib')))
  found = [x for y in places for x in docstrings(pathlib.Path(y))]
  return apart([{'text': x} for x in dict.fromkeys(found)], judged)


def run() -> bool:
  output = runtime.open_workdir(_OUTPUT.value)
  if output is None:
    raise ValueError("--output='': name a folder")
  if bool(_FOLDER.value) == _DOCSTRINGS.value:
    raise ValueError('give either --multi30k=DIR or --docstrings')
  if _DOCSTRINGS.value:
    parts = {TRAIN: _documented()}
  else:
    test = pairs(_FOLDER.value, TEST)
    parts = {TEST: test, TRAIN: apart(pairs(_FOLDER.value, TRAIN), test)}
  for name, found in parts.items():
    lines = '\n'.join(json.dumps(x, ensure_ascii=False) for x in found)
    files.write(output / f'{name}.jsonl', lines)
    print(f'{output / name}.jsonl: {len(found)} rows')
  return True


if __name__ == '__main__':
  runtime.launch(run)
