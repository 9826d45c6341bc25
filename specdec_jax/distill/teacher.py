"""The teacher's answers and features, recorded on disk for its students.

Answers are plainly decoded, batch by batch, into a folder that a later run with
the same settings resumes or reads. Features come from a teacher-forced pass
over the finished text.
"""

import functools
import hashlib
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

# Tokens that a teacher-forced pass reads at a time.
_CHUNK = 64


class Sampling(NamedTuple):
  """How completions are decoded.

  length: tokens of a row, prompt included.
  temperatures: rows alternate, by their request numbers.
  seed: keys the draws, together with the request number.
  stop_ids: end a completion.
  """

  length: int
  temperatures: tuple[float, ...]
  seed: int
  stop_ids: tuple[int, ...]


class Answers(NamedTuple):
  """n rows of L tokens; memory-mapped where they were recorded.

  tokens: [n, L] int32.
  spans: [n, 2] prompt length and total length; equal in a row left out.
  features: [n, L, E] float16 or None: hidden states at each token, each tap
    divided by its root mean square. 0 in a row left out.
  mass: [n, L] float32 or None: log-sum-exp of the logits after each token.
  """

  tokens: np.ndarray
  spans: np.ndarray
  features: np.ndarray | None = None
  mass: np.ndarray | None = None


def take(answers: Answers, index: Any) -> Answers:
  """Some of the rows; index as NumPy takes it."""
  return jax.tree.map(lambda x: x[index], answers)


def rows(answers: Answers) -> dict[str, np.ndarray]:
  """The arrays of training batches.

  'tokens', 0 after the end; 'counted', true for the tokens of completions,
  which count in the loss; 'features' and 'mass' if there are any.
  """
  index_1L = np.arange(answers.tokens.shape[1])[None]
  start, end = answers.spans[:, :1], answers.spans[:, 1:]
  found = {
    'tokens': np.where(index_1L < end, answers.tokens, 0),
    'counted': (index_1L >= start) & (index_1L < end),
  }
  if answers.features is not None and answers.mass is not None:
    found |= {'features': answers.features, 'mass': answers.mass}
  return found


def answer(
  folder: str,
  target: build.LanguageModel,
  prompts: Sequence[Sequence[int]],
  how: Sampling,
  *,
  batch: int,
  taps: tuple[int, ...] = (),
  texts: np.ndarray | None = None,
) -> Answers:
  """Records the teacher's answers to all prompts, resuming the folder.

  A row with logits that are not finite is left out; a warning counts them.

  Args:
    folder: created if needed; its facts.json has all that answers depend on and
      how many are done. Empty: in the cache, under a digest of those.
    target: the teacher.
    prompts: token ids, each shorter than how.length.
    how: the decoding.
    batch: rows decoded together; changes no token.
    taps: layers whose features are recorded, the last among them; () is none.
    texts: [n, L] prompts and what follows them, to be read instead of answered.

  Raises:
    ValueError: the folder has other facts or is damaged; the disk is too small,
      before the first answer; all rows were left out.
  """
  facts = _facts(target, prompts, how, taps, texts)
  key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
  path = pathlib.Path(folder or files.cache_folder() / 'answers' / key)
  arrays, done = _open(path, facts, target.config.width * len(taps))
  starts = range(done, len(prompts), batch)
  for first in runtime.track(starts, 'teacher answers'):
    some = slice(first, min(first + batch, len(prompts)))
    if texts is None:
      numbers = np.arange(some.start, some.stop)
      part = generate(
        target.model,
        target.params,
        prompts[some],
        numbers,
        how,
        rows=batch,
        layout=target.layout,
      )
    else:
      spans = [[len(x), how.length] for x in prompts[some]]
      part = Answers(texts[some], np.array(spans))
    if taps:
      part = _with_features(part, target, taps, batch)
    for array, x in zip(arrays, part, strict=True):
      if array is not None:
        array[some] = x
        array.flush()  # pyright: ignore[reportAttributeAccessIssue]
    _write_facts(path, facts | {'done': some.stop})
  _check_broken(arrays.spans, target.label)
  return arrays


