"""Counts the memory that models will take, and what is free."""

import itertools
import math
import pathlib
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from specdec_jax.io import plan
from specdec_jax.models import convert, lm, weights, work

# From the nearest to the smallest.
_SMALL = (convert.STORED, 'bfloat16', *weights.INTEGERS)
# The setting of a dtype, by what a model is called.
_KEYS = {x: f'{x}.dtype' for x in ('target', 'draft', 'self')}
_COPY = 'self'


def free(root: pathlib.Path = pathlib.Path('/')) -> float:
  """Returns bytes that programs on this CPU can still have; inf if unknown.

  What the machine has or, if less, what this process's control groups leave, in
  version 1 or 2 (https://docs.kernel.org/admin-guide/). Pages read from files
  are not counted as used: they make room.
  """
  found = re.search(r'MemAvailable:\s*(\d+) kB', _text(root / 'proc/meminfo'))
  left = [int(found[1]) * 1024 if found else math.inf]
  groups = _text(root / 'proc/self/cgroup')
  for kind, own in re.findall(r'^\d+:(memory|):/(.*)', groups, re.M):
    top, inside = root / 'sys/fs/cgroup' / kind, pathlib.Path(own)
    left += [_left(top / group, kind) for group in (inside, *inside.parents)]
  return max(0, min(left))


def _left(group: pathlib.Path, kind: str) -> float:
  """Returns the bytes that a control group leaves; inf without a limit. kind:
  'memory' in version 1, where total_NAME counts the groups inside, too."""
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
  models: Mapping[str, plan.Plan],
  tokens: int = 0,
  numbers: Mapping[str, int] | None = None,
) -> str:
  """Returns 'target 1.1 GB (stored), caches 0.1 GB; 20.4 GB of memory are
  free'; on CPU, ValueError with a dtype that fits, if it is more than is free.

  models: by name (_KEYS), in the order in which they are read.
  tokens: for which their caches have room, at least.
  numbers: how many each draft file holds, by its name. Counts them in the first
    model's float dtype; the CPU kernels keep a byte for those in layers and
    head. Leaves out draft caches, of few layers, and copied target heads.
  """
  slot = lambda x: work.slot_bytes(lm.make(x.source.config), 1)
  # A copy that drafts has the target's cache.
  caches = tokens * sum(slot(x) for k, x in models.items() if k != _COPY)

  def room(models: Mapping[str, plan.Plan]) -> tuple[dict[str, float], float]:
    """Returns each one's bytes by name, and the most while they are read."""
    wide = jnp.dtype(next(iter(models.values())).config.dtype).itemsize
    drafts = {name: wide * count for name, count in (numbers or {}).items()}
    own = {k: x.bytes() for k, x in models.items()}
    before = itertools.accumulate(own.values(), initial=0)
    each = [b + x.most() for b, x in zip(before, models.values(), strict=False)]
    own |= drafts
    return own, max(*each, sum(own.values()) + caches)

  own, most = room(models)
  numeric = lambda x: x.dtype == convert.STORED and not x.kept
  dtype_of = lambda x: x.config.dtype if numeric(x) else x.dtype
  each = [f'{k} {_gb(own[k])} ({dtype_of(x)})' for k, x in models.items()]
  each += [f'{k} {_gb(own[k])}' for k in numbers or ()]
  each += [f'caches {_gb(caches)}'] if tokens else []
  if most > 1.05 * (sum(own.values()) + caches):
    each += [f'{_gb(most)} while they are read']
  have = free() if jax.default_backend() == 'cpu' else math.inf
  line = ', '.join(each)
  if have < math.inf:
    line += f'; {_gb(have)} of memory are free'
  if most <= have:
    return line
  for dtype in _SMALL:
    other = {k: x.again(dtype) for k, x in models.items()}
    less = {k: x for k, x in other.items() if x.bytes() < own[k]}
    if dtype == convert.STORED:
      less.pop(_COPY, None)  # it would be the target
    if (small := room({**models, **less})[-1]) <= have:
      keys = ' and '.join(f'{_KEYS.get(k, "dtype")}={dtype!r}' for k in less)
      raise ValueError(f'{line}: give {keys}, which takes {_gb(small)}')
  raise ValueError(f'{line}: give a smaller model, whatever its dtype')


def _gb(size: float) -> str:
  return f'{size / 1e9:.1f} GB' if size >= 1e8 else f'{size / 1e6:.1f} MB'
