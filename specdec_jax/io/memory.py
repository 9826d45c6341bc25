"""What models will take of memory, beside what is free."""

import math
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.io import files, sources
from specdec_jax.io.gguf import blocks
from specdec_jax.io.quantised import rounded
from specdec_jax.kernels import library, quantised
from specdec_jax.models import convert, lm, weights, work

# From the nearest to the smallest.
_SMALL = (convert.STORED, 'bfloat16', *weights.INTEGERS)
# The setting of a dtype, by what a model is called.
_KEYS = {x: f'{x}.dtype' for x in ('target', 'draft', 'self')}


class Model(NamedTuple):
  """A model that is about to be read, and its dtype (convert.DTYPES).

  cached: whether it has a cache of its own.
  packs: whether the kernels of one CPU will read it, if this is one.
  """

  source: sources.Source
  dtype: str
  cached: bool = True
  packs: bool = True

  def bytes(self) -> float:
    """Of its parameters."""
    return sum(held for held, _ in self._each().values())

  def most(self) -> float:
    """Of its parameters while they are read, with what one takes until it has
    its place: its numbers, or again the blocks that stay."""
    held = most = 0.0
    for own, beside in self._each().values():
      held += own
      most = max(most, held + beside)
    return most

  def step_bytes(self) -> float:
    """Of the parameters that each pass reads, as work.step_bytes has them."""
    each = self._each().items()
    return sum(held for name, (held, _) in each if lm.every_pass(name))

  def slot(self) -> float:
    """Bytes of a token in its cache."""
    config = self.source.config
    return work.slot_bytes(lm.make(config), 1) if self.cached else 0.0

  def as_read(self) -> tuple[frozenset[str], str]:
    """(kinds of blocks that stay as they are, dtype of all but integers).

    'stored', for the kernels of one CPU: every matrix stays as it is, but for
    those that have none. Elsewhere all is read as float32; on accelerators a
    quantised model as bfloat16, another one in the source's dtype.
    """
    none = frozenset()
    if self.dtype in weights.INTEGERS:
      return none, activations()
    if self.dtype != convert.STORED:
      return none, self.dtype
    every = frozenset(self.source.kinds.values())
    kept, narrow = every & blocks.KEPT.keys(), self.source.dtype
    kinds = [blocks.KEPT[x].kind for x in kept]
    if self.packs and library.ready('auto', files.cache_folder(), kinds):
      return kept, narrow if kept == every else 'float32'
    if jax.default_backend() == 'cpu':
      return none, 'float32'
    return none, 'bfloat16' if every else narrow

  def _each(self) -> dict[str, tuple[float, float]]:
    """(bytes, those beside them while it is read) of each parameter, in the
    order in which they are read."""
    shapes = lm.shapes(self.source.config)
    sizes = {name: math.prod(x.shape) for name, x in shapes.items()}
    packs = self.packs and jax.default_backend() == 'cpu'
    if self.dtype in weights.INTEGERS and not packs:
      made = rounded.shapes(shapes, self.dtype).items()
      return {name: (work.tree_bytes(x), 4 * sizes[name]) for name, x in made}
    kept, floats = self.as_read()
    out, wide = {}, jnp.dtype(floats).itemsize
    for name, x in shapes.items():
      # How the CPU kernels have it; '': as numbers.
      stored, kind, count = self.source.kinds.get(name, ''), '', sizes[name]
      if stored in kept:
        kind = blocks.KEPT[stored].kind
      elif self.dtype in weights.INTEGERS:
        kind = rounded.packed_kind(self.dtype, name, x.shape)
      k = quantised.KINDS[kind] if kind else None
      held = count * (k.size / k.depth if k else wide)
      out[name] = held, held if stored in kept else 4 * count
    return out


def activations() -> str:
  """The dtype of activations beside matrices of integers."""
  return 'float32' if jax.default_backend() == 'cpu' else 'bfloat16'


