"""Reads Medusa-1 heads in the three layouts that are published.

Heads with a matrix each, and heads that share the target's, are separate files;
others lie in a model tuned with them. Source: medusa_model and
medusa_model_legacy in FasterDecoding/Medusa.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import hosts
from specdec_jax.io import download, files, hf, load, names
from specdec_jax.io.arrays import stored
from specdec_jax.io.quantised import rounded
from specdec_jax.models import lm

FORM = 'a folder or hf:org/name that has Medusa heads, or a file of them'
# Where heads are saved by themselves; else they are among a model's weights.
FILE = 'medusa_lm_head.safetensors'
_FILES = (FILE, 'medusa_lm_head.pt')
INSIDE = 'medusa_head.'


def fit(
  source: str | os.PathLike, target: load.LanguageModel
) -> dict[str, Any]:
  """Returns a source's heads by number, read once for a target."""
  paths = find(source)
  read = lambda: _read(f'medusa {source}', paths, target)
  return target.once(('medusa', *files.stamp(paths)), read)


def find(source: str | os.PathLike) -> list[pathlib.Path]:
  """Returns a source's files, checked to be there."""
  path = download.local(source)
  if not path.exists():
    raise ValueError(f'medusa {source}: no such file; give {FORM}')
  if not path.is_dir():
    return [path]
  alone = [path / x for x in _FILES if (path / x).exists()]
  return alone[:1] or hf.weight_files(path)


def _read(
  where: str, paths: list[pathlib.Path], target: load.LanguageModel
) -> dict[str, Any]:
  opened = map(stored.open_file, paths)
  found = stored.unique(where, (pair for x in opened for pair in x.items()))
  inside = {k: x for k, x in found.items() if k.startswith(INSIDE)}
  arrays = {k.removeprefix(INSIDE): x for k, x in (inside or found).items()}
  config, layout, flat = target.config, target.layout, {}
  for name, theirs in _places(where, arrays, target).items():
    x = np.asarray(arrays[theirs].read().T, jnp.dtype(config.dtype))
    names.check_finite(where, theirs, x)
    axes = (None, 'vocab') if name.endswith('head') else ()
    flat[name] = hosts.put(x, layout and layout.sharding(*axes))
  heads = lm.nest(flat)
  return rounded.pack_draft(heads) if config.run.packed else heads


def _places(
  where: str, arrays: Mapping[str, Any], target: load.LanguageModel
) -> dict[str, str]:
  """Maps parameters to stored names, checked to be complete. Counts the heads
  and layers: settings beside them err."""
  weight = re.compile(r'(\d+)\.(\d+)\.linear\.weight')
  numbers = [m.groups() for x in arrays if (m := weight.fullmatch(x))]
  count, depth = (len({pair[i] for pair in numbers}) for i in range(2))
  known = _names(count, depth, own=f'0.{depth}.weight' in arrays)
  D, V = target.config.width, target.config.vocab
  shapes = {'kernel': (D, D), 'bias': (D,), 'head': (V, D)}
  needed = {x: shapes[n.split('/')[-1]] for n, x in known.items()}
  found = {n: x.shape for n, x in arrays.items()}
  who, advice = f'heads of {target.label}', f'; give {FORM}, of this target'
  names.check(where, needed, found, who, advice)
  return known


def _names(count: int, depth: int, own: bool) -> dict[str, str]:
  """Maps parameters to stored names; own: heads have a matrix each."""
  layers = {
    f'{i}/layers/{j}/{ours}': f'{i}.{j}.linear.{theirs}'
    for i in range(count)
    for j in range(depth)
    for ours, theirs in (('kernel', 'weight'), ('bias', 'bias'))
  }
  heads = {f'{i}/head': f'{i}.{depth}.weight' for i in range(count) if own}
  return layers | heads


def stored_as(heads: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Names heads as stored; `fit` reads them from these arrays."""
  first, flat = heads['0'], lm.flatten(heads)
  known = _names(len(heads), len(first['layers']), 'head' in first)
  return {theirs: np.asarray(flat[n]).T for n, theirs in known.items()}
