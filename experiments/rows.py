"""The empirical tables' rows: targets, their drafts, and prompts.

They are in rows.toml. Those whose models are not trained here yet have a
command that trains them; `quick` takes tiny random models instead.
"""

import dataclasses
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Draft:
  """A row's draft."""

  name: str  # in the tables
  theirs: str = ''  # the paper's draft that it is shown beside
  method: str = 'lm'  # of drafters.table.DRAFTERS
  source: str = ''  # the model of an lm
  dtype: str = 'float32'  # of its weights
  # Of the drafter; of an ngram its order.
  settings: dict[str, Any] = dataclasses.field(default_factory=dict)
  optional: bool = False  # the row is measured without it while it is missing


NGRAMS = (
  Draft('unigram', 'Unigram', 'ngram', settings={'order': 1}),
  Draft('bigram', 'Bigram', 'ngram', settings={'order': 2}),
)


@dataclasses.dataclass(frozen=True)
class Row:
  """A target with its drafts."""

  name: str  # of --rows
  target: str  # its source
  drafts: tuple[Draft, ...]
  prompts: str  # see texts.prompts
  theirs: str = ''  # the paper's target that it is shown beside, in table 3
  task: str = ''  # and its task, in table 2
  counted: str = 'stdlib:prose'  # source of the text that n-grams count
  counted_field: str = 'text'  # of its rows
  new: int = 48  # tokens of an answer, at most
  read: int = 0  # tokens of a prompt, at most; 0: all
  top_k: int = 0  # where it is sampled; 0: all
  metric: str = ''  # of answers beside references, 'bleu' or 'rouge'
  command: str = ''  # that trains what is missing

  def missing(self) -> list[str]:
    """Lists the models' and texts' folders and files that are not there."""
    sources = [self.target, self.prompts, self.counted]
    sources += [x.source for x in self.drafts if not x.optional]
    paths = [pathlib.Path(x) for x in sources if x.startswith(('/', './'))]
    lost = [] if self.prompts else ['a file of prompts']
    return lost + [str(x) for x in dict.fromkeys(paths) if not x.exists()]


# By name; and of each its cells, which are plain JSON.
Rows = Mapping[str, Row]
Cells = Mapping[str, list[dict[str, Any]]]


def all_rows(models: pathlib.Path) -> dict[str, Row]:
  """Reads rows.toml, by name, with the trained models below a folder."""
  models = models.resolve()
  text = (ROOT / 'experiments/rows.toml').read_text('utf-8')
  data = tomllib.loads(text.replace('{models}', str(models)))
  out = {}
  for name, found in data.items():
    found = data[found.pop('like')] | found if 'like' in found else found
    drafts = (*NGRAMS, *(Draft(**x) for x in found['drafts']))
    # A command is shown, and run in the repository.
    command = found.get('command', '').replace(f'{ROOT}/', '')
    out[name] = Row(name, **found | {'drafts': drafts, 'command': command})
  return out


def pair(target: str, draft: str, prompts: str) -> Row:
  """Makes a row from two models of yours; prompts: a JSONL file, or empty."""
  drafts = (*NGRAMS, Draft('draft', source=draft))
  return Row('pair', target, drafts, prompts or 'built in')


# Of several models or layers of a row one is enough; the zoo has no eagle for a
# random target.
_LARGE = {
  *('w256', 'layers', 'mini distilled', 'eagle'),
  *('early exit 4', 'early exit 20'),
}


def quick(row: Row) -> Row:
  """Gives a row tiny random models, and built-in prompts."""
  size = 't5_tiny' if row.theirs.startswith('T5') else 'tiny'
  drafts = tuple(
    dataclasses.replace(
      x,
      source=f'random:{size}:1' if x.source else '',
      settings={'exit': 1} if x.method == 'early_exit' else x.settings,
    )
    for x in row.drafts
    if x.name not in _LARGE and not x.optional
  )
  return dataclasses.replace(
    row,
    target=f'random:{size}',
    drafts=drafts,
    prompts='numbers' if row.metric else row.prompts and 'built in',
    counted='numbers',
    counted_field='words',
    new=8,
    read=64,
    metric=row.metric and 'bleu',  # whose package is installed
    command='',
  )
