"""Converts parameters to other layouts: fused projections, panels for the CPU
kernels, all apart, or a head with fewer columns."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, types
from specdec_jax.kernels import pages
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, weights

# As the file has them (io.plan.make).
STORED = 'stored'
CODES = (STORED, *weights.INTEGERS)
DTYPES = (*model_config.ALLOWED['dtype'], *CODES)
# Last parts of the flat names of what the CPU kernels take in float32.
VECTORS = 'scale', 'bias', 'relative'
# Fused projection -> the module that it is in, and what it is made of.
_FUSED = {'qkv': ('attn', ('q', 'k', 'v')), 'gate_up': ('mlp', ('gate', 'up'))}
# Those whose parts do not share a panel.
PARTS = {'gate_up': 2}


def fuse(config: model_config.LMConfig, params: types.Params):
  """Fuses a model's projections; returns its (config, params). Changes params
  in place: each layer's parts are freed as they are joined, so memory never
  holds the model twice."""
  if config.run.fused:
    return config, params
  assert not config.run.scan_layers, 'scanned and fused: choose one'
  layers = list(params['layers'].values())
  layers += params.get('encoder', {}).get('layers', {}).values()
  for layer in layers:
    for whole, (group, parts) in _FUSED.items():
      if parts[0] not in layer[group]:
        continue  # an MLP without a gate
      found = [layer[group].pop(part) for part in parts]
      layer[group][whole] = {
        leaf: weights.join([x[leaf] for x in found], PARTS.get(whole, 1))
        for leaf in found[0]
      }
    pages.trim()
  return config.running(fused=True), params


def pack(config: model_config.LMConfig, params: types.Params):
  """Packs a fused model for the CPU kernels, in place: (config, params)."""
  params = pack_params(params)
  pages.trim()
  return config.running(packed=True), params


def pack_params(params: dict[str, Any], name: str = '') -> dict[str, Any]:
  """Packs kernels and casts vectors to float32, in place; returns params. Their
  innermost module has this name."""
  parts = PARTS.get(name, 1)
  for key, x in params.items():
    if isinstance(x, dict):
      params[key] = pack_params(x, key)
    elif key in ('kernel', 'head'):
      matrix = x if weights.is_stored(x) else weights.pack(x, parts)
      params[key] = jax.tree.map(pages.enlarge, matrix)
    elif key == 'bias' and 'kernel' in params:
      params[key] = weights.pad(x, params['kernel'], parts)
    elif key in VECTORS:
      params[key] = x.astype(jnp.float32)
  return params


def plain(config: model_config.LMConfig, params: types.Params):
  """Undoes packed, fused and scan_layers; returns (config, params by flat
  name). The parts are views if params are numpy arrays, else copies."""
  packed = config.run.packed
  config = config.running(scan_layers=False, fused=False, packed=False)
  flat = {n: weights.of(x).dense() for n, x in lm.flatten(params).items()}
  for name in [n for n in flat if 'layers/' in n]:
    group, _, rest = name.rpartition('layers/')
    if not rest.split('/')[0].isdecimal():
      stack = flat.pop(name)
      flat |= {f'{group}layers/{i}/{rest}': x for i, x in enumerate(stack)}
  out, shapes = {}, lm.shapes(config)
  for name, x in flat.items():
    *stem, module, leaf = ['', *name.split('/')]
    start, parts = 0, _FUSED[module][1] if module in _FUSED else [module]
    for part in parts:
      own = '/'.join([*stem, part, leaf]).lstrip('/')
      end = start + shapes[own].shape[-1]
      one = x[..., start:end]
      out[own] = one.astype(shapes[own].dtype) if packed else one
      # The biases of a packed model are padded.
      start = x.shape[-1] // PARTS[module] if module in PARTS else end
  return config, {name: out[name] for name in shapes}


def reduce(
  config: model_config.LMConfig, params: types.Params, ids: Sequence[int]
) -> tuple[model_config.LMConfig, types.Params]:
  """Cuts the head to these ascending ids; returns (config, params), which share
  layers' and norms' arrays with those given."""
  own = dataclasses.replace(
    config, tied=False, proposes=tuple(int(i) for i in ids)
  )
  head = weights.of(params['head'])
  few_R = jnp.asarray(own.proposes, jnp.int32)
  if config.tied:
    table = (
      weights.Table if weights.is_stored(params['head']) else jnp.transpose
    )
    params = params | {'embed': table(params['head'])}
  return own, params | {'head': head.take(few_R)}


def digest(params: types.Params) -> str:
  """Returns the SHA-256 over names, dtypes, shapes and values."""
  h = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    x = np.asarray(leaf)
    h.update(f'{jax.tree_util.keystr(path)} {x.dtype}{x.shape}'.encode())
    h.update(x.tobytes())
  return h.hexdigest()


def dtype_of(x: Any) -> str:
  """Returns the name of a model's dtype, given by name or as jnp.bfloat16."""
  name = jnp.dtype(x).name if isinstance(x, type | np.dtype) else x
  if name not in DTYPES:
    raise ValueError(f'dtype={x!r}: {fields.choices(x, DTYPES)}')
  return name
