"""Patterns that byte-level tokenizers cut text into words by."""

import tokenizers
from tokenizers import pre_tokenizers

CUT = r'\s*[\r\n]+|\s+(?!\S)|\s+'
# Of Mistral Nemo: a word is cut before a capital letter.
_UPPER = r'[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]'
_LOWER = r'[\p{Ll}\p{Lm}\p{Lo}\p{M}]'
_CASED = '|'.join(
  rf'[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}' for a, b in ('*+', '+*')
)
TEKKEN = rf'{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{CUT}'


def byte_characters() -> dict[str, int]:
  """Maps GPT-2's printable characters to their bytes."""
  plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
  moved = [b for b in range(256) if b not in plain]
  found = {chr(b): b for b in plain}
  return found | {chr(256 + i): b for i, b in enumerate(moved)}


def split(*words: str) -> list[pre_tokenizers.PreTokenizer]:
  """Returns the steps that cut by these patterns, one after another."""
  cut = lambda x: pre_tokenizers.Split(tokenizers.Regex(x), 'isolated')
  by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  return [*map(cut, words), by_bytes]
