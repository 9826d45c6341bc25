"""Trains a language model on a text and exports it (scripts/train.py)."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import fields, sharding, types
from specdec_jax import settings as settings_lib
from specdec_jax.bench import metrics
from specdec_jax.io import export
from specdec_jax.io import load as load_lib
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import data, lm_loss, loop, program, text
from specdec_jax.train import step as step_lib

# A resumed run cannot change its data or the shapes of its parameters.
_FIXED = ('model.size', 'text', 'run.seed', 'optimiser.muon')
# The most rows that the held-out loss is computed on.
_JUDGED = 64


@dataclasses.dataclass(frozen=True)
class Model(fields.Checked):
  size: str = fields.setting(
    help='a row of models.config.SIZES, with the vocabulary of the tokenizer'
  )
  dtype: str = fields.setting(
    allowed=settings_lib.DTYPES,
    help='of the forward pass; trained parameters are float32',
  )
  remat: bool = fields.setting(
    help='compute the layers again in the backward pass, to save memory'
  )


@dataclasses.dataclass(frozen=True)
class Text(fields.Checked):
  source: str = fields.setting(help='see train.text.read')
  field: str = fields.setting(help='the field of JSONL and Hugging Face rows')
  tokenizer: str = fields.setting(
    help='a folder with one, or a model; empty: train one of `vocab` tokens'
  )
  vocab: int = fields.setting(low=257)
  length: int = fields.setting(low=2, help='tokens of a row')
  held_out: int = fields.setting(low=2, help='one document in so many')
  rows: int = fields.setting(low=1, help='of a batch')


@dataclasses.dataclass(frozen=True)
class Settings:
  model: Model
  text: Text
  mesh: settings_lib.Mesh
  optimiser: step_lib.Optimiser
  run: loop.Run

  def __post_init__(self):
    data.check_rows({'text.rows': self.text.rows}, self.mesh.data)


def settings(config) -> Settings:
  """Checks a ConfigDict and returns it as dataclasses; loads nothing."""
  return fields.parse(Settings, config)


def run(
  s: Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a model and writes it to workdir/model, in Hugging Face's format.

  Resumes a run that was interrupted; returns at once if it was finished.

  Args:
    s: the settings.
    workdir: the folder of the run.
    changed: resume even if the settings differ from those it began with.

  Returns:
    The figures of the best step, with 'step', 'finished' and the path of the
    'model'; only 'step' and 'finished' if a signal ended the run.

  Raises:
    ValueError: as program.run; a text or a tokenizer that cannot be used.
  """
  return program.run(
    s,
    workdir,
    lambda begun: _prepare(s, workdir, begun),
    result='model',
    changed=changed,
    fixed=_FIXED,
  )


def _prepare(
  s: Settings, workdir: pathlib.Path, begun: bool
) -> program.Prepared:
  model = model_config.sized(s.model.size)
  export.settings(model)  # fail now, not after training, if it has no format
  corpus = text.read(s.text.source, field=s.text.field)
  kept, held = text.held_out(corpus, s.text.held_out)
  tokenizer = _tokenizer(s.text, kept, workdir, begun)
  model = dataclasses.replace(model, vocab=-(-tokenizer.size // 64) * 64)
  mesh = sharding.mesh_of(s.mesh.data, s.mesh.model)
  layout = None if mesh is None else sharding.lay_out(mesh, model)

  def write(params, about):
    path, about = workdir / 'model', about | {'corpus': corpus.sha256}
    export.save(path, model, params, tokenizer, made_by=about)
    return path

  task = _task(s, model, tokenizer, kept, held, layout)
  return program.Prepared(task, layout, write)


def _tokenizer(
  s: Text, corpus: text.Corpus, workdir: pathlib.Path, begun: bool
) -> tokenizer_lib.Tokenizer:
  """The tokenizer of the settings, of the run to resume, or a new one."""
  if not s.tokenizer:
    folder = workdir / 'tokenizer'
    # Not trained again: if the text has changed, the run is refused later, and
    # must still have the tokenizer of its checkpoints.
    if begun and folder.is_dir():
      return tokenizer_lib.from_folder(folder, str(folder))
    return text.train_tokenizer(corpus, s.vocab, folder)
  folder = pathlib.Path(s.tokenizer).expanduser()
  if folder.is_dir():  # perhaps without a model
    return tokenizer_lib.from_folder(folder, s.tokenizer)
  try:
    return load_lib.open_source(s.tokenizer).tokenizer
  except ValueError as error:
    raise ValueError(f'text.tokenizer: {error}') from error


def _task(
  s: Settings,
  model: model_config.LMConfig,
  tokenizer: tokenizer_lib.Tokenizer,
  kept: text.Corpus,
  held: text.Corpus,
  layout: sharding.Layout | None,
) -> loop.Task:
  rows = text.pack(kept.documents, tokenizer, s.text.length)
  few = text.pack(held.documents, tokenizer, s.text.length)[:_JUDGED]
  params = lm.init(model, s.run.seed, layout and layout.put)
  loss = lm_loss.cross_entropy(
    dataclasses.replace(model, dtype=s.model.dtype),
    ids=tokenizer.size,
    remat=s.model.remat,
    constrain=layout and layout.constrain,
  )
  tokens = s.text.rows * s.text.length
  return loop.Task(
    params=params,
    loss=loss,
    frozen={},
    batches=data.batches(_batch(rows), batch=s.text.rows, seed=s.run.seed),
    judge=held_out_loss(loss, few),
    score=lambda figures: -figures['held_out_loss'],
    tokens=tokens,
    flops=6.0 * metrics.step_parameters(params) * tokens,
    dtype=s.model.dtype,
  )


def held_out_loss(
  loss: step_lib.Loss, tokens_NT: np.ndarray
) -> Callable[[types.Params], dict[str, float]]:
  """A function from params to {'held_out_loss': mean over these rows}."""
  program = jax.jit(
    lambda params, rows: loss(params, {}, rows, jax.random.key(0))[0]
  )
  rows = _batch(tokens_NT)
  return lambda params: {
    'held_out_loss': float(program(params, jax.tree.map(jnp.asarray, rows)))
  }


def _batch(tokens_NT: np.ndarray) -> dict[str, np.ndarray]:
  """A batch in which every token counts in the loss."""
  return {'tokens': tokens_NT, 'counted': np.ones(tokens_NT.shape, bool)}
