"""The teacher's answers and features, recorded on disk for its students.

Answers are decoded plainly into a folder that a later run with the same
settings resumes, reads or extends.
"""

import functools
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from specdec_jax import build, hosts, printing, requests, types
from specdec_jax.distill import completions
from specdec_jax.io import files
from specdec_jax.train import logs, text

# In a folder of answers: what they depend on, as JSON.
_FACTS = 'facts.json'


def select(answers: completions.Answers, index: Any) -> completions.Answers:
  """Selects rows; index as NumPy takes it."""
  return jax.tree.map(lambda x: x[index], answers)


def in_order(
  found: Iterable[tuple[np.ndarray, completions.Answers]],
  source: types.Source | None,
) -> completions.Answers:
  """Joins what completions.generate yields, in the order of the prompts."""
  index, parts = zip(*found, strict=True)
  order = np.argsort(np.concatenate(index))
  whole = jax.tree.map(lambda *x: np.concatenate(x)[order], *parts)
  return whole._replace(source=source)


def rows(answers: completions.Answers) -> dict[str, np.ndarray]:
  """The arrays of training batches.

  'tokens', 0 after the end; 'counted', true for the tokens of completions,
  which count in the loss; if there are any, 'features' and 'mass', 'scale',
  'source' and 'source_length'.
  """
  index_1L = np.arange(answers.tokens.shape[1])[None]
  start, end = answers.spans[:, :1], answers.spans[:, 1:]
  found = {
    'tokens': np.where(index_1L < end, answers.tokens, 0),
    'counted': (index_1L >= start) & (index_1L < end),
  }
  if answers.features is not None and answers.mass is not None:
    found |= {'features': answers.features, 'mass': answers.mass}
  if answers.scale is not None:
    found['scale'] = answers.scale
  if answers.source is not None:
    found |= zip(('source', 'source_length'), answers.source, strict=True)
  return found


