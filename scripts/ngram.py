"""Counts the bigrams of a text, for the drafter ngram.

python scripts/ngram.py --target=SOURCE --output=FILE [--corpus=A.txt,B.txt]

Without a corpus: the topics of the Python manual, part of every Python. Prints
how many tokens it counted.
"""

import hashlib
import os
import pathlib
import sys
from pydoc_data import topics

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from specdec_jax import printing, program
from specdec_jax.drafters import ngram
from specdec_jax.io import load
from specdec_jax.io.published import draft_file

_TARGET = flags.DEFINE_string('target', '', 'model whose tokenizer to use')
_CORPUS = flags.DEFINE_list(
  'corpus', [], 'text files to count; empty: topics of the Python manual'
)
_OUTPUT = flags.DEFINE_string('output', '', 'file to write')
_ORDER = flags.DEFINE_integer(
  'order', 2, '2, or 1 for unigrams alone', lower_bound=1, upper_bound=2
)


def run() -> bool:
  if not _TARGET.value or not _OUTPUT.value:
    raise ValueError('want --target=SOURCE and --output=FILE')
  try:
    texts = [pathlib.Path(x).read_text('utf-8') for x in _CORPUS.value]
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'corpus: not readable as text: {error}') from error
  texts = texts or list(topics.topics.values())
  tokenizer = load.tokenizer_of(_TARGET.value)
  encoded = tokenizer.inner.encode_batch(texts, add_special_tokens=False)
  ids = [x.ids for x in encoded]
  counts = ngram.count(ids, order=_ORDER.value, vocab=tokenizer.size)
  about = {
    'order': _ORDER.value,
    'tokenizer': tokenizer.fingerprint(),
    'corpus': hashlib.sha256('\0'.join(texts).encode()).hexdigest(),
    'tokens': sum(map(len, ids)),
  }
  draft_file.write(draft_file.NGRAM, _OUTPUT.value, counts._asdict(), about)
  size = os.path.getsize(_OUTPUT.value)
  said = f'{_OUTPUT.value}: counts of {about["tokens"]:,} tokens'
  printing.result(about | {'bytes': size}, said)
  return True


if __name__ == '__main__':
  program.launch(run)
