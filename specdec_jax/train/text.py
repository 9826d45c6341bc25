"""Text to train on: where it comes from, its tokenizer, its rows of tokens.

Knows no model, and downloads nothing unless hf: is asked for.
"""

import codecs
import gzip
import hashlib
import json
import os
import pathlib
import platform
import re
import sysconfig
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from specdec_jax.io import files
from specdec_jax.io import tokenizer as tokenizer_lib

# Separates the documents of a text file; our tokenizers end a text with it.
END = '<|endoftext|>'

_TEXT = ('.txt', '.md', '.txt.gz', '.md.gz')
_JSONL = ('.jsonl', '.jsonl.gz')
_FORMS = (
  'stdlib, stdlib:prose, a .txt, .md or .jsonl file (or a .gz of one), a '
  'folder of .txt and .md files, hf:org/name[:config]/split'
)


class Corpus(NamedTuple):
  """Documents, none of them blank; sha256 is of them, NUL between two."""

  label: str
  documents: tuple[str, ...]
  sha256: str


def read(source: str, *, field: str = 'text') -> Corpus:
  """The documents of a source, always in the same order.

  stdlib: Python's own manual and the sources of its library, up to 8 million
  characters; stdlib:prose: the manual alone. Both differ between versions of
  Python. A .txt or .md file is one document, or several with END between them,
  and a folder all that are in it, sub-folders too. The objects of a .jsonl file
  and the rows of hf:org/name[:config]/split (by the `datasets` package) give
  what `field` holds: a text, or a list of texts, joined by blank lines.

  Raises:
    ValueError: no such source, one that cannot be read, one without text.
  """
  path = pathlib.Path(source)
  name = path.name.lower()
  if source == 'stdlib:prose':
    documents = _manual(source)
  elif source == 'stdlib':
    documents = [*_manual(source), *_sources(source)]
  elif source.startswith('hf:'):
    documents = _dataset(source, field)
  elif path.is_dir():
    documents = _folder(path)
  elif name.endswith(_TEXT):
    documents = _decoded(path).split(END)
  elif name.endswith(_JSONL):
    documents = _objects(path, field)
  else:
    raise ValueError(f'corpus {source!r}: allowed are {_FORMS}')
  label = source
  if source.startswith('stdlib'):
    label = f'{source} of Python {platform.python_version()}'
  return _corpus(label, documents)


def held_out(corpus: Corpus, every: int) -> tuple[Corpus, Corpus]:
  """(the rest, about one document in `every`); at least one, and equal ones
  on one side. A single document is cut: its last 1 / every is held out.

  Raises:
    ValueError: every below 2, or a document too short to cut.
  """
  if every < 2:
    raise ValueError(f'every={every}: allowed are 2 and more')
  # By hash, not by place: a corpus is often ordered by subject.
  ranked = sorted(set(corpus.documents), key=_sha256)
  if len(ranked) > 1:
    chosen = set(ranked[::every])
    rest = [d for d in corpus.documents if d not in chosen]
    held = [d for d in corpus.documents if d in chosen]
  else:
    text = ranked[0]
    about = len(text) - len(text) // every
    cut = text.rfind('\n', 0, about) + 1 or about
    rest, held = [text[:cut]], [text[cut:]]
    if not rest[0].strip() or not held[0].strip():
      raise ValueError(
        f'corpus {corpus.label}: a single document of {len(text)} characters '
        f'is too short to hold out 1 / {every} of it; give more text'
      )
  return (
    _corpus(f'{corpus.label}, but 1 in {every}', rest),
    _corpus(f'{corpus.label}, 1 in {every}', held),
  )


def train_tokenizer(
  corpus: Corpus, vocab: int, folder: str | os.PathLike
) -> tokenizer_lib.Tokenizer:
  """Trains a byte-level BPE with END as its id 0 and writes it to a folder.

  Its files are those of Hugging Face and the same for the same corpus. It has
  `vocab` tokens, fewer when the corpus has no more pairs that come twice.

  Raises:
    ValueError: vocab below the 256 bytes and END; a folder not writable.
  """
  if vocab < 257:
    raise ValueError(
      f'vocab={vocab}: allowed are 257 (all bytes and {END}) and more'
    )
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab,
    min_frequency=2,
    show_progress=False,
    special_tokens=[END],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  inner.train_from_iterator(corpus.documents, trainer)
  settings = {
    # transformers 4 would otherwise drop spaces before punctuation.
    'clean_up_tokenization_spaces': False,
    'eos_token': END,
    'tokenizer_class': 'PreTrainedTokenizerFast',
  }
  folder = pathlib.Path(folder)
  try:
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / 'tokenizer.json', inner.to_str(pretty=True))
    files.write(
      folder / 'tokenizer_config.json', json.dumps(settings, indent=2)
    )
  except OSError as error:
    raise ValueError(
      f'output {folder}: cannot be written: {error.strerror}'
    ) from error
  return tokenizer_lib.from_folder(folder, str(folder))


def pack(
  documents: Iterable[str], tokenizer: tokenizer_lib.Tokenizer, length: int
) -> np.ndarray:
  """int32 [n, length]: the tokens of all documents, eos after each, in rows.

  A document goes on in the next row; what does not fill the last is dropped.

  Raises:
    ValueError: length below 2, less than one row, a tokenizer without eos.
  """
  if length < 2:
    raise ValueError(
      f'length={length}: allowed are 2 and more, a token and the next'
    )
  if not tokenizer.eos_ids:
    raise ValueError(
      f'{tokenizer.source}: has no end-of-text token to put between documents; '
      'use a tokenizer with an eos_token'
    )
  end = tokenizer.eos_ids[0]
  ids = [np.asarray([*tokenizer.encode(d), end], np.int32) for d in documents]
  tokens = sum(map(len, ids))
  rows = tokens // length
  if not rows:
    raise ValueError(
      f'{tokens} tokens are less than one row of length={length}: give more '
      'text or a shorter length'
    )
  return np.concatenate(ids)[: rows * length].reshape(rows, length)