def _facts(target, prompts, how: Sampling, taps, texts) -> dict[str, Any]:
  """Everything that answers depend on, as JSON."""
  given = prompts if texts is None else texts.tolist()
  return {
    'teacher': target.digest,
    'dtype': target.dtype,
    'questions': digest(given),
    'rows': len(given),
    'length': how.length,
    'temperatures': list(how.temperatures) if texts is None else [],
    'seed': how.seed,
    'stop_ids': list(how.stop_ids),
    'taps': list(taps),
  }


def digest(rows: Sequence[Sequence[int]]) -> str:
  """SHA-256 of token ids, in their order."""
  return hashlib.sha256('\0'.join(map(str, rows)).encode()).hexdigest()


def _check_broken(spans: np.ndarray, label: str) -> None:
  """Counts the rows left out in a warning; ValueError if those are all."""
  broken = int((spans[:, 0] == spans[:, 1]).sum())
  if not broken:
    return
  sentence = (
    f'{broken} of {len(spans)} answers are left out: the logits of {label} are '
    'not finite there'
  )
  if broken == len(spans):
    raise ValueError(f'{sentence}; try --config.teacher.dtype=float32')
  logging.warning(sentence)


def generate(
  model: types.Model,
  params: types.Params,
  prompts: Sequence[Sequence[int]],
  numbers: np.ndarray,
  how: Sampling,
  *,
  rows: int,
  layout: sharding_lib.Layout | None,
) -> Answers:
  """Decodes one batch plainly.

  Args:
    model, params: of a teacher or a student.
    prompts: token ids of at most `rows` prompts.
    numbers: their request numbers, which key randomness and temperature.
    how: the decoding.
    rows: of the batch; missing prompts are padded.
    layout: of the model on its mesh, or None.

  Returns:
    Answers without features; one with logits that are not finite is empty.
  """
  count, temperatures = len(prompts), np.array(how.temperatures)
  request = requests.make(
    requests.items(prompts, numbers),
    ids=model.vocab,
    context=model.context,
    max_new_tokens=np.array([how.length - len(x) for x in prompts]),
    temperature=temperatures[numbers % len(temperatures)],
    seed=how.seed,
    stop_ids=how.stop_ids,
    rows=rows,
    length=how.length,
  )
  options = decode.Options(narrow=False)
  program = decode.programs(model, decode.PLAIN, reject.RULE, options).generate
  placed = requests.place(request, layout)
  out = jax.device_get(program(types.Weights(params), placed))
  ends_B = np.where(out.info.broken_B, request.lengths_B, out.lengths_B)
  spans = np.stack([request.lengths_B, ends_B], 1)
  return Answers(out.tokens_BL[:count], spans[:count])


def _with_features(
  answers: Answers,
  target: build.LanguageModel,
  taps: tuple[int, ...],
  rows: int,
) -> Answers:
  """Answers and their features, from a teacher-forced pass over `rows` rows."""
  count = len(answers.tokens)
  tokens = np.pad(answers.tokens, ((0, rows - count), (0, 0)))
  ends = np.pad(answers.spans[:, 1], (0, rows - count)).astype(np.int32)
  if (layout := target.layout) is not None:
    tokens = jax.device_put(tokens, layout.sharding('batch', None))
    ends = jax.device_put(ends, layout.sharding('batch'))
  read = _reader(target.model, taps)
  found = jax.device_get(read(target.params, tokens, ends))
  features, mass = (x[:count] for x in found)
  good = np.isfinite(mass).all(1) & np.isfinite(features).all((1, 2))
  good &= answers.spans[:, 0] < answers.spans[:, 1]
  return Answers(
    answers.tokens,
    np.where(good[:, None], answers.spans, answers.spans[:, :1]),
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


def _open(folder: pathlib.Path, facts: dict[str, Any], width: int):
  """Opens a folder; returns (Answers to write to, number of finished rows)."""
  with logs.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  done, path = 0, folder / 'facts.json'
  if path.exists():
    found = files.read_json(path)
    done = found.pop('done')
    differ = sorted(k for k in facts if found.get(k) != facts[k])
    if differ:
      raise ValueError(
        f'{folder}: holds answers with other {", ".join(differ)}; name another '
        'folder, or remove it'
      )
  n, L = facts['rows'], facts['length']
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


def _write_facts(folder: pathlib.Path, facts: dict[str, Any]) -> None:
  with logs.writing(folder):
    files.write(folder / 'facts.json', json.dumps(facts))
