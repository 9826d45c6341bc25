"""A trained model as a Hugging Face folder, which transformers reads too.

The family is the one whose config.json, read back by config_hf, says these
settings; the names of the weights are names' tables from the other side.
"""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from specdec_jax import types
from specdec_jax.io import config_hf, files, hf, names
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

# Says that a folder is ours to replace, and what made it.
MARK = 'specdec_jax.json'
_FORMAT = 'specdec_jax export 1'
_FILES = frozenset(
  ['config.json', hf.SINGLE, 'tokenizer.json', 'tokenizer_config.json', MARK]
)


def save(
  folder: str | os.PathLike,
  config: model_config.LMConfig,
  params: types.Params,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  made_by: dict[str, Any] | None = None,
  draft_ids: Sequence[int] = (),
  overwrite: bool = False,
) -> None:
  """Writes a folder that sources.load and transformers read, or nothing.

  Loading it at config.dtype gives these parameters bit for bit, but for Gemma's
  scales below 0.5: it stores their differences from 1.

  Args:
    folder: where; its parents are made. Empty, or not there yet.
    config: the settings; fused and scanned layers are taken apart.
    params: of lm.make(config), in its dtypes.
    tokenizer: what the model was trained with.
    made_by: anything of JSON, kept beside the model (config, seed, commit).
    draft_ids: ids that we have it propose as a draft; transformers, which knows
      no such thing, has it propose all. All if ().
    overwrite: replace an earlier export. Between two renames the earlier one is
      under NAME.PID.old, and a kill leaves it there.

  Raises:
    ValueError: settings that no family has, parameters that are not theirs or
      not finite, a folder that holds something else, or a full disk.
  """
  folder = pathlib.Path(folder).resolve()
  _check_folder(folder, overwrite)
  if tokenizer.size > config.vocab:
    raise ValueError(
      f'export {folder}: the tokenizer has {tokenizer.size} ids, the model '
      f'{config.vocab}; give the tokenizer that the model was trained with'
    )
  family, said = _say(config)
  weights = _weights(family, config, params)
  contents = {
    'config.json': _json(said | _special_ids(tokenizer)),
    'tokenizer.json': _inner(tokenizer).to_str(pretty=True),
    'tokenizer_config.json': _json(_tokenizer_settings(tokenizer, config)),
    MARK: _json(
      dict(format=_FORMAT, made_by=made_by)
      | (dict(draft_ids=[int(i) for i in draft_ids]) if len(draft_ids) else {})
    ),
  }
  part = folder.with_name(f'{folder.name}.{os.getpid()}.part')
  try:
    shutil.rmtree(part, ignore_errors=True)  # of a killed run of this number
    part.mkdir(parents=True)
    # transformers refuses a file that does not say whose layout it has.
    pt = {'format': 'pt'}
    safetensors.numpy.save_file(weights, part / hf.SINGLE, metadata=pt)
    for name, content in contents.items():
      files.write(part / name, content)
    _move(part, folder)
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'export {folder}: cannot be written: {error}') from error
  finally:
    shutil.rmtree(part, ignore_errors=True)


def draft_ids(folder: str | os.PathLike) -> tuple[int, ...]:
  """What save was given; () for any other folder, or what is none.

  Raises:
    ValueError: a list that is none of ids.
  """
  path = pathlib.Path(folder) / MARK
  if not path.is_file():
    return ()
  ids = files.read_json(path).get('draft_ids', [])
  if not isinstance(ids, list) or any(type(i) is not int for i in ids):
    raise ValueError(f'{path}: draft_ids is no list of ids; export it again')
  return tuple(ids)


def _check_folder(folder: pathlib.Path, overwrite: bool) -> None:
  if not folder.exists():
    return
  there = {x.name for x in folder.iterdir()} if folder.is_dir() else None
  if there == set():
    return
  if there is None or MARK not in there:
    raise ValueError(
      f'export {folder}: is there and is no export (it has no {MARK}); name '
      'another folder'
    )
  if not overwrite:
    raise ValueError(
      f'export {folder}: an earlier export is there; say overwrite=True to '
      'replace it, or name another folder'
    )
  others = sorted(there - _FILES)
  if others:
    raise ValueError(
      f'export {folder}: holds {", ".join(others)} besides an earlier export; '
      'move that elsewhere, or name another folder'
    )


def _move(part: pathlib.Path, folder: pathlib.Path) -> None:
  """Puts a whole folder in its place; an earlier one goes only then."""
  old = folder.with_name(f'{folder.name}.{os.getpid()}.old')
  if folder.exists():
    shutil.rmtree(old, ignore_errors=True)
    os.rename(folder, old)
  try:
    os.rename(part, folder)
  except OSError:
    if old.exists():
      os.rename(old, folder)
    raise
  shutil.rmtree(old, ignore_errors=True)


