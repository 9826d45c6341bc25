"""scripts/train.py: a language model from a text, from nothing to a folder."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import sharding
from specdec_jax.bench import machine, metrics
from specdec_jax.io import export
from specdec_jax.io import load as load_lib
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import data, lm_loss, loop, text
from specdec_jax.train import step as step_lib


@dataclasses.dataclass(frozen=True)
class Model:
  """size: a row of models.config.SIZES, whose vocabulary becomes the
  tokenizer's. dtype: of the forward pass; masters are float32. remat: compute
  the layers again in the backward pass, for less memory.
  """

  size: str
  dtype: str
  remat: bool


@dataclasses.dataclass(frozen=True)
class Text:
  """source, field: see train.text.read. tokenizer: a folder with one, a
  model (io.load.FORMS), or '' to train one of `vocab` tokens. length: tokens
  of a row. held_out: one document in so many is. rows: of a batch.
  """

  source: str
  field: str
  tokenizer: str
  vocab: int
  length: int
  held_out: int
  rows: int


@dataclasses.dataclass(frozen=True)
class Mesh:
  """data: over the rows of a batch; model: over heads, mlp and vocabulary."""

  data: int
  model: int

  def __post_init__(self):
    for name, size in (('data', self.data), ('model', self.model)):
      if size < 1:
        raise ValueError(f'{name}={size}: must be 1 or more')

  def check_rows(self, rows: dict[str, int]) -> None:
    """Refuses numbers of rows, by their keys, that data does not divide."""
    for name, count in rows.items():
      if count % self.data:
        raise ValueError(
          f'{name}={count}: mesh.data={self.data} has to divide it'
        )


@dataclasses.dataclass(frozen=True)
class Settings:
  model: Model
  text: Text
  mesh: Mesh
  optimiser: step_lib.Optimiser
  run: loop.Run

  def __post_init__(self):
    self.mesh.check_rows({'text.rows': self.text.rows})


# Rows that the held-out loss is the mean of, at most.
_JUDGED = 64


def settings(config) -> Settings:
  """A ConfigDict as checked dataclasses; nothing is loaded."""
  return from_sections(Settings, config)


def from_sections(kind: type, config) -> Any:
  """A ConfigDict of sections as one dataclass of dataclasses.

  Raises:
    ValueError: a value out of range, or a key that is missing or unknown.
  """
  parts: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(kind)}
  if set(config) != set(parts):
    raise ValueError(f'config sections {sorted(config)}: want {sorted(parts)}')
  out = {}
  for name, make in parts.items():
    try:
      out[name] = make(**config[name])
    except TypeError as error:
      raise ValueError(f'config.{name}: {error}') from error
    except ValueError as error:
      raise ValueError(f'{name}.{error}') from error
  return kind(**out)


def run(
  s: Settings, workdir: pathlib.Path, *, changed: bool = False
) -> dict[str, Any]:
  """Trains a model and writes workdir/model, as Hugging Face has it.

  Returns the best step's figures, 'step' and 'finished'; at once, if all of it
  was done before.
  """
  loop.check_one_process()
  said = dataclasses.asdict(s)
  loop.open_workdir(workdir, said, changed)
  if before := loop.ended(workdir, said):
    return before['figures']
  mesh = sharding.mesh_of(s.mesh.data, s.mesh.model)
  corpus = text.read(s.text.source, field=s.text.field)
  kept, held = text.held_out(corpus, s.text.held_out)
  tokenizer = _tokenizer(s, kept, workdir)
  config = dataclasses.replace(
    model_config.sized(s.model.size), vocab=-(-tokenizer.size // 64) * 64
  )
  layout = None if mesh is None else sharding.lay_out(mesh, config)
  rows = rows_of(text.pack(kept.documents, tokenizer, s.text.length))
  few = text.pack(held.documents, tokenizer, s.text.length)[:_JUDGED]
  computed = dataclasses.replace(config, dtype=s.model.dtype)
  loss = lm_loss.cross_entropy(
    computed,
    ids=tokenizer.size,
    remat=s.model.remat,
    constrain=layout and layout.constrain,
  )
  params = lm.init(config, s.run.seed, layout and layout.put)
  task = loop.Task(
    params=params,
    loss=loss,
    frozen={},
    batches=data.batches(
      rows, batch=s.text.rows, seed=s.run.seed, process=processes()
    ),
    judge=held_out_loss(loss, few),
    score=lambda figures: -figures['held_out_loss'],
    tokens=s.text.rows * s.text.length,
    flops=6.0 * metrics.step_parameters(params) * s.text.rows * s.text.length,
    dtype=s.model.dtype,
  )
  ended = loop.run(
    task,
    s.run,
    s.optimiser,
    workdir,
    config=said,
    changed=changed,
    place=placer(layout),
  )
  if ended.best is None:
    return {'step': ended.step, 'finished': False}
  step, params, figures = ended.best
  about = {
    'config': said,
    'corpus': corpus.sha256,
    'step': step,
    'figures': figures,
    'made_by': machine.made_by(*machine.commit()),
  }
  export.save(
    workdir / 'model', config, params, tokenizer, made_by=about, overwrite=True
  )
  figures |= {'step': step, 'finished': True}
  return loop.end(workdir, said, 'model', figures)['figures']


def rows_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
  """Packed text, all of which counts."""
  return {'tokens': tokens, 'counted': np.ones(tokens.shape, bool)}


def processes() -> tuple[int, int]:
  return jax.process_index(), jax.process_count()


def placer(layout: sharding.Layout | None):
  """Puts this process's rows of a batch where the mesh's data axis has them."""
  if layout is None:
    return lambda batch: batch
  return lambda batch: {
    name: jax.make_array_from_process_local_data(
      layout.sharding('batch', *[None] * (x.ndim - 1)), x
    )
    for name, x in batch.items()
  }


def held_out_loss(loss: step_lib.Loss, tokens: np.ndarray):
  """judge(params) of a language model: its loss on rows of held-out text."""
  rows = rows_of(tokens)
  program = jax.jit(
    lambda params, rows: loss(params, {}, rows, jax.random.key(0))[0]
  )

  def figures(params) -> dict[str, float]:
    return {
      'held_out_loss': float(program(params, jax.tree.map(jnp.asarray, rows)))
    }

  return figures


def _tokenizer(
  s: Settings, corpus: text.Corpus, workdir: pathlib.Path
) -> tokenizer_lib.Tokenizer:
  if s.text.tokenizer:
    folder = pathlib.Path(s.text.tokenizer).expanduser()
    if folder.is_dir():  # perhaps without a model
      return tokenizer_lib.from_folder(folder, s.text.tokenizer)
    try:
      return load_lib.open_source(s.text.tokenizer).tokenizer
    except ValueError as error:
      raise ValueError(f'text.tokenizer: {error}') from error
  return text.train_tokenizer(corpus, s.text.vocab, workdir / 'tokenizer')
