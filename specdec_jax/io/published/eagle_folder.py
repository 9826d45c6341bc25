"""Reads published drafts: a folder with config.json and weights.

EAGLE-1 and 2, which differ only in decoding; EAGLE-3 as its authors, SpecForge,
AngelSlim, speculators and DeepSpec write it, with EAGLE-3.1's additions; and
the MTP module in a MiMo, which drafts as EAGLE does. A folder says what it
claims to be; drafters.readings measures whether it is.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import hosts, types
from specdec_jax.io import download, files, hf, load, names
from specdec_jax.io.arrays import stored
from specdec_jax.io.config_json import families
from specdec_jax.io.published import claims
from specdec_jax.io.quantised import rounded
from specdec_jax.models import convert, eagle, lm

FORMS = (
  'EAGLE 1 to 3 of their authors, SpecForge, speculators, DeepSpec, and MTP of '
  'MiMo'
)
HEAD, EMBED = 'lm_head.weight', 'embed_tokens.weight'
IDS = 'd2t', 't2d'
_AUX = 'eagle_aux_hidden_state_layer_ids'
Arrays = dict[str, np.ndarray]
# Where an MTP lies in a MiMo; what it has -> what EAGLE has in its place.
MTP = 'model.mtp_layers.0.'
MTP_MODULES = {
  'token_layernorm': 'layers.0.token_norm',
  'hidden_layernorm': 'layers.0.hidden_norm',
  'input_proj': 'fc',
  'final_layernorm': 'norm',
}
# form(what errors begin with, config.json, arrays, the target's depth).
Form = Callable[[str, dict[str, Any], Arrays, int], claims.Claim]


def find(source: str | os.PathLike) -> pathlib.Path | None:
  """Returns the folder at 'hf:org/name' or a path; None if that is a file."""
  folder = download.local(source)
  return folder if folder.is_dir() else None


def fit(
  folder: pathlib.Path,
  where: str,
  target: load.LanguageModel,
  form: Form | None = None,
  reading: claims.Reading = (),
) -> tuple[eagle.EagleConfig, types.Params]:
  """Returns (config, weights.draft) from a published draft for this target.

  where: what errors begin with.
  form: reads a claim from config.json; None: in the forms of EAGLE.
  reading: answers to `questions`; (): all is as the folder claims.
  """
  read = _claimed(folder, where, target, form)
  claim, arrays = claims.read_as(*read, target.config.depth, reading)
  config = _config(folder / 'config.json', claim, arrays, target)
  _check_target(where, config, claim, target)
  places = _places(where, config, arrays)
  for name, x in arrays.items():
    names.check_finite(where, name, x)
  turn = lambda x, turned: x.T if turned else x
  layer = {n: turn(arrays[x], turned) for n, (x, turned) in places.items()}
  ids, own = None, {}
  if HEAD in arrays or 'd2t' in arrays:
    ids, real_R = _vocabulary(where, arrays, target)
    ids = ids[real_R]
    if HEAD in arrays:
      own['head'] = arrays[HEAD][real_R].T
  if EMBED in arrays:
    own['embed'] = arrays[EMBED]
  return placed(config, layer, ids, target, **own)


def placed(
  config: eagle.EagleConfig,
  layer: Arrays,
  ids: np.ndarray | None,
  target: load.LanguageModel,
  **own: np.ndarray,
) -> tuple[eagle.EagleConfig, types.Params]:
  """Places these arrays whole on the target's devices, as it runs: (config,
  weights.draft). layer: of models.eagle.Eagle, by flat name. ids, own: see
  models.eagle.weights."""
  put = target.layout and target.layout.sharding()
  place = lambda x, dtype: hosts.put(jnp.asarray(x, dtype), put)
  shapes, run = eagle.shapes(config), target.config.run
  nested = lm.nest({n: place(x, shapes[n].dtype) for n, x in layer.items()})
  ids = None if ids is None else place(ids, np.int32)
  heads = {n: place(x, config.block.dtype) for n, x in own.items()}
  made = eagle.weights(nested, ids, target.params, **heads)
  if 'head' in made and 'head' not in own:  # columns of the target's
    made['head'] = hosts.put(made['head'], put)
  stack = {'0': nested['block']} | nested.get('more', {})
  block, _ = convert.fuse(config.block, {'layers': stack})
  if run.packed:
    made |= rounded.pack_draft(
      {k: made[k] for k in ('layer', 'head') if k in made}
    )
  block = block.running(scan_layers=run.scan_layers, packed=run.packed)
  return dataclasses.replace(config, block=block), made


def paths(folder: pathlib.Path) -> list[pathlib.Path]:
  """Lists the files that a draft is read from; ValueError if one is missing."""
  settings = folder / 'config.json'
  files.read_json(settings)
  return [settings, *hf.weight_files(folder)]


def questions(
  folder: pathlib.Path, where: str, target: load.LanguageModel, form=None
) -> tuple[tuple[str, ...], ...]:
  """Returns what a folder leaves open, for drafters.readings."""
  claim, _ = _claimed(folder, where, target, form)
  return tuple(tuple(x) for x in claims.questions(claim, target.config.depth))


def _claimed(
  folder: pathlib.Path, where: str, target: load.LanguageModel, form=None
) -> tuple[claims.Claim, Arrays]:
  raw, arrays = files.read_json(folder / 'config.json'), _arrays(folder)
  claim = (form or _claim)(where, raw, arrays, target.config.depth)
  return claim, arrays


# --- what a config.json claims -----------------------------------------------


def _claim(
  where: str, raw: dict[str, Any], arrays: Arrays, depth: int
) -> claims.Claim:
  """Reads a folder's claim in one of EAGLE's forms."""
  kind, llama = raw.get('speculators_model_type'), {'model_type': 'llama'}
  if kind == 'eagle3':
    layers = {'model_type': 'qwen3'} | raw.get('transformer_layer_config', {})
    layers['target_hidden_size'] = raw.get('target_hidden_size')
    return claims.Claim(layers, _below(raw, depth), _norms(raw), more=1)
  # MTP and EAGLE-1 read the target's normed state, and feed back such a one.
  if 'layers.0.token_norm.weight' in arrays:
    settings = dict(reads='joined', tap_norm='none', last_norm='fed')
    return claims.Claim(raw, (depth,), settings)
  if kind is None and 'layers.0.hidden_norm.weight' in arrays:
    if 'target_layer_ids' in raw:  # DeepSpec
      return claims.Claim(raw, tuple(raw['target_layer_ids']), _norms(raw))
    # By EAGLE's authors, SpecForge and AngelSlim. eagle_config has the ids of
    # the layers whose outputs are taps, as SGLang reads them.
    inner = raw.get('eagle_config') or {}
    taps = inner.get(_AUX) or _below(raw, depth)
    more = int(not inner.get(_AUX))
    return claims.Claim(llama | raw, tuple(taps), _norms(raw | inner), more)
  if kind is None and 'fc.weight' in arrays and HEAD not in arrays:
    bias = 'fc.bias' in arrays
    settings = dict(reads='bare', tap_norm='none', last_norm='none', bias=bias)
    return claims.Claim(llama | raw, (depth,), settings)
  what = kind or raw.get('architectures') or raw.get('model_type')
  raise ValueError(
    f'{where}: {what} is no draft that is read; read are {FORMS}'
  )


def _below(raw: dict[str, Any], depth: int) -> tuple[int, ...]:
  """Returns the ids less one, as in vLLM; without any, the usual three."""
  ids = raw.get(_AUX) or (2, depth // 2, depth - 3)
  return tuple(i - 1 for i in ids)


def _norms(raw: dict[str, Any]) -> dict[str, Any]:
  """Reads norms; fc_norm and norm_output are EAGLE-3.1's."""
  joined = 'joined' if raw.get('norm_before_fc') else 'none'
  return dict(
    reads='beside',
    tap_norm='each' if raw.get('fc_norm') else joined,
    normed_residual=bool(raw.get('norm_before_residual')),
    last_norm='fed' if raw.get('norm_output') else 'head',
  )


