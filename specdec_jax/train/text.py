"""Reads training text: sources, held-out part, tokenizers, token rows."""

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
from absl import logging

from specdec_jax import requests
from specdec_jax.io import files
from specdec_jax.io import tokenizer as tokenizer_lib

# Separates the documents of a text file; our tokenizers end a text with it.
END = '<|endoftext|>'

_MOST_CHARACTERS = 8_000_000  # of the library's sources
_DIGITS = 'zero one two three four five six seven eight nine'.split()
# Names that `stdlib` leaves out: tests, other packages, the manual itself,
# tables, programs, descriptions of the machine that built this Python.
_SKIPPED = (
  'tests?|idle_test|site-packages|dist-packages|pydoc_data|encodings|idlelib|'
  'lib2to3|distutils|turtledemo|config-.*|_sysconfigdata.*'
)


class Corpus(NamedTuple):
  """Documents to train on or to evaluate with."""

  label: str  # their source, for messages
  documents: tuple[str, ...]  # none is blank
  sha256: str  # of the documents, then the sources, joined by NUL
  sources: tuple[str, ...] = ()  # what an encoder reads, one for each document
  # Of what a server has recorded: (its tokenizer's fingerprint, ids), by text.
  said: dict[str, tuple[str, list[int]]] = {}

  def ids(self, text: str, tokenizer: tokenizer_lib.Tokenizer) -> list[int]:
    """Returns the ids that a server decoded, or encodes text and an end."""
    whose, said = self.said.get(text, ('', []))
    if whose and whose == tokenizer.fingerprint():
      return said
    found, end = tokenizer.encode(text), end_of(tokenizer)
    return found if found[-1:] == [end] else [*found, end]


def digests(source: str) -> dict[str, str]:
  """Hashes a corpus that is a file: {'text': SHA-256}; {} for others."""
  path = pathlib.Path(source)
  return {'text': files.sha256(path)} if path.is_file() else {}


def read(source: str, *, field: str = 'text', source_field: str = '') -> Corpus:
  """Reads a source's documents, always in the same order.

  Args:
    source: one of
      a .txt or .md file: one document, or several with END between them;
      a .jsonl file: objects whose `field` is a text, or texts to join by blank
      lines;
      hf:org/name[:config]/split: rows like JSONL's, by the `datasets` package;
      stdlib:prose: Python's own manual; stdlib: the manual and up to 8 million
      characters of its library. Both differ between versions of Python;
      numbers: rows to try an encoder-decoder with, 'digits' ("409") and
      'words', the digits' names from the last on ("nine zero four").
    field: of JSONL and Hugging Face rows, their text.
    source_field: in such rows, what an encoder reads before the text, or ''.

  Raises:
    ValueError: an unknown or unreadable source, or one without text; a row with
      a source and no text, or the reverse.
  """
  rows = _rows(source)
  if rows is not None:
    fields = (field, source_field) if source_field else (field,)
    texts, said = [], {}
    for where, row in rows:
      texts.append(_texts(row, fields, where))
      own = row.get('specdec_jax')
      if isinstance(own, dict) and {'tokenizer', *fields} <= {*own}:
        pairs = zip(fields, texts[-1], strict=True)
        said |= {x: (own['tokenizer'], own[name]) for name, x in pairs}
    columns = zip(*texts, strict=True) if texts else ((),)
    return _corpus(source, *columns)._replace(said=said)
  if source_field:
    raise ValueError(
      f'corpus {source!r}: source_field={source_field!r} is of rows; give a '
      '.jsonl file or hf:org/name[:config]/split'
    )
  if source in ('stdlib', 'stdlib:prose'):
    from pydoc_data import topics  # half a megabyte, and not in every Python

    documents = [*topics.topics.values()]
    documents += _library() if source == 'stdlib' else []
    return _corpus(f'{source} of Python {platform.python_version()}', documents)
  if not source.lower().endswith(('.txt', '.md')):
    raise ValueError(
      f'corpus {source!r}: allowed are a .txt, .md or .jsonl file, '
      'hf:org/name[:config]/split, stdlib, stdlib:prose'
    )
  return _corpus(source, _decoded(pathlib.Path(source)).split(END))


def chats(source: str, field: str) -> list[Sequence[dict[str, str]]]:
  """Reads the different conversations in rows' `field` or 'messages', each up
  to its last question; skips rows without messages."""
  found = {}
  for _, row in _rows(source) or ():
    said: Any = row.get(field, row.get('messages'))
    if not requests.is_chat(said):
      continue
    role = lambda x: isinstance(x, dict) and x.get('role')
    asked = [i for i, x in enumerate(said, 1) if role(x) == 'user']
    some = said[: max(asked, default=0)]
    found[json.dumps(some)] = some
  return [x for x in found.values() if x]


