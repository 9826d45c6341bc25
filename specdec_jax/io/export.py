"""Saves what training makes as Hugging Face folders, for transformers too:
models of the Llama, Qwen2, Qwen3 and T5 families."""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
import tokenizers

from specdec_jax import types
from specdec_jax.io import files, hf, names
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.io.config_json import families
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, rope

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
) -> None:
  """Writes a folder that io.load and transformers read, or nothing.

  Loading it at config.dtype gives these parameters bit for bit. Replaces an
  earlier export there. Takes fused and scanned layers apart.

  made_by: JSON, kept beside the model (config, seed, commit).
  draft_ids: the ids that it proposes as a draft, () for all. transformers does
    not know them, and lets it propose all.
  """
  folder = pathlib.Path(folder).resolve()
  held = set(os.listdir(folder)) if folder.is_dir() else set()
  ours = folder.is_dir() and (not held or {MARK} <= held <= _FILES)
  if folder.exists() and not ours:
    raise ValueError(
      f'export {folder}: is there and is no export, or holds more than an '
      'export; move it elsewhere, or name another folder'
    )
  assert tokenizer.size <= config.vocab, 'ids without a row'
  about: dict[str, Any] = dict(format=_FORMAT, made_by=made_by)
  if len(draft_ids):
    about['draft_ids'] = [int(i) for i in draft_ids]
  raw = settings(config)
  contents = {
    'config.json': raw | _special_ids(tokenizer, config),
    'tokenizer.json': _inner(tokenizer, config).to_str(pretty=True),
    'tokenizer_config.json': _tokenizer_settings(tokenizer, config),
    MARK: about,
  }
  _, naming = families.from_json(raw, folder)
  write(folder, contents, _weights(config, params, naming))


def write(
  folder: pathlib.Path, contents: dict[str, Any], weights: dict[str, np.ndarray]
) -> None:
  """Writes the folder beside its place, then moves it there. contents: JSON or
  text of files by name, MARK among them."""
  part = folder.with_name(f'{folder.name}.{os.getpid()}.part')
  try:
    shutil.rmtree(part, ignore_errors=True)  # of a killed run of this number
    part.mkdir(parents=True)
    for name, x in contents.items():
      content = x if isinstance(x, str) else json.dumps(x, indent=2)
      files.write(part / name, content)
    # transformers refuses a file that does not say whose layout it has.
    pt = {'format': 'pt'}
    safetensors.numpy.save_file(weights, part / hf.SINGLE, metadata=pt)
    # safetensors writes with mode 0600, whatever the umask.
    shutil.copymode(part / MARK, part / hf.SINGLE)
    if folder.exists():
      shutil.rmtree(folder)
    os.rename(part, folder)
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(f'export {folder}: cannot be written: {error}') from error
  finally:
    shutil.rmtree(part, ignore_errors=True)


def draft_ids(folder: str | os.PathLike, vocab: int) -> tuple[int, ...]:
  """Reads draft_ids from an exported folder; () for any other."""
  path = pathlib.Path(folder) / MARK
  ids = files.read_json(path, {}).get('draft_ids', [])
  listed = isinstance(ids, list) and all(type(i) is int for i in ids)
  if not listed or [*ids] != sorted({i for i in ids if 0 <= i < vocab}):
    raise ValueError(f'{path}: draft_ids is no list of ids; export it again')
  return tuple(ids)


def settings(config: model_config.LMConfig) -> dict[str, Any]:
  """Makes config.json from settings, without special ids; refuses by name what
  none of these families has. Training calls it before it begins, so that its
  result can be saved."""
  out = _t5(config) if config.encoder else _decoder_only(config)
  # What cannot be written is found by reading back what was written.
  read, _ = families.from_json(out, pathlib.Path('config.json'))
  if read.encoder:  # whether it is tied is for the weights to say
    read = dataclasses.replace(read, tied=config.tied)
  want, have = vars(_canonical(config)), vars(_canonical(read))
  lost = [
    f'{k}={have[k]!r}, not {x!r}' for k, x in want.items() if have[k] != x
  ]
  if lost:
    name = out['architectures'][0].partition('For')[0]
    raise ValueError(
      'export: only models of the Llama, Qwen2, Qwen3 and T5 families can be '
      f'saved; the nearest, {name}, has {", ".join(lost)}'
    )
  return out


def _t5(c: model_config.LMConfig) -> dict[str, Any]:
  # transformers 4 reads from tie_word_embeddings whether the head is scaled, so
  # that it cannot have an untied one that is; 5 reads both.
  assert c.encoder is not None
  return dict(
    model_type='t5', architectures=['T5ForConditionalGeneration'],
    is_encoder_decoder=True, num_layers=c.encoder.depth,
    feed_forward_proj='gated-gelu' if c.gated else 'relu',
    num_decoder_layers=c.depth, d_model=c.width, num_heads=c.heads,
    d_kv=c.head_dim, d_ff=c.mlp, vocab_size=c.vocab, n_positions=c.context,
    relative_attention_num_buckets=c.buckets[0],
    relative_attention_max_distance=c.buckets[1],
    layer_norm_epsilon=c.norm_eps, decoder_start_token_id=c.start,
    tie_word_embeddings=c.tied, scale_decoder_outputs=c.head_scale != 1,
    torch_dtype=c.dtype,
  )  # fmt: skip


