"""Writes the texts that the rows' models learn from, as JSONL for training.

python experiments/texts.py --multi30k=DIR --output=DIR
python experiments/texts.py --docstrings --output=DIR
python experiments/texts.py --functions --output=DIR
python experiments/texts.py --library --output=DIR

The first writes pairs of English and German captions. DIR has train.en.gz,
train.de.gz and test_2016_flickr's, as in https://github.com/multi30k/dataset
(data/task1/raw). Line i of both is a pair.

The second writes docstring paragraphs from this Python's library and what is
installed, for drafts of a model that writes titles. None is in Python's manual,
whose titles judge them.

The third writes pairs of their functions and the docstring's first line. Every
package is in one part; no function and no line is in both.

The fourth writes the manual and this Python's library, less one document in 20.
"""

import ast
import gzip
import hashlib
import json
import pathlib
import re
import sys
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np
from absl import flags

from specdec_jax import program
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.distill import training_prompts
from specdec_jax.io import files
from specdec_jax.train import text

_FOLDER = flags.DEFINE_string('multi30k', '', 'folder of the captions')
_DOCSTRINGS = flags.DEFINE_bool('docstrings', False, 'paragraphs of docstrings')
_FUNCTIONS = flags.DEFINE_bool('functions', False, 'functions and what they do')
_LIBRARY = flags.DEFINE_bool(
  'library', False, "the manual and Python's library"
)
_OUTPUT = flags.DEFINE_string('output', '', 'folder of train.jsonl and others')
TRAIN, TEST, HELD = 'train', 'test_2016_flickr', 'held_out'
_LINE, _CODE = (15, 100), 500  # of a docstring's first line, and of a function
PIECE = 32  # tokens of a prompt cut from a document
_OUT = 20  # one document in so many is held out
# By the field of the references of pairs, that of the sources.
SOURCES = {'de': 'en', 'summary': 'code', 'words': 'digits'}
_SKIPPED = {'site-packages', 'test', 'tests', 'idlelib', 'lib2to3'}


def prompts(source: str, most: int, *, counted: str, field: str, tokenizer):
  """Reads a row's (prompts, references by prompt), in the order of their use.

  Args:
    source: questions, questions:code, questions:maths: generated; paragraphs:
      of Python's manual; held out: pieces of documents that a model of
      scripts/train.py has not read; built in: those of the benchmark; numbers,
      or a .jsonl file of pairs; another .jsonl file: prompts, as the benchmark
      reads them.
    most: prompts.
    counted: source of the text that n-grams are counted on.
    field: the references' in pairs; empty: there are none.
    tokenizer: cuts pieces.
  """
  make = lambda found: tuple(
    prompts_lib.Prompt(str(i), turns=(x,)) for i, x in enumerate(found)
  )
  if field:
    read = text.read(source, field=field, source_field=SOURCES[field])
    found = make(read.sources[:most])
    return found, {x.id: read.documents[int(x.id)] for x in found}
  kind, _, topic = source.partition(':')
  if kind == 'questions':
    return make(training_prompts.generated(most, 0, topic)), {}
  if source == 'held out':
    _, held = text.held_out(text.read(counted), _OUT)
    pieces = text.pack(held, tokenizer, PIECE)
    order = np.random.default_rng(0).permutation(len(pieces))[:most]
    return tuple(
      prompts_lib.Prompt(str(i), tokens=tuple(pieces[i].tolist()))
      for i in order.tolist()
    ), {}
  named = {'paragraphs': prompts_lib.manual, 'built in': prompts_lib.builtin}
  found = named[source]() if source in named else prompts_lib.read(source)
  return tuple(found[:most]), {}


def pairs(folder: str, name: str) -> list[dict[str, str]]:
  """Reads a part's captions {'en', 'de'}; ValueError if files do not pair."""
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
  """Keeps the rows in train that share no text with test."""
  seen = {x for row in test for x in row.values()}
  return [row for row in train if not seen & set(row.values())]


def parsed(folder: pathlib.Path) -> Iterator[tuple[str, list[str], ast.Module]]:
  """Yields (package, lines, tree) for a folder's modules, without tests."""
  for path in sorted(folder.rglob('*.py')):
    parts = path.relative_to(folder).parts
    if _SKIPPED & set(parts):
      continue
    try:
      with tokenize.open(path) as file:
        source = file.read()
      with warnings.catch_warnings(action='ignore'):
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError):
      continue  # of another Python, or meant to be wrong
    yield parts[0].removesuffix('.py'), source.split('\n'), tree