def _json(content: dict[str, Any]) -> str:
  try:
    return json.dumps(content, indent=2, allow_nan=False)
  except (TypeError, ValueError) as error:
    raise ValueError(f'made_by: is not JSON: {error}') from error


# --- weights -----------------------------------------------------------------

# What undoes a transform of names' tables; float32 keeps 1 + x - 1 from 0.5 on.
_UNDO = {
  names.keep: lambda x: x,
  names.transpose: lambda x: x.T,
  names.add_one: lambda x: x - x.dtype.type(1),
}


def _weights(family: str, config, params) -> dict[str, np.ndarray]:
  """Stored name -> array as it is stored; contiguous, checked."""
  flat = {name: np.asarray(x) for name, x in lm.flatten(params).items()}
  _check_params(config, flat)
  plain, flat = lm.plain(config, lm.nest(flat))
  rows = config_hf.FAMILIES[family].rows
  stored = names.stored_names(rows, plain)
  whole: dict[str, list[np.ndarray]] = {}
  for name in sorted(stored, key=lambda name: stored[name][0]):
    own, transform = stored[name]
    # GPT-2's q, k and v, which names.split cut, in their order.
    joined = re.sub(r'\[\d\]', '', own)
    whole.setdefault(joined, []).append(_UNDO[transform](flat[name]))
  return {
    name: np.ascontiguousarray(np.concatenate(x, -1) if len(x) > 1 else x[0])
    for name, x in whole.items()
  }


def _check_params(config, flat: Mapping[str, np.ndarray]) -> None:
  want = lm.shapes(config)
  unknown, missing = sorted(flat.keys() - want), sorted(want.keys() - flat)
  if unknown or missing:
    raise ValueError(
      f'params: no place for {unknown[:12]}; nothing for {missing[:12]}: give '
      'the config they were made with'
    )
  for name, x in flat.items():
    need = want[name]
    if x.shape != need.shape or x.dtype != need.dtype:
      raise ValueError(
        f'params: {name} is {x.dtype}{list(x.shape)}; the config needs '
        f'{need.dtype}{list(need.shape)}'
      )
    if not np.isfinite(x).all():
      raise ValueError(
        f'params: {name} has {int((~np.isfinite(x)).sum())} values that are '
        'not finite; export an earlier checkpoint'
      )


# --- config.json -------------------------------------------------------------


class _Family(NamedTuple):
  """architecture: transformers' class; say(config) -> its keys."""

  architecture: str
  say: Callable[[model_config.LMConfig], dict[str, Any]]


def _say(config: model_config.LMConfig) -> tuple[str, dict[str, Any]]:
  """(model_type, config.json) of the first family that has these settings.

  Raises:
    ValueError: none has; names what the nearest lacks.
  """
  want = _meaning(config)
  lacks: dict[str, dict[str, Any]] = {}
  for kind, family in _FAMILIES.items():
    said = dict(
      model_type=kind,
      architectures=[family.architecture],
      tie_word_embeddings=config.tied,
      # The key of transformers 4, which 5 reads too; so with rope_scaling.
      torch_dtype=config.dtype,
      **family.say(config),
    )
    try:
      read = config_hf.FAMILIES[kind].settings(
        config_hf.Settings(pathlib.Path(kind), said)
      )
    except ValueError:
      continue  # such as a head_dim that GPT-2 would derive otherwise
    have = _meaning(read)
    lacks[kind] = {k: have[k] for k in want if have[k] != want[k]}
    if not lacks[kind]:
      return kind, said
  if not lacks:
    raise ValueError(f'export: no family can say these settings: {config}')
  kind = min(lacks, key=lambda kind: len(lacks[kind]))
  raise ValueError(
    f'export: no family of {", ".join(_FAMILIES)} has these settings; nearest '
    f'is {kind}, which has '
    + ', '.join(f'{k}={x!r}, not {want[k]!r}' for k, x in lacks[kind].items())
  )


def _meaning(config: model_config.LMConfig) -> dict[str, Any]:
  """Settings that change a result, each said in one way."""
  c = dict(vars(config))
  for name in ('dtype', 'scan_layers', 'fused'):
    del c[name]
  c['windows'] = _windows(config)
  c['query_scale'] = _query_scale(config)
  return c


def _windows(c: model_config.LMConfig) -> tuple[int, ...]:
  return tuple(c.windows[i % len(c.windows)] for i in range(c.depth))


def _query_scale(c: model_config.LMConfig) -> float:
  return c.head_dim**-0.5 if c.query_scale is None else c.query_scale


def _sizes(c: model_config.LMConfig) -> dict[str, Any]:
  """What Llama, Qwen and Gemma call alike."""
  return dict(
    num_hidden_layers=c.depth,
    hidden_size=c.width,
    num_attention_heads=c.heads,
    num_key_value_heads=c.kv_heads,
    head_dim=c.head_dim,
    intermediate_size=c.mlp,
    vocab_size=c.vocab,
    max_position_embeddings=c.context,
    rms_norm_eps=c.norm_eps,
    rope_theta=c.rope_theta,
    rope_scaling=_rope_scaling(c.rope_scaling),
  )


