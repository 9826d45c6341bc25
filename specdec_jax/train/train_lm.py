"""Trains a language model on text, or an encoder-decoder on pairs of texts, and
exports it (scripts/train.py)."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, hosts, sharding, types
from specdec_jax import settings as settings_lib
from specdec_jax.io import export, plan, sources
from specdec_jax.io import load as load_lib
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import work
from specdec_jax.train import data, loop, runner, text, text_loss, text_metrics
from specdec_jax.train import step as step_lib

# A resumed run cannot change its data, the shapes of its parameters, or the
# judge, by whose figures its steps are compared.
_FIXED = ('model.size', 'model.source', 'read', 'text', 'run.seed', 'judge')
_FIXED += ('optimiser.muon',)
# The most rows that the held-out loss is computed on.
_HELD_OUT = 64


@dataclasses.dataclass(frozen=True)
class Model(fields.Checked):
  """The model: of a size, with random weights, or of a source."""

  size: str = fields.setting(help='of models.config.SIZES, random weights')
  source: str = fields.setting(help='a model to go on from, as hf:org/name')
  # Of the forward pass; trained parameters are float32.
  dtype: str = fields.setting(allowed=settings_lib.DTYPES)
  remat: bool = fields.setting(help='compute layers twice, to save memory')
  dropout: float = fields.setting(low=0, below=1, help='share that is zeroed')

  def __post_init__(self):
    super().__post_init__()
    if bool(self.size) == bool(self.source):
      raise ValueError(
        f'size={self.size!r} and source={self.source!r}: give one of them, '
        'random weights of a size or a model to go on from'
      )


@dataclasses.dataclass(frozen=True)
class Text(fields.Checked):
  source: str = fields.setting(help='see train.text.read')
  field: str = fields.setting(help='the field of JSONL and Hugging Face rows')
  source_field: str = fields.setting(help='that an encoder reads, or empty')
  # A folder with one, or a model; empty: one of `vocab` tokens is trained.
  tokenizer: str = fields.setting()
  vocab: int = fields.setting(low=257)
  length: int = fields.setting(low=2, help='tokens of a row')
  source_length: int = fields.setting(low=2, help='of what an encoder reads')
  held_out: int = fields.setting(low=2, help='one document in so many')
  rows: int = fields.setting(low=1, help='of a batch')


@dataclasses.dataclass(frozen=True)
class Settings:
  model: Model
  text: Text
  mesh: step_lib.Mesh
  optimiser: step_lib.Optimiser
  run: loop.Run
  judge: text_metrics.Judge

  def __post_init__(self):
    rows = {'text.rows': self.text.rows}
    data.check_rows(rows, self.optimiser.accumulate, 'optimiser.accumulate')
    if self.judge.metric and not self.text.source_field:
      raise ValueError(
        f'judge.metric={self.judge.metric!r}: is of answers to sources; give '
        "text.source_field, or judge.metric=''"
      )
    if self.model.source and self.text.tokenizer:
      raise ValueError(
        f'text.tokenizer={self.text.tokenizer!r}: model.source has its own; '
        'leave it empty'
      )


def settings(config) -> Settings:
  """Checks a ConfigDict and returns it as dataclasses; loads nothing."""
  return fields.parse(Settings, config)


def run(
  s: Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a model and writes it to workdir/model, in Hugging Face's format.
  Resumes an earlier run there, as runner.run; changed: even if settings that
  may change have changed."""
  read = text.digests(s.text.source)
  if s.model.source:
    read['model'] = sources.open_source(s.model.source).digest
  return runner.run(
    s,
    workdir,
    lambda begun: _prepare(s, workdir, begun),
    result='model',
    changed=changed,
    fixed=_FIXED,
    read=read,
  )


def _prepare(
  s: Settings, workdir: pathlib.Path, begun: bool
) -> runner.Prepared:
  mesh = s.mesh.over({'text.rows': s.text.rows})
  opened = sources.open_source(s.model.source) if s.model.source else None
  config = opened.config if opened else model_config.sized(s.model.size)
  _check(s, config)
  # Fail now, not after training: no format, or a mesh that does not divide it.
  export.settings(config)
  if mesh is not None:
    sharding.lay_out(mesh, config, fsdp=s.mesh.fsdp)
  corpus = text.read(
    s.text.source, field=s.text.field, source_field=s.text.source_field
  )
  kept, held = text.held_out(corpus, s.text.held_out)
  if opened is None:
    tokenizer = _tokenizer(s.text, kept, workdir, begun)
    config = _of_size(s.model.size, tokenizer)
    drawn = sources.Drawn(s.run.seed)
    opened = sources.Source(
      s.model.size, s.model.size, tokenizer, config, drawn
    )
  layout = mesh and sharding.lay_out(mesh, config, fsdp=s.mesh.fsdp)
  planned = plan.make(
    opened, 'float32', layout=layout, scan_layers=False, kernels='xla'
  )
  model = load_lib.read(planned)

  def write(params, about):
    path, about = workdir / 'model', about | {'corpus': corpus.sha256}
    rest = model.config, hosts.fetch(params), model.tokenizer
    hosts.from_first(lambda: export.save(path, *rest, made_by=about))
    return path

  return _task(s, model, kept, held), write


