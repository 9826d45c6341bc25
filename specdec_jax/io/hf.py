"""Reads the config and safetensors weights of a local Hugging Face folder.

Supports files of transformers 4 and 5. Runs no code from the folder, and reads
nothing outside it.
"""

import pathlib
from typing import NamedTuple

import numpy as np
import safetensors

from specdec_jax.io import config_hf, files, names
from specdec_jax.models import config as model_config

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'


class Folder(NamedTuple):
  """An open model folder.

  config: settings of the model.
  reader: of its weights.
  weights: paths of the weight files.
  """

  config: model_config.LMConfig
  reader: names.Reader
  weights: tuple[pathlib.Path, ...]


def open_folder(folder: pathlib.Path, source: str) -> Folder:
  """Opens a model folder; arrays are read later, one by one.

  Raises:
    ValueError: a file is missing, unsupported or damaged.
  """
  config, rows = config_hf.read(folder / 'config.json')
  paths = _weight_files(folder)
  reader = _reader(paths, source, rows)
  # GPT-2 stores q, k and v as one array.
  reader = names.split(reader, names.GPT2_QKV, 3)
  return Folder(config, reader, tuple(paths))


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  index = folder / INDEX
  if not index.exists():
    return [folder / SINGLE]
  shards = files.read_json(index).get('weight_map')
  if not isinstance(shards, dict) or not shards:
    raise ValueError(f'{index}: weight_map is missing or empty')
  chosen = set(map(str, shards.values()))
  for name in chosen:
    # A plain name: a downloaded index must not point outside its folder.
    if not name.endswith('.safetensors') or any(c in name for c in '/\\\0'):
      raise ValueError(
        f'{index}: weight_map names {name!r}; allowed are *.safetensors files '
        'of the same folder'
      )
  return [folder / name for name in sorted(chosen)]


def _reader(paths: list[pathlib.Path], source: str, rows) -> names.Reader:
  """A reader of all tensors; a file is opened (memory-mapped) for each read."""
  shapes: dict[str, tuple[int, ...]] = {}
  where: dict[str, pathlib.Path] = {}
  for path in paths:
    with _open(path) as f:
      for name in f.keys():
        part = f.get_slice(name)
        if names.HARMLESS.fullmatch(name):
          continue
        if part.get_dtype() not in ('F32', 'F16', 'BF16', 'F64'):
          raise ValueError(
            f'{path}: {name} is {part.get_dtype()}; allowed are F32, F16, '
            'BF16, F64 (dequantise the checkpoint first)'
          )
        if name in where:
          raise ValueError(f'{path}: {name} is also in {where[name].name}')
        shapes[name] = tuple(part.get_shape())
        where[name] = path

  def get(name: str) -> np.ndarray:
    with _open(where[name]) as f:
      return f.get_tensor(name)

  return names.Reader(source, rows, shapes, get)


def _open(path: pathlib.Path):
  try:
    return safetensors.safe_open(path, 'numpy')
  except FileNotFoundError as e:
    raise ValueError(
      f'{path}: no such file; weights are read from {SINGLE}, or from the '
      f'files that {INDEX} lists'
    ) from e
  except (OSError, safetensors.SafetensorError) as e:
    with open(path, 'rb') as f:
      start = f.read(32)
    what = str(e)
    if start.startswith(b'version https://git-lfs'):
      what = 'a Git LFS pointer; fetch the weights with `git lfs pull`'
    raise ValueError(f'{path}: not a whole safetensors file: {what}') from e
