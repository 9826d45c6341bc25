"""The README's headline figures, each from the stored document of a command.

bash experiments/headline/run.sh             # every command, then the README
bash experiments/headline/run.sh avx2 kills  # these
bash experiments/headline/run.sh --show      # the README from what is stored
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from specdec_jax import machine, printing, program
from specdec_jax.bench import intervals
from specdec_jax.bench import verdict as verdict_lib
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_SHOW = flags.DEFINE_bool('show', False, 'measure nothing')
_TARGET = flags.DEFINE_string('pair_target', '', "the pair's 1.5B, in Q4_K_M")
_DRAFT = flags.DEFINE_string('pair_draft', '', 'its 0.5B')


class Figure(NamedTuple):
  """What the README says of a document; '-' where it has none.

  plain: tokens a second of plain decoding. result: with its 95 % interval.
  predicted: of the first method of the result, before it was measured.
  """

  result: str
  plain: str = '-'
  predicted: str = '-'


class Headline(NamedTuple):
  """A row of the README.

  what: was measured, as the README says it.
  command: whose last line is a JSON document; what follows `python`.
  figure: of the document.
  shown: the command that the README names, if it is another.
  at: where the command itself stores the document, if it does.
  """

  what: str
  command: str
  figure: Callable[[dict[str, Any]], Figure]
  shown: str = ''
  at: str = ''


def speeds(doc: dict[str, Any]) -> Figure:
  """Every drafter of a benchmark at its best gamma, the best first."""
  plain, *rows = doc['rows']
  best: dict[str, dict[str, Any]] = {}
  rank = lambda x: verdict_lib.rank(intervals.Interval(**x['improvement']))
  for row in sorted(rows, key=rank, reverse=True):
    best.setdefault(row['drafter'], row)
  told = [_gain(x) for x in best.values()]
  # 'eagle g=4': why, of what could not win by its prediction; not in old ones.
  names = [x.rpartition(' g=')[0] for x in doc.get('left_out', {})]
  told += [
    f'{x} left out by its prediction'
    for x in dict.fromkeys(names)
    if x not in best
  ]
  ahead = [x['predicted'] for x in best.values()][:1]
  return Figure(
    '; '.join(told),
    f'{plain["tok_s"]:.0f}',
    *(times(x['improvement'], x['low'], x['high']) for x in ahead if x),
  )


def times(value: float, low: float | None, high: float | None) -> str:
  """1.40x (1.14 to 1.67), or 1.40x without an interval."""
  told = page.interval(intervals.Interval(value, low, high))
  return told.replace(' (', 'x (') if low is not None else f'{told}x'


def _gain(row: dict[str, Any]) -> str:
  """'lookup 1.40x (1.14 to 1.67)', with '~' where that holds 1."""
  gain = intervals.Interval(**row['improvement'])
  near = '~' * (gain.outcome not in ('win', 'loss'))
  return f'{row["drafter"]} {near}{times(*gain)}{page.refuted(row)}'


def kills(doc: dict[str, Any]) -> Figure:
  return Figure(f'{doc["kills"] - len(doc["wrong"])} of {doc["kills"]}')


def tpu(doc: dict[str, Any]) -> Figure:
  s, room, told = doc['setting'], doc['shares'], doc['roofline']
  held = sum(x['weights'] for x in room.values()) + doc['temporaries']
  held += sum(doc['caches'].values())
  _, gain = told['best']['0.7']
  width = s['gamma'] + 1
  return Figure(
    f'{held / 1e9:.1f} of {doc["device"]["memory"] / 1e9:.0f} GB a chip',
    predicted=f'by roofline {gain:.2f}x at alpha 0.7: c {told["c"]:.2f}, '
    f'v({width}) {told["v"][str(width)]:.2f}',
  )


def pools(doc: dict[str, Any]) -> Figure:
  """A pool's gain over batches, by what decodes; `plain` is of the pool."""
  plain, *_ = doc['cells']
  name = {'autoregressive': 'plain'}
  told = [
    f'{name.get(x["decoding"], x["decoding"])} {times(**x["gain"])}'
    for x in doc['cells']
  ]
  return Figure('; '.join(told), f'{plain["pool"]:.0f}')


def gpu(doc: dict[str, Any]) -> Figure:
  parts = {name: part['rows'] for name, part in doc['parts'].items()}
  row = next(x for x in parts['improvement'] if x['alpha'] == 0.8)
  return Figure(
    f'at alpha 0.8 {times(**row["measured"])}',
    f'{1e3 / parts["plain"][0]["ms"]["value"]:.0f}',
    f'{row["predicted"]:.2f}x',
  )


def promise(doc: dict[str, Any]) -> Figure:
  (row,) = doc['promises']
  return Figure(row['reached'])


