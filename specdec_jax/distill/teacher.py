"""The teacher's answers and features, recorded on disk for its students.

Answers are plainly decoded, batch by batch, into a folder that a later run with
the same settings resumes or reads. Features come from a teacher-forced pass
over the finished text.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

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

# Tokens that a teacher-forced pass reads at a time.
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Facts:
  """Everything that answers depend on, as in facts.json."""

  teacher: str  # digest of its weights
  dtype: str  # of its forward pass
  questions: str  # digest of the prompts or texts
  rows: int
  length: int  # tokens of a row, prompt included
  temperatures: tuple[float, ...]  # rows alternate; () for given texts
  seed: int  # keys the draws, together with the request number
  stop_ids: tuple[int, ...]  # end an answer
  taps: tuple[int, ...]  # layers with features, the last among them; () is none


class Answers(NamedTuple):
  """n rows of L tokens, memory-mapped.

  tokens: [n, L] int32.
  spans: [n, 2] prompt length and total length; equal in a row left out.
  features: [n, L, E] float16 or None: hidden states at each token, each tap
    divided by its root mean square. 0 in a row left out.
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
  """Records the teacher's answers to all prompts, resuming the folder.

  A row with logits that are not finite is left out; a warning counts them.

  Args:
    folder: created if needed; its facts.json has `facts` and how many are done.
    facts: must equal those in the folder.
    target: the teacher.
    prompts: token ids, each shorter than facts.length.
    batch: rows decoded together; changes no token.
    texts: [n, L] prompts and what follows them, to be read instead of answered.

  Raises:
    ValueError: the folder has other facts or is damaged; the disk is too small,
      before the first answer; all rows were left out.
  """
  arrays, done = _open(folder, facts, target.config.width * len(facts.taps))
  starts = range(done, len(prompts), batch)
  for first in runtime.track(starts, 'teacher answers'):
    rows = slice(first, min(first + batch, len(prompts)))
    part = _batch(facts, target, prompts, texts, rows, batch)
    for array, x in zip(arrays, part, strict=True):
      if array is not None:
        array[rows] = x
    _flush(folder, facts, arrays, rows.stop)
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


def generate(
  model: types.Model,
  params: types.Params,
  prompts: Sequence[Sequence[int]],
  numbers: np.ndarray,
  facts: Facts,
  *,
  rows: int,
  layout: sharding_lib.Layout | None,
) -> tuple[np.ndarray, np.ndarray]:
  """Decodes one batch plainly.

  Args:
    model, params: of a teacher or a student.
    prompts: token ids of at most `rows` prompts.
    numbers: their request numbers, which key randomness and temperature.
    facts: length, temperatures, seed and stop_ids are read.
    rows: of the batch; missing prompts are padded.
    layout: of the model on its mesh, or None.

  Returns:
    spans [n, 2] and tokens [n, L] as in Answers. A row with logits that are not
    finite has an empty answer.
  """
  count, temperatures = len(prompts), np.array(facts.temperatures)
  request = requests.make(
    requests.items(prompts, numbers),
    ids=model.vocab,
    context=model.context,
    max_new_tokens=np.array([facts.length - len(x) for x in prompts]),
    temperature=temperatures[numbers % len(temperatures)],
    seed=facts.seed,
    stop_ids=facts.stop_ids,
    rows=rows,
    length=facts.length,
  )
  options = decode.Options(narrow=False)
  program = decode.programs(model, decode.PLAIN, reject.RULE, options).generate
  placed = requests.place(request, layout)
  out = jax.device_get(program(types.Weights(params), placed))
  ends_B = np.where(out.info.broken_B, request.lengths_B, out.lengths_B)
  spans = np.stack([request.lengths_B, ends_B], 1)
  return spans[:count], out.tokens_BL[:count]


