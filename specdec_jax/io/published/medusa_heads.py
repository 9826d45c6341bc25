"""Reads the heads of Medusa-1 in the four layouts that they are published in.

Heads with a matrix each, and heads that share the target's, are files by
themselves; others lie in a model that was tuned with them, or are as vLLM has
them. Source: medusa_model and medusa_model_legacy of FasterDecoding/Medusa, and
vLLM's medusa.
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
  """The heads of a source by their numbers, read once for a target."""
  paths = find(source)
  read = lambda: _read(f'medusa {source}', paths, target)
  return target.once(('medusa', *files.stamp(paths)), read)


def find(source: str | os.PathLike) -> list[pathlib.Path]:
  """The files of a source, checked to be there."""
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
  found = stored.once(where, (pair for x in opened for pair in x.items()))
  inside = {k: x for k, x in found.items() if k.startswith(INSIDE)}
  arrays = {k.removeprefix(INSIDE): x for k, x in (inside or found).items()}
  arrays = _renamed(where, arrays)
  config, layout, flat = target.config, target.layout, {}
  for name, theirs in _places(where, arrays, target).items():
    x = np.asarray(arrays[theirs].read().T, jnp.dtype(config.dtype))
    names.check_finite(where, theirs, x)
    axes = (None, 'vocab') if name.endswith('head') else ()
    flat[name] = hosts.put(x, layout and layout.sharding(*axes))
  heads = lm.nest(flat)
  return rounded.pack_draft(heads) if config.run.packed else heads


def _renamed(where: str, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
  """Arrays of vLLM by the names that Medusa's authors give theirs."""
  bare = {x: x.removeprefix('medusa_heads.') for x in arrays}
  layer = re.compile(r'blocks\.(\d+)\.layers\.(\d+)')
  depth = len({m[2] for x in bare.values() if (m := layer.match(x))})
  if not depth:
    return arrays
  head = lambda x: re.sub(r'^lm_heads\.(\d+)', rf'\1.{depth}', x)
  named = lambda x: layer.sub(r'\1.\2.linear', head(bare[x]))
  return stored.once(where, ((named(n), x) for n, x in arrays.items()))


def _places(
  where: str, arrays: Mapping[str, Any], target: load.LanguageModel
) -> dict[str, str]:
  """{a parameter: its stored name}, checked to be complete.

  How many heads and layers there are is counted: settings beside them err.
  """
  weight = re.compile(r'(\d+)\.(\d+)\.linear\.weight')
  numbers = [m.groups() for x in arrays if (m := weight.fullmatch(x))]
  count, depth = (len({pair[i] for pair in numbers}) for i in range(2))
  own, biased = (x in arrays for x in (f'0.{depth}.weight', '0.0.linear.bias'))
  known = _names(count, depth, own, biased)
  D, V = target.config.width, target.config.vocab
  shapes = {'kernel': (D, D), 'bias': (D,), 'head': (V, D)}
  needed = {x: shapes[n.split('/')[-1]] for n, x in known.items()}
  found = {n: x.shape for n, x in arrays.items()}
  who, advice = f'heads of {target.label}', f'; give {FORM}, of this target'
  names.check(where, needed, found, who, advice)
  return known


def _names(count: int, depth: int, own: bool, biased: bool) -> dict[str, str]:
  """{a parameter: its stored name}; own: heads have a matrix each."""
  leaves = [('kernel', 'weight'), ('bias', 'bias')][: 1 + biased]
  layers = {
    f'{i}/layers/{j}/{ours}': f'{i}.{j}.linear.{theirs}'
    for i in range(count)
    for j in range(depth)
    for ours, theirs in leaves
  }
  heads = {f'{i}/head': f'{i}.{depth}.weight' for i in range(count) if own}
  return layers | heads


def stored_as(heads: Mapping[str, Any]) -> dict[str, np.ndarray]:
  """Arrays under their stored names, from which `fit` reads these heads."""
  layers, own = heads['0']['layers'], 'head' in heads['0']
  known = _names(len(heads), len(layers), own, biased='bias' in layers['0'])
  flat = lm.flatten(heads)
  return {theirs: np.asarray(flat[n]).T for n, theirs in known.items()}
