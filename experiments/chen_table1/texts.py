"""Table 1's rows and their prompts: documents and code."""

import pathlib

import numpy as np
from absl import flags

from experiments import rows as rows_lib
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.io import files

_XSUM = flags.DEFINE_string(
  'xsum', '', "of chen_table1: JSONL with XSum's document and summary"
)
_HUMANEVAL = flags.DEFINE_string(
  'humaneval', '', 'of chen_table1: HumanEval.jsonl'
)
XSUM, HUMANEVAL = 'XSum (ROUGE-2)', 'HumanEval (100 shot)'
SUMMARISE = 'Summarise this in one sentence.\n\n'
COMPLETE = 'Complete this Python function.\n\n'
CHARACTERS = 2000  # of a document, from its beginning


def rows(
  models: pathlib.Path, target: str, draft: str
) -> dict[str, rows_lib.Row]:
  """Makes table 1's rows; ValueError if --xsum or --humaneval is unreadable."""
  chat = rows_lib.all_rows(models)['chat']
  drafts = [x for x in chat.drafts if x.name == 'eagle']
  if draft:
    drafts = [rows_lib.Draft('draft', source=draft)]
  drafts.append(rows_lib.Draft('lookup', method='lookup'))
  made = (
    ('xsum', XSUM, bool(_XSUM.value)),
    ('humaneval', HUMANEVAL, bool(_HUMANEVAL.value)),
    ('paragraphs', XSUM, True),
    ('code', HUMANEVAL, True),
  )
  out = {}
  for name, theirs, there in made:
    new = 64 if theirs == XSUM else 128
    out[name] = rows_lib.Row(
      name,
      target or chat.target,
      tuple(drafts),
      'built in' if there else '',  # `read` makes them
      theirs=theirs,
      new=new,
    )
  for name in ('xsum', 'humaneval'):
    if out[name].prompts:
      read(name, 1)
  return out


def read(
  name: str, most: int
) -> tuple[list[prompts_lib.Prompt], dict[str, str]]:
  """Reads a row's (prompts, their summaries or {}); ValueError if it fails."""
  summaries: list[str] = []
  if name == 'xsum':
    documents, summaries = _columns('xsum', _XSUM.value, 'document', 'summary')
    found = [SUMMARISE + x[:CHARACTERS] for x in documents]
  elif name == 'humaneval':
    (heads,) = _columns('humaneval', _HUMANEVAL.value, 'prompt')
    found = [COMPLETE + x for x in heads]
  elif name == 'paragraphs':
    found = [SUMMARISE + x.turns[0] for x in prompts_lib.manual()]
  else:
    every = prompts_lib.builtin()
    found = [x.turns[0] for x in every if x.category == 'code']
  order = range(len(found))
  if name in ('xsum', 'humaneval'):
    order = np.random.default_rng(0).permutation(len(found)).tolist()
  chosen = [*order][:most]
  prompts = [prompts_lib.Prompt(str(i), turns=(found[i],)) for i in chosen]
  return prompts, {str(i): summaries[i] for i in chosen if summaries}


def _columns(flag: str, path: str, *names: str) -> list[list[str]]:
  """Reads every column's texts in a JSONL file."""
  rows = [row for _, row in files.read_jsonl(path)]
  for name in names:
    if not rows or not all(isinstance(row.get(name), str) for row in rows):
      raise ValueError(f'--{flag}={path}: not every row has a text {name!r}')
  return [[row[name] for row in rows] for name in names]