def docstrings(folder: pathlib.Path) -> Iterator[str]:
  """Yields docstrings' paragraphs below a folder that read as sentences."""
  for _, _, tree in parsed(folder):
    for node in ast.walk(tree):
      if isinstance(
        node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
      ):
        for found in (ast.get_docstring(node) or '').split('\n\n'):
          found = ' '.join(found.split())
          fits = prompts_lib.SHORT < len(found) < prompts_lib.LONG
          if fits and found.endswith('.'):
            yield found


def functions(folder: pathlib.Path) -> Iterator[tuple[str, dict[str, str]]]:
  """Yields (package, {'code', 'summary'}) for the functions below a folder.

  code: a function's beginning, without its docstring and decorators. summary:
  the docstring's first line, if it is a sentence of its own.
  """
  for package, lines, tree in parsed(folder):
    for node in ast.walk(tree):
      if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        continue
      summary = (ast.get_docstring(node) or '').split('\n')[0].strip()
      shortest, longest = _LINE
      if not (shortest <= len(summary) <= longest and summary.endswith('.')):
        continue
      doc = node.body[0]
      head = lines[node.lineno - 1 : doc.lineno - 1]
      body = lines[doc.end_lineno : node.end_lineno]
      if head and any(x.strip() for x in body):
        code = textwrap.dedent('\n'.join(head + body)).strip()
        yield package, {'code': code[:_CODE], 'summary': summary}


def name_of(code: str) -> str:
  """Splits a function's name into words."""
  found = re.match(r'(?:async )?def (\w+)', code)
  return ' '.join((found[1] if found else '').split('_')).strip()


def split(found) -> dict[str, list[dict[str, str]]]:
  """Splits (package, row) into parts: packages are held out by their names."""
  held = lambda name: hashlib.sha256(name.encode()).digest()[0] % _OUT == 0
  rows = {row['code']: (name, row) for name, row in found}
  every = [rows[x] for x in sorted(rows)]
  order = np.random.default_rng(0).permutation(len(every)).tolist()
  test, train = (
    [every[i][1] for i in order if held(every[i][0]) == part]
    for part in (True, False)
  )
  return {HELD: test, TRAIN: apart(train, test)}


def _installed() -> list[pathlib.Path]:
  places = map(sysconfig.get_path, ('stdlib', 'purelib'))
  return [pathlib.Path(x) for x in dict.fromkeys(places)]


def _documented() -> list[dict[str, str]]:
  manual = [x.turns[0] for x in prompts_lib.manual()]
  judged = [{'text': ' '.join(x.split())} for x in manual]
  found = [x for y in _installed() for x in docstrings(y)]
  return apart([{'text': x} for x in dict.fromkeys(found)], judged)


def run() -> bool:
  output = program.open_workdir(_OUTPUT.value)
  if output is None:
    raise ValueError("--output='': name a folder")
  kinds = _FOLDER, _DOCSTRINGS, _FUNCTIONS, _LIBRARY
  if sum(bool(x.value) for x in kinds) != 1:
    raise ValueError(
      'give one of --multi30k=DIR, --docstrings, --functions, --library'
    )
  if _DOCSTRINGS.value:
    parts = {TRAIN: _documented()}
  elif _FUNCTIONS.value:
    parts = split(x for y in _installed() for x in functions(y))
  elif _LIBRARY.value:
    kept, _ = text.held_out(text.read('stdlib'), _OUT)
    parts = {TRAIN: [{'text': x} for x in kept.documents]}
  else:
    test = pairs(_FOLDER.value, TEST)
    parts = {TEST: test, TRAIN: apart(pairs(_FOLDER.value, TRAIN), test)}
  for name, found in parts.items():
    lines = '\n'.join(json.dumps(x, ensure_ascii=False) for x in found)
    files.write(output / f'{name}.jsonl', lines)
    last = {[*x.values()][-1] for x in found}
    told = f'{len(found)} rows, {len(last)} distinct in their last field'
    print(f'{output / name}.jsonl: {told}')
  return True


if __name__ == '__main__':
  program.launch(run)