def _batch(
  facts: Facts,
  target: build.LanguageModel,
  prompts: Sequence[Sequence[int]],
  texts: np.ndarray | None,
  rows: slice,
  batch: int,
) -> Answers:
  """The answers of some rows and, with taps, their features."""
  model, params, layout = target.model, target.params, target.layout
  some = prompts[rows]
  if texts is not None:
    tokens = texts[rows]
    spans = np.array([[len(x), tokens.shape[1]] for x in some])
  else:
    numbers = np.arange(rows.start, rows.stop)
    spans, tokens = generate(
      model, params, some, numbers, facts, rows=batch, layout=layout
    )
  if not facts.taps:
    return Answers(tokens, spans, None, None)
  short = batch - len(some)
  full = np.pad(tokens, ((0, short), (0, 0)))
  ends = np.pad(spans[:, 1], (0, short)).astype(np.int32)
  if layout is not None:
    full = jax.device_put(full, layout.sharding('batch', None))
    ends = jax.device_put(ends, layout.sharding('batch'))
  found = jax.device_get(_reader(model, facts.taps)(params, full, ends))
  features, mass = (x[: len(some)] for x in found)
  good = np.isfinite(mass).all(1) & np.isfinite(features).all((1, 2))
  good &= spans[:, 0] < spans[:, 1]
  return Answers(
    tokens,
    np.where(good[:, None], spans, spans[:, :1]),
    # 0, as the gradient of a masked NaN would still be NaN.
    np.where(good[:, None, None], features, 0),
    np.where(good[:, None], mass, 0),
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
    # One position at a time: logits [B, L, V] would not fit in memory.
    mass_LB = jax.lax.map(
      lambda x_BD: jax.nn.logsumexp(model.head(params, x_BD), -1),
      jnp.moveaxis(last_BLD, 1, 0),
    )
    normed_BLE = eagle.normed(features_BLE, len(taps))
    return normed_BLE.astype(jnp.float16), mass_LB.T

  return jax.jit(read)


def _open(folder: pathlib.Path, facts: Facts, width: int):
  """Opens a folder; returns (Answers to write to, number of finished rows)."""
  with logs.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  done, path = 0, folder / 'facts.json'
  if path.exists():
    found = files.read_json(path)
    done = found.pop('done')
    wanted = json.loads(json.dumps(dataclasses.asdict(facts)))
    differ = sorted(k for k in wanted if found.get(k) != wanted[k])
    if differ:
      raise ValueError(
        f'{folder}: holds answers with other {", ".join(differ)}; name another '
        'folder, or remove it'
      )
  n, L = facts.rows, facts.length
  array = functools.partial(_array, folder, bool(done))
  return Answers(
    tokens=array('tokens', np.int32, n, L),
    spans=array('spans', np.int32, n, 2),
    features=array('features', np.float16, n, L, width) if width else None,
    mass=array('mass', np.float32, n, L) if width else None,
  ), done


def _array(folder: pathlib.Path, exists: bool, name: str, dtype, *shape: int):
  """A memory-mapped file of the folder, created unless it exists."""
  path = folder / f'{name}.npy'
  if not exists:
    with logs.writing(path):
      np.lib.format.open_memmap(path, 'w+', dtype, shape)
      # Reserves the disk space: writing to a full disk would be a bus error.
      if hasattr(os, 'posix_fallocate'):
        with open(path, 'r+b') as file:
          os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
  try:
    # Checked here: mode r+ would silently extend a truncated file.
    np.lib.format.open_memmap(path, 'r')
    return np.lib.format.open_memmap(path, 'r+')
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path}: cannot be read ({error}); remove {folder} to ask again'
    ) from error


def _flush(folder, facts: Facts, arrays: Answers, done: int) -> None:
  """Writes rows to disk, then marks them as done."""
  for x in arrays:
    if isinstance(x, np.memmap):
      x.flush()
  with logs.writing(folder):
    content = json.dumps(dataclasses.asdict(facts) | {'done': done})
    files.write(folder / 'facts.json', content)
