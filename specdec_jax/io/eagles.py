"""Files of EAGLE drafts, as scripts/distill.py writes them, and the zoo's."""

import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specdec_jax import types
from specdec_jax.io import files
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm

_FORMAT = 'specdec_jax eagle 1'
ZOO = pathlib.Path(__file__).parents[1] / 'zoo'
FORMS = 'a file of scripts/distill.py, or zoo:NAME'


class Draft(NamedTuple):
  """What a file holds. layer: by flat name. ids: the draft's vocabulary.

  about: how and for whom it was made, as its writer said.
  """

  taps: tuple[int, ...]
  layer: dict[str, np.ndarray]
  ids: np.ndarray
  about: dict[str, str]


def write(path: str | os.PathLike, draft: Draft) -> None:
  """Writes a file, whole or not at all.

  Raises:
    ValueError: a path that cannot be written.
  """
  about = draft.about | dict(format=_FORMAT, taps=json.dumps(draft.taps))
  arrays = draft.layer | {'ids': np.asarray(draft.ids, np.int32)}
  try:
    content = safetensors.numpy.save(arrays, metadata=about)
    files.write(pathlib.Path(path), content)
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be written: {error.strerror}'
    ) from error


def find(path: str | os.PathLike) -> pathlib.Path:
  """The file of a path or of zoo:NAME.

  Raises:
    ValueError: a name that the zoo does not have.
  """
  scheme, _, name = os.fspath(path).partition(':')
  if scheme != 'zoo':
    return pathlib.Path(os.path.abspath(path))
  known = sorted(x.parent.name for x in ZOO.glob('*/draft.safetensors'))
  if name not in known:
    raise ValueError(
      f'eagle {path}: the zoo has {", ".join(known) or "no draft yet"}'
    )
  return ZOO / name / 'draft.safetensors'


def existing(path: str | os.PathLike) -> pathlib.Path:
  """As find; ValueError where no file is."""
  found = find(path)
  if not found.is_file():
    raise ValueError(f'eagle {path}: no such file; give {FORMS}')
  return found


def read(path: str | os.PathLike) -> Draft:
  """A draft as it lies in its file.

  Raises:
    ValueError: no such file, another kind of file, or a damaged one.
  """
  found = existing(path)
  try:
    with safetensors.safe_open(found, 'numpy') as file:
      about = file.metadata() or {}
      if about.pop('format', '') != _FORMAT:
        raise ValueError(f'eagle {path}: not {FORMS}')
      arrays = {name: file.get_tensor(name) for name in file.keys()}
    taps = tuple(json.loads(about.pop('taps')))
    return Draft(taps, arrays, arrays.pop('ids'), about)
  except OSError as error:
    raise ValueError(f'eagle {path}: cannot be read: {error}') from error
  except (
    KeyError,
    TypeError,
    json.JSONDecodeError,
    safetensors.SafetensorError,
  ) as error:
    raise ValueError(
      f'eagle {path}: damaged, or not {FORMS}: {error}'
    ) from error


def fit(
  draft: Draft,
  path: str | os.PathLike,
  target: model_config.LMConfig,
  target_params: types.Params,
  tokenizer: tokenizer_lib.Tokenizer,
  sharding: jax.sharding.Sharding | None = None,
) -> tuple[eagle.EagleConfig, types.Params]:
  """(settings, weights.draft) of a draft for this target, on its devices.

  sharding: where the draft lies; of the target the columns that the draft needs
  are gathered from wherever they are.

  Raises:
    ValueError: a draft for another tokenizer or for another kind of target, or
      one whose vocabulary is none.
  """
  if draft.about.get('tokenizer') != tokenizer.fingerprint():
    raise ValueError(
      f'eagle {path}: trained with another tokenizer than that of '
      f'{tokenizer.source}; train one for this target with scripts/distill.py'
    )
  try:
    config = eagle.settings(target, draft.taps)
  except ValueError as error:
    raise ValueError(
      f'eagle {path}: {error}; train one for this target with '
      'scripts/distill.py'
    ) from error
  want = eagle.shapes(config)
  found = {name: x.shape for name, x in draft.layer.items()}
  for name in sorted({*want, *found}):
    wanted = want[name].shape if name in want else None
    if wanted != found.get(name):
      raise ValueError(
        f'eagle {path}: {name} is {found.get(name)}, this target needs '
        f'{wanted}; train one for it with scripts/distill.py'
      )
  ids = _vocabulary(draft, path, min(tokenizer.size, target.vocab))
  put = lambda x: jax.device_put(x, sharding)
  layer = {
    n: put(jnp.asarray(x, want[n].dtype)) for n, x in draft.layer.items()
  }
  made = weights(lm.nest(layer), put(ids), target_params)
  return config, made | {'head': put(made['head'])}


def _vocabulary(draft: Draft, path, real: int) -> np.ndarray:
  """The ids of a draft's vocabulary, which must be `real` ones."""
  ids = draft.ids
  listed = ids.ndim == 1 and len(ids) and np.issubdtype(ids.dtype, np.integer)
  if listed and 0 <= ids.min() and ids.max() < real:
    if len(np.unique(ids)) == len(ids):
      return ids.astype(np.int32)
  raise ValueError(
    f'eagle {path}: damaged: its vocabulary is not a list of different ids '
    f'below {real}'
  )


def weights(layer: types.Params, ids: Any, target_params) -> types.Params:
  """weights.draft of a layer, the ids of its vocabulary, and its target."""
  ids = jnp.asarray(ids)
  head_DR = jnp.take(target_params['head'], ids, axis=1)
  return {'layer': layer, 'head': head_DR, 'ids': ids, 'target': target_params}


def describe(about: dict[str, Any]) -> dict[str, str]:
  """Facts as a file's header holds them: texts."""
  text = lambda x: x if isinstance(x, str) else json.dumps(x)
  return {name: text(value) for name, value in about.items()}