def free(root: pathlib.Path = pathlib.Path('/')) -> float:
  """Bytes that programs on this CPU can still have; infinite if not known.

  What the machine has, or, if that is less, what the control groups of this
  process leave, of version 1 or 2 (https://docs.kernel.org/admin-guide/). Pages
  of files that are read are not counted as used: they make room.
  """
  found = re.search(r'MemAvailable:\s*(\d+) kB', _text(root / 'proc/meminfo'))
  left = [int(found[1]) * 1024 if found else math.inf]
  groups = _text(root / 'proc/self/cgroup')
  for kind, own in re.findall(r'^\d+:(memory|):/(.*)', groups, re.M):
    top, inside = root / 'sys/fs/cgroup' / kind, pathlib.Path(own)
    left += [_left(top / group, kind) for group in (inside, *inside.parents)]
  return max(0, min(left))


def _left(group: pathlib.Path, kind: str) -> float:
  """What a control group leaves to its processes; infinite without a limit.

  kind: 'memory' in version 1, which counts groups inside under total_NAME.
  """
  names = 'limit_in_bytes usage_in_bytes' if kind else 'max current'
  each = (group / f'memory.{x}' for x in (*names.split(), 'stat'))
  most, used, stat = (_text(x).strip() for x in each)
  if not (most.isdecimal() and used.isdecimal()):
    return math.inf
  name = 'total_' * bool(kind) + '(?:in)?active_file'
  cached = re.findall(rf'^{name} (\d+)$', stat, re.M)
  return int(most) - int(used) + sum(map(int, cached))


def _text(path: pathlib.Path) -> str:
  return path.read_text() if path.exists() else ''


def check(
  models: Mapping[str, Model],
  tokens: int = 0,
  numbers: Mapping[str, int] | None = None,
) -> str:
  """'target 1.1 GB (stored), caches 0.1 GB; 20.4 GB of memory are free'.

  models: by what they are called (_KEYS), in the order in which they are read.
  tokens: for which their caches have room, at least.
  numbers: of drafts of files by their names, in the dtype of the first model's
    floats; the CPU kernels keep a byte of each of their layers and head. Not
    counted are their caches, of few layers, and what they copy of the target's
    head.

  Raises:
    ValueError: more than is free, on CPU; it names a dtype that fits.
  """
  caches = tokens * sum(x.slot() for x in models.values())

  def room(models: Mapping[str, Model]) -> tuple[dict[str, int], float, float]:
    """Bytes of each draft of a file, of all, and of all while it is read."""
    wide = jnp.dtype(next(iter(models.values())).as_read()[1]).itemsize
    drafts = {name: wide * count for name, count in (numbers or {}).items()}
    held = most = 0.0
    for x in models.values():
      most = max(most, held + x.most())
      held += x.bytes()
    held += caches + sum(drafts.values())
    return drafts, held, max(most, held)

  drafts, needs, most = room(models)
  each = []
  for k, x in models.items():
    kept, floats = x.as_read()
    dtype = floats if x.dtype == convert.STORED and not kept else x.dtype
    each.append(f'{k} {_gb(x.bytes())} ({dtype})')
  each += [f'{name} {_gb(size)}' for name, size in drafts.items()]
  each += [f'caches {_gb(caches)}'] if tokens else []
  each += [f'{_gb(most)} while they are read'] if most > 1.05 * needs else []
  have = free() if jax.default_backend() == 'cpu' else math.inf
  line = ', '.join(each)
  if have < math.inf:
    line += f'; {_gb(have)} of memory are free'
  if most <= have:
    return line
  for dtype in _SMALL:
    other = {
      k: x._replace(dtype=dtype)
      for k, x in models.items()
      if dtype != convert.STORED or x.cached  # else a copy, which is rounded
    }
    less = {k: x for k, x in other.items() if x.bytes() < models[k].bytes()}
    small = room({**models, **less})[-1]
    if small <= have:
      keys = ' and '.join(f'{_KEYS.get(k, "dtype")}={dtype!r}' for k in less)
      raise ValueError(f'{line}: give {keys}, which takes {_gb(small)}')
  raise ValueError(f'{line}: give a smaller model, whatever its dtype')


def _gb(size: float) -> str:
  return f'{size / 1e9:.1f} GB' if size >= 1e8 else f'{size / 1e6:.1f} MB'