def _decoder_only(c: model_config.LMConfig) -> dict[str, Any]:
  kind, name, more = 'llama', 'Llama', dict(attention_bias=c.qkv_bias)
  if c.qk_norm:
    kind, name = 'qwen3', 'Qwen3'
  elif c.qkv_bias and not c.o_bias:
    kind, name, more = 'qwen2', 'Qwen2', dict(use_sliding_window=False)
  return more | dict(
    model_type=kind, architectures=[f'{name}ForCausalLM'], hidden_act='silu',
    num_hidden_layers=c.depth, hidden_size=c.width,
    num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
    head_dim=c.head_dim, intermediate_size=c.mlp, vocab_size=c.vocab,
    max_position_embeddings=c.context, rms_norm_eps=c.norm_eps,
    rope_theta=c.rope_theta, tie_word_embeddings=c.tied,
    # The keys of transformers 4, which 5 reads too.
    rope_scaling=_rope_scaling(c.rope_scaling), torch_dtype=c.dtype,
  )  # fmt: skip


def _rope_scaling(s: rope.Scaling | None) -> dict[str, Any] | None:
  if not isinstance(s, rope.RopeScaling):
    return None
  if not s.original_context:
    return dict(rope_type='linear', factor=s.factor)
  return dict(
    rope_type='llama3', factor=s.factor, low_freq_factor=s.low_freq_factor,
    high_freq_factor=s.high_freq_factor,
    original_max_position_embeddings=s.original_context,
  )  # fmt: skip


def _canonical(c: model_config.LMConfig) -> model_config.LMConfig:
  """Makes settings equal that give equal results."""
  return dataclasses.replace(
    c,
    windows=tuple(c.windows[i % len(c.windows)] for i in range(c.depth)),
    rotated=tuple(c.rotated[i % len(c.rotated)] for i in range(c.depth)),
    query_scale=c.query_scale or c.head_dim**-0.5,
    proposes=(),
    dtype='float32',
    run=model_config.Execution(),
    # An encoder has no head.
    encoder=c.encoder and dataclasses.replace(_canonical(c.encoder), tied=True),
  )


def _weights(config, params, naming: names.Naming) -> dict[str, np.ndarray]:
  """Returns {stored name: array as stored}: contiguous, kernels [out, in]."""
  _, flat = convert.plain(config, jax.tree.map(np.asarray, params))
  out = {}
  for name, x in flat.items():
    assert np.isfinite(x).all(), f'{name} is not finite'
    stored = naming.stored('embed' if config.tied and name == 'head' else name)
    out[stored] = np.ascontiguousarray(x.T if naming.turned(name) else x)
  return out


# --- the tokenizer -----------------------------------------------------------


def _special_ids(t: tokenizer_lib.Tokenizer, config) -> dict[str, Any]:
  """Writes null for an absent one: else transformers takes a family's own."""
  eos = list(t.eos_ids) or [None]
  pad = t.inner.token_to_id(dict(t.specials).get('pad_token', ''))
  return dict(
    bos_token_id=t.bos_id,
    eos_token_id=eos[0] if len(eos) == 1 else eos,
    # A T5's decoder begins with padding.
    pad_token_id=config.start if pad is None else pad,
  )


def _tokenizer_settings(t: tokenizer_lib.Tokenizer, config) -> dict[str, Any]:
  named = dict(t.specials)
  eos = t.eos_ids[0] if t.eos_ids else None
  ids = dict(bos_token=t.bos_id, eos_token=eos, pad_token=config.start)
  for key, i in ids.items():
    if i is not None:
      named.setdefault(key, str(t.inner.id_to_token(i)))
  if t.chat_template is not None:
    named['chat_template'] = _template(t)
  return named | dict(
    # The class that takes tokenizer.json as it is; a family's own rebuilds it.
    tokenizer_class='PreTrainedTokenizerFast',
    model_max_length=config.context,
    clean_up_tokenization_spaces=False,
    add_bos_token=t.add_bos,
  )


def _template(t: tokenizer_lib.Tokenizer) -> str:
  """Returns the chat template, with bos if a folder's chat would lack it."""
  asked = [dict(role='user', content='Hello')]
  alone = dataclasses.replace(t, chat_bos=False)
  if t.encode_chat(asked) == alone.encode_chat(asked):
    return str(t.chat_template)
  assert t.bos_id is not None
  bos = json.dumps(t.inner.id_to_token(t.bos_id))
  return f'{{{{ {bos} }}}}{t.chat_template}'


def _inner(t: tokenizer_lib.Tokenizer, config) -> tokenizers.Tokenizer:
  """Copies the tokenizer; puts bos before texts if ours does, and eos behind an
  encoder's texts, which ours adds to sources itself."""
  first = [t.bos_id] if t.add_bos and t.bos_id is not None else []
  last = t.eos_ids[:1] if config.encoder else ()
  named = {i: str(t.inner.id_to_token(i)) for i in (*first, *last)}
  single = [*(named[i] for i in first), '$A', *(named[i] for i in last)]
  inner = tokenizers.Tokenizer.from_str(t.inner.to_str())
  inner.post_processor = tokenizers.processors.TemplateProcessing(
    single=single,
    pair=[*single, '$B:1', *(named[i] for i in last)],
    special_tokens=[(text, i) for i, text in named.items()],
  )
  return inner
