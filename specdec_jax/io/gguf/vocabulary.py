"""Reads the tokenizer in a GGUF file into a tokenizers.Tokenizer. Takes
pre-tokenizers, bos and ends from llama.cpp's src/llama-vocab.cpp."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from absl import logging
from tokenizers import decoders, normalizers, pre_tokenizers

from specdec_jax.io import tokenizer as text
from specdec_jax.io.gguf.container import File
from specdec_jax.io.tokens import specials, words

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
  rf'\p{{N}}{{1,%d}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{words.CUT}'
)

_GPT2 = [pre_tokenizers.ByteLevel(add_prefix_space=False)]


class Pre(NamedTuple):
  """What tokenizer.ggml.pre stands for.

  steps: the pre-tokenizers. whole: take a word that is a token without merges.
  bos: bos comes first, unless the file says otherwise.
  normal: compose text first (NFC), as Qwen's own tokenizer does.
  """

  steps: Sequence[pre_tokenizers.PreTokenizer]
  whole: bool = False
  bos: bool = False
  normal: bool = False


_LLAMA3 = Pre(words.split(_WORDS % 3), whole=True, bos=True)
_DIGITS = Pre([pre_tokenizers.Digits(individual_digits=True), *_GPT2])

PRE = {
  'default': Pre(
    words.split(
      r'[\p{P}\$\+<=>\^~\|]+',
      r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
      r'\p{N}+',
      '[0-9]{3}',
    )
  ),
  'gpt-2': Pre(_GPT2),
  'smollm': _DIGITS,
  'refact': _DIGITS,  # Granite
  'qwen2': Pre(words.split(_WORDS % 1), normal=True),
  'deepseek-r1-qwen': Pre(words.split(_WORDS % 1)),
  **dict.fromkeys(
    ('llama-bpe', 'llama3', 'llama-v3', 'falcon3', 'pixtral'), _LLAMA3
  ),
  'smaug-bpe': Pre(words.split(_WORDS % 3)),  # SmolLM3
  'dbrx': Pre(words.split(_WORDS % 3)),  # OLMo 2, Phi 4
  'tekken': Pre(words.split(words.TEKKEN), whole=True, bos=True),
}

# What ends a reply in llama.cpp's loader beside ends of turns: texts that end a
# text, and a file in code.
ENDS = '<|endoftext|> <|end_of_text|> </s> <eos> [EOS] <|tool_response>'.split()
# Of each the first that there is, unless a field names one.
CODE_ENDS = {
  'fim_pad': '<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]'.split(),
  'fim_rep': '<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>'.split(),
  'fim_sep': ['<|file_sep|>'],
}
# Ids that no field has to name. Those of 'gpt2' are Falcon's, else a word's.
_IDS = dict(llama=dict(unknown=0, bos=1, eos=2), gpt2=dict(bos=11, eos=11))


def read(file: File, source: str) -> text.Tokenizer:
  tokens = file.field('tokenizer.ggml.tokens', list)
  kinds = _column(file, 'token_type', len(tokens), NORMAL)
  real = [i for i, kind in enumerate(kinds) if kind != UNUSED]
  ids = {tokens[i]: i for i in real}
  if len(ids) != len(real):
    raise ValueError(f'{file.path}: tokenizer.ggml.tokens has repeated tokens')
  model = file.field('tokenizer.ggml.model', str)
  if model not in _MODELS:
    raise ValueError(
      f'{file.path}: tokenizer.ggml.model {model!r} is not supported; allowed '
      f'are {sorted(_MODELS)}'
    )
  inner, adds_bos = _MODELS[model](file, ids, tokens, kinds)
  token = functools.partial(tokenizers.AddedToken, normalized=False)
  added = [i for i in real if kinds[i] in (CONTROL, USER_DEFINED)]
  inner.add_tokens(
    [token(tokens[i], special=kinds[i] == CONTROL) for i in added]
  )
  fits = lambda i: model == 'llama' or kinds[i] == CONTROL
  has = lambda i: inner.id_to_token(i) is not None
  known = {x: i for x, i in _IDS[model].items() if has(i) and fits(i)}
  for name in ('bos', 'eos', 'eot', 'eom', 'unknown', 'padding', *CODE_ENDS):
    i = file.fields.get(f'tokenizer.ggml.{name}_token_id', known.get(name))
    if i is None:
      continue
    if type(i) is not int or not 0 <= i < len(tokens):
      raise ValueError(
        f'{file.path}: {name}_token_id is {i!r}; ids are 0 to {len(tokens) - 1}'
      )
    known[name] = i
  named = dict(bos_token='bos', eos_token='eos')
  named |= dict(unk_token='unknown', pad_token='padding')
  ends = [known[name] for name in ('eos', 'eot', 'eom') if name in known]
  ends += _ends_by_text(inner, known)
  specials.hide(inner, ends)
  adds_bos = file.field('tokenizer.ggml.add_bos_token', bool, adds_bos)
  template = file.fields.get('tokenizer.chat_template')
  return text.Tokenizer(
    source,
    inner,
    eos_ids=tuple(dict.fromkeys(ends)),
    bos_id=known.get('bos'),
    add_bos='bos' in known and adds_bos,
    chat_bos=True,
    chat_template=template if isinstance(template, str) else None,
    specials=tuple(
      (x, tokens[known[i]]) for x, i in named.items() if i in known
    ),
  )


def _ends_by_text(inner: tokenizers.Tokenizer, fields) -> list[int]:
  """Returns the other tokens that end a reply for llama.cpp's loader."""
  texts = specials.ids_of(inner, ENDS)
  if '<|tool_response>' in texts:  # Gemma 4, where </s> is a tag of HTML
    texts.pop('</s>', None)
  ends = specials.turn_ends(inner, texts)
  for name, several in CODE_ENDS.items():
    found = [*specials.ids_of(inner, several).values()]
    ends += [fields[name]] if name in fields else found[:1]
  return ends


