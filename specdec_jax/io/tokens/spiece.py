"""Reads a tokenizer from spiece.model, which T5's older folders have."""

import pathlib
import struct
from typing import Any

import tokenizers
from google.protobuf import empty_pb2, unknown_fields
from tokenizers import decoders, normalizers, pre_tokenizers


def read(path: pathlib.Path, extra: int) -> tokenizers.Tokenizer:
  """Reads a file's unigrams, then <extra_id_99> to <extra_id_0>, as T5Converter
  does in transformers 5.23. sentencepiece_model.proto numbers the fields."""
  unknown, control = 2, 3  # types of pieces
  try:
    fields = _fields(path.read_bytes())
    pieces = [dict(_fields(x)) for number, x in fields if number == 1]
    training, norm = (dict(_fields(dict(fields)[i])) for i in (2, 3))
    if training.get(3, 1) != 1 or 0 in (norm.get(3, 1), norm.get(4, 1)):
      raise ValueError('no unigrams, or spaces are treated in another way')
    score = lambda piece: struct.pack('<I', piece.get(2, 0))
    vocab = [(x[1].decode(), *struct.unpack('<f', score(x))) for x in pieces]
    kinds = [x.get(3, 1) for x in pieces]
    marks = [(f'<extra_id_{i}>', 0.0) for i in reversed(range(extra))]
    unigrams = tokenizers.models.Unigram(vocab + marks, kinds.index(unknown))
    steps = [normalizers.Precompiled(norm[2])] if norm.get(2) else []
  except Exception as e:
    raise ValueError(f'{path}: not a sentencepiece file of a T5: {e!r}') from e
  inner = tokenizers.Tokenizer(unigrams)
  joined = normalizers.Replace(tokenizers.Regex(' {2,}'), '▁')
  steps += [normalizers.Strip(left=False), joined]
  inner.normalizer = normalizers.Sequence(steps)
  inner.pre_tokenizer = pre_tokenizers.Metaspace()
  inner.decoder = decoders.Metaspace()
  special = [
    x[0] for x, k in zip(vocab, kinds, strict=True) if k in (unknown, control)
  ]
  inner.add_special_tokens([*special, *(text for text, _ in marks)])
  return inner


def _fields(message: bytes) -> list[tuple[int, Any]]:
  """Returns a protocol buffer's fields as (number, value)."""
  found = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(message))
  return [(x.field_number, x.data) for x in found]
