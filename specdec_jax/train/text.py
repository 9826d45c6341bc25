"""Training text: sources, the held-out part, tokenizers and token rows."""

import hashlib
import json
import pathlib
import platform
import re
import sysconfig
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from specdec_jax.io import files
from specdec_jax.io import tokenizer as tokenizer_lib

# Separates the documents of a text file; our tokenizers end a text with it.
END = '<|endoftext|>'

_SUFFIXES = ('.txt', '.md')
_MOST_CHARACTERS = 8_000_000  # of the library's sources
# Left out of `stdlib`: tests, other packages, the manual itself, tables,
# programs, descriptions of the machine that built this Python.
_SKIPPED = (
  'tests?|idle_test|site-packages|dist-packages|pydoc_data|encodings|idlelib|'
  'lib2to3|distutils|turtledemo|config-.*|_sysconfigdata.*'
)


class Corpus(NamedTuple):
  """Documents to train on or to evaluate with."""

  label: str  # their source, for messages
  documents: tuple[str, ...]  # none is blank
  sha256: str  # of the documents, joined by NUL


def read(source: str, *, field: str = 'text') -> Corpus:
  """The documents of a source, always in the same order.

  Args:
    source: one of
      a .txt or .md file: one document, or several with END between them;
      a folder: all .txt and .md files in it and in its folders;
      a .jsonl file of objects whose `field` is a text, or a list of texts,
      which are joined by blank lines;
      hf:org/name[:config]/split: rows as those of JSONL, by the `datasets`
      package;
      stdlib:prose: Python's own manual; stdlib: the manual and up to 8 million
      characters of its library. Both differ between versions of Python.

  Raises:
    ValueError: no such source, one that cannot be read, one without text.
  """
  path, label = pathlib.Path(source), source
  if source in ('stdlib', 'stdlib:prose'):
    from pydoc_data import topics  # half a megabyte, and not in every Python

    label = f'{source} of Python {platform.python_version()}'
    documents = list(topics.topics.values())
    documents += _library() if source == 'stdlib' else []
  elif source.startswith('hf:'):
    documents = _dataset(source, field)
  elif path.is_dir():
    paths = _below(path, _SUFFIXES)
    documents = [x for one in paths for x in _decoded(one).split(END)]
  else:
    documents = _file(path, field)
  return _corpus(label, documents)


def held_out(corpus: Corpus, every: int) -> tuple[Corpus, Corpus]:
  """Splits a corpus into (training part, held-out part).

  About one document in `every`, and at least one, is held out; equal documents
  go to the same part. A single document is cut: its last 1 / every is held out.

  Raises:
    ValueError: a document too short to cut.
  """
  # By hash, not by index: a corpus is often ordered by subject.
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
  corpus: Corpus, vocab: int, folder: pathlib.Path
) -> tokenizer_lib.Tokenizer:
  """Trains a byte-level BPE with END as its id 0 and writes it to a folder.

  The files are in Hugging Face's format, and the same for the same corpus.

  Args:
    corpus: to train on.
    vocab: number of tokens, 257 (all bytes and END) or more; the tokenizer has
      fewer if no pair of tokens occurs twice any more.
    folder: to write to.
  """
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
  folder.mkdir(parents=True, exist_ok=True)
  files.write(folder / 'tokenizer.json', inner.to_str(pretty=True))
  files.write(folder / 'tokenizer_config.json', json.dumps(settings, indent=2))
  return tokenizer_lib.from_folder(folder, str(folder))


def pack(
  documents: Iterable[str], tokenizer: tokenizer_lib.Tokenizer, length: int
) -> np.ndarray:
  """The tokens of all documents, eos after each: int32 [rows, length].

  A document continues in the next row; an incomplete last row is dropped.

  Raises:
    ValueError: less than one row; a tokenizer without eos.
  """
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


def _library() -> list[str]:
  """Files of the standard library, by path, up to _MOST_CHARACTERS."""
  out, room = [], _MOST_CHARACTERS
  folder = pathlib.Path(sysconfig.get_path('stdlib'))
  for path in _below(folder, ('.py',), _SKIPPED):
    text = _decoded(path)
    room -= len(text)
    if room < 0:
      break
    out.append(text)
  return out


def _below(
  folder: pathlib.Path, suffixes: tuple[str, ...], skipped: str = '(?!)'
) -> list[pathlib.Path]:
  """The files in a folder and its subfolders, sorted by path.

  skipped: a pattern of names; whatever is in a folder of such a name is left
    out too. By default there is none.
  """
  inside = lambda path: path.relative_to(folder)
  found = [
    path
    for path in folder.rglob('*')
    if path.name.lower().endswith(suffixes)
    and path.is_file()
    and not any(re.fullmatch(skipped, name) for name in inside(path).parts)
  ]
  return sorted(found, key=lambda path: inside(path).as_posix())


def _file(path: pathlib.Path, field: str) -> list[str]:
  name = path.name.lower()
  if name.endswith(_SUFFIXES):
    return _decoded(path).split(END)
  if not name.endswith('.jsonl'):
    raise ValueError(
      f'corpus {str(path)!r}: allowed are a .txt, .md or .jsonl file, a folder '
      'of .txt and .md files, hf:org/name[:config]/split, stdlib, stdlib:prose'
    )
  return [_text(row, field, where) for where, row in files.read_jsonl(path)]


def _decoded(path: pathlib.Path) -> str:
  try:
    return path.read_bytes().decode('utf-8-sig')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'corpus {path}: cannot be read: {error}') from error


def _text(row: dict[str, Any], field: str, where: str) -> str:
  value = row.get(field)
  texts: list[Any] = value if isinstance(value, list) else [value]
  if not all(isinstance(x, str) for x in texts):
    raise ValueError(
      f'{where}: no text in field {field!r}; the fields are {", ".join(row)}'
    )
  return '\n\n'.join(texts)


def _dataset(source: str, field: str) -> list[str]:
  try:
    import datasets  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    raise ValueError(
      f'corpus {source} needs datasets: pip install datasets'
    ) from error
  repo, _, split = source.removeprefix('hf:').rpartition('/')
  name, _, config = repo.partition(':')
  try:
    rows = datasets.load_dataset(name, config or None, split=split)
  except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
    reason = str(error).partition('\n')[0]
    raise ValueError(
      f'corpus {source}: {reason}; the form is hf:org/name[:config]/split'
    ) from error
  return [_text(row, field, f'{source}:{i}') for i, row in enumerate(rows)]
