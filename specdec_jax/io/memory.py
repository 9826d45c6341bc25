"""What models will take of memory, beside what is free."""

import collections
import math
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.io import sources
from specdec_jax.io.gguf import blocks
from specdec_jax.io.quantised import rounded
from specdec_jax.kernels import quantised
from specdec_jax.models import convert, lm, weights, work

# From the nearest to the smallest.
SMALL = (convert.STORED, 'bfloat16', *weights.INTEGERS)


class Model(NamedTuple):
  """A model that is about to be read, and its dtype (convert.DTYPES).

  cached: whether it has a cache of its own.
  """

  source: sources.Source
  dtype: str
  cached: bool = True

  def bytes(self) -> float:
    """Of its parameters, and of the one that is being read, as float32."""
    shapes = lm.shapes(self.source.config)
    largest = max(math.prod(x.shape) for x in shapes.values())
    return _parameters(self.source, self.dtype, shapes) + 4 * largest

  def step_bytes(self) -> float:
    """Of the parameters that each pass reads, as work.step_bytes has them."""
    assert self.dtype != convert.STORED  # source.kinds are of all parameters
    shapes = lm.shapes(self.source.config).items()
    read = {name: x for name, x in shapes if lm.every_pass(name)}
    return _parameters(self.source, self.dtype, read)

  def slot(self) -> float:
    """Bytes of a token in its cache."""
    config = self.source.config
    return work.slot_bytes(lm.make(config), 1) if self.cached else 0.0


def _parameters(source: sources.Source, dtype: str, shapes) -> float:
  integers, kinds = dtype in weights.INTEGERS, collections.Counter()
  if integers and jax.default_backend() != 'cpu':
    return work.tree_bytes(rounded.shapes(shapes, dtype))
  sizes = {name: math.prod(x.shape) for name, x in shapes.items()}
  for name, x in shapes.items() if integers else ():
    kinds[rounded.packed_kind(dtype, name, x.shape)] += sizes[name]
  if dtype == convert.STORED:
    kinds.update(source.kinds)
  elif not integers:
    return sum(sizes.values()) * jnp.dtype(dtype).itemsize
  kept = {k: n for k, n in kinds.items() if k in blocks.KEPT}
  rows = {k: quantised.KINDS[blocks.KEPT[k].kind] for k in kept}
  codes = sum(n * rows[k].size / rows[k].depth for k, n in kept.items())
  return codes + 4 * (sum(sizes.values()) - sum(kept.values()))


def free() -> float:
  """Bytes that programs on this CPU can still have; infinite if not known."""
  path = pathlib.Path('/proc/meminfo')
  text = path.read_text() if path.exists() else ''
  found = re.search(r'MemAvailable:\s*(\d+) kB', text)
  return int(found[1]) * 1024 if found else math.inf


def check(models: Mapping[str, Model], tokens: int = 0) -> str:
  """'target 1.1 GB (stored), caches 0.1 GB; 20.4 GB of memory are free'.

  Args:
    models: by what they are called.
    tokens: for which their caches have room, at least.

  Raises:
    ValueError: more than is free, on CPU; it names a dtype that fits.
  """
  caches = tokens * sum(x.slot() for x in models.values())
  needs = {name: x.bytes() for name, x in models.items()}
  each = [f'{k} {_gb(n)} ({models[k].dtype})' for k, n in needs.items()]
  each += [f'caches {_gb(caches)}'] if tokens else []
  have = free() if jax.default_backend() == 'cpu' else math.inf
  line = ', '.join(each)
  if have < math.inf:
    line += f'; {_gb(have)} of memory are free'
  if sum(needs.values()) + caches <= have:
    return line
  for dtype in SMALL:
    other = {k: x._replace(dtype=dtype).bytes() for k, x in models.items()}
    small = sum(min(other[k], n) for k, n in needs.items())
    if small + caches <= have:
      raise ValueError(
        f"{line}: give dtype='{dtype}', which takes {_gb(small)}"
      )
  raise ValueError(f'{line}: give a smaller model, whatever its dtype')


def _gb(size: float) -> str:
  return f'{size / 1e9:.1f} GB' if size >= 1e8 else f'{size / 1e6:.1f} MB'
