"""Files of drafts: arrays, and facts such as the tokenizer's fingerprint.

A path is a file, or zoo:NAME for a draft that comes with the library. Each
drafter defines its arrays (drafters.eagle_file, drafters.ngram).
"""

import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from specdec_jax.io import files, load

ZOO = pathlib.Path(__file__).parents[1] / 'zoo'


class Kind(NamedTuple):
  """A kind of draft file.

  name: of the drafter.
  form: where such a file comes from, for error messages.
  """

  name: str
  form: str


def write(
  kind: Kind,
  path: str | os.PathLike,
  arrays: Mapping[str, np.ndarray],
  about: Mapping[str, Any],
) -> None:
  """Writes a draft's file atomically.

  Args:
    kind: of the draft.
    path: of the file.
    arrays: by name.
    about: facts; those that are not strings are written as JSON. They must
      include 'tokenizer', the fingerprint of the target's tokenizer.

  Raises:
    ValueError: a path that cannot be written.
  """
  about = {**about, 'format': _format(kind)}
  facts = {k: x if type(x) is str else json.dumps(x) for k, x in about.items()}
  try:
    # safetensors writes a transposed array in the order of its memory.
    plain = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    content = safetensors.numpy.save(plain, metadata=facts)
    files.write(pathlib.Path(path), content)
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be written: {error.strerror}'
    ) from error


def find(kind: Kind, path: str | os.PathLike) -> pathlib.Path:
  """The file at a path, or of zoo:NAME.

  Raises:
    ValueError: no such file.
  """
  scheme, _, name = os.fspath(path).partition(':')
  file = pathlib.Path(os.path.abspath(path))
  if scheme == 'zoo':
    known = sorted(x.parent.name for x in ZOO.glob('*/draft.safetensors'))
    if name not in known:
      raise ValueError(
        f'{kind.name} {path}: the zoo has {", ".join(known) or "no draft yet"}'
      )
    file = ZOO / name / 'draft.safetensors'
  if not file.is_file():
    raise ValueError(f'{kind.name} {path}: no such file; give {kind.form}')
  return file


def read(
  kind: Kind, path: str | os.PathLike
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """(arrays, facts) of a file; all facts are strings.

  Raises:
    ValueError: no such file, a file of another kind, or a damaged one.
  """
  file = find(kind, path)
  try:
    with safetensors.safe_open(file, 'numpy') as opened:
      about = opened.metadata() or {}
      arrays = {name: opened.get_tensor(name) for name in opened.keys()}
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
      f'{kind.name} {path}: damaged, or not {kind.form}: {error}'
    ) from error
  if about.pop('format', '') != _format(kind):
    raise ValueError(f'{kind.name} {path}: not {kind.form}')
  return arrays, about


def fitted(
  kind: Kind,
  path: str | os.PathLike,
  target: load.LanguageModel,
  fit: Callable[[dict[str, np.ndarray], dict[str, str]], Any],
) -> Any:
  """fit(arrays, facts) of a file; kept in the target, which it is for."""
  file = find(kind, path)
  key = kind.name, file, file.stat().st_mtime_ns
  if key not in target.drafts:
    target.drafts[key] = fit(*read(kind, path))
  return target.drafts[key]


def check_tokenizer(
  kind: Kind,
  path: str | os.PathLike,
  about: Mapping[str, Any],
  target: load.LanguageModel,
) -> None:
  """Raises ValueError if a draft was made with another tokenizer."""
  if about.get('tokenizer') != target.tokenizer.fingerprint():
    raise ValueError(
      f'{kind.name} {path}: made with another tokenizer than that of '
      f'{target.tokenizer.source}; give {kind.form} for this target'
    )


def _format(kind: Kind) -> str:
  return f'specdec_jax {kind.name} 1'
