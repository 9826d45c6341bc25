"""A model that gguf-split has cut into files, NAME-00001-of-00003.gguf.

llama.cpp (src/llama-model-loader.cpp) is given the first, which has the
settings, and finds the others by their names.
"""

import dataclasses
import pathlib
import re

from specdec_jax.io.gguf import container


def parse(path: pathlib.Path) -> container.File:
  """Opens a file, or the first of several, with the tensors of all of them."""
  file = container.parse(path)
  count = file.field('split.count', int, 1)
  if count == 1:
    return file
  number = file.field('split.no', int)
  name = re.fullmatch(r'(.+)-(\d{5})-of-(\d{5})\.gguf', path.name)
  this = f'{path}: is part {number + 1} of {count}'
  if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
    raise ValueError(
      f'{this}, and must be called NAME-{number + 1:05d}-of-{count:05d}.gguf, '
      'as the others are: rename it'
    )
  paths = [
    path.with_name(f'{name[1]}-{i + 1:05d}-of-{count:05d}.gguf')
    for i in range(count)
  ]
  if number:
    raise ValueError(f'{this}; name the first, {paths[0].name}')
  if missing := [x.name for x in paths if not x.exists()]:
    raise ValueError(
      f'{path}: of its {count} parts are missing {", ".join(missing)}: '
      'put them beside it'
    )
  parts = [file, *map(container.parse, paths[1:])]
  tensors: dict[str, container.Tensor] = {}
  for i, part in enumerate(parts):
    found = part.fields.get('split.no'), part.fields.get('split.count')
    twice = sorted(tensors.keys() & part.tensors.keys())
    if found != (i, count) or twice:
      why = f'has {twice[0]} again' if twice else f'says it is {found}'
      raise ValueError(
        f'{part.path}: is not part {i + 1} of {count} of {paths[0].name}: it '
        f'{why}'
      )
    tensors |= part.tensors
  return dataclasses.replace(file, tensors=tensors, parts=paths)