def _corpus(label: str, documents: Sequence[str]) -> Corpus:
  documents = tuple(d for d in documents if d.strip())
  if not documents:
    raise ValueError(f'corpus {label}: there is no text in it')
  return Corpus(label, documents, _sha256('\0'.join(documents)))


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _manual(source: str) -> list[str]:
  try:
    from pydoc_data import topics
  except ImportError as error:
    raise ValueError(
      f'corpus {source}: this Python comes without pydoc_data; install its '
      'standard library whole, or give a text file'
    ) from error
  return list(topics.topics.values())


# Tests; what is not the library's; the manual itself; tables; programs; what
# tells of the machine that built this Python.
_SKIPPED = re.compile(
  'tests?|idle_test|site-packages|dist-packages|pydoc_data|encodings|idlelib|'
  'lib2to3|distutils|turtledemo|config-.*|_sysconfigdata.*'
)
_MOST_CHARACTERS = 8_000_000


def _sources(source: str) -> list[str]:
  """The library's files in the order of their names, while there is room."""
  folder = pathlib.Path(sysconfig.get_path('stdlib'))
  out, room = [], _MOST_CHARACTERS
  for path in _below(folder, ('.py',), _SKIPPED):
    out.append(_decoded(path))
    room -= len(out[-1])
    if room < 0:
      return out[:-1]
  if not out:
    raise ValueError(
      f'corpus {source}: no sources of the library in {folder}; use '
      'stdlib:prose or give a text file'
    )
  return out


def _folder(folder: pathlib.Path) -> list[str]:
  found = _below(folder, _TEXT)
  if not found:
    raise ValueError(
      f'corpus {folder}: no .txt or .md file (or a .gz of one) in this folder'
    )
  return [d for path in found for d in _decoded(path).split(END)]


def _below(
  folder: pathlib.Path,
  suffixes: tuple[str, ...],
  skipped: re.Pattern = re.compile('(?!)'),
) -> list[pathlib.Path]:
  """The files of a folder and those in it, in the order of their paths."""
  found = []
  for root, folders, names in os.walk(folder):
    # In place, so that walk does not enter them: site-packages is large.
    folders[:] = [name for name in folders if not skipped.fullmatch(name)]
    found += [
      pathlib.Path(root, name)
      for name in names
      if name.lower().endswith(suffixes) and not skipped.fullmatch(name)
    ]
  return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _decoded(path: pathlib.Path) -> str:
  try:
    data = path.read_bytes()
    if path.name.lower().endswith('.gz'):
      data = gzip.decompress(data)
  except (OSError, EOFError, zlib.error) as error:
    reason = getattr(error, 'strerror', None) or error
    raise ValueError(f'corpus {path}: cannot be read: {reason}') from error
  data = data.removeprefix(codecs.BOM_UTF8)
  try:
    return data.decode()
  except UnicodeDecodeError as error:
    line = data[: error.start].count(b'\n') + 1
    raise ValueError(
      f'corpus {path}:{line}: not UTF-8 ({error.reason}): save it as UTF-8'
    ) from error


def _objects(path: pathlib.Path, field: str) -> list[str]:
  out = []
  # Not splitlines: JSON allows a bare U+2028 in a string, which would split it.
  for number, line in enumerate(_decoded(path).split('\n'), 1):
    if not line.strip():
      continue
    where = f'corpus {path}:{number}'
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      raise ValueError(
        f'{where}: not JSON ({error}): each line must be one JSON object'
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
        f'{where}: {type(row).__name__} is not an object: write {{"{field}": '
        '"..."}'
      )
    if field not in row:
      raise ValueError(
        f'{where}: no field {field!r}; name one that it has: {", ".join(row)}'
      )
    out.append(_text(row[field], field, where))
  return out


def _text(value: Any, field: str, where: str) -> str:
  texts = value if isinstance(value, list) else [value]
  if not all(isinstance(text, str) for text in texts):
    raise ValueError(
      f'{where}: {field} holds no text: it must be a text or a list of texts'
    )
  try:
    _sha256(text := '\n\n'.join(texts))
  except UnicodeEncodeError as error:
    raise ValueError(
      f'{where}: {field} holds half of a surrogate pair: write both halves or '
      'the character itself'
    ) from error
  return text


def _dataset(source: str, field: str) -> list[str]:
  form = r'hf:([\w.-]+/[\w.-]+)(?::([\w.-]+))?/([^/]+)'
  match = re.fullmatch(form, source)
  if not match:
    raise ValueError(
      f'corpus {source!r}: the form is hf:org/name[:config]/split'
    )
  try:
    import datasets  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise ValueError(
      f'corpus {source} needs datasets: pip install datasets'
    ) from error
  repo, config, split = match.groups()
  try:
    data = datasets.load_dataset(repo, config, split=split)
  except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
    first = str(error).partition('\n')[0]
    raise ValueError(
      f'corpus {source}: not to be had: {type(error).__name__}: {first}'
    ) from error
  if field not in data.column_names:
    raise ValueError(
      f'corpus {source}: no field {field!r}; name one that it has: '
      f'{", ".join(data.column_names)}'
    )
  return [
    _text(value, field, f'corpus {source}: row {i}')
    for i, value in enumerate(data[field])
  ]
