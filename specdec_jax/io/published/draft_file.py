"""Draft files: arrays, and facts such as the tokenizer's fingerprint.

A source is a file, or zoo:NAME for a draft in the library. First what all kinds
share; then the layer for drafters.eagle, and drafts for drafters.lm: some
layers on the target's own embedding and head.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from specdec_jax import sharding, types
from specdec_jax.io import files, load, names
from specdec_jax.io.published import eagle_folder
from specdec_jax.io.quantised import rounded
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, eagle, lm

_FORMAT = 'specdec_jax {} 1'
ZOO = pathlib.Path(__file__).parents[2] / 'zoo'


# Kinds of files, by the drafter; where they come from, for error messages.
LAYERS, EAGLE, NGRAM = 'lm', 'eagle', 'ngram'
FORMS = {
  LAYERS: 'a file of scripts/distill.py, or zoo:NAME',
  EAGLE: 'a file of scripts/distill.py, zoo:NAME or a published draft',
  NGRAM: 'a file of scripts/ngram.py',
}


def write(
  kind: str,
  path: str | os.PathLike,
  arrays: Mapping[str, np.ndarray],
  about: Mapping[str, Any],
) -> None:
  """Writes a draft's file atomically; ValueError if it cannot. about: facts, as
  JSON unless strings; 'tokenizer' must be the fingerprint of the target's."""
  about = {**about, 'format': _FORMAT.format(kind)}
  facts = {k: x if type(x) is str else json.dumps(x) for k, x in about.items()}
  try:
    # safetensors writes a transposed array in the order of its memory.
    plain = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    content = safetensors.numpy.save(plain, metadata=facts)
    files.write(pathlib.Path(path), content)
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be written: {error.strerror}'
    ) from error


def find(kind: str, source: str | os.PathLike) -> pathlib.Path:
  """Returns a source's file; ValueError if there is none."""
  scheme, _, name = os.fspath(source).partition(':')
  file = pathlib.Path(os.path.abspath(source))
  if scheme == 'zoo':
    known = sorted(x.parent.name for x in ZOO.glob('*/draft.safetensors'))
    if name not in known:
      have = ', '.join(known) or 'no draft yet'
      raise ValueError(f'{kind} {source}: the zoo has {have}')
    file = ZOO / name / 'draft.safetensors'
  if not file.is_file():
    raise ValueError(f'{kind} {source}: no such file; give {FORMS[kind]}')
  return file


