"""Files of n-gram counts, as drafters.ngram makes them."""

import functools
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from specdec_jax.drafters import ngram
from specdec_jax.io import files
from specdec_jax.io import tokenizer as tokenizer_lib

_FORMAT = 'specdec_jax n-grams 1'


def texts_of(paths: Sequence[str]) -> list[str]:
  """The texts of files; without any, the Python manual's topics.

  Raises:
    ValueError: a file that cannot be read as UTF-8.
  """
  if not paths:
    from pydoc_data import topics

    return list(topics.topics.values())
  out = []
  for path in paths:
    try:
      out.append(pathlib.Path(path).read_text('utf-8'))
    except (OSError, UnicodeDecodeError) as error:
      raise ValueError(
        f'corpus {path}: not readable as text: {error}'
      ) from error
  return out


def count(
  texts: Sequence[str], tokenizer: tokenizer_lib.Tokenizer, *, order: int
) -> tuple[ngram.Counts, dict[str, str]]:
  """(the counts of texts, what write says about them).

  Raises:
    ValueError: an order or a corpus that ngram.count refuses.
  """
  ids = [
    np.asarray(x.ids, np.int32)
    for x in tokenizer.inner.encode_batch(list(texts), add_special_tokens=False)
  ]
  counts = ngram.count(ids, order=order, vocab=tokenizer.size)
  about = {
    'format': _FORMAT,
    'order': str(order),
    'tokenizer': tokenizer.fingerprint(),
    'corpus': hashlib.sha256('\0'.join(texts).encode()).hexdigest(),
    'tokens': str(sum(map(len, ids))),
  }
  return counts, about


def write(path: str, counts: ngram.Counts, about: dict[str, str]) -> None:
  """Writes a file, whole or not at all.

  Raises:
    ValueError: a path that cannot be written.
  """
  content = safetensors.numpy.save(counts._asdict(), metadata=about)
  try:
    files.write(pathlib.Path(path), content)
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be written: {error.strerror}'
    ) from error


def read(
  path: str | os.PathLike,
  tokenizer: tokenizer_lib.Tokenizer,
  sharding: jax.sharding.Sharding | None = None,
) -> tuple[int, ngram.Counts]:
  """(order, counts on their devices) of a file counted with this tokenizer.

  Raises:
    ValueError: no such file, another kind of file, or another tokenizer.
  """
  try:
    changed = os.stat(path).st_mtime_ns
    with open(path, 'rb') as file:
      ours = f'"format":"{_FORMAT}"'.encode() in file.read(1 << 12)
  except IsADirectoryError:
    ours = False
  except OSError as error:
    raise ValueError(
      f'n-grams {path}: {error.strerror}; scripts/ngram.py makes such a file'
    ) from error
  if not ours:
    raise ValueError(f'n-grams {path}: not a file of scripts/ngram.py')
  about, counts = _read(os.path.abspath(path), changed, sharding)
  if about['tokenizer'] != tokenizer.fingerprint():
    raise ValueError(
      f'n-grams {path}: counted with another tokenizer than that of '
      f'{tokenizer.source}; count the text again with scripts/ngram.py '
      f'--target={tokenizer.source}'
    )
  return int(about['order']), counts


@functools.lru_cache(maxsize=4)
def _read(path: str, changed: int, sharding) -> tuple[dict[str, str], Any]:
  try:
    with safetensors.safe_open(path, 'numpy') as file:
      names = ngram.Counts._fields
      counts = ngram.Counts(*(file.get_tensor(name) for name in names))
      return file.metadata(), jax.device_put(counts, sharding)
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'n-grams {path}: damaged: {error}') from error