def _column(file, name: str, count: int, usual: float) -> list[float]:
  """Reads a number per token; `usual` where the field is absent."""
  absent = np.full(count, usual)
  values = file.field(f'tokenizer.ggml.{name}', np.ndarray, absent)
  if len(values) != count:
    raise ValueError(f'{file.path}: {count} tokens, {len(values)} of {name}')
  return values.tolist()


def _byte_level(file, ids, tokens, kinds):
  """Makes a BPE like GPT-2's: printable characters for bytes, ranked merges."""
  if not (pre := file.field('tokenizer.ggml.pre', str, '')):
    warning = '%s: no tokenizer.ggml.pre: words are cut as under "default"'
    logging.warning(warning, file.path)
    pre = 'default'
  if pre not in PRE:
    raise ValueError(
      f'{file.path}: tokenizer.ggml.pre {pre!r} is not known; allowed are '
      f'{sorted(PRE)}; or use the Hugging Face folder of this model'
    )
  lines = file.field('tokenizer.ggml.merges', list)
  merges = [tuple(line.split(' ')) for line in lines]
  try:
    bpe = tokenizers.models.BPE(ids, merges, ignore_merges=PRE[pre].whole)
  except Exception as e:
    raise ValueError(f'{file.path}: tokenizer.ggml.merges: {e}') from e
  inner = tokenizers.Tokenizer(bpe)
  if PRE[pre].normal:
    inner.normalizer = normalizers.NFC()
  inner.pre_tokenizer = pre_tokenizers.Sequence([*PRE[pre].steps])
  inner.decoder = decoders.ByteLevel()
  return inner, PRE[pre].bos


def _sentencepiece(file, ids, tokens, kinds):
  """Makes a BPE like Llama 2's: U+2581 for spaces, merges by score."""
  scores = _column(file, 'scores', len(tokens), 0.0)
  unknown = [tokens[i] for i, kind in enumerate(kinds) if kind == UNKNOWN]
  bpe = tokenizers.models.BPE(
    ids,
    _merges(ids, tokens, kinds, scores),
    unk_token=unknown[0] if unknown else None,
    fuse_unk=True,
    byte_fallback=True,
  )
  inner = tokenizers.Tokenizer(bpe)
  prefix = file.field('tokenizer.ggml.add_space_prefix', bool, True)
  steps = [normalizers.Prepend('▁')] if prefix else []
  inner.normalizer = normalizers.Sequence(
    [*steps, normalizers.Replace(' ', '▁')]
  )
  inner.decoder = decoders.Sequence(
    [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    + ([decoders.Strip(' ', 1, 0)] if prefix else [])
  )
  return inner, True


def _merges(ids, tokens, kinds, scores) -> list[tuple[str, str]]:
  """Returns every pair of tokens that joins to a token, by its score.
  SentencePiece stores scores, not merges, and joins the pair whose result
  scores highest: BPE with the merges in this order."""
  normal = [i for i, kind in enumerate(kinds) if kind == NORMAL]
  plain = {tokens[i] for i in normal}
  out = []
  for i in sorted(normal, key=lambda i: -scores[i]):
    token = tokens[i]
    pairs = [(token[:c], token[c:]) for c in range(1, len(token))]
    pairs = [p for p in pairs if p[0] in plain and p[1] in plain]
    out += sorted(pairs, key=lambda p: (ids[p[0]], ids[p[1]]))
  return out


_MODELS = {'gpt2': _byte_level, 'llama': _sentencepiece}