def held_out(corpus: Corpus, every: int) -> tuple[Corpus, Corpus]:
  """Splits a corpus into (training part, held-out part).

  Holds out about one document in `every`, at least one; equal documents, or
  those with equal sources, stay together. A single one loses its last 1 /
  every.
  """
  # By hash, not by index: a corpus is often ordered by subject.
  keys = corpus.sources or corpus.documents
  ranked = sorted(set(keys), key=_sha256)
  if len(ranked) > 1:
    chosen = set(ranked[::every])
    columns = [x for x in (corpus.documents, corpus.sources) if x]
    pick = lambda texts, out: tuple(
      x for x, key in zip(texts, keys, strict=True) if (key in chosen) == out
    )
    rest, held = ([pick(x, out) for x in columns] for out in (False, True))
  else:
    text = ranked[0]
    about = len(text) - len(text) // every
    cut = text.rfind('\n', 0, about) + 1 or about
    rest, held = [[text[:cut]]], [[text[cut:]]]
    if corpus.sources or not text[:cut].strip() or not text[cut:].strip():
      raise ValueError(
        f'corpus {corpus.label}: a single text of {len(text)} characters '
        f'is too short to hold out 1 / {every} of it; give more text'
      )
  made = [_corpus(corpus.label, *x) for x in (rest, held)]
  return made[0]._replace(said=corpus.said), made[1]._replace(said=corpus.said)


def train_tokenizer(
  corpus: Corpus, vocab: int, folder: pathlib.Path
) -> tokenizer_lib.Tokenizer:
  """Trains a byte-level BPE and writes it to a folder in Hugging Face's format.

  Id 0 is END; for a corpus with sources, ids 0 and 1 are T5's. The same corpus
  gives the same files.

  vocab: number of tokens, 257 (all bytes and END) or more; there are fewer if
    no pair of tokens occurs twice any more.
  """
  specials = {'eos_token': END}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  if corpus.sources:
    end = '</s>'
    specials = {'pad_token': '<pad>', 'eos_token': end}
    # transformers puts it behind every text.
    inner.post_processor = tokenizers.processors.TemplateProcessing(
      single=f'$A {end}', pair=f'$A {end} $B {end}', special_tokens=[(end, 1)]
    )
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  inner.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab,
    min_frequency=2,
    show_progress=False,
    special_tokens=list(specials.values()),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
  )
  inner.train_from_iterator([*corpus.sources, *corpus.documents], trainer)
  settings = {
    # transformers 4 would otherwise drop spaces before punctuation.
    'clean_up_tokenization_spaces': False,
    **specials,
    'tokenizer_class': 'PreTrainedTokenizerFast',
  }
  folder.mkdir(parents=True, exist_ok=True)
  files.write(folder / 'tokenizer.json', inner.to_str(pretty=True))
  files.write(folder / 'tokenizer_config.json', json.dumps(settings, indent=2))
  return tokenizer_lib.from_folder(folder, str(folder))


def pack(
  corpus: Corpus, tokenizer: tokenizer_lib.Tokenizer, length: int
) -> np.ndarray:
  """Packs all documents' ids: int32 [rows, length]. A document continues in the
  next row; an incomplete last row is dropped."""
  every = (corpus.ids(x, tokenizer) for x in corpus.documents)
  ids = [np.asarray(x, np.int32) for x in every]
  tokens = sum(map(len, ids))
  rows = tokens // length
  if not rows:
    raise ValueError(
      f'{tokens} tokens are less than one row of length={length}: give more '
      'text or a shorter length'
    )
  return np.concatenate(ids)[: rows * length].reshape(rows, length)


