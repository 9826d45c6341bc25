"""The output file of a run, and the sidecar by which a rerun goes on with it.

OUT holds one JSON line an answer, OUT.meta.json what the answers depend on. The
two are a valid beginning at any moment, whatever ends the run.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.io import draft_file, files

KEYS = ('id', 'text', 'tokens', 'finish_reason', 'metrics')

# A resumed run may change these; they change no answer, up to float rounding.
# Models, n-grams and EAGLE drafts are compared by content, wherever they lie.
_NO_EFFECT = (
  'target.source',
  'target.scan_layers',
  'draft.source',
  'draft.replicated',
  'ngram.path',
  'eagle.path',
  'decode.chunk',
)


def check_output(path: str, prompts_path: str) -> pathlib.Path:
  """The output's path, if it can be written; writes nothing.

  Raises:
    ValueError: no path, a folder, a parent that is missing or not writable, or
      a path that would overwrite the prompts.
  """
  for flag, value in (('prompts', prompts_path), ('output', path)):
    if not value:
      raise ValueError(f'--{flag} is missing: name a JSONL file')
  out = check_writable('output', path)
  for each in (out, sidecar(out)):
    if each.exists() and not each.is_file():
      raise ValueError(f'output {each}: not a file: name a file to write')
    if each.exists() and os.path.exists(prompts_path):
      if os.path.samefile(each, prompts_path):
        raise ValueError(f'output {each} is the prompts: name another file')
  return out


def check_writable(what: str, path: str | os.PathLike) -> pathlib.Path:
  """A path that a file can be written to; writes nothing.

  Raises:
    ValueError: a folder, or a parent that is missing or not writable.
  """
  out = pathlib.Path(path)
  if out.exists() and not out.is_file():
    raise ValueError(f'{what} {path}: not a file: name a file to write')
  if not out.parent.is_dir():
    raise ValueError(
      f'{what} {path}: there is no folder {out.parent}: make it first'
    )
  try:
    with tempfile.TemporaryFile(dir=out.parent):
      pass
    if out.exists():
      open(out, 'r+b').close()
  except OSError as error:
    raise ValueError(
      f'{what} {path}: cannot be written ({error.strerror}): name another'
    ) from error
  return out


def check_page(path: str, output: pathlib.Path, prompts_path: str, lines: int):
  """Raises ValueError unless --html can be written beside the answers.

  lines: answers that are there; the page shows those that are decoded now.
  """
  if not path:
    return
  page = check_writable('html', path).resolve()
  taken = (output, sidecar(output), pathlib.Path(prompts_path))
  if page in [each.resolve() for each in taken]:
    raise ValueError(f'html {path} is another file of this run: name another')
  if lines:
    raise ValueError(
      f'html {path}: a page shows answers as they are decoded, and {output} '
      f'has {lines} already: {_advice(output)}'
    )


def describe(settings, prompts: Sequence[prompts_lib.Prompt], **models):
  """What the answers depend on, for the sidecar; models by role, or None.

  Without models, what is known before they are loaded.
  """
  flat = {
    f'{section}.{key}': value
    for section, part in settings.sections().items()
    for key, value in dataclasses.asdict(part).items()
    if section not in ('mesh', 'bench') or (section, key) == ('bench', 'chat')
  }
  config = {k: v for k, v in flat.items() if k not in _NO_EFFECT}
  content = [[p.id, p.turns, p.tokens, p.listed] for p in prompts]
  meta = {
    'config': config,
    'prompts': {'count': len(prompts), 'sha256': _sha256(content)},
  }
  models = {role: model for role, model in models.items() if model is not None}
  if models:
    meta['weights'] = {
      key: value
      for role, model in models.items()
      for key, value in identify(role, model).items()
    }
    meta['sources'] = {role: model.source for role, model in models.items()}
    for method in settings.decode.methods:
      if path := getattr(settings.drafters[method], 'path', ''):
        file = draft_file.find(draft_file.Kind(method, 'a draft file'), path)
        meta['weights'][f'{method} draft'] = files.sha256(file)
        meta['sources'][f'{method} draft'] = path
  return json.loads(json.dumps(meta))


def identify(role: str, model) -> dict[str, str]:
  """A model by its content, wherever it lies: weights, settings, tokenizer."""
  config = dataclasses.asdict(model.config)
  del config['scan_layers'], config['proposes']
  if model.draft_ids:
    config['draft_ids'] = model.draft_ids
  t = model.tokenizer
  return {
    role: model.digest,
    f'{role} settings and tokenizer': _sha256(
      [config, t.fingerprint(), t.chat_template, t.eos_ids]
    ),
  }


def _sha256(content) -> str:
  return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def sidecar(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f'{path.name}.meta.json')


def begun(path: pathlib.Path, meta: dict[str, Any], prompts) -> tuple[int, int]:
  """(lines, bytes) of the answers that are there; a torn last line is not one.

  Raises:
    ValueError: lines that answer other prompts, or were begun with another
      config, other prompts or other weights than meta, as far as it tells.
  """
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return 0, 0
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be read ({error.strerror}): name another'
    ) from error
  if not data:
    return 0, 0
  _check_meta(path, meta)
  *lines, torn = data.split(b'\n')
  if len(lines) + bool(torn) > len(prompts):
    raise ValueError(
      f'output {path}: has more lines than the {len(prompts)} prompts: '
      f'{_advice(path)}'
    )
  for index, (line, prompt) in enumerate(zip(lines, prompts, strict=False)):
    try:
      row = json.loads(line)
    except (ValueError, RecursionError):
      row = None
    if not isinstance(row, dict) or tuple(row) != KEYS:
      raise ValueError(f'{path}:{index + 1}: no answer: {_advice(path)}')
    if row['id'] != prompt.id:
      raise ValueError(
        f'{path}:{index + 1}: answers {row["id"]!r}, and prompt {index + 1} is '
        f'{prompt.id!r}: {_advice(path)}'
      )
  return len(lines), len(data) - len(torn)


def _check_meta(path: pathlib.Path, meta: dict[str, Any]) -> None:
  try:
    old = json.loads(sidecar(path).read_text('utf-8'))
    sections = {name: dict(old[name]) for name in meta if name != 'sources'}
  except FileNotFoundError as error:
    raise ValueError(
      f'output {path}: is there without {sidecar(path).name}, so it is not '
      f'known what it answers: {_advice(path)}'
    ) from error
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
      f'{sidecar(path)}: cannot be read, so the run cannot go on: '
      f'{_advice(path)}'
    ) from error
  for name, was in sections.items():
    for key in {**was, **meta[name]}:
      a, b = was.get(key), meta[name].get(key)
      if a != b and key not in _NO_EFFECT:  # which an old sidecar may have
        raise ValueError(
          f'output {path}: was begun with other {name}: {key} was {_short(a)}, '
          f'now {_short(b)}: give the {name} it was begun with, or '
          f'{_advice(path)}'
        )


def _advice(path: pathlib.Path) -> str:
  return f'name another --output, or delete {path.name} to start again'


def _short(value) -> str:
  text = json.dumps(value)
  return text if len(text) < 24 else f'{text[:13]}..."'


# --- writing -----------------------------------------------------------------


@contextlib.contextmanager
def opened(path: pathlib.Path):
  """The output for appending, unbuffered, and ours alone."""
  import fcntl  # Not on Windows, where the rest of this module works.

  with _disk(path):
    file = open(path, 'ab', buffering=0)
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ValueError(
        f'output {path}: another run is writing it: wait for it or name another'
      ) from error
    except OSError:
      pass  # A file system without locks.
    yield file


def begin(path: pathlib.Path, file, meta, prompts) -> int:
  """Whole lines that are there; cuts off a torn one, writes a new sidecar."""
  lines, size = begun(path, meta, prompts)
  with _disk(path):
    if not lines:
      # Written whole beside it and renamed: there is never half of one.
      part = sidecar(path).with_suffix('.part')
      with open(part, 'w', encoding='utf-8') as f:
        f.write(json.dumps(meta, indent=1) + '\n')
        f.flush()
        os.fsync(f.fileno())
      os.replace(part, sidecar(path))
    file.truncate(size)
  return lines


def append(path: pathlib.Path, file, data: bytes) -> None:
  with _disk(path):
    while data:
      data = data[file.write(data) :]
    os.fsync(file.fileno())


@contextlib.contextmanager
def _disk(path: pathlib.Path):
  try:
    yield
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be written ({error.strerror}); its whole lines '
      'are kept: make room, and run the same command to go on'
    ) from error
