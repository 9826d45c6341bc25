"""Opens the weights of a local Hugging Face folder.

Runs no code from the folder, and reads nothing outside it.
"""

import dataclasses
import pathlib

import numpy as np
import safetensors
from absl import logging

from specdec_jax.io import config_hf, files, names
from specdec_jax.models import config as model_config

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'


def open_folder(
  folder: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, list[pathlib.Path]]:
  """(settings, weights, paths of the weights) of a model folder.

  Raises:
    ValueError: a file is missing, unsupported or damaged.
  """
  config, naming = config_hf.read(folder / 'config.json')
  paths = _weight_files(folder)
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
        shapes[name], where[name] = tuple(part.get_shape()), path

  def get(name: str) -> np.ndarray:
    with _open(where[name]) as f:  # memory-mapped
      return f.get_tensor(name)

  reader = names.Reader(source, naming, shapes, get)
  if config.tied and reader.unties():
    # As transformers 5 does; of a T5 only the weights tell.
    config = dataclasses.replace(config, tied=False)
    if config.encoder is None:
      logging.warning(
        '%s: the head is stored and is not the embedding: they are NOT tied, '
        'whatever tie_word_embeddings says',
        source,
      )
  return config, reader, paths


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