def _check(s: Settings, config: model_config.LMConfig) -> None:
  """Refuses sources without an encoder, an encoder without sources, and answers
  that do not fit into the context."""
  name = s.model.size or s.model.source
  field, has = s.text.source_field, config.encoder is not None
  if bool(field) != has:
    raise ValueError(
      f'text.source_field={field!r}: {name} has {"an" if has else "no"} '
      'encoder; name the field that an encoder reads, and none for other models'
    )
  lengths = s.text.length, s.text.source_length
  if s.judge.metric and max(lengths) > config.context:
    raise ValueError(
      f'text.length={lengths[0]}, text.source_length={lengths[1]}: '
      f'judge.metric={s.judge.metric!r} answers within the context of {name}, '
      f"{config.context} tokens; take at most that, or judge.metric=''"
    )


def _of_size(
  size: str, tokenizer: tokenizer_lib.Tokenizer
) -> model_config.LMConfig:
  """Returns a size's settings with a tokenizer's vocabulary."""
  config = model_config.sized(size, vocab=-(-tokenizer.size // 64) * 64)
  if config.encoder is None:
    return config
  # As in T5, a decoder begins with padding; where there is none, with eos.
  named = dict(tokenizer.specials).get('pad_token', '')
  pad = tokenizer.inner.token_to_id(named)
  start = text.end_of(tokenizer) if pad is None else pad
  return dataclasses.replace(config, start=start)


def _tokenizer(
  s: Text, corpus: text.Corpus, workdir: pathlib.Path, begun: bool
) -> tokenizer_lib.Tokenizer:
  """Returns the settings' tokenizer or a begun run's, or trains one."""
  folder = workdir / 'tokenizer'
  if s.tokenizer:
    folder = pathlib.Path(s.tokenizer).expanduser()
  if s.tokenizer and not folder.is_dir():  # which may have no model
    return load_lib.tokenizer_of(s.tokenizer)

  def make() -> None:
    # Not trained again: if the text has changed, the run is refused later, and
    # must still have the tokenizer of its checkpoints.
    if not (s.tokenizer or (begun and folder.is_dir())):
      text.train_tokenizer(corpus, s.vocab, folder)

  hosts.from_first(make)
  return tokenizer_lib.from_folder(folder, str(folder))


def _task(
  s: Settings,
  model: load_lib.LanguageModel,
  kept: text.Corpus,
  held: text.Corpus,
) -> loop.Task:
  rows, few = _rows(s.text, model, kept), _rows(s.text, model, held)
  running = model.config.running(dtype=s.model.dtype)
  loss = functools.partial(
    text_loss.cross_entropy,
    running,
    ids=model.ids,
    remat=s.model.remat,
    layout=model.layout,
  )
  trained = loss(dropout=s.model.dropout)
  losses = held_out_loss(loss(), {n: x[:_HELD_OUT] for n, x in few.items()})
  evaluate = losses
  if s.judge.metric:
    answering = dataclasses.replace(model, params=None, lm_config=running)
    scores = text_metrics.scores(s.judge, answering, held, few, s.text.rows)
    gather = text_loss.gatherer(model.layout)
    evaluate = lambda params: losses(params) | scores(gather(params))
  read = s.text.source_length if s.text.source_field else 0
  ends = text.ends(rows) if read else {}
  batches = data.Batches(rows, batch=s.text.rows, seed=s.run.seed, ends=ends)
  needed = batches.share * s.text.rows
  return loop.Task(
    params=model.params,
    loss=trained,
    frozen={},
    batches=batches,
    evaluate=evaluate,
    score=lambda figures: -figures['held_out_loss'],
    tokens=round(needed * (s.text.length + read)),
    flops=6 * needed * work.row_products(model.params, s.text.length, read),
    dtype=s.model.dtype,
    place=data.placer(model.layout),
  )


def _rows(
  s: Text, model: load_lib.LanguageModel, corpus: text.Corpus
) -> dict[str, np.ndarray]:
  """Makes all rows; without sources, every token counts in the loss."""
  if model.start is not None:
    lengths = s.length, s.source_length
    return text.pair_rows(corpus, model.tokenizer, model.start, *lengths)
  tokens_NT = text.pack(corpus, model.tokenizer, s.length)
  return {'tokens': tokens_NT, 'counted': np.ones(tokens_NT.shape, bool)}


def held_out_loss(
  loss: step_lib.Loss, rows: dict[str, np.ndarray]
) -> Callable[[types.Params], dict[str, float]]:
  """Makes a function from params to {'held_out_loss': mean over these rows}."""
  program = jax.jit(
    lambda params, rows: loss(params, {}, rows, jax.random.key(0))[0]
  )
  return lambda params: {
    'held_out_loss': float(program(params, jax.tree.map(jnp.asarray, rows)))
  }