def ends(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """By name of an array of rows, the columns before padding: [N].

  {} without sources: rows of a language model then keep their one length.
  """
  if 'source' not in rows:
    return {}
  found = text.ends(rows)
  return found | {n: found['tokens'] for n in ('features', 'mass') if n in rows}


def answer(
  folder: str,
  target: build.LanguageModel,
  prompts: Sequence[requests.Item],
  how: completions.Sampling,
  *,
  batch: int,
  taps: tuple[int, ...] = (),
  scaled: bool = False,
) -> completions.Answers:
  """Records the teacher's answers to all prompts, memory-mapped.

  A folder of fewer of the same prompts is extended, one of more is read, one
  that is damaged or has other facts is refused. A row with logits that are not
  finite is left out; a warning counts them.

  Args:
    folder: created if needed; its facts.json has all that answers depend on.
      Empty: in the cache, under a digest of those and of the prompts.
    target: the teacher.
    prompts: as completions.generate takes them, numbered from 0.
    how: the decoding.
    batch: rows decoded together; changes no token.
    taps: layers whose features are recorded, the last among them; () is none.
    scaled: record what the taps were multiplied by, too.
  """
  facts = _facts(target, how, taps) | ({'scaled': True} if scaled else {})
  key = json.dumps(facts | {'prompts': digest(prompts)})
  name = hashlib.sha256(key.encode()).hexdigest()[:16]
  path = pathlib.Path(folder or files.cache_folder() / 'answers' / name)
  if not hosts.is_first():  # a copy of its own: hosts may share the folder
    path = path.with_name(f'{path.name}.process{jax.process_index()}')
  source = requests.source_of(prompts, len(prompts), how.sources)
  arrays = _open(path, facts, prompts, source, target.config.width)
  left = np.flatnonzero(hosts.anywhere(arrays.spans[:, 1] == 0)).tolist()
  found = completions.generate(
    target.model,
    target.params,
    [prompts[i] for i in left],
    how,
    rows=batch,
    layout=target.layout,
    recording=completions.Recording(taps, target.config, scaled)
    if taps
    else None,
  )
  each = ((left[n], select(x, i)) for at, x in found for i, n in enumerate(at))
  for row, one in printing.track(each, 'teacher answers', len(left)):
    # Spans last: they say that a row is done.
    for name in ('features', 'mass', 'scale', 'tokens', 'spans'):
      if (array := getattr(arrays, name)) is not None:
        array[row] = getattr(one, name)
        array.flush()
  _check_broken(arrays.spans, target.label)
  return arrays


def fewer(
  folder: pathlib.Path,
  into: pathlib.Path,
  taps: Sequence[int],
  *,
  scaled: bool = False,
) -> None:
  """Writes answers anew with some of their layers, for another kind of student.

  folder: as `answer` wrote it. into: such a folder of these taps, with their
  scales if `scaled`; the folder must have them.
  """
  facts = files.read_json(folder / _FACTS)
  at = [facts['taps'].index(i) for i in taps]
  read = lambda name: np.load(folder / f'{name}.npy', mmap_mode='r')
  arrays = {name: read(name) for name in ('tokens', 'spans', 'mass')}
  n, L, _ = (features := read('features')).shape
  of_tap = features.reshape(n, L, len(facts['taps']), -1)
  arrays['features'] = of_tap[:, :, at].reshape(n, L, -1)
  if facts.pop('scaled', False) and scaled:
    arrays['scale'], facts['scaled'] = read('scale')[..., at], True
  assert scaled == ('scale' in arrays), f'{folder} has no scales'
  into.mkdir(parents=True, exist_ok=True)
  for name, x in arrays.items():
    np.save(into / f'{name}.npy', x)
  # Last: without it the folder counts as empty.
  files.write(into / _FACTS, json.dumps(facts | {'taps': list(taps)}))


def _facts(target, how, taps) -> dict[str, Any]:
  """All that the answers depend on, besides the prompts, as JSON."""
  facts = {
    'teacher': target.digest,
    'dtype': target.arithmetic,
    'length': how.length,
    'temperatures': list(how.temperatures),
    'seed': how.seed,
    'stop_ids': list(how.stop_ids),
    'taps': list(taps),
  }
  return facts | ({'sources': how.sources} if how.sources else {})


def digest(prompts: Sequence[requests.Item]) -> str:
  """SHA-256 of the token ids of prompts and of their sources, in order."""
  rows = (x for one in prompts for x in (one.tokens, one.source) if len(x))
  words = '\0'.join(str(list(x)) for x in rows)
  return hashlib.sha256(words.encode()).hexdigest()


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


def _open(
  folder: pathlib.Path,
  facts: dict[str, Any],
  prompts: Sequence[requests.Item],
  source: types.Source | None,
  width: int,
) -> completions.Answers:
  """Opens a folder for these prompts; spans are 0 where there is no answer.

  width: of each tap of the facts.
  """
  with logs.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  if (path := folder / _FACTS).exists():
    found = files.read_json(path)
    differ = sorted(k for k in facts if found.get(k) != facts[k])
    _check_same(folder, differ)
  n, L, taps = len(prompts), facts['length'], len(facts['taps'])
  array = functools.partial(_array, folder, path.exists(), n)
  opened = completions.Answers(
    tokens=array('tokens', np.int32, L),
    spans=array('spans', np.int32, 2),
    features=array('features', np.float16, L, taps * width) if taps else None,
    mass=array('mass', np.float32, L) if taps else None,
    scale=array('scale', np.float32, L, taps) if 'scaled' in facts else None,
  )
  done = np.flatnonzero(opened.spans[:, 1])
  asked = lambda i, x: (
    opened.tokens[i, : opened.spans[i, 0]].tolist() == list(x)
  )
  same = all(asked(i, prompts[i].tokens) for i in done.tolist())
  if source is not None:
    wide = source.tokens_BI.shape[1]
    kept = array('source', np.int32, wide), array('source_length', np.int32)
    for old, new in zip(kept, source, strict=True):
      same &= np.array_equal(old[done], new[done])
    opened = opened._replace(source=types.Source(*kept))
  _check_same(folder, [] if same else ['prompts'])
  for old, new in zip(opened.source or (), source or (), strict=True):
    old[:] = new
  with logs.writing(folder):
    files.write(path, json.dumps(facts))
  return opened


def _check_same(folder: pathlib.Path, differ: Sequence[str]) -> None:
  if differ:
    raise ValueError(
      f'{folder}: holds answers with other {", ".join(differ)}; name another '
      'folder, or remove it'
    )


def _array(
  folder: pathlib.Path, exists: bool, n: int, name: str, dtype, *shape: int
):
  """The first n rows of a memory-mapped file, extended with zeros to those."""
  path, memmap = folder / f'{name}.npy', np.lib.format.open_memmap
  rows = 0
  try:
    # Checked here: mode r+ would silently extend a truncated file.
    rows = len(memmap(path, 'r')) if exists else 0
  except (OSError, ValueError) as error:
    raise ValueError(
      f'{path}: cannot be read ({error}); remove {folder} to ask again'
    ) from error
  if rows < n:
    _reserve(path, exists, (n, *shape), np.dtype(dtype))
  return memmap(path, 'r+')[:n]


def _reserve(path: pathlib.Path, exists: bool, shape, dtype) -> None:
  """Creates or extends a .npy file; NumPy's headers leave room for that.

  It takes the disk space: writing to a full disk would be a bus error.
  """
  with logs.writing(path), open(path, 'r+b' if exists else 'w+b') as file:
    header = dict(descr=dtype.str, fortran_order=False, shape=shape)
    np.lib.format.write_array_header_1_0(file, header)
    size = file.tell() + dtype.itemsize * math.prod(shape)
    if hasattr(os, 'posix_fallocate'):
      os.posix_fallocate(file.fileno(), 0, size)
    else:
      file.truncate(size)
