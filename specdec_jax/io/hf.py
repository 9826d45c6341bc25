"""Finds local models, and opens the weights in a Hugging Face folder. Runs no
code from the folder, and reads nothing outside it."""

import dataclasses
import os
import pathlib
import re

import numpy as np

from specdec_jax.io import files, names
from specdec_jax.io.arrays import stored
from specdec_jax.io.config_json import families
from specdec_jax.io.quantised import form
from specdec_jax.io.quantised import reader as quantised
from specdec_jax.models import config as model_config

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
# A file and the index of several; the first that are there are read.
_FORMS = (
  (SINGLE, INDEX),
  ('pytorch_model.bin', 'pytorch_model.bin.index.json'),
)
_SUFFIXES = ('.safetensors', '.bin', '.pt', '.pth')
DRAFT = "a draft is an option: draft='lm' or 'eagle' with its source"


def find(source: str) -> pathlib.Path | None:
  """Returns the folder or .gguf file that a source names, None if there is
  none. Takes a file that is read with its folder as the folder."""
  path = pathlib.Path(os.path.expanduser(source))
  if not source or not os.path.exists(path):
    return None
  if path.is_dir() or path.suffix == '.gguf':
    return path
  folder = path.parent
  if (folder / 'config.json').exists():
    read = ['config.json', *(index for _, index in _FORMS)]
    if path.name in read or path in weight_files(folder):
      return folder
  raise ValueError(
    f'source {source!r}: is no model alone; give the folder that has its '
    f'config.json, or a .gguf file; {DRAFT}'
  )


def open_folder(
  folder: pathlib.Path, source: str
) -> tuple[model_config.LMConfig, names.Reader, list[pathlib.Path]]:
  """Returns (settings, weights, paths to the weights) for a model folder."""
  if adapter := next(folder.glob('adapter_[cm]o*'), None):
    raise ValueError(
      f'{adapter}: an adapter, which is not read: merge it (peft: '
      'merge_and_unload, then save_pretrained), and give what that saves, or '
      'move the adapter elsewhere to run the model without it'
    )
  path = folder / 'config.json'
  how, raw = quantised.settings(files.read_json(path), path)
  config, naming = families.from_json(raw, path)
  paths = weight_files(folder)
  pairs = (
    (names.INNER.sub('', name), (array, path))
    for path in paths
    for name, array in stored.open_file(path).items()
  )
  kept = (x for x in pairs if not names.HARMLESS.fullmatch(x[0]))
  found = stored.unique(folder, kept)
  arrays = {name: array for name, (array, _) in found.items()}

  plans, plain = {}, arrays
  if how is not None:
    plans, plain = quantised.plan(str(folder), how, arrays)
  for name, array in plain.items():
    if array.dtype not in form.FLOATS:
      raise ValueError(
        f'{found[name][1]}: {name} is {array.dtype}; allowed are '
        f'{", ".join(form.FLOATS)}, and the parts of quantised matrices of '
        'which config.json has the quantization_config'
      )
  reader = quantised.opened(source, naming, plans, plain)
  if config.tied and reader.unties():
    # As transformers 5 does; of a T5 only the weights tell.
    config = dataclasses.replace(config, tied=False)
  return config, reader, paths


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  for name, index_name in _FORMS:
    single, index = folder / name, folder / index_name
    listed = _listed(index, single.suffix) if index.exists() else []
    if single.exists():
      # A stale index is often left beside weights that were saved again.
      if any(path.exists() and path != single for path in listed):
        _check_same(single, listed, index)
      return [single]
    if listed:
      return listed
    found = sorted(folder.glob(f'*{single.suffix}'))
    # Shards without an index: NAME-00001-of-00003 and all the others.
    of = rf'(.+)-\d+-of-0*{len(found)}'
    numbered = [re.fullmatch(of, path.stem) for path in found]
    if all(numbered) and len({m and m[1] for m in numbered}) == 1:
      return found
  have = [x.name for x in sorted(folder.iterdir()) if x.suffix in _SUFFIXES]
  raise ValueError(
    f'{folder / SINGLE}: no such file; weights are read from it, from the '
    f'files that {INDEX} lists, or from {" or ".join(_FORMS[1])}; '
    + (f'here are {have[:4]}' if have else 'here are none')
  )


def _check_same(
  single: pathlib.Path, shards: list[pathlib.Path], index: pathlib.Path
) -> None:
  """Raises ValueError unless the one file holds what the shards hold."""
  if all(path.exists() for path in shards):
    one, many = stored.open_file(single), {}
    for path in shards:
      many |= stored.open_file(path)
    equal = lambda name: np.array_equal(one[name].read(), many[name].read())
    if one.keys() == many.keys() and all(map(equal, one)):
      return
  raise ValueError(
    f'{index}: the weights that it lists are not those of {single.name} beside '
    'it; remove the old ones (transformers reads the single file)'
  )


def _listed(index: pathlib.Path, suffix: str) -> list[pathlib.Path]:
  folder = index.parent
  shards = files.read_json(index).get('weight_map')
  if not isinstance(shards, dict) or not shards:
    raise ValueError(f'{index}: weight_map is missing or empty')
  chosen = set(map(str, shards.values()))
  for name in chosen:
    # A plain name: a downloaded index must not point outside its folder.
    if not name.endswith(suffix) or any(c in name for c in '/\\\0'):
      raise ValueError(
        f'{index}: weight_map names {name!r}; allowed are *{suffix} files of '
        'the same folder'
      )
  return [folder / name for name in sorted(chosen)]
