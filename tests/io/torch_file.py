"""Writes PyTorch's .bin files opcode by opcode, without PyTorch."""

import struct
import zipfile

import numpy as np

STORAGES = dict(
  float32='Float', float16='Half', bfloat16='BFloat16', float64='Double',
  int64='Long', int32='Int', int16='Short', int8='Char', uint8='Byte',
  bool='Bool',
)  # fmt: skip
EMPTY = b'ccollections\nOrderedDict\n)R'


def text(x: str) -> bytes:
  raw = x.encode()
  return b'X' + struct.pack('<I', len(raw)) + raw


def number(x: int) -> bytes:
  return b'J' + struct.pack('<i', x)


def tuple_of(*parts: bytes) -> bytes:
  return b'(' + b''.join(parts) + b't'


def storage(key: str, kind: str, size: int) -> bytes:
  name = f'ctorch\n{kind}Storage\n'.encode()
  words = text('storage'), name, text(key), text('cpu'), number(size)
  return tuple_of(*words) + b'Q'


def tensor(held: bytes, first: int, shape, strides) -> bytes:
  """A view of a storage; strides in elements, as PyTorch counts."""
  sizes = [tuple_of(*map(number, x)) for x in (shape, strides)]
  parts = held, number(first), *sizes, b'\x89', EMPTY
  return b'ctorch._utils\n_rebuild_tensor_v2\n' + tuple_of(*parts) + b'R'


def ordered(items: dict[str, bytes]) -> bytes:
  """A state dict, which says something of its modules."""
  pairs = b''.join(text(name) + x for name, x in items.items())
  about = b'}' + text('_metadata') + EMPTY + b's'
  return EMPTY + b'(' + pairs + b'u' + about + b'b'


def zipped(path, pickle: bytes, storages=(), more=(), method=0):
  """The archive of a pickle and its storages; more: other members.

  method: of zipfile; 0 stores.
  """
  members = {'data.pkl': b'\x80\x02' + pickle + b'.', 'version': b'3\n'}
  members |= {f'data/{key}': x for key, x in dict(storages).items()}
  with zipfile.ZipFile(path, 'w', method) as archive:
    for name, content in {**members, **dict(more)}.items():
      archive.writestr(f'archive/{name}', content)
  return path


def save(path, arrays: dict[str, np.ndarray]):
  """What torch.save(model.state_dict(), path) writes for these arrays."""
  items, storages = {}, {}
  for key, (name, x) in enumerate(arrays.items()):
    storages[str(key)] = x.tobytes()
    steps = [n // x.itemsize for n in np.empty(x.shape, x.dtype).strides]
    held = storage(str(key), STORAGES[x.dtype.name], x.size)
    items[name] = tensor(held, 0, x.shape, steps)
  return zipped(path, ordered(items), storages)