def pair_rows(
  corpus: Corpus,
  tokenizer: tokenizer_lib.Tokenizer,
  start: int,
  length: int,
  source_length: int,
) -> dict[str, np.ndarray]:
  """Makes rows for an encoder-decoder, one for each pair in a corpus.

  Longer pairs keep their beginning, targets then without eos; the log counts
  them. start: the id that the decoder begins with.

  Returns:
    tokens [N, T]: start, target, eos, padding. counted [N, T]: true for the
      target and its eos. source [N, I], source_length [N]: as types.Source.
  """
  end, N, cut = end_of(tokenizer), len(corpus.documents), 0
  tokens_NT = np.zeros((N, length), np.int32)
  source_NI = np.zeros((N, source_length), np.int32)
  ends_N, source_ends_N = np.zeros((2, N), np.int32)
  for i, pair in enumerate(zip(corpus.sources, corpus.documents, strict=True)):
    source, target = (corpus.ids(x, tokenizer) for x in pair)
    cut += len(source) > source_length or len(target) + 1 > length
    source = [*source[:-1][: source_length - 1], end]
    target = [start, *target][:length]
    source_NI[i, : len(source)], source_ends_N[i] = source, len(source)
    tokens_NT[i, : len(target)], ends_N[i] = target, len(target)
  if cut:
    limits = f'length={length} or source_length={source_length}'
    logging.warning('%d of %d pairs are longer than %s: cut', cut, N, limits)
  at_1T = np.arange(length)[None]
  counted_NT = (at_1T > 0) & (at_1T < ends_N[:, None])
  source = dict(source=source_NI, source_length=source_ends_N)
  return dict(tokens=tokens_NT, counted=counted_NT, **source)


def ends(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Counts the columns before padding, [N], by name in pair_rows."""
  # The start is not counted.
  target_N = 1 + rows['counted'].sum(1)
  return dict(tokens=target_N, counted=target_N, source=rows['source_length'])


def end_of(tokenizer: tokenizer_lib.Tokenizer) -> int:
  """Returns the id behind every text; raises ValueError if there is none."""
  if not tokenizer.eos_ids:
    raise ValueError(
      f'{tokenizer.source}: has no end-of-text token to put after documents; '
      'use a tokenizer with an eos_token'
    )
  return tokenizer.eos_ids[0]


def _corpus(
  label: str, documents: Iterable[str], sources: Iterable[str] = ()
) -> Corpus:
  documents = tuple(d for d in documents if d.strip())
  if not documents:
    raise ValueError(f'corpus {label}: there is no text in it')
  sources = tuple(sources)
  digest = _sha256('\0'.join(documents + sources))
  return Corpus(label, documents, digest, sources)


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _rows(source: str) -> Iterable[tuple[str, dict[str, Any]]] | None:
  """Reads (place, row) from a source with rows; None for any other source."""
  if source.startswith('hf:'):
    return _dataset(source)
  if source.lower().endswith('.jsonl'):
    return files.read_jsonl(source)
  if source == 'numbers':
    words = lambda n: ' '.join(_DIGITS[int(x)] for x in reversed(str(n)))
    row = lambda n: {'digits': str(n), 'words': words(n)}
    return ((f'{source}:{n}', row(n)) for n in range(10_000))
  return None


def _dataset(source: str) -> list[tuple[str, dict[str, Any]]]:
  repo, _, split = source.removeprefix('hf:').rpartition('/')
  name, _, config = repo.partition(':')
  try:
    import datasets  # pyright: ignore[reportMissingImports]
  except ImportError as error:
    wrong = f'corpus {source} needs datasets: pip install datasets'
    raise ValueError(wrong) from error
  try:
    rows = datasets.load_dataset(name, config or None, split=split)
  except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
    reason = str(error).partition('\n')[0]
    raise ValueError(
      f'corpus {source}: {reason}; the form is hf:org/name[:config]/split'
    ) from error
  return [(f'{source}:{i}', row) for i, row in enumerate(rows)]


def _texts(row: dict[str, Any], fields: Sequence[str], where: str) -> list[str]:
  """Returns a row's texts: [target], or [target, source], neither blank."""
  out = []
  for field in fields:
    value = row.get(field)
    parts: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(x, str) for x in parts):
      said = row.values()
      raise ValueError(
        f'{where}: no text in field {field!r}; the fields are {", ".join(row)}'
        + '; messages are for data.chat=True' * any(map(requests.is_chat, said))
      )
    out.append('\n\n'.join(parts))
  if len(out) > 1 and not all(x.strip() for x in out):
    raise ValueError(
      f'{where}: an empty text; a pair needs a source ({fields[1]!r}) and a '
      f'target ({fields[0]!r})'
    )
  return out


def _library() -> list[str]:
  """Reads the standard library by path, up to _MOST_CHARACTERS."""
  out, room = [], _MOST_CHARACTERS
  folder = pathlib.Path(sysconfig.get_path('stdlib'))
  inside = lambda path: path.relative_to(folder)
  for path in sorted(folder.rglob('*.py'), key=lambda x: inside(x).as_posix()):
    if any(re.fullmatch(_SKIPPED, x) for x in inside(path).parts):
      continue
    text = _decoded(path)
    room -= len(text)
    if room < 0:
      break
    out.append(text)
  return out


def _decoded(path: pathlib.Path) -> str:
  try:
    return path.read_bytes().decode('utf-8-sig')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'corpus {path}: cannot be read: {error}') from error