def _rope_scaling(s: model_config.RopeScaling | None) -> dict[str, Any] | None:
  if s is None:
    return None
  if not s.original_context:
    return dict(rope_type='linear', factor=s.factor)
  return dict(
    rope_type='llama3',
    factor=s.factor,
    low_freq_factor=s.low_freq_factor,
    high_freq_factor=s.high_freq_factor,
    original_max_position_embeddings=s.original_context,
  )


def _llama(c: model_config.LMConfig) -> dict[str, Any]:
  return _sizes(c) | dict(hidden_act='silu', attention_bias=c.qkv_bias)


def _qwen2(c: model_config.LMConfig) -> dict[str, Any]:
  return _sizes(c) | dict(hidden_act='silu', use_sliding_window=False)


def _qwen3(c: model_config.LMConfig) -> dict[str, Any]:
  return _llama(c) | dict(use_sliding_window=False)


def _gemma2(c: model_config.LMConfig) -> dict[str, Any]:
  kinds = {True: 'sliding_attention', False: 'full_attention'}
  return _sizes(c) | dict(
    hidden_activation='gelu_pytorch_tanh',
    attention_bias=c.qkv_bias,
    query_pre_attn_scalar=round(_query_scale(c) ** -2),
    sliding_window=max(c.windows) or 4096,
    layer_types=[kinds[window > 0] for window in _windows(c)],
    attn_logit_softcapping=c.attn_softcap,
    final_logit_softcapping=c.logit_softcap,
  )


def _gemma3(c: model_config.LMConfig) -> dict[str, Any]:
  return _gemma2(c) | dict(rope_local_base_freq=c.local_rope_theta)


def _gpt2(c: model_config.LMConfig) -> dict[str, Any]:
  acts = dict(gelu='gelu', gelu_tanh='gelu_new', silu='gelu_new')
  return dict(
    n_layer=c.depth,
    n_embd=c.width,
    n_head=c.heads,
    n_inner=c.mlp,
    n_positions=c.context,
    vocab_size=c.vocab,
    layer_norm_epsilon=c.norm_eps,
    activation_function=acts[c.act],
  )


# model_type -> how to say it; the first that fits is taken.
_FAMILIES = {
  'llama': _Family('LlamaForCausalLM', _llama),
  'qwen2': _Family('Qwen2ForCausalLM', _qwen2),
  'qwen3': _Family('Qwen3ForCausalLM', _qwen3),
  'gpt2': _Family('GPT2LMHeadModel', _gpt2),
  'gemma2': _Family('Gemma2ForCausalLM', _gemma2),
  'gemma3_text': _Family('Gemma3ForCausalLM', _gemma3),
}


# --- tokenizer ---------------------------------------------------------------


def _special_ids(t: tokenizer_lib.Tokenizer) -> dict[str, Any]:
  """Said even where there is none: transformers would take a family's own."""
  eos = list(t.eos_ids) or [None]
  pad = t.inner.token_to_id(dict(t.specials).get('pad_token', ''))
  return dict(
    bos_token_id=t.bos_id,
    eos_token_id=eos[0] if len(eos) == 1 else eos,
    pad_token_id=pad,
  )


def _tokenizer_settings(t: tokenizer_lib.Tokenizer, config) -> dict[str, Any]:
  named = dict(t.specials)
  for key, i in (('bos_token', t.bos_id), ('eos_token', [*t.eos_ids, None][0])):
    token = None if i is None else t.inner.id_to_token(i)
    if token is not None:
      named.setdefault(key, token)
  if t.chat_template is not None:
    named['chat_template'] = t.chat_template
  return named | dict(
    # The class that takes tokenizer.json as it is; a family's own rebuilds it.
    tokenizer_class='PreTrainedTokenizerFast',
    model_max_length=config.context,
    clean_up_tokenization_spaces=False,
    add_bos_token=t.add_bos,
  )


def _inner(t: tokenizer_lib.Tokenizer) -> tokenizers.Tokenizer:
  """The tokenizer with a first token if ours puts one, and else without."""
  inner, bos_id = t.inner, t.bos_id
  adds = bos_id is not None and inner.encode('a').ids[:1] == [bos_id]
  if adds == t.add_bos or bos_id is None:
    return inner
  inner = tokenizers.Tokenizer.from_str(inner.to_str())
  bos = str(inner.id_to_token(bos_id))
  first = f'{bos} ' if t.add_bos else ''
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single=f'{first}$A',
    pair=f'{first}$A $B',
    special_tokens=[(bos, bos_id)],
  )
  return inner
