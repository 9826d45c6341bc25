"""Reads the heads of Medusa-1 in the three layouts that they are published in.

Heads with a matrix each, and heads that share the target's, are files by
themselves; others lie in a model that was tuned with them. Source: medusa_model
and medusa_model_legacy of FasterDecoding/Medusa.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import hosts
from specdec_jax.io import download, hf, load, names
from specdec_jax.io.arrays import stored
from specdec_jax.models import convert, lm

FORM = 'a folder or hf:org/name that has Medusa heads, or a file of them'
# Where heads are saved by themselves; else they are among a model's weights.
_FILES = ('medusa_lm_head.safetensors', 'medusa_lm_head.pt')
_INSIDE = 'medusa_head.'


def fit(
  source: str | os.PathLike, target: load.LanguageModel
) -> dict[str, Any]:
  """The heads of a source by their numbers, read once for a target.

  Raises:
    ValueError: nothing there, or heads that are not of this target.
  """
  path = download.local(source)
  if not path.exists():
    raise ValueError(f'medusa {source}: no such file; give {FORM}')
  paths = [path]
  if path.is_dir():
    alone = [path / x for x in _FILES if (path / x).exists()]
    paths = alone[:1] or hf.weight_files(path)
  key = 'medusa', *((path, path.stat().st_mtime_ns) for path in paths)
  return target.once(key, lambda: _read(f'medusa {source}', paths, target))


def _read(
  where: str, paths: list[pathlib.Path], target: load.LanguageModel
) -> dict[str, Any]:
  """The heads of these files, on the target's devices."""
  found = {k: x for path in paths for k, x in stored.open_file(path).items()}
  inside = {k: x for k, x in found.items() if k.startswith(_INSIDE)}
  arrays = {k.removeprefix(_INSIDE): x for k, x in (inside or found).items()}
  config, layout, flat = target.config, target.layout, {}
  for name, (theirs, shape) in _places(where, arrays, config).items():
    if arrays[theirs].shape != shape:
      raise ValueError(
        f'{where}: {theirs} has shape {arrays[theirs].shape}, and heads of '
        f'{target.label} need {shape}; give heads of this target'
      )
    x = np.asarray(arrays[theirs].read().T, jnp.dtype(config.dtype))
    if not np.isfinite(x).all():
      raise ValueError(f'{where}: {theirs} has values that are not finite')
    axes = (None, 'vocab') if name.endswith('head') else ()
    flat[name] = hosts.put(x, layout and layout.sharding(*axes))
  heads = lm.nest(flat)
  return convert.pack_params(heads) if config.run.packed else heads


def _places(
  where: str, arrays: Mapping[str, Any], config
) -> dict[str, tuple[str, tuple[int, ...]]]:
  """{a parameter: (its stored name, its stored shape)}, checked to be complete.

  How many heads and layers there are is counted: settings beside them err.
  """
  weight = re.compile(r'(\d+)\.(\d+)\.linear\.weight')
  numbers = [m.groups() for x in arrays if (m := weight.fullmatch(x))]
  count, depth = (len({pair[i] for pair in numbers}) for i in range(2))
  D, V, places = config.width, config.vocab, {}
  for i in range(count):
    for j in range(depth):
      ours, theirs = f'{i}/layers/{j}', f'{i}.{j}.linear'
      places[f'{ours}/kernel'] = f'{theirs}.weight', (D, D)
      places[f'{ours}/bias'] = f'{theirs}.bias', (D,)
    if f'0.{depth}.weight' in arrays:
      places[f'{i}/head'] = f'{i}.{depth}.weight', (V, D)
  known = [theirs for theirs, _ in places.values()]
  unknown = [x for x in arrays if x not in known]
  missing = [x for x in known if x not in arrays]
  if unknown or missing or not count:
    raise ValueError(
      f'{where}: no heads of Medusa-1: no place for {names.some(unknown)}; '
      f'nothing for {names.some(missing)}; give {FORM}'
    )
  return places