_STORED = (
  'scripts/bench.py --config=configs/smollm2.py '
  '--config.target.dtype=stored --minutes=4'
)
# What a user would run first, as the files have it.
HEADLINES = {
  'stored': Headline('SmolLM2-135M as stored in Q4_1', _STORED, speeds),
  'avx2': Headline('the same without AVX-512', _STORED, speeds),
  'pair': Headline(
    'Qwen2.5-Coder 1.5B with 0.5B as stored in Q4_K_M, 128 tokens',
    'scripts/bench.py --config=configs/pair.py '
    '--config.target.source={pair_target} '
    '--config.draft.source={pair_draft}',
    speeds,
    'python scripts/bench.py --config=configs/pair.py '
    '--config.target.source=1.5B.gguf --config.draft.source=0.5B.gguf',
  ),
  'titles': Headline(
    'Flan-T5-small that writes titles, a draft of one layer',
    'scripts/bench.py --config=configs/t5.py --minutes=4',
    speeds,
  ),
  'demo': Headline(
    'SmolLM2-135M blown up to float32, slower than as stored; plain decoding '
    'had been 91 tok/s (LOG.md)',
    'scripts/bench.py --config=configs/smollm2.py --minutes=4',
    speeds,
    'bash scripts/demo.sh',
  ),
  'pools': Headline(
    'SmolLM2-135M in float32, 64 answers of 16 to 256 tokens: 8 rows that are '
    'refilled, over batches of 8',
    'experiments/serving/pools.py',
    pools,
    'bash experiments/serving/run.sh pools',
    'experiments/serving/results/pools.json',
  ),
  'kernels': Headline(
    'greedy tokens of tiny random models on the CPU kernels',
    'scripts/certify.py --only=kernel-identity --tier=full',
    promise,
  ),
  'kills': Headline(
    'kills survived by training a tiny model, restored byte for byte',
    'scripts/kill_matrix.py',
    kills,
  ),
  'gpu': Headline(
    'Llama 3 8B with 1B, random weights, bfloat16, scripted acceptance',
    'experiments/gpu/measure.py',
    gpu,
    'bash experiments/gpu/run.sh',
    'experiments/gpu/results/gpu.json',
  ),
  'tpu': Headline(
    'Llama 3 8B with 1B on v5e:2x4, batch 8, **compiled for, not run on**',
    'scripts/tpu_report.py --config=configs/llama3.py --topology=v5e:2x4 '
    '--config.target.source=random:llama3_8b '
    '--config.draft.source=random:llama3_1b --config.bench.batch_size=8 '
    "--config.decode.gammas='(4,)'",
    tpu,
  ),
}


def path(name: str) -> pathlib.Path:
  """Where a headline's document is."""
  at = HEADLINES[name].at or f'experiments/headline/results/{name}.json'
  return ROOT / at


def stored(name: str) -> dict[str, Any]:
  return json.loads(path(name).read_text('utf-8'))


def measure(name: str) -> None:
  """Runs a headline's command and stores its document.

  Once more where a result is refuted by its own parts; then it says so.

  Raises:
    ValueError: the command fails or its last line is no document.
  """
  asked = _TARGET, _DRAFT
  command = HEADLINES[name].command.format(**{x.name: x.value for x in asked})
  doc = _run(command)
  if HEADLINES[name].at:
    return
  if any(map(page.refuted, doc.get('rows', ()))):
    print('A result is not what its own parts explain: once more.')
    doc = _run(command)
  doc = {'command': command, 'machine': machine.describe(), **doc}
  (HERE / 'results').mkdir(exist_ok=True)
  files.write(path(name), printing.compact(doc))


def _run(command: str) -> dict[str, Any]:
  """The document that a command prints last."""
  ran = subprocess.run(
    [sys.executable, *shlex.split(command)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  lines = ran.stdout.splitlines()
  print('\n'.join(lines[:-1]))
  if ran.returncode or not lines:
    raise ValueError(f'{command}: status {ran.returncode}; nothing is stored')
  return json.loads(lines[-1])


def rows() -> list[str]:
  """The README's table of results, from what is stored."""
  out = []
  for name, x in HEADLINES.items():
    if not path(name).exists():
      continue  # not measured yet
    doc = stored(name)
    made, figure = doc['machine'], x.figure(doc)
    where = made.get('card') or f'{made["cpu"]}, {made["cores"]} cores'
    command = f'`{x.shown or f"python {x.command}"}`'
    out.append(
      [
        *(x.what, figure.plain, figure.result, figure.predicted),
        *(f'{where} ({made["commit"][:7]})', command),
      ]
    )
  head = ['what', 'plain tok/s', 'times plain (95 %)', 'predicted (90 %)']
  return page.table([*head, 'machine', 'command'], out)


def verdict() -> list[str]:
  """The demo's verdict as docs/benchmark.md quotes it: without reasons."""
  every = stored('demo')['verdict']
  change = every.index('What to change:')
  heads = [x for x in every[:change] if re.match(r'\w+: |Checked', x)]
  changes = [x.partition('. ')[0] for x in every[change:]]
  wrap = textwrap.TextWrapper(92, subsequent_indent='      ')
  return [y for x in [*heads, *changes] for y in wrap.wrap(f'    {x}')]


# Name: (page, its lines).
BLOCKS = {
  'headline': ('README.md', rows),
  'verdict': ('docs/benchmark.md', verdict),
}


def run(names: list[str]) -> bool:
  if set(names) - set(HEADLINES):
    raise ValueError(f'{" ".join(names)}: name some of {", ".join(HEADLINES)}')
  for name in () if _SHOW.value else names or HEADLINES:
    measure(name)
  for name, (path, lines) in BLOCKS.items():
    text = page.filled((ROOT / path).read_text('utf-8'), lines(), name)
    files.write(ROOT / path, text.removesuffix('\n'))
  return True


if __name__ == '__main__':
  program.launch(run, positional=True)
