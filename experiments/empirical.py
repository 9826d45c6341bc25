"""What the empirical tables share: flags, stored results, and their page.

A row's results are a file of their own, results/ROW.json, with the commit of
the code that measured it. A run goes on with the rows that are not stored; a
table renders from what is stored alone, and only if all of it is from one
commit. Tables that are measured together read one set of texts.
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import claims as claims_lib
from experiments import page
from experiments import rows as rows_lib
from specdec_jax import machine, printing, program
from specdec_jax.bench import budget, identity, intervals, timing
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files

Cells, Row, Rows = rows_lib.Cells, rows_lib.Row, rows_lib.Rows
ROOT = pathlib.Path(__file__).parents[1]
GAMMAS = (1, 2, 3, 4, 6, 8)

_NAMES = flags.DEFINE_list('rows', [], 'rows to measure; all, if empty')
_MODELS = flags.DEFINE_string(
  'models', str(ROOT / 'results/rows'), 'folder of experiments/train_rows.sh'
)
_TARGET = flags.DEFINE_string('target', '', 'of a row `pair` of your own')
_DRAFT = flags.DEFINE_string('draft', '', 'of the same row')
_PROMPTS = flags.DEFINE_string('prompts', '', 'of the same row, a JSONL file')
_TOKENS = flags.DEFINE_integer('tokens', 10_000, 'of each target, for alpha')
_SEED = flags.DEFINE_integer('seed', 0, 'of the texts')
_QUICK = flags.DEFINE_bool('quick', False, 'tiny random models, few tokens')
_RENDER = flags.DEFINE_bool(
  'render', False, 'only the page, from what is stored'
)
_RESULTS = flags.DEFINE_string(
  'results', '', 'folder of the results, with one in it for each table'
)


class Asked(NamedTuple):
  """tokens: for alpha. prompts: that table 2 times; repeats: of each."""

  tokens: int
  seed: int
  prompts: int
  repeats: int
  gammas: tuple[int, ...]


class Table(NamedTuple):
  """An experiment.

  home: its folder.
  measure: the cells of a row.
  markdown: (cells, rows, caption) -> the page. A row without cells was not run.
  claims: the paper's cells that have one of ours.
  figure: a PNG for the report, beside that of the claims.
  rows: (--models, --target, --draft) -> its rows, if they are not those of
    rows.py.
  """

  home: pathlib.Path
  measure: Callable[[rows_lib.Loaded, Asked], list[dict[str, Any]]]
  markdown: Callable[[Cells, Rows, str], str]
  claims: Callable[[Cells, Rows], list[claims_lib.Claim]]
  figure: Callable[[Cells], bytes] | None = None
  rows: Callable[[pathlib.Path, str, str], dict[str, Row]] | None = None


class Page(NamedTuple):
  """A table from stored results; commit: that measured them all.

  caption: that commit and the machine, after a warning if they are quick.
  """

  text: str
  caption: str
  commit: str
  claims: list[claims_lib.Claim]
  cells: Cells


def run(tables: Sequence[Table]) -> bool:
  """Measures the rows that are not stored, and renders the pages.

  Raises:
    ValueError: an unknown row, a model that is not there, or results of
      another commit; before anything is measured.
  """
  every, asked = [rows(x) for x in tables], _asked()
  _, folders = folders_of(tables)
  given = list(zip(tables, folders, every, strict=True))
  if not _RENDER.value:
    measure(given, asked)
  for table, folder, known in given:
    text = rendered(table, folder, known).text
    page.write(folder, table.home, text)
    print(text)
  return True


def rendered(table: Table, folder: pathlib.Path, every: Rows) -> Page:
  """The page from stored results alone.

  Raises:
    ValueError: nothing stored, or results of several commits.
  """
  found = stored(folder, every)
  if not found:
    raise ValueError(f'{folder}: no results; run without --render first')
  commits = {name: x['machine']['commit'] for name, x in found.items()}
  if len(set(commits.values())) > 1:
    told = ', '.join(f'{n}.json of {c[:12]}' for n, c in commits.items())
    raise ValueError(
      f'{folder}: results of several commits, {told}: remove the older ones, '
      'and run again to measure them'
    )
  made_on: dict[str, list[str]] = {}  # rows by the machine that measured them
  for name, x in found.items():
    made_on.setdefault(page.made_on(x['machine']), []).append(name)
  several = len(made_on) > 1
  caption = ' '.join(
    f'{", ".join(names)}: {made}' if several else made
    for made, names in made_on.items()
  )
  if any(x['quick'] for x in found.values()):
    caption = f'QUICK: tiny random models, which say nothing. {caption}'
  cells = {name: x['cells'] for name, x in found.items()}
  shown = {name: _shown(x, found.get(name)) for name, x in every.items()}
  text = table.markdown(cells, shown, caption)
  claims = table.claims(cells, shown)
  lines = [text, *_gates(found), '', *claims_lib.lines(claims)]
  (commit,) = set(commits.values())
  made = '\n'.join(lines).rstrip('\n')
  return Page(made, caption, commit, claims, cells)


def _shown(row: Row, doc) -> Row:
  """The row of stored results, a toy where the target fails its gate.

  Its drafts are those that were measured, wherever their models are now.
  """
  if not doc:
    return row
  names = {x.get('draft') for x in doc['cells']}
  row = row._replace(drafts=tuple(x for x in row.drafts if x.name in names))
  failed = doc['gate'] and not rows_lib.Gate(**doc['gate']).passed
  return row._replace(name=f'toy {row.name}') if failed else row


def _gates(found: Mapping[str, Any]) -> list[str]:
  gates = {n: rows_lib.Gate(**x['gate']) for n, x in found.items() if x['gate']}
  and_distinct = f' and {rows_lib.DISTINCT:.0%}'
  return [
    f'* {name}: the target has {x.metric.upper()} {x.value:.1f} on {x.texts} '
    f'texts, {x.distinct:.0%} of its answers are distinct (a toy below '
    f'{x.least:.1f}{and_distinct if x.metric == "bleu" else ""}).'
    for name, x in gates.items()
  ]


def stored(folder: pathlib.Path, names) -> dict[str, Any]:
  """The stored rows, in the order of the names."""
  paths = {name: folder / f'{name}.json' for name in names}
  return {n: files.read_json(x) for n, x in paths.items() if x.exists()}


def measure(
  given: Sequence[tuple[Table, pathlib.Path, Rows]], asked: Asked
) -> None:
  """Measures and stores the rows of --rows, or those whose models are there.

  A row is loaded once for all tables that have it.

  Args:
    given: of each table the folder of its results, and its rows.
    asked: how much to measure.

  Raises:
    ValueError: an unknown row, a model that is not there, or another row's
      results of another commit.
  """
  head, dirty = machine.commit(*page.WRITTEN)
  wanted = [
    (name, table, folder, every[name])
    for table, folder, every in given
    for name in _chosen(folder, every, head)
  ]
  for _, folder, _ in given:
    program.open_workdir(str(folder))
  names = [name for name, *_ in wanted]
  wanted.sort(key=lambda x: names.index(x[0]))
  setting = {
    'asked': json.loads(printing.compact(asked)),
    'quick': _QUICK.value,
  }
  loaded, gate = None, None
  for name, table, folder, row in wanted:
    before = stored(folder, [name]).get(name)
    if before and not dirty and not before['machine']['dirty']:
      known = {k: before[k] for k in setting}
      if known == setting and before['machine']['commit'] == head:
        continue
    if loaded is None or loaded.row != row:
      loaded = rows_lib.load(row, asked.gammas, _most(asked))
      gate = rows_lib.gate(loaded)
    about = machine.describe() | {'commit': head, 'dirty': dirty}
    doc = setting | {'machine': about, 'gate': gate and gate._asdict()}
    doc |= {'cells': table.measure(loaded, asked)}
    files.write(folder / f'{name}.json', printing.compact(doc))


def _chosen(folder: pathlib.Path, every: Rows, head: str) -> list[str]:
  """The rows to measure; raises ValueError as measure does."""
  chosen = _NAMES.value or [n for n, x in every.items() if not x.missing()]
  for name in chosen:
    if name not in every:
      allowed = ', '.join(every)
      raise ValueError(f'--rows={name}: no such row; allowed are {allowed}')
    if lost := every[name].missing():
      raise ValueError(
        f'--models={_MODELS.value}: row {name} needs {lost[0]}, which is not '
        f'there; {every[name].command}'
      )
  for name, x in stored(folder, every).items():
    same = x['machine']['commit'] == head
    if not same and name not in chosen:
      raise ValueError(
        f'{folder}/{name}.json: measured by commit '
        f'{x["machine"]["commit"][:12]}, and this is {head[:12]}; name it in '
        '--rows, or remove it'
      )
  return chosen


def folders_of(
  tables: Sequence[Table],
) -> tuple[pathlib.Path, list[pathlib.Path]]:
  """(where the report goes, where the results of each table are).

  With --results=DIR, or quick: a folder, and one in it for each table.
  """
  if not _RESULTS.value and not _QUICK.value:
    return ROOT / 'results', [x.home / 'results' for x in tables]
  output = pathlib.Path(_RESULTS.value or ROOT / 'results/quick')
  return output, [output / x.home.name for x in tables]


def rows(table: Table) -> dict[str, Row]:
  """The rows of a table by name, as the flags have them."""
  if bool(_TARGET.value) != bool(_DRAFT.value):
    lost = '--draft' if _TARGET.value else '--target'
    raise ValueError(f'{lost}: empty; a pair is --target and --draft')
  for flag, x in (('target', _TARGET.value), ('draft', _DRAFT.value)):
    if x.startswith(('/', './')) and not pathlib.Path(x).exists():
      raise ValueError(f'--{flag}={x}: no such file or folder')
  if _PROMPTS.value and (table.rows or not _TARGET.value):
    raise ValueError(
      '--prompts: of --target and --draft, and not of chen_table1 and '
      'distillspec_t5; give them too'
    )
  models = pathlib.Path(_MODELS.value)
  every = rows_lib.all_rows(models)
  if table.rows:
    every = table.rows(models, _TARGET.value, _DRAFT.value)
  elif _TARGET.value:
    own = rows_lib.pair(_TARGET.value, _DRAFT.value, _PROMPTS.value)
    every['pair'] = own
  if _PROMPTS.value and not pathlib.Path(_PROMPTS.value).is_file():
    raise ValueError(f'--prompts={_PROMPTS.value}: no such file')
  if _QUICK.value:
    every = {name: rows_lib.quick(row) for name, row in every.items()}
  return every


def _asked() -> Asked:
  if _TOKENS.value < 1:
    raise ValueError(f'--tokens={_TOKENS.value}: want 1 or more')
  if _QUICK.value:
    return Asked(min(_TOKENS.value, 60), _SEED.value, 4, 2, (1, 2))
  return Asked(_TOKENS.value, _SEED.value, 48, 3, GAMMAS)


def _most(asked: Asked) -> int:
  """Prompts that are enough, of answers that may be short."""
  return 8 if asked.tokens < 100 else max(64, asked.tokens // 4)


def interval(
  sums: Sequence[Sequence[float]], column: int
) -> intervals.Interval:
  """A mean over tokens, with its interval over requests.

  sums: of each request, its tokens, then sums over them; column: which.
  """
  return intervals.interval(means(sums, column), len(sums))


def means(sums: Sequence[Sequence[float]], column: int) -> np.ndarray:
  """The mean, then those of resampled requests; paired for the same ones."""
  times_RB = intervals.draws(len(sums))
  at = lambda i: times_RB @ [float(x[i]) for x in sums]
  return at(column) / at(0)


def timed(arms: Sequence[plan_lib.Arm], groups, programs, repeats: int):
  """(runs, outputs) of all groups, by arm, in the time they take.

  Raises:
    ValueError: logits that are not finite.
  """
  blocks = budget.blocks(len(groups), repeats, budget.UNLIMITED, printing.track)
  runs = timing.measure(arms, groups, programs, blocks)
  outputs = {name: r.outputs for name, r in runs.items()}
  if failed := identity.failures(groups, outputs):
    raise ValueError(f'{failed[0].method}: logits that are not finite')
  return runs, outputs


def beside(every: Rows, cells: Cells, target: str, draft: str):
  """(row, draft) of what is measured beside a draft of a paper's target."""
  return [
    (name, x)
    for name in cells
    for x in every[name].drafts
    if x.theirs == draft and target in (every[name].theirs, every[name].task)
  ]


def lost(every: Rows, cells: Cells, home: str) -> list[str]:
  """A sentence for each row without results: how to run it."""
  trained = lambda row: f'`{row.command}`, then ' if row.command else ''
  return [
    f'* {name}: not run; {trained(row)}'
    f'`bash experiments/{home}/run.sh --rows={name}`'
    for name, row in every.items()
    if name not in cells
  ]


def not_run(every: Rows, cells: Cells, home: str) -> list[str]:
  """The sentences of `lost`, and one for the papers' targets."""
  return [
    *lost(every, cells, home),
    "* The papers' targets (T5-XXL of 11B, LaMDA of 137B, a GPT of 97M): not "
    'run. Their fine-tuned weights are not published; with a pair of your own, '
    f'such as `hf:google/t5-v1_1-xxl`, `bash experiments/{home}/run.sh '
    '--rows=pair --target=SOURCE --draft=SOURCE --prompts=FILE`.',
  ]