def _config(
  path: pathlib.Path,
  claim: claims.Claim,
  arrays: Arrays,
  target: load.LanguageModel,
) -> eagle.EagleConfig:
  """Returns the draft's settings, in the target's dtype, not fused. Counts
  layers and heads in the arrays."""
  numbers = {m[1] for n in arrays if (m := re.match(r'layers\.(\d+)\.', n))}
  counts: dict[str, Any] = dict(num_hidden_layers=len(numbers))
  heads = claim.layers.get('num_attention_heads')
  q, k = (arrays.get(f'layers.0.self_attn.{x}_proj.weight') for x in 'qk')
  if isinstance(heads, int) and heads > 0 and q is not None and k is not None:
    size = claim.layers.get('head_dim') or max(1, len(q) // heads)
    counts |= dict(head_dim=size, num_key_value_heads=max(1, len(k) // size))
  block, _ = families.from_json(claim.layers | counts, path)
  return eagle.EagleConfig(
    dataclasses.replace(block, tied=False, dtype=target.config.dtype),
    claim.taps,
    tap_width=target.config.width,
    reads_first=False,
    **claim.settings,
  )


def _check_target(where, config, claim: claims.Claim, target) -> None:
  label, own, taps = target.label, target.config, config.taps
  width = claim.layers.get('target_hidden_size') or config.block.width
  for size, theirs, ours in (
    ('width', width, own.width),
    ('vocabulary', config.block.vocab, own.vocab),
  ):
    if theirs != ours:
      raise ValueError(
        f'{where}: for a target of {size} {theirs}, and {label} has {ours}; '
        'give a draft of this target'
      )
  if len({*taps}) < len(taps) or not {*taps} <= {*range(-1, own.depth + 1)}:
    ids, more = tuple(i + claim.more for i in taps), claim.more
    raise ValueError(
      f'{where}: it reads layers {ids}, each once, by the count of its '
      f'config.json, where {label} has {more - 1} to {own.depth + more}; give '
      'a draft of this target'
    )


# --- arrays ------------------------------------------------------------------


def _arrays(folder: pathlib.Path) -> Arrays:
  """Reads a folder's arrays, under the names that speculators gives EAGLE's."""
  opened = map(stored.open_file, hf.weight_files(folder))
  every = stored.unique(folder, (pair for x in opened for pair in x.items()))
  inside, out = any(name.startswith(MTP) for name in every), []
  for name, array in every.items():
    if inside and name.startswith(MTP):
      module, _, leaf = name.removeprefix(MTP).partition('.')
      x = array.read()
      if module == 'input_proj':  # which reads the state first
        x = np.roll(x, x.shape[-1] // 2, -1)
      out.append((f'{MTP_MODULES.get(module, f"layers.0.{module}")}.{leaf}', x))
      continue
    name = re.sub('^midlayer', 'layers.0', name.removeprefix('model.'))
    kept = name in IDS if inside else not names.HARMLESS.fullmatch(name)
    out += [(name, array.read())] if kept else []
  return stored.unique(folder, out)


def _places(
  where: str, config: eagle.EagleConfig, arrays: Arrays
) -> dict[str, tuple[str, bool]]:
  """Returns what `named` does, checked to be complete."""
  H, V = config.block.width, config.block.vocab
  shapes = {n: x.shape for n, x in arrays.items() if n not in IDS}
  places, needed = named(config), {}
  for name, s in eagle.shapes(config).items():
    theirs, turned = places[name]
    needed[theirs] = s.shape[::-1] if turned else s.shape
  if EMBED in shapes:
    needed[EMBED] = V, H
  if HEAD in shapes or config.reads == 'beside':
    needed[HEAD] = (*shapes.get(HEAD, (V,))[:1], H)
  names.check(where, needed, shapes, 'its settings and this target')
  if EMBED not in arrays and H != config.tap_width:
    raise ValueError(
      f'{where}: it has no {EMBED}, and is not as wide as its target'
    )
  return places


def named(config: eagle.EagleConfig) -> dict[str, tuple[str, bool]]:
  """Maps each layer parameter to (its stored name, whether transposed)."""
  each, context = config.tap_norm == 'each', config.reads == 'context'
  joined = config.reads == 'joined'
  modules = {
    **names.HF.modules,
    **dict.fromkeys(('fuse', 'join'), 'fc'),
    'norm': 'norm',
    'token_norm': f'layers.0.{"token_norm" if joined else "input_layernorm"}',
    'feature_norm': 'hidden_norm' if context else 'layers.0.hidden_norm',
    **{
      f'tap_norms/{i}': f'fc_norm.{i}' if each else 'input_norm'
      for i in range(len(config.taps))
    },
  }
  naming = names.HF._replace(layer='layers.{}.', modules=modules)
  out = {}
  for name in eagle.shapes(config):
    number = lambda m: f'layers/{m[2] or 0}/'
    ours = re.sub(r'^(block|more/(\d+))/', number, name)
    out[name] = naming.stored(ours), naming.turned(ours)
  return out


def _vocabulary(
  where: str, arrays: Arrays, target: load.LanguageModel
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (the target's ids that it drafts [R], whether each is real). d2t
  holds how much larger each id is in the target's vocabulary."""
  V = target.config.vocab
  d2t = arrays.get('d2t', np.zeros(V, int))
  R = len(arrays.get(HEAD, d2t))
  ids = d2t + np.arange(len(d2t))
  known = arrays.get('t2d', np.isin(np.arange(V), ids))
  if (
    d2t.shape != (R,)
    or known.shape != (V,)
    or not np.array_equal(np.sort(ids), np.flatnonzero(known))
  ):
    raise ValueError(
      f'{where}: damaged: i + d2t[i] must be {R} different ids below {V}, '
      'those of t2d'
    )
  return ids, ids < target.ids
