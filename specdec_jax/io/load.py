"""Language models: from a source (sources.FORMS), or the user's own."""

import dataclasses
import functools
import inspect
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import fields, sharding, types
from specdec_jax.io import memory, own, plan, sources
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.kernels import library
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm, weights


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
  """A language model: parameters, tokenizer, settings and where they lie.

  source: where it was loaded from. label: its name in tables.
  lm_config: models.lm's settings, which describe params exactly; None for the
    user's own model, which has `own` instead.
  layout: how the parameters are split over a mesh; None: one device.
  draft_ids: the ids that it proposes as a draft; (): all.
  codes: how its matrices are quantised, and their input rows, as in 'stored,
    int8 rows'; '': not at all.
  hashed: computes `digest`.
  drafts: those fitted to it, shared by engines of every gamma. Kept here, not
    in a module: they hold its arrays, and are freed with it.
  """

  source: str
  label: str
  tokenizer: tokenizer_lib.Tokenizer
  params: types.Params
  lm_config: model_config.LMConfig | None = None
  own: types.Model | None = None
  layout: sharding.Layout | None = None
  draft_ids: tuple[int, ...] = ()
  codes: str = ''
  hashed: Callable[[], str] = lambda: ''
  drafts: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)

  def __repr__(self) -> str:
    return f'LanguageModel({self.source!r}, {self.dtype})'

  @property
  def config(self) -> model_config.LMConfig:
    """lm_config; ValueError for the user's own model, which has none."""
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
    """Makes the draft model, which reads as_draft's parameters. Gives it the
    target's ids and logits' width, or refuses it."""
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
    """(lm_config, params) with only draft_ids' columns in the head."""
    if not self.draft_ids:
      return self.lm_config, self.params
    return convert.reduce(self.config, self.params, self.draft_ids)

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the weights; reads the files again, on first use."""
    return self.hashed()

  @property
  def arithmetic(self) -> str:
    """Tells models with one digest apart: 'float32, stored, int8 rows'."""
    return ', '.join(filter(None, (self.dtype, self.codes)))

  def once(self, key: Any, make: Callable[[], Any]) -> Any:
    """Returns what make() gave when this model was first asked for `key`."""
    if key not in self.drafts:
      self.drafts[key] = make()
    return self.drafts[key]

  @property
  def context(self) -> int:
    """The longest text that it reads, in tokens."""
    return (self.own or self.config).context

  @property
  def vocab(self) -> int:
    """The embedding's rows, padding included."""
    return (self.own or self.config).vocab

  @property
  def start(self) -> int | None:
    """The id that an encoder-decoder's decoder begins with, else None."""
    return self.lm_config and self.lm_config.start

  @property
  def ids(self) -> int:
    """How many ids are real; the embedding may have more rows."""
    return min(self.tokenizer.size, self.vocab)

  @property
  def dtype(self) -> str:
    """That of the parameters; in the user's own model, of the first float."""
    if self.lm_config is not None:
      return self.lm_config.dtype
    kinds = [jnp.result_type(x) for x in jax.tree.leaves(self.params)]
    real = [str(x) for x in kinds if jnp.issubdtype(x, jnp.floating)]
    return real[0] if real else 'float32'


