"""Opens a file of arrays by name: safetensors, or PyTorch's .bin and .pt."""

import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np
import safetensors

from specdec_jax.io import files
from specdec_jax.io.arrays import pickled

# NumPy's dtype -> its name in safetensors.
_DTYPES = {
  **{f'float{bits}': f'F{bits}' for bits in (16, 32, 64)},
  **{f'int{bits}': f'I{bits}' for bits in (8, 16, 32, 64)},
  **dict(bfloat16='BF16', uint8='U8', bool='BOOL'),
}

T = TypeVar('T')


class Stored(NamedTuple):
  """An array in a file.

  dtype: its name in safetensors, 'BF16'. read: reads it, memory-mapped; 8-bit
    floats, which NumPy lacks, as bytes.
  """

  dtype: str
  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


def open_file(path: pathlib.Path) -> dict[str, Stored]:
  """Lists a file's arrays by name; reads none."""
  files.head(path)
  if path.suffix != '.safetensors':
    return {
      name: Stored(_DTYPES[str(x.dtype)], x.shape, lambda x=x: x)
      for name, x in pickled.read(path).items()
    }
  found = {}
  try:
    with safetensors.safe_open(path, 'numpy') as f:
      for name in f.keys():
        part, read = f.get_slice(name), functools.partial(_read, path, name)
        found[name] = Stored(part.get_dtype(), tuple(part.get_shape()), read)
    return found
  except (OSError, safetensors.SafetensorError) as e:
    raise ValueError(f'{path}: not a whole safetensors file: {e}') from e


def unique(where: object, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
  """Makes a dict; ValueError, after `where`, for a name that is there twice."""
  found = {}
  for name, x in pairs:
    if name in found:
      raise ValueError(f'{where}: {name} is there twice')
    found[name] = x
  return found


def _read(path: pathlib.Path, name: str) -> np.ndarray:
  with safetensors.safe_open(path, 'numpy') as f:
    if not f.get_slice(name).get_dtype().startswith('F8_'):
      return f.get_tensor(name)
  with open(path, 'rb') as f:
    header = f.read(int.from_bytes(f.read(8), 'little'))
    about = json.loads(header)[name]
    start, end = about['data_offsets']
    f.seek(8 + len(header) + start)
    return np.frombuffer(f.read(end - start), np.uint8).reshape(about['shape'])
