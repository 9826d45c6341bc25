"""The teacher's answers and features, recorded on disk for its students.

Answers come from plain decoding, batch after batch, in a folder that a later
run with the same settings resumes or reads. Features come from one
teacher-forced pass over the finished text.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from specdec_jax import build, decode, forward, requests, runtime, types
from specdec_jax import sharding as sharding_lib
from specdec_jax.io import files
from specdec_jax.models import eagle
from specdec_jax.train import logs
from specdec_jax.verify import reject

# Tokens that one pass over a text reads at a time.
_CHUNK = 64


class Decoding(NamedTuple):
  """How rows are decoded.

  length: tokens of a row, prompt included.
  temperatures: of the rows, in turn; () for texts that are given.
  seed: of their randomness, together with the request number.
  stop_ids: ids that end an answer.
  """

  length: int
  temperatures: tuple[float, ...]
  seed: int
  stop_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Facts:
  """All that answers depend on, as facts.json records it.

  teacher: digest of the weights. dtype: of the forward pass. questions: digest
  of the prompts or texts. rows: how many. taps: layers of which features are
  kept, the last layer among them; () keeps none.
  """

  teacher: str
  dtype: str
  questions: str
  rows: int
  decoding: Decoding
  taps: tuple[int, ...]

  def plain(self) -> dict[str, Any]:
    """JSON values, those of decoding beside the others."""
    found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    found |= found.pop('decoding')._asdict()
    return json.loads(json.dumps(found))


class Answers(NamedTuple):
  """n rows of L tokens, memory-mapped.

  tokens: [n, L] int32.
  spans: [n, 2] prompt length and whole length; equal in a row that is left out.
  features: [n, L, E] float16 or None: hidden states at each token, each tap
    divided by its root mean square. 0 in a row that is left out.
  mass: [n, L] float32 or None: log-sum-exp of the logits after each token.
  """

  tokens: np.ndarray
  spans: np.ndarray
  features: np.ndarray | None
  mass: np.ndarray | None


def answer(
  folder: pathlib.Path,
  facts: Facts,
  target: build.LanguageModel,
  prompts: Sequence[Sequence[int]],
  *,
  batch: int,
  texts: np.ndarray | None = None,
) -> Answers:
  """The teacher's answers to all prompts; those in the folder are not redone.

  A row whose logits are not finite anywhere is left out, and a warning tells
  how many are.

  Args:
    folder: made if need be. Its facts.json has `facts` and how many are done.
    facts: another value in the folder is refused.
    target: the teacher.
    prompts: token ids, each shorter than facts.decoding.length.
    batch: rows decoded together; changes no token.
    texts: [n, L] prompts and what follows them, to be read instead of answered.

  Raises:
    ValueError: a folder of other answers, naming what differs; a damaged one;
      no room on the disk, before the first answer; no row is left.
  """
  arrays, done = _open(folder, facts, target.config.width * len(facts.taps))
  starts = range(done, len(prompts), batch)
  for first in runtime.track(starts, 'teacher answers'):
    rows = slice(first, min(first + batch, len(prompts)))
    part = _part(facts, target, prompts, texts, rows, batch)
    for array, x in zip(arrays, part, strict=True):
      if array is not None:
        array[rows] = x
    _record(folder, facts, arrays, rows.stop)
  broken = int((arrays.spans[:, 0] == arrays.spans[:, 1]).sum())
  if broken:
    sentence = (
      f'{broken} of {len(prompts)} answers are left out: the logits of '
      f'{target.label} are not finite there'
    )
    if broken == len(prompts):
      raise ValueError(f'{sentence}; try --config.teacher.dtype=float32')
    logging.warning(sentence)
  return arrays


def _part(
  facts: Facts,
  target: build.LanguageModel,
  prompts: Sequence[Sequence[int]],
  texts: np.ndarray | None,
  rows: slice,
  batch: int,
) -> Answers:
  """The answers of some rows; with taps, read once more for their features."""
  model, layout = target.model, target.layout
  if texts is not None:
    tokens = texts[rows]
    spans = np.array([[len(x), tokens.shape[1]] for x in prompts[rows]])
  else:
    spans, tokens = generate(
      model,
      target.params,
      prompts[rows],
      np.arange(rows.start, rows.stop),
      facts.decoding,
      rows=batch,
      layout=layout,
    )
  if not facts.taps:
    return Answers(tokens, spans, None, None)
  count = len(tokens)
  put = lambda x, *axes: (
    x if layout is None else jax.device_put(x, layout.sharding('batch', *axes))
  )
  features, mass = jax.device_get(
    _reader(model, facts.taps)(
      target.params,
      put(np.pad(tokens, ((0, batch - count), (0, 0))), None),
      put(np.pad(spans[:, 1], (0, batch - count)).astype(np.int32)),
    )
  )
  return without_broken(Answers(tokens, spans, features[:count], mass[:count]))


def generate(
  model: types.Model,
  params: types.Params,
  prompts: Sequence[Sequence[int]],
  numbers: np.ndarray,
  decoding: Decoding,
  *,
  rows: int,
  layout: sharding_lib.Layout | None,
) -> tuple[np.ndarray, np.ndarray]:
  """Decodes one batch plainly.

  Args:
    model, params: who answers.
    prompts: token ids of at most `rows` prompts.
    numbers: their request numbers, which key randomness and temperature.
    decoding: length, temperatures, seed and stop ids.
    rows: of the batch; missing prompts are padded.
    layout: of the model on its mesh, or None.

  Returns:
    spans [n, 2], tokens [n, L] as in Answers. A row whose logits broke has an
    empty answer.
  """
  count, length = len(prompts), decoding.length
  temperatures = np.array(decoding.temperatures)
  request = requests.make(
    requests.items(prompts, numbers),
    ids=model.vocab,
    context=model.context,
    max_new_tokens=np.array([length - len(x) for x in prompts]),
    temperature=temperatures[numbers % len(temperatures)],
    seed=decoding.seed,
    stop_ids=decoding.stop_ids,
    rows=rows,
    length=length,
  )
  options = decode.Options(narrow=False)
  program = decode.programs(model, decode.PLAIN, reject.RULE, options).generate
  placed = requests.place(request, layout)
  out = jax.device_get(program(types.Weights(params), placed))
  ends_B = np.where(out.info.broken_B, request.lengths_B, out.lengths_B)
  spans = np.stack([request.lengths_B, ends_B], 1)
  return spans[:count], out.tokens_BL[:count]


def without_broken(x: Answers) -> Answers:
  """The rows with empty answers where a feature or mass is not finite.

  Their features become 0: the gradient of a masked NaN is NaN still.
  """
  assert x.features is not None and x.mass is not None
  good = np.isfinite(x.mass).all(1) & np.isfinite(x.features).all((1, 2))
  good &= x.spans[:, 0] < x.spans[:, 1]
  return Answers(
    x.tokens,
    np.where(good[:, None], x.spans, x.spans[:, :1]),
    np.where(good[:, None, None], x.features, 0),
    np.where(good[:, None], x.mass, 0),
  )


@functools.cache
def _reader(model: types.Model, taps: tuple[int, ...]):
  """(params, tokens_BL, ends_B) -> (features_BLE, mass_BL), teacher-forced."""

  def read(params, tokens_BL, ends_B):
    cache = model.init_cache(*tokens_BL.shape)
    _, features_BLE = forward.prefill(
      model, params, tokens_BL, ends_B, cache, chunk=_CHUNK, taps=taps
    )
    assert features_BLE is not None
    last_BLD = jnp.split(features_BLE, len(taps), -1)[-1]
    # A position at a time: logits [B, L, V] would not fit.
    mass_LB = jax.lax.map(
      lambda x_BD: jax.nn.logsumexp(model.head(params, x_BD), -1),
      jnp.moveaxis(last_BLD, 1, 0),
    )
    normed_BLE = eagle.normed(features_BLE, len(taps))
    return normed_BLE.astype(jnp.float16), mass_LB.T

  return jax.jit(read)


def _open(folder: pathlib.Path, facts: Facts, width: int):
  """(Answers to write to, how many rows are done)."""
  with logs.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  wanted, done = facts.plain(), 0
  path = folder / 'facts.json'
  if path.exists():
    found = files.read_json(path)
    done = found.pop('done')
    differ = sorted(k for k in wanted if found.get(k) != wanted[k])
    if differ:
      raise ValueError(
        f'{folder}: holds answers with other {", ".join(differ)}; name another '
        'folder, or remove it'
      )
  n, L = facts.rows, facts.decoding.length

  def array(name: str, dtype, *shape: int) -> np.memmap:
    path = folder / f'{name}.npy'
    if not done:
      with logs.writing(path):
        np.lib.format.open_memmap(path, 'w+', dtype, shape)
        _allocate(path)
    try:
      # Mode r+ alone would fill up a file that was cut.
      np.lib.format.open_memmap(path, 'r')
      return np.lib.format.open_memmap(path, 'r+')
    except (OSError, ValueError) as error:
      raise ValueError(
        f'{path}: cannot be read ({error}); remove {folder} to ask again'
      ) from error

  answers = Answers(
    tokens=array('tokens', np.int32, n, L),
    spans=array('spans', np.int32, n, 2),
    features=array('features', np.float16, n, L, width) if width else None,
    mass=array('mass', np.float32, n, L) if width else None,
  )
  return answers, done


def _allocate(path: pathlib.Path) -> None:
  """Without it, writing to a mapped file on a full disk is a bus error."""
  if hasattr(os, 'posix_fallocate'):
    with open(path, 'r+b') as file:
      os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _record(folder, facts: Facts, arrays: Answers, done: int) -> None:
  """Rows count as done once their bytes are on the disk."""
  for x in arrays:
    if isinstance(x, np.memmap):
      x.flush()
  with logs.writing(folder):
    content = json.dumps(facts.plain() | {'done': done})
    files.write(folder / 'facts.json', content)
