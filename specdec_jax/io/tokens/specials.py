"""Special tokens: those in files beside tokenizer.json, and ends of turns.

Reads tokenizer_config.json and special_tokens_map.json as transformers 5.24
does (`PreTrainedTokenizerBase._from_pretrained`, `TokenizersBackend`).
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from specdec_jax.io import files
from specdec_jax.io.tokens import words

# In the order in which transformers adds those that tokenizer.json lacks.
NAMED = ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')

# Tokens that end a turn by their text, from the list by which llama.cpp's
# src/llama-vocab.cpp finds them. Chat files often name the end of text alone.
TURN_ENDS = (
  '<|eot_id|>', '<|eom_id|>',  # Llama 3
  '<|im_end|>',  # ChatML
  '<|end|>',  # Phi 3
  '<end_of_turn>', '<turn|>',  # Gemma
  '<|return|>', '<|call|>', '<|calls|>', '<|flush|>', '<EOT>', '_<EOT>',
  '[EOT]', '<end_of_utterance>',
)  # fmt: skip
# Where calls are tokens of their own, <|end|> only ends a part of a turn.
_CALLS = ({'<|return|>', '<|call|>'}, {'<|calls|>', '<|flush|>'})

# Families whose LlamaTokenizer transformers builds anew from the vocabulary.
_REBUILT = ('llama', 'smollm3')
# Those of which some files have another family's pattern of words.
_TEKKEN = ('mistral', 'mistral3')

_FLAGS = ('single_word', 'lstrip', 'rstrip', 'normalized', 'special')


def read(folder: pathlib.Path) -> dict[str, Any]:
  """Reads a folder's tokenizer_config.json. Without added_tokens_decoder,
  special_tokens_map.json's tokens win."""
  settings = files.read_json(folder / 'tokenizer_config.json', {})
  if settings.get('split_special_tokens'):
    raise ValueError(
      f'{folder / "tokenizer_config.json"}: split_special_tokens is not '
      'supported; here a special token that a text spells is that token'
    )
  if 'added_tokens_decoder' not in settings:
    settings |= files.read_json(folder / 'special_tokens_map.json', {})
  return settings


def named(settings: Mapping[str, Any]) -> dict[str, str]:
  """Returns texts by their names in chat templates, such as bos_token. The
  standard ones first, then a model's own: other keys that end with _token, and
  extra_special_tokens where it is a dict."""
  standard = [f'{name}_token' for name in NAMED]
  own = [x for x in settings if x.endswith('_token') and x not in standard]
  extra = settings.get('extra_special_tokens')
  given = {key: settings.get(key) for key in (*standard, *own)}
  given |= extra if isinstance(extra, dict) else {}
  found = {key: _text(value) for key, value in given.items()}
  return {key: text for key, text in found.items() if text is not None}


def add(
  inner: tokenizers.Tokenizer, folder: pathlib.Path, settings: Mapping[str, Any]
) -> None:
  """Adds the settings' tokens that tokenizer.json lacks, under the next ids:
  those in added_tokens_decoder, in the order of its ids, then those only named.
  Tokens that are there get their flags; named ones are special, unless
  added_tokens_decoder passes over them."""
  keys = 'extra_special_tokens', 'additional_special_tokens'
  extra = settings.get(keys[0]) or settings.get(keys[1])
  extra = extra if isinstance(extra, list) else []
  names = named(settings)
  values = [settings.get(key, text) for key, text in names.items()]
  have = {x.content: x for x in inner.get_added_tokens_decoder().values()}
  before = {text: repr(token) for text, token in have.items()}
  given = settings.get('added_tokens_decoder') or {}
  try:
    pairs = sorted((int(i), entry) for i, entry in given.items())
    wanted = {entry['content']: _token(entry) for _, entry in pairs}
    for value in (*values, *extra):
      if (text := _text(value)) is not None and text not in have:
        flags = value if isinstance(value, dict) else {}
        entry = flags | {'content': text, 'special': True}
        wanted.setdefault(text, _token(entry))
  except (AttributeError, KeyError, TypeError, ValueError) as e:
    raise ValueError(
      f'{folder / "tokenizer_config.json"}: added tokens must be ids with '
      f'objects that have a text, "content", and true or false as flags: {e!r}'
    ) from e
  for text in names.values():
    if text in have and 'added_tokens_decoder' not in settings:
      wanted.setdefault(text, have[text])
    if text in wanted:
      wanted[text].special = True
  changed = (t for t in wanted.values() if repr(t) != before.get(t.content))
  inner.add_tokens([*changed])


def rebuild(
  inner: tokenizers.Tokenizer, folder: pathlib.Path, settings: Mapping[str, Any]
) -> None:
  """Gives a Llama's tokenizer transformers' LlamaTokenizer steps, and Mistral's
  the Tekken pattern where fix_mistral_regex asks for it.

  LlamaTokenizer takes only the vocabulary from tokenizer.json; `legacy` and
  `add_prefix_space` say where a word begins with a space: at a text's start,
  behind special tokens, too, or nowhere.
  """
  family = files.read_json(folder / 'config.json', {}).get('model_type')
  large = inner.get_vocab_size(with_added_tokens=False) > 100_000
  if settings.get('fix_mistral_regex') and family in _TEKKEN and large:
    steps = words.split(words.TEKKEN)
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
  kind = str(settings.get('tokenizer_class')).removesuffix('Fast')
  steps = [inner.pre_tokenizer, inner.decoder]
  by_bytes = [x for x in steps if x and b'ByteLevel' in x.__getstate__()]
  bpe = isinstance(inner.model, tokenizers.models.BPE)
  if kind != 'LlamaTokenizer' or family not in _REBUILT or by_bytes or not bpe:
    return
  inner.model.fuse_unk = inner.model.byte_fallback = True
  spaced = settings.get('add_prefix_space') is not False
  always = 'always' if settings.get('legacy') else 'first'
  inner.normalizer = None
  inner.pre_tokenizer = pre_tokenizers.Metaspace(
    prepend_scheme=always if spaced else 'never', split=False
  )
  inner.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    + [decoders.Strip(' ', 1, 0)] * spaced
  )


def turn_ends(
  inner: tokenizers.Tokenizer, more: Iterable[str] = ()
) -> list[int]:
  """Returns the ids for TURN_ENDS and more texts, in order."""
  found = ids_of(inner, (*TURN_ENDS, *more))
  if any(all(x in found for x in calls) for calls in _CALLS):
    found.pop('<|end|>', None)
  return [*found.values()]


def hide(inner: tokenizers.Tokenizer, ids: Iterable[int]) -> None:
  """Makes tokens special, under their ids: no text has what they spell."""
  added = inner.get_added_tokens_decoder()
  for i in ids:
    if (text := inner.id_to_token(i)) is not None:
      token = added.get(i) or tokenizers.AddedToken(text, normalized=False)
      token.special = True
      inner.add_tokens([token])


def ids_of(inner: tokenizers.Tokenizer, texts: Iterable[str]) -> dict[str, int]:
  """Returns the ids for those texts that are tokens."""
  pairs = ((x, inner.token_to_id(x)) for x in texts)
  return {text: i for text, i in pairs if i is not None}


def _token(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
  flags = {key: entry[key] for key in _FLAGS if key in entry}
  if not isinstance(entry['content'], str):
    raise TypeError('a token without text')
  return tokenizers.AddedToken(entry['content'], **flags)


def _text(value: Any) -> str | None:
  value = value.get('content') if isinstance(value, dict) else value
  return value if isinstance(value, str) else None
