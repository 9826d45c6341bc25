"""Counts the n-grams of a text, for the ngram drafter.

python scripts/ngram.py --target=SOURCE --output=FILE [--corpus=A.txt,B.txt]

Without a corpus: the Python manual's topics, which every Python has. Prints one
line of JSON.
"""

import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from specdec_jax.analysis import output_file  # noqa: E402
from specdec_jax.io import load, ngrams  # noqa: E402

_TARGET = flags.DEFINE_string('target', '', 'model whose tokenizer to use')
_CORPUS = flags.DEFINE_list('corpus', [], 'text files')
_OUTPUT = flags.DEFINE_string('output', '', 'file to write')
_ORDER = flags.DEFINE_integer('order', 4, 'longest n-gram, 1 to 4')


def run() -> bool:
  if not _TARGET.value or not _OUTPUT.value:
    raise ValueError('want --target=SOURCE and --output=FILE')
  output_file.check_writable('output', _OUTPUT.value)
  texts = ngrams.texts_of(_CORPUS.value)
  tokenizer = load.open_source(_TARGET.value).tokenizer
  counts, about = ngrams.count(texts, tokenizer, order=_ORDER.value)
  ngrams.write(_OUTPUT.value, counts, about)
  size = os.path.getsize(_OUTPUT.value)
  done = about | {'ngrams': len(counts.token_J), 'bytes': size}
  print(json.dumps(done))
  return True


if __name__ == '__main__':
  runtime.launch(run)
