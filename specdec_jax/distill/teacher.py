"""Records the teacher's answers and features on disk for its students.

A later run with the same settings resumes, reads or extends the folder.
"""

import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from specdec_jax import build, hosts, printing, program, requests, types
from specdec_jax.distill import completions, sections
from specdec_jax.io import files
from specdec_jax.train import logs, text

# In a folder of answers: what they depend on, and a digest of each prompt.
_FACTS = 'facts.json'


def rows(
  answers: Mapping[str, np.ndarray], source: types.Source | None = None
) -> dict[str, np.ndarray]:
  """Returns the arrays for training batches, from completions.generate's.

  'tokens', 0 after the end; 'counted', true for completions; what else was
  recorded; 'source' and 'source_length' if there are any.
  """
  recorded = {**answers}
  tokens, spans = recorded.pop('tokens'), recorded.pop('spans')
  index_1L = np.arange(tokens.shape[1])[None]
  start, end = spans[:, :1], spans[:, 1:]
  found = {
    'tokens': np.where(index_1L < end, tokens, 0),
    'counted': (index_1L >= start) & (index_1L < end),
  }
  if source is not None:
    found |= zip(('source', 'source_length'), source, strict=True)
  return found | recorded


def ends(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Counts the columns before padding, [N], by the rows' array names.

  {} without sources: a language model's rows then keep their one length.
  """
  if 'source' not in rows:
    return {}
  found = text.ends(rows)
  recorded = rows.keys() - found.keys() - {'source_length'}
  return found | dict.fromkeys(recorded, found['tokens'])


def answer(
  data: sections.Data,
  target: build.LanguageModel,
  prompts: Sequence[requests.Item],
  taps: tuple[int, ...] = (),
) -> dict[str, np.ndarray]:
  """Records the teacher's answers to all prompts: rows, memory-mapped.

  They are in data.folder, or in the cache under a digest of all that they
  depend on. A folder with fewer of the same prompts is extended, one with more
  is read, one that is damaged or has other facts is refused. A row whose logits
  are not finite is left out; a warning counts them.

  target, prompts, taps: as completions.generate takes them; numbered from 0.
  """
  facts = {
    'teacher': target.digest,
    'dtype': target.arithmetic,
    'length': data.length,
    'temperatures': list(data.temperatures),
    'seed': data.seed,
    'stop_ids': list(target.tokenizer.eos_ids),
    'taps': list(taps),
    'sources': (room := completions.source_room(data, target)),
  }
  key = json.dumps(facts | {'prompts': digest(prompts)})
  name = hashlib.sha256(key.encode()).hexdigest()[:16]
  path = pathlib.Path(data.folder or program.cache_folder() / 'answers' / name)
  if not hosts.is_first():  # a copy of its own: hosts may share the folder
    path = path.with_name(f'{path.name}.process{jax.process_index()}')
  own = [digest([x])[:16] for x in prompts]
  arrays = _open(path, facts, own, target.config.width)
  left = np.flatnonzero(hosts.anywhere(arrays['spans'][:, 1] == 0)).tolist()
  asked = [prompts[i] for i in left]
  found = completions.generate(
    target, target.model, target.params, asked, data, data.seed, taps
  )
  pick = lambda x, i: jax.tree.map(lambda array: array[i], x)
  each = ((left[n], pick(x, i)) for at, x in found for i, n in enumerate(at))
  for row, one in printing.track(each, 'teacher answers', len(left)):
    for name, array in arrays.items():
      array[row] = one[name]
      array.flush()
  broken = int(np.equal(*arrays['spans'].T).sum())
  sentence = (
    f'{broken} of {len(prompts)} answers are left out: the logits of '
    f'{target.label} are not finite there'
  )
  if broken == len(prompts):
    raise ValueError(f'{sentence}; try --config.teacher.dtype=float32')
  if broken:
    logging.warning(sentence)
  return rows(arrays, requests.source_of(prompts, len(prompts), room))


def digest(prompts: Sequence[requests.Item]) -> str:
  """Hashes the token ids in prompts and sources, in order: SHA-256."""
  rows = (x for one in prompts for x in (one.tokens, one.source) if len(x))
  words = '\0'.join(str(list(x)) for x in rows)
  return hashlib.sha256(words.encode()).hexdigest()


def _open(
  folder: pathlib.Path, facts: dict[str, Any], prompts: list[str], width: int
) -> dict[str, np.memmap]:
  """Opens a folder for prompts of these digests; spans are 0 if unanswered."""
  with logs.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  exists = (path := folder / _FACTS).exists()
  before = files.read_json(path) if exists else facts | {'prompts': prompts}
  differ = sorted(k for k in facts if before.get(k) != facts[k])
  had = before.get('prompts', [''])
  n, L, taps = len(prompts), facts['length'], len(facts['taps'])
  if had[:n] != prompts[: len(had)]:
    differ.append('prompts')
  if differ:
    raise ValueError(
      f'{folder}: holds answers with other {", ".join(differ)}; name another '
      'folder, or remove it'
    )
  recorded = {
    'features': (np.float16, L, taps * width),
    'mass': (np.float32, L),
    'scale': (np.float32, L, taps),
  }
  # Spans last: they say that a row is done.
  own = {'tokens': (np.int32, L), 'spans': (np.int32, 2)}
  kinds = recorded | own if taps else own
  array = lambda name: _array(folder, exists, n, name, *kinds[name])
  opened = {name: array(name) for name in kinds}
  with logs.writing(folder):
    both = facts | {'prompts': max(had, prompts, key=len)}
    files.write(path, json.dumps(both))
  return opened


def _array(
  folder: pathlib.Path, exists: bool, n: int, name: str, dtype, *shape: int
):
  """Maps a file's first n rows, extending it with zeros if it has fewer."""
  path, rows = folder / f'{name}.npy', 0
  try:
    # Checked here: mode r+ would silently extend a truncated file.
    rows = len(np.load(path, mmap_mode='r')) if exists else 0
  except (EOFError, OSError, ValueError) as error:
    raise ValueError(
      f'{path}: cannot be read ({error}); remove {folder} to ask again'
    ) from error
  if rows < n:
    # It takes the disk space: writing to a full disk would be a bus error.
    with logs.writing(path), open(path, 'r+b' if exists else 'w+b') as file:
      whole, dtype = (n, *shape), np.dtype(dtype)
      # NumPy's headers leave room for more rows.
      header = dict(descr=dtype.str, fortran_order=False, shape=whole)
      np.lib.format.write_array_header_1_0(file, header)
      size = file.tell() + dtype.itemsize * math.prod(whole)
      if hasattr(os, 'posix_fallocate'):  # else opening it takes the space
        os.posix_fallocate(file.fileno(), 0, size)
  return np.load(path, mmap_mode='r+')[:n]