def load(
  source: str | os.PathLike | sources.Source,
  *,
  dtype: Any = convert.STORED,
  mesh: jax.sharding.Mesh | None = None,
  tensor_parallel: int = 0,
  scan_layers: bool | None = None,
  kernels: str = 'auto',
) -> LanguageModel:
  """Loads a model.

  Args:
    source: 'hf:org/name', a folder, a .gguf file, 'random:SIZE' (sources.FORMS)
      or 'package.module:make', your own function (docs/your_own_model.md); or
      what sources.open_source made from one of the first four.
    dtype: 'stored': as in the file (plan.make); 'float32', 'bfloat16' or
      'float64' (under x64), or that of jax.numpy; 'int8', 'int4': integer
      matrices, all else in bfloat16, on CPU float32.
    mesh: a (data, model) mesh (sharding.make_mesh); None: one device.
    tensor_parallel: for drafts, as in sharding.lay_out.
    scan_layers: scan over the layers, to compile faster; None: on TPU only.
    kernels: 'auto': specdec_jax.kernels on one CPU; 'int8': with input rows
      rounded to 8 bits, not 16, for matrices of codes; 'xla': none, to train.
  """
  opened = source if isinstance(source, sources.Source) else None
  if not isinstance(source, str | os.PathLike | sources.Source):
    given = f'source={fields.short(source)}'
    raise ValueError(f'{given}: must be a text or a path, as in hf:org/name')
  source = opened.name if opened else str(source)
  dtype = convert.dtype_of(dtype)
  library.check(kernels)
  sharding.check(mesh)
  if scan_layers not in (None, True, False):
    raise ValueError(f'scan_layers={scan_layers!r}: give True, False or None')
  if not opened and sources.FUNCTION.fullmatch(source):
    return _made(source, dtype, mesh, kernels)
  opened = opened or sources.open_source(source)
  layout = mesh and sharding.lay_out(
    mesh, opened.config, tensor_parallel=tensor_parallel
  )
  planned = plan.make(
    opened, dtype, layout=layout, scan_layers=scan_layers, kernels=kernels
  )
  if kernels == 'int8' and not (planned.packs and planned.codes):
    raise ValueError(
      f"{source}: kernels='int8' is for matrices that are codes on one CPU: "
      "dtype='stored', 'int8' or 'int4'; else give kernels='auto'"
    )
  memory.check({source: planned})
  model = read(planned)
  config, params = model.config, model.params
  if layout is None and not config.run.scan_layers:
    config, params = convert.fuse(config, params)
  if planned.packs:
    config, params = convert.pack(config, params)
  return dataclasses.replace(model, lm_config=config, params=params)


def read(planned: plan.Plan) -> LanguageModel:
  """Reads the weights, neither fused nor packed."""
  opened = planned.source
  return LanguageModel(
    opened.name,
    planned.label,
    opened.tokenizer,
    plan.read(planned),
    lm_config=planned.config,
    layout=planned.layout,
    draft_ids=opened.draft_ids,
    codes=planned.codes,
    hashed=lambda: opened.digest,
  )


def tokenizer_of(source: str) -> tokenizer_lib.Tokenizer:
  """Returns the tokenizer; loads no weights, but for the user's own model."""
  mine = sources.FUNCTION.fullmatch(source)
  return (load if mine else sources.open_source)(source).tokenizer


def wrap(
  model: types.Model,
  params: types.Params,
  tokenizer: tokenizer_lib.Tokenizer | str | os.PathLike | None = None,
  *,
  source: str = 'a model of your own',
) -> LanguageModel:
  """Wraps a model of the user's own for whatever generates and measures.

  model: must give ids from tokenizer.size on logit -inf.
  tokenizer: with at most model.vocab ids; or a folder with tokenizer.json;
    None: ids below 256 are bytes, then eos and bos.
  source: its name in tables and errors.
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
  return LanguageModel(
    source,
    source,
    tokenizer.cut_to(model.vocab, source),
    params,
    own=model,
    hashed=lambda: convert.digest(params),
  )


def _made(source: str, dtype: str, mesh: Any, kernels: str) -> LanguageModel:
  """Calls package.module:make, which may take vocab, seed and dtype, and
  returns the arguments of `wrap`."""
  dtype = 'float32' if dtype == convert.STORED else dtype
  if mesh is not None or dtype in weights.INTEGERS or kernels == 'int8':
    raise ValueError(
      f'{source}: a model of your own has no mesh, no integers and no int8 '
      "rows: give dtype='float32', kernels='auto'"
    )
  try:
    make = own.import_name(source)
    known = inspect.signature(make).parameters
    offered = dict(vocab=512, seed=0, dtype=dtype)
    made = make(**{k: x for k, x in offered.items() if k in known})
    if not isinstance(made, tuple) or len(made) not in (2, 3):
      raise TypeError(
        f'it returned {type(made).__name__}, not (types.Model, params, '
        'tokenizer)'
      )
  except Exception as error:  # whatever the user's module does
    raise ValueError(
      f'source {source!r}: {fields.first_line(error)}; allowed are '
      f'{sources.FORMS}'
    ) from error
  return wrap(*made, source=source)
