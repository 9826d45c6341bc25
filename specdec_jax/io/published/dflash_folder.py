"""Reads published DFlash drafts, folders with config.json and weights, in the
forms of its authors (z-lab), speculators and DeepSpec, which saves them as
DSpark drafts without a Markov head."""

import os
import pathlib
from typing import Any

from specdec_jax import types
from specdec_jax.io import files, load
from specdec_jax.io.published import claims, eagle_folder
from specdec_jax.models import eagle

FORM = 'a folder or hf:org/name with a DFlash draft'
_KINDS = 'dflash', 'DFlashDraftModel', 'Qwen3DSparkModel'


def fit(
  source: str | os.PathLike,
  target: load.LanguageModel,
  reading: claims.Reading = (),
) -> tuple[eagle.Blocks, types.Params]:
  """Returns (settings, weights.draft), fitted to this target. source: as in
  `find`; the rest as in eagle_folder.fit."""
  where, folder = f'dflash {source}', find(source)
  block = _block(folder, where, target)
  config, params = eagle_folder.fit(folder, where, target, claim, reading)
  if any(config.block.windows):
    raise ValueError(f'{where}: layers with a sliding window are not read')
  return eagle.Blocks(config, *block), params


def find(source: str | os.PathLike) -> pathlib.Path:
  """Returns the folder at 'hf:org/name' or a path."""
  folder = eagle_folder.find(source)
  if folder is None:
    raise ValueError(f'dflash {source}: no such folder; give {FORM}')
  return folder


def _block(
  folder: pathlib.Path, where: str, target: load.LanguageModel
) -> tuple[int, int, int]:
  """Returns eagle.Blocks' mask, size and first, as config.json claims."""
  raw = files.read_json(folder / 'config.json')
  kind, *_ = raw.get('architectures') or ['']
  kind = raw.get('speculators_model_type', kind)
  if kind not in _KINDS:
    raise ValueError(f'{where}: {kind} is no DFlash draft; give {FORM}')
  usual = dict(block_size=8) if kind == 'dflash' else {}  # speculators'
  said = usual | raw | (raw.get('dflash_config') or {})
  mask, size = (said.get(x, -1) for x in ('mask_token_id', 'block_size'))
  whole = type(mask) is type(size) is int
  if not whole or size < 2 or not 0 <= mask < target.config.vocab:
    raise ValueError(
      f'{where}: mask_token_id={mask!r}, block_size={size!r}: needs an id '
      f'below {target.config.vocab}, and at least 2 tokens'
    )
  anchored = said.get('sample_from_anchor', kind == _KINDS[-1])
  return mask, size, int(not anchored)


def claim(where: str, raw: dict[str, Any], *_) -> claims.Claim:
  """Reads a claim; speculators numbers taps by the layer they feed, from 1."""
  said = raw | (raw.get('dflash_config') or {})
  above = said.get('aux_hidden_state_layer_ids')
  taps = [i - 1 for i in above] if above else said.get('target_layer_ids')
  if not taps:
    raise ValueError(f'{where}: its config.json has no target_layer_ids')
  layers = {'model_type': 'qwen3'} | raw.get('transformer_layer_config', raw)
  layers['target_hidden_size'] = raw.get('target_hidden_size')
  settings = dict(reads='context', tap_norm='none', last_norm='fed')
  return claims.Claim(layers, tuple(taps), settings, more=int(bool(above)))
