"""Files of drafts that are some layers on a target's embedding and head.

An encoder is the target's too. Kernels are int8, with a step for each output.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import sharding, types
from specdec_jax.drafters import draft_file
from specdec_jax.io import files, load
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm

KIND = draft_file.Kind('lm', 'a file of scripts/distill.py, or zoo:NAME')
# Parameters that a file leaves to the target; a student may share them, frozen.
SHARED = ('embed', 'head', 'encoder')
_STEP = '/step'


def is_file(source: str) -> bool:
  """Whether a draft's source is such a file."""
  return source.startswith('zoo:') or source.endswith('.safetensors')


def write(
  path: str | os.PathLike,
  config: model_config.LMConfig,
  params: types.Params,
  about: Mapping[str, Any],
) -> None:
  """Writes a file atomically.

  Args:
    path: of the file.
    config, params: of the draft; params of SHARED may be those of any model.
    about: how and for which target it was made; 'tokenizer' is a fingerprint.

  Raises:
    ValueError: it cannot be written.
  """
  config, flat = convert.plain(config, params)
  ids = np.array(config.proposes, np.int32)
  arrays: dict[str, np.ndarray] = {'ids': ids}
  for name, x in flat.items():
    if name.split('/')[0] in SHARED:
      continue
    x = np.asarray(x, np.float32)
    if name.endswith('/kernel'):
      step = np.maximum(np.abs(x).max(0), np.finfo(np.float32).tiny) / 127
      arrays[name + _STEP] = step
      x = np.rint(x / step).astype(np.int8)
    arrays[name] = x
  draft_file.write(
    KIND,
    path,
    arrays,
    {**about, 'windows': config.windows, 'rotated': config.rotated},
  )


def read(
  source: str | os.PathLike, target: load.LanguageModel
) -> load.LanguageModel:
  """The draft of a file for this target, whose arrays it shares.

  Args:
    source: a path, or zoo:NAME.
    target: with its dtype, layout on devices and kernels.

  Raises:
    ValueError: no such file, a damaged one, or of another target.
  """
  return draft_file.fitted(
    KIND, source, target, lambda *saved: _fit(source, target, *saved)
  )


def _fit(source, target, arrays, about) -> load.LanguageModel:
  draft_file.check_tokenizer(KIND, source, about, target)
  train = 'train one for this target with scripts/distill.py'
  steps = {n: arrays.pop(n) for n in list(arrays) if n.endswith(_STEP)}
  ids = arrays.pop('ids', np.empty(0))
  flat = {n: x * steps.get(n + _STEP, 1) for n, x in arrays.items()}
  numbers = {n.split('/')[1] for n in flat if n.startswith('layers/')}
  config = dataclasses.replace(
    target.config,
    depth=len(numbers),
    windows=tuple(json.loads(about.get('windows', '[0]'))),
    rotated=tuple(json.loads(about.get('rotated', '[true]'))),
  )
  wanted = {
    name: x.shape
    for name, x in lm.shapes(_plain(config)).items()
    if name.split('/')[0] not in SHARED
  }
  for name in sorted({*wanted, *flat}):
    have = flat[name].shape if name in flat else None
    if have != wanted.get(name):
      raise ValueError(
        f'lm {source}: {name} is {have}, this target needs '
        f'{wanted.get(name)}; {train}'
      )
  if len(ids) and not 0 <= ids.min() <= ids.max() < target.ids:
    raise ValueError(
      f'lm {source}: damaged: it proposes ids that are not below {target.ids}'
    )
  layout = target.layout and sharding.lay_out(target.layout.mesh, config)
  own = _laid_out(config, flat, layout)
  file = draft_file.find(KIND, source)
  return load.LanguageModel(
    os.fspath(source),
    os.fspath(source),
    target.tokenizer,
    target.params | own,
    lm_config=config,
    layout=layout,
    draft_ids=tuple(int(i) for i in ids),
    hashed=lambda: files.sha256(file),
  )


def _plain(config: model_config.LMConfig) -> model_config.LMConfig:
  return config.running(scan_layers=False, fused=False, packed=False)


def _laid_out(config, flat, layout) -> types.Params:
  """The parameters of a file nested, as the target has its own."""
  if config.scan_layers:
    parts = {n.split('/', 2)[2] for n in flat if n.startswith('layers/')}
    stack = lambda x: np.stack(
      [flat.pop(f'layers/{i}/{x}') for i in range(config.depth)]
    )
    flat |= {f'layers/{x}': stack(x) for x in sorted(parts)}
  put = layout.put if layout else lambda name, x: jnp.asarray(x)
  own = lm.nest({n: put(n, x.astype(config.dtype)) for n, x in flat.items()})
  if config.fused:
    _, own = convert.fuse(_plain(config), own)
  return convert.pack_params(own) if config.packed else own
