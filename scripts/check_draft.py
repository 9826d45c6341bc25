r"""Finds by measurement how a published draft is to be read.

python scripts/check_draft.py --target=SOURCE --draft=FOLDER [--drafter=medusa]

A folder may not say, or say wrongly, which layers its draft reads and how.
Prints for each reading that was tried how many of the tokens of the target's
own greedy text are a draft's first choice, for the first to the third draft of
a window; then the reading under which the draft runs. What is found is
kept in the cache folder. Exit status 1 if it is not as the draft claims.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from specdec_jax import printing, program
from specdec_jax.drafters import dflash, eagle, medusa, readings
from specdec_jax.io import load

_TARGET = flags.DEFINE_string('target', '', 'the model to draft for')
_DRAFT = flags.DEFINE_string('draft', '', 'folder or hf:org/name of a draft')
_FORMS = {'eagle': eagle.FORM, 'medusa': medusa.FORM, 'dflash': dflash.FORM}
_DRAFTER = flags.DEFINE_enum('drafter', 'eagle', _FORMS, 'what drafts with it')
_DTYPE = flags.DEFINE_string('dtype', 'stored', 'of the target')


def run() -> bool:
  """True if the draft is what it claims."""
  if not _TARGET.value or not _DRAFT.value:
    raise ValueError('want --target=SOURCE and --draft=SOURCE')
  target = load.load(_TARGET.value, dtype=_DTYPE.value)
  found = readings.find(_FORMS[_DRAFTER.value], target, _DRAFT.value)
  shares = lambda x: ' '.join(f'{share:6.1%}' for share in x)
  print('agreement by place in a window, and reading')
  ordered = sorted(found.agreed.items(), key=lambda x: -sum(x[1]))
  for words, agreed in ordered:
    print(f'{shares(agreed)}  {words}')
  print(f'{found.unigram:6.1%}  the most frequent token of the text')
  readings.judge(f'draft {_DRAFT.value}', target, found)
  (_, best), *rest = [(words, sum(x) / len(x)) for words, x in ordered]
  facts = dict(
    reading=readings.words(found.reading),
    agreement=found.agreed[readings.words(found.reading)],
    margin=round(best - rest[0][1], 4),
    claim=found.agreed[readings.words(())],
    unigram=found.unigram,
  )
  printing.result(facts, f'It is read as: {facts["reading"]}')
  return not any(found.reading)


if __name__ == '__main__':
  program.launch(run)
