"""Files of EAGLE drafts: writing, reading and checking against a target."""

import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import hosts, types
from specdec_jax.drafters import draft_file
from specdec_jax.io import load
from specdec_jax.models import convert, eagle, lm

KIND = draft_file.Kind('eagle', 'a file of scripts/distill.py, or zoo:NAME')


class Saved(NamedTuple):
  """The content of a draft's file.

  taps: the target's layers whose residual streams are its features.
  layer: parameters of the draft's layer, by flat name.
  ids: the draft's vocabulary, as ids of the target.
  about: how and for which target it was made; 'tokenizer' is a fingerprint.
  """

  taps: tuple[int, ...]
  layer: dict[str, np.ndarray]
  ids: np.ndarray
  about: dict[str, Any]


def write(path: str | os.PathLike, saved: Saved) -> None:
  """Writes a file atomically; ValueError if it cannot be written."""
  arrays = saved.layer | {'ids': np.asarray(saved.ids, np.int32)}
  draft_file.write(KIND, path, arrays, saved.about | {'taps': saved.taps})


def read(path: str | os.PathLike) -> Saved:
  """Reads a draft; ValueError if the file is missing or damaged."""
  return unpacked(path, *draft_file.read(KIND, path))


def unpacked(path, arrays, about) -> Saved:
  """Saved from a file's arrays and facts; ValueError if one is missing."""
  try:
    taps = tuple(json.loads(about['taps']))
    ids = arrays['ids']
  except (KeyError, TypeError, json.JSONDecodeError) as error:
    raise ValueError(
      f'eagle {path}: damaged, or not {KIND.form}: {error}'
    ) from error
  layer = {name: x for name, x in arrays.items() if name != 'ids'}
  return Saved(
    taps, layer, ids, {k: x for k, x in about.items() if k != 'taps'}
  )


def fit(
  saved: Saved,
  path: str | os.PathLike,
  target: load.LanguageModel,
  put: jax.sharding.Sharding | None = None,
) -> tuple[eagle.EagleConfig, types.Params]:
  """(config, weights.draft) of a draft for this target, on its devices.

  Args:
    saved: the draft.
    path: of its file, for error messages.
    target: the model to draft for; its embedding and head are used.
    put: the sharding of the draft's parameters; None: the default device.

  Raises:
    ValueError: the draft was made for another tokenizer or other sizes, or its
      vocabulary does not fit the target's.
  """
  draft_file.check_tokenizer(KIND, path, saved.about, target)
  train = 'train one for this target with scripts/distill.py'
  try:
    config = eagle.settings(target.config, saved.taps)
  except ValueError as error:
    raise ValueError(f'eagle {path}: {error}; {train}') from error
  want = eagle.shapes(config)
  for name in sorted({*want, *saved.layer}):
    wanted = want[name].shape if name in want else None
    found = saved.layer[name].shape if name in saved.layer else None
    if wanted != found:
      raise ValueError(
        f'eagle {path}: {name} is {found}, this target needs {wanted}; {train}'
      )
  ids = saved.ids
  listed = ids.ndim == 1 and len(ids) and np.issubdtype(ids.dtype, np.integer)
  if (
    not listed
    or len(np.unique(ids)) < len(ids)
    or not 0 <= ids.min() <= ids.max() < target.ids
  ):
    raise ValueError(
      f'eagle {path}: damaged: its vocabulary is not a list of different ids '
      f'below {target.ids}'
    )
  place = lambda x: hosts.put(x, put)
  layer = {
    name: place(jnp.asarray(x, want[name].dtype))
    for name, x in saved.layer.items()
  }
  ids, nested = place(ids.astype(np.int32)), lm.nest(layer)
  if target.config.packed:
    config = eagle.settings(target.config, saved.taps, packed=True)
    nested = convert.pack_params(nested)
  made = eagle.weights(nested, ids, target.params)
  return config, made | {'head': place(made['head'])}