def read(
  kind: str, source: str | os.PathLike
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """Returns the (arrays, facts) in a file; all facts are strings. ValueError:
  no such file, one of another kind, or a damaged one."""
  file = find(kind, source)
  try:
    with safetensors.safe_open(file, 'numpy') as opened:
      about = opened.metadata() or {}
      arrays = {name: opened.get_tensor(name) for name in opened.keys()}
  except (OSError, safetensors.SafetensorError) as error:
    why = f'damaged, or not {FORMS[kind]}: {error}'
    raise ValueError(f'{kind} {source}: {why}') from error
  if (found := about.pop('format', '')) != _FORMAT.format(kind):
    made = re.fullmatch(_FORMAT.format(r'(\w+)'), found)
    why = f'not {FORMS[kind]}'
    if made:
      section = {'lm': 'draft'}.get(made[1], made[1])
      why = f'is a draft of {made[1]}: give it as {section}.source'
    raise ValueError(f'{kind} {source}: {why}')
  return arrays, about


def fitted(
  kind: str,
  source: str | os.PathLike,
  target: load.LanguageModel,
  fit: Callable[[dict[str, np.ndarray], dict[str, str]], Any],
) -> Any:
  """Returns fit(arrays, facts) for a file; kept in the target."""
  key = kind, *files.stamp([find(kind, source)])

  def read_and_fit():
    arrays, about = read(kind, source)
    check_tokenizer(kind, source, about, target)
    try:
      return fit(arrays, about)
    except (KeyError, TypeError, AssertionError) as e:
      raise ValueError(f'{kind} {source}: damaged: {e!r}') from e

  return target.once(key, read_and_fit)


def check_tokenizer(
  kind: str, source, about: Mapping[str, Any], target: load.LanguageModel
) -> None:
  """Raises ValueError if a draft was made with another tokenizer."""
  if about.get('tokenizer') != target.tokenizer.fingerprint():
    raise ValueError(
      f'{kind} {source}: made with another tokenizer than that of '
      f'{target.tokenizer.source}; give {FORMS[kind]} for this target'
    )


_TRAIN = 'train one for this target with scripts/distill.py'


def _check_shapes(kind: str, source, found, wanted) -> None:
  """Raises ValueError for arrays missing, unknown or in other shapes."""
  shapes = lambda arrays: {name: x.shape for name, x in arrays.items()}
  where, who = f'{kind} {source}', 'drafts of this target'
  names.check(where, shapes(wanted), shapes(found), who, f'; {_TRAIN}')


# --- the layer of an EAGLE draft ---------------------------------------------


class Eagle(NamedTuple):
  """What an EAGLE draft file holds.

  taps: the target's layers whose residual streams are its features.
  layer: its parameters, by flat name. ids: its vocabulary, as target ids.
  about: how and for which target it was made; 'tokenizer' is a fingerprint.
  """

  taps: tuple[int, ...]
  layer: dict[str, np.ndarray]
  ids: np.ndarray
  about: dict[str, Any]


def write_eagle(path: str | os.PathLike, draft: Eagle) -> None:
  """Writes a file atomically; ValueError if it cannot."""
  arrays = draft.layer | {'ids': np.asarray(draft.ids, np.int32)}
  write(EAGLE, path, arrays, draft.about | {'taps': draft.taps})


def read_eagle(source: str | os.PathLike) -> Eagle:
  """Reads a draft; ValueError if the file is missing or damaged."""
  return _eagle(*read(EAGLE, source))


def _eagle(arrays, about) -> Eagle:
  taps = tuple(json.loads(about.pop('taps')))
  return Eagle(taps, arrays, arrays.pop('ids'), about)


def eagle_for(
  source: str | os.PathLike, target: load.LanguageModel
) -> tuple[eagle.EagleConfig, types.Params]:
  """Returns (config, weights.draft) for a file, or random:SEED; once for each
  target."""

  def fit(draft: Eagle):
    config = check_eagle(draft, source, target)
    return eagle_folder.placed(config, draft.layer, draft.ids, target)

  scheme, _, seed = os.fspath(source).partition(':')
  if scheme != 'random':
    return fitted(EAGLE, source, target, lambda *x: fit(_eagle(*x)))
  if not seed.isdecimal():
    raise ValueError(f'eagle {source}: must be random:SEED, as in random:0')
  return target.once(
    (EAGLE, os.fspath(source)), lambda: fit(_drawn(int(seed), target))
  )


def _drawn(seed: int, target: load.LanguageModel) -> Eagle:
  """Draws a layer over the target's last one; only its speed is right."""
  taps = (target.config.depth - 1,)
  layer = eagle.init(eagle.settings(target.config, taps), seed)
  return Eagle(taps, jax.device_get(layer), np.arange(target.ids), {})


def check_eagle(
  draft: Eagle, source: str | os.PathLike, target: Any
) -> eagle.EagleConfig:
  """Returns a draft's config; refuses one for other sizes or ids. target: a
  LanguageModel, or a Source whose weights are not read yet."""
  try:
    config = eagle.settings(target.config, draft.taps)
  except ValueError as error:
    raise ValueError(f'eagle {source}: {error}; {_TRAIN}') from error
  want = eagle.shapes(config)
  _check_shapes(EAGLE, source, draft.layer, want)
  ids, known = draft.ids, np.arange(target.ids)
  if not len(ids) or not np.array_equal(
    known[np.isin(known, ids)], np.sort(ids)
  ):
    raise ValueError(
      f'eagle {source}: damaged: its vocabulary is not a list of different ids '
      f'below {target.ids}'
    )
  return config


# --- layers on the target's embedding, head and encoder ----------------------

# Parameters that a file leaves to the target; a student may share them, frozen.
SHARED = ('embed', 'head', 'encoder')
_STEP = '/step'


def write_layers(
  path: str | os.PathLike,
  config: model_config.LMConfig,
  params: types.Params,
  about: Mapping[str, Any],
) -> None:
  """Writes a file atomically: kernels as int8, with a step per output.

  config, params: of the draft, without SHARED, which may be any model's.
  about: how and for which target it was made; 'tokenizer' is a fingerprint.
  """
  config, flat = convert.plain(config, params)
  arrays: dict[str, np.ndarray] = {'ids': np.array(config.proposes, np.int32)}
  for name, x in flat.items():
    if name.split('/')[0] in SHARED:
      continue
    x = np.asarray(x, np.float32)
    if name.endswith('/kernel'):
      step = np.maximum(np.abs(x).max(0), np.finfo(np.float32).tiny) / 127
      arrays[name + _STEP] = step
      x = np.rint(x / step).astype(np.int8)
    arrays[name] = x
  facts = {'windows': config.windows, 'rotated': config.rotated}
  write(LAYERS, path, arrays, {**about, **facts})


def layers_for(
  source: str | os.PathLike, target: load.LanguageModel
) -> load.LanguageModel:
  """Returns a file's draft, made once for a target; shares its arrays, dtype,
  layout and kernels. ValueError: no file, damage, or another target's."""
  fit = lambda *content: _layers(source, target, *content)
  return fitted(LAYERS, source, target, fit)


def _layers(source, target, arrays, about) -> load.LanguageModel:
  steps = {n: arrays.pop(n) for n in list(arrays) if n.endswith(_STEP)}
  ids = arrays.pop('ids', np.empty(0))
  flat = {n: x * steps.get(n + _STEP, 1) for n, x in arrays.items()}
  numbers = {n.split('/')[1] for n in flat if n.startswith('layers/')}
  config = dataclasses.replace(
    target.config,
    depth=len(numbers),
    windows=tuple(json.loads(about.get('windows', '[0]'))),
    rotated=tuple(json.loads(about.get('rotated', '[true]'))),
  )
  wanted = lm.shapes(_plain(config))
  own = {n: x for n, x in wanted.items() if n.split('/')[0] not in SHARED}
  _check_shapes(LAYERS, source, flat, own)
  if len(ids) and not (
    (np.diff(ids, prepend=-1) > 0).all() and ids[-1] < target.ids
  ):
    raise ValueError(
      f'lm {source}: damaged: its ids are not ascending and below {target.ids}'
    )
  layout = target.layout and sharding.lay_out(target.layout.mesh, config)
  file = find(LAYERS, source)
  return load.LanguageModel(
    os.fspath(source),
    os.fspath(source),
    target.tokenizer,
    target.params | _laid_out(config, flat, layout),
    lm_config=config,
    layout=layout,
    draft_ids=tuple(int(i) for i in ids),
    hashed=lambda: files.sha256(file),
  )


def _plain(config: model_config.LMConfig) -> model_config.LMConfig:
  return config.running(scan_layers=False, fused=False, packed=False)


def _laid_out(config, flat, layout) -> types.Params:
  """Nests a file's parameters as the target has its own."""
  if config.run.scan_layers:
    parts = {n.split('/', 2)[2] for n in flat if n.startswith('layers/')}
    stack = lambda x: np.stack(
      [flat.pop(f'layers/{i}/{x}') for i in range(config.depth)]
    )
    flat |= {f'layers/{x}': stack(x) for x in sorted(parts)}
  put = layout.put if layout else lambda name, x: jnp.asarray(x)
  own = lm.nest({n: put(n, x.astype(config.dtype)) for n, x in flat.items()})
  if config.run.fused:
    _, own = convert.fuse(_plain(config), own)
  return rounded.pack_draft(own) if config.run.packed else own
