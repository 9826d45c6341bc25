"""Reads arrays from PyTorch's .bin and .pt files, and runs none of their code.

Such a file is a zip archive: a pickle, data.pkl, and one member per storage, a
flat array (torch/serialization.py, since 1.6). A pickle is a program. Here it
may make constants, tuples, dicts and views of storages; any other opcode is
refused (Python's pickletools).
"""

import pathlib
import pickletools
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np


def _view(flat: np.ndarray, first: int, shape, strides, *_) -> np.ndarray:
  """Makes an array over a storage; NumPy refuses one that leaves it."""
  size = flat.itemsize
  steps = [x * size for x in strides]
  return np.ndarray(shape, flat.dtype, flat.view('u1'), first * size, steps)


_KINDS = dict(Float='f4', Half='f2', BFloat16=ml_dtypes.bfloat16, Double='f8')
_KINDS |= dict(Long='i8', Int='i4', Short='i2', Char='i1', Byte='u1', Bool='?')
# What a pickle may ask Python for -> what stands for it here.
_GLOBALS: dict[str, Any] = {
  **{f'torch {kind}Storage': np.dtype(x) for kind, x in _KINDS.items()},
  'torch._utils _rebuild_tensor_v2': _view,
  'collections OrderedDict': lambda: {},
}
_VALUES = 'NONE BININT BININT1 BININT2 LONG1 BINUNICODE'.split()
# How many values an opcode takes off the stack; None: all above the last mark.
_TAKES = dict(TUPLE1=1, TUPLE2=2, TUPLE3=3, TUPLE=None, SETITEM=2)
_TAKES |= dict(SETITEMS=None, BUILD=1, BINPERSID=1, REDUCE=2)
_DAMAGE = TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Maps a file's arrays into memory, by name."""
  try:
    with zipfile.ZipFile(path) as archive:
      members = {x.filename: x for x in archive.infolist()}
    found = _content(np.memmap(path, mode='r'), members)
    kinds = {(type(name), type(x)) for name, x in found.items()}
    if kinds != {(str, np.ndarray)}:
      raise ValueError('it is no dict of arrays by their names')
    return found
  except (ValueError, zipfile.BadZipFile, *_DAMAGE) as e:
    why = f'it is damaged ({e!r})' if isinstance(e, _DAMAGE) else e
    raise ValueError(
      f'{path}: cannot be read: {why}; give what PyTorch writes since 1.6 by '
      'torch.save(model.state_dict(), path)'
    ) from e


def _content(raw: np.ndarray, at: dict[str, zipfile.ZipInfo]) -> Any:
  """Runs an archive's pickle, given its bytes and members."""
  (folder,) = (x[:-8] for x in at if x.endswith('/data.pkl'))

  def member(name: str) -> np.ndarray:
    info = at[folder + name]
    start = info.header_offset + 30  # its header, which ends with two sizes
    start += int(raw[start - 4 : start].view('<u2').sum())
    if info.compress_type or start + info.file_size > raw.size:
      raise ValueError(f'{name} is compressed or cut off')
    return raw[start : start + info.file_size]

  if folder + 'byteorder' in at and bytes(member('byteorder')) != b'little':
    raise ValueError('its numbers are big-endian')
  return _run(bytes(member('data.pkl')), lambda key: member(f'data/{key}'))


def _run(pickle: bytes, storage: Callable[[str], np.ndarray]) -> Any:
  """Runs a pickle, returns what it makes. storage(key) -> its bytes."""
  stack, marks, memo = [], [], {}
  for op, arg, _ in pickletools.genops(pickle):
    count = _TAKES.get(op.name, 0)
    start = marks.pop() if count is None else len(stack) - count
    taken = stack[start:]
    del stack[start:]
    match op.name, *taken:
      case 'PROTO' | 'STOP' | 'BUILD', *_:  # what is built describes modules
        pass
      case 'MARK', *_:
        marks.append(len(stack))
      case 'BINPUT' | 'LONG_BINPUT', *_:
        memo[arg] = stack[-1]
      case 'BINGET' | 'LONG_BINGET', *_:
        stack.append(memo[arg])
      case name, *_ if name in _VALUES:
        stack.append(arg)
      case 'NEWTRUE' | 'NEWFALSE' as name, *_:
        stack.append(name == 'NEWTRUE')
      case 'EMPTY_DICT', *_:
        stack.append({})
      case 'EMPTY_TUPLE' | 'TUPLE' | 'TUPLE1' | 'TUPLE2' | 'TUPLE3', *_:
        stack.append(tuple(taken))
      case 'SETITEM' | 'SETITEMS', *_ if {*map(type, taken[::2])} <= {str, int}:
        dict.update(stack[-1], zip(taken[::2], taken[1::2], strict=True))
      case 'GLOBAL', *_ if arg in _GLOBALS:
        stack.append(_GLOBALS[arg])
      case 'BINPERSID', ('storage', np.dtype() as dtype, str(key), *_):
        stack.append(storage(key).view(dtype))
      case 'REDUCE', function, tuple(args) if callable(function):
        stack.append(function(*args))
      case _:
        what = op.name if arg is None else f'{op.name} {arg}'[:80]
        raise ValueError(f'its pickle has {what}, which makes no array')
  return stack.pop()
