"""What the empirical tables share: flags, measuring, and stored results.

results/ROW.json stores a row's results with the commit that measured them; a
run goes on with rows not stored. Tables measured together share texts.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import claims as claims_lib
from experiments import loaded as loaded_lib
from experiments import page, resampled
from experiments import rows as rows_lib
from specdec_jax import machine, printing, program
from specdec_jax.bench import intervals, timing
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files

Cells, Row, Rows = rows_lib.Cells, rows_lib.Row, rows_lib.Rows
ROOT, HOMES = rows_lib.ROOT, pathlib.Path(__file__).parent
GAMMAS = (1, 2, 3, 4, 6, 8)

_NAMES = flags.DEFINE_list('rows', [], 'rows to measure; all, if empty')
_MODELS = flags.DEFINE_string(
  'models', str(ROOT / 'results/rows'), 'folder of experiments/train_rows.sh'
)
_TARGET = flags.DEFINE_string('target', '', 'of a row `pair` of your own')
_DRAFT = flags.DEFINE_string('draft', '', 'of the same row')
_PROMPTS = flags.DEFINE_string('prompts', '', 'of the same row, a JSONL file')
_TOKENS = flags.DEFINE_integer('tokens', 10_000, 'of each target, for alpha')
_QUICK = flags.DEFINE_bool('quick', False, 'tiny random models, few tokens')
RENDER = flags.DEFINE_bool(
  'render', False, 'only the page, from what is stored'
)
_RESULTS = flags.DEFINE_string(
  'results', '', 'folder of the results, with one in it for each table'
)


class Asked(NamedTuple):
  """How much to measure."""

  tokens: int  # for alpha
  prompts: int  # that table 2 times
  repeats: int  # of each
  gammas: tuple[int, ...]  # that it chooses from


THEIRS = (
  "The papers' targets (T5-XXL of 11B, LaMDA of 137B, a GPT of 97M): not run. "
  'Their fine-tuned weights are not published; with a pair of your own, such '
  'as `hf:google/t5-v1_1-xxl`, `{run} --rows=pair --target=SOURCE '
  '--draft=SOURCE --prompts=FILE`.'
)


class Table(NamedTuple):
  """An experiment whose rows are measured, stored and shown one by one."""

  name: str  # of its folder
  # The cells of a row, which are plain JSON.
  measure: Callable[[loaded_lib.Loaded, Asked], list[dict[str, Any]]]
  # Of all cells, the tables of its page, and the paper's cells beside ours.
  parts: Callable[[Cells, Rows], list[page.Part]]
  claims: Callable[[Cells, Rows], list[claims_lib.Claim]]
  why: str  # ours differ, for the summary
  theirs: str = THEIRS  # on the paper's models, which were not run
  # (--models, --target, --draft) -> its rows, if they are not those of rows.py.
  rows: Callable[[pathlib.Path, str, str], dict[str, Row]] | None = None

  @property
  def home(self) -> pathlib.Path:
    return HOMES / self.name


def stored(folder: pathlib.Path, names) -> dict[str, Any]:
  """Reads the stored rows, in the order of the names."""
  paths = {name: folder / f'{name}.json' for name in names}
  return {n: files.read_json(x) for n, x in paths.items() if x.exists()}


def measure(
  given: Sequence[tuple[Table, pathlib.Path, Rows]], asked: Asked
) -> None:
  """Measures and stores the rows of --rows, or those whose models are there.

  A row is loaded once for all tables that have it.

  given: for each table its results' folder, and its rows. Raises ValueError for
  an unknown row, a missing model, or another row's results at another commit.
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
  setting = {'asked': page.plain(asked), 'quick': _QUICK.value}
  loaded, gate = None, None
  for name, table, folder, row in printing.track(wanted, 'rows'):
    before = stored(folder, [name]).get(name)
    if before and not dirty and not before['machine']['dirty']:
      known = {k: before[k] for k in setting}
      if known == setting and before['machine']['commit'] == head:
        continue
    if loaded is None or loaded.row != row:
      # So many prompts are enough if answers are short.
      most = 8 if asked.tokens < 100 else max(64, asked.tokens // 4)
      loaded = loaded_lib.load(row, asked.gammas, most)
      gate = loaded_lib.gate(loaded)
    told = printing.progress_console()
    told.print(f'{table.name}: row {name}', highlight=False)
    about = machine.describe() | {'commit': head, 'dirty': dirty}
    doc = setting | {'machine': about, 'gate': gate and gate._asdict()}
    doc |= {'cells': table.measure(loaded, asked)}
    files.write(folder / f'{name}.json', printing.compact(doc))


def _chosen(folder: pathlib.Path, every: Rows, head: str) -> list[str]:
  """Picks the rows to measure; raises ValueError as measure does."""
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
  """Returns (the report's folder, each table's results folder).

  With --results=DIR, or quick: a folder, and one in it for each table.
  """
  if not _RESULTS.value and not _QUICK.value:
    return ROOT / 'results', [x.home / 'results' for x in tables]
  output = pathlib.Path(_RESULTS.value or ROOT / 'results/quick')
  return output, [output / x.home.name for x in tables]


def rows(table: Table) -> dict[str, Row]:
  """Returns a table's rows by name, as the flags have them."""
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
    given = _TARGET.value, _DRAFT.value, _PROMPTS.value
    every['pair'] = rows_lib.pair(*given)
  if _PROMPTS.value and not pathlib.Path(_PROMPTS.value).is_file():
    raise ValueError(f'--prompts={_PROMPTS.value}: no such file')
  if _QUICK.value:
    every = {name: rows_lib.quick(row) for name, row in every.items()}
  return every


def asked() -> Asked:
  if _TOKENS.value < 1:
    raise ValueError(f'--tokens={_TOKENS.value}: want 1 or more')
  if _QUICK.value:
    return Asked(min(_TOKENS.value, 60), 4, 2, (1, 2))
  return Asked(_TOKENS.value, 48, 3, GAMMAS)


def interval(
  sums: Sequence[Sequence[float]], column: int
) -> intervals.Interval:
  """Averages over tokens, with an interval over requests.

  sums: each request's tokens, then sums over them; column: which.
  """
  return resampled.interval(means(sums, column), len(sums))


def means(sums: Sequence[Sequence[float]], column: int) -> np.ndarray:
  """Returns the mean, then resampled requests'; paired for the same ones."""
  times_RB = resampled.draws(len(sums))
  at = lambda i: times_RB @ [float(x[i]) for x in sums]
  return at(column) / at(0)


def measured(
  arms: Sequence[plan_lib.Arm], plan: plan_lib.Plan, repeats: int, programs=None
) -> timing.Measured:
  """Runs timing.measured so often; ValueError if logits are not finite."""
  bench = dataclasses.replace(plan.bench, repeats=repeats)
  found = timing.measured(arms, plan._replace(bench=bench), programs)
  if found.failed:
    raise ValueError(f'{found.failed[0].method}: logits that are not finite')
  return found


def improvement(
  mine: timing.Runs, plain: timing.Runs, *, whole: bool = False
) -> intervals.Interval:
  """Returns timing.improvements for one arm chosen before it was measured."""
  runs = {'plain': plain, 'mine': mine}
  return timing.improvements(runs, whole=whole)['mine']


def beside(every: Rows, cells: Cells, target: str, draft: str):
  """Lists (row, draft) measured beside the draft of a paper's target."""
  return [
    (name, x)
    for name in cells
    for x in every[name].drafts
    if x.theirs == draft and target in (every[name].theirs, every[name].task)
  ]


def lines(cells: Cells, every: Rows) -> list[dict[str, Any]]:
  """Lists all cells, each with its target's name."""
  return [
    {'target': every[name].name} | x
    for name, found in cells.items()
    for x in found
  ]
