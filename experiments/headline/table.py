"""The README's headline figures, each from a command's stored document.

bash experiments/headline/run.sh             # every command, then the README
bash experiments/headline/run.sh avx2 kills  # these
bash experiments/headline/run.sh --show      # the README from what is stored
"""

import json
import os
import pathlib
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
from specdec_jax.bench import intervals, tables
from specdec_jax.bench import verdict as verdict_lib
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_SHOW = flags.DEFINE_bool('show', False, 'measure nothing')
_TARGET = flags.DEFINE_string('pair_target', '', "the pair's 1.5B, in Q4_K_M")
_DRAFT = flags.DEFINE_string('pair_draft', '', 'its 0.5B')


class Figure(NamedTuple):
  """What a method gains in a document; None is what that does not have.

  plain: plain decoding's tokens a second. predicted: the improvement with its
  90 % interval, before it was measured. note: what its own parts contradict.
  """

  method: str
  gain: intervals.Interval = intervals.Interval()
  plain: float | None = None
  predicted: intervals.Interval | None = None
  note: str = ''


class Headline(NamedTuple):
  """A row in the README, or a line below its table.

  what: was measured, as the README says it. command: whose last line is a JSON
  document; what follows `python`. figures: the document's, best first; or a
  text, for a line. shown: the command that the README names, if it is another.
  at: where the command itself stores the document, if it does.
  """

  what: str
  command: str
  figures: Callable[[dict[str, Any]], list[Figure] | str]
  shown: str = ''
  at: str = ''


def speeds(doc: dict[str, Any]) -> list[Figure]:
  """Lists every drafter at its best gamma, the best first."""
  plain, *rows = doc['rows']
  best: dict[str, dict[str, Any]] = {}
  rank = lambda x: verdict_lib.rank(intervals.Interval(**x['improvement']))
  for row in sorted(rows, key=rank, reverse=True):
    best.setdefault(row['drafter'], row)
  found = []
  for name, row in best.items():
    gain, told = intervals.Interval(**row['improvement']), row['predicted']
    ends = told and (told['improvement'], told['low'], told['high'])
    told = ends and intervals.Interval(*ends)
    found.append(Figure(name, gain, plain['tok_s'], told, page.refuted(row)))
  # 'eagle g=4': why, of what could not win by its prediction; not in old ones.
  names = [x.rpartition(' g=')[0] for x in doc.get('left_out', {})]
  left = [x for x in dict.fromkeys(names) if x not in best]
  return found + [Figure(f'{x}, left out by its prediction') for x in left]


def translation(doc: dict[str, Any]) -> list[Figure]:
  """Lists every draft at the temperature where it gains most."""
  best: dict[str, dict[str, Any]] = {}
  for cell in sorted(doc['cells'], key=lambda x: -x['measured']['value']):
    best.setdefault(cell['draft'], cell)
  named = {f'{k}, T = {x["temperature"]:g}': x for k, x in best.items()}
  gain = lambda x: intervals.Interval(**x['measured'])
  return [Figure(name, gain(x)) for name, x in named.items()]


def kills(doc: dict[str, Any]) -> str:
  return f'{doc["kills"] - len(doc["wrong"])} of {doc["kills"]}'


def tpu(doc: dict[str, Any]) -> str:
  s, room, told = doc['setting'], doc['shares'], doc['roofline']
  held = sum(x['weights'] for x in room.values()) + doc['temporaries']
  held += sum(doc['caches'].values())
  _, gain = told['best']['0.7']
  width = s['gamma'] + 1
  return (
    f'{held / 1e9:.1f} of {doc["device"]["memory"] / 1e9:.0f} GB a chip; by '
    f'roofline {gain:.2f}x at alpha 0.7: c {told["c"]:.2f}, '
    f'v({width}) {told["v"][str(width)]:.2f}'
  )


def pools(doc: dict[str, Any]) -> list[Figure]:
  """Lists a pool's gain over batches, by what decodes; plain is the pool's."""
  plain = doc['cells'][0]['pool']
  name = lambda x: x.replace('autoregressive', 'plain')
  gain = lambda x: intervals.Interval(**x['gain'])
  return [Figure(name(x['decoding']), gain(x), plain) for x in doc['cells']]


def gpu(doc: dict[str, Any]) -> list[Figure]:
  parts = {name: part['rows'] for name, part in doc['parts'].items()}
  row = next(x for x in parts['improvement'] if x['alpha'] == 0.8)
  gain, plain = intervals.Interval(**row['measured']), parts['plain'][0]
  told = intervals.Interval(row['predicted'])
  return [Figure('lm at alpha 0.8', gain, 1e3 / plain['ms']['value'], told)]


def promise(doc: dict[str, Any]) -> str:
  (row,) = doc['promises']
  return row['reached']


_STORED = (
  'scripts/bench.py --config=configs/smollm2.py '
  '--config.target.dtype=stored --minutes=4'
)
# What a user would run first, as the files have it.
HEADLINES = {
  'stored': Headline('SmolLM2-135M as stored in Q4_1', _STORED, speeds),
  'avx2': Headline(
    'the same without AVX-512',
    _STORED,
    speeds,
    f'SPECDEC_JAX_ISA=avx2 python {_STORED}',
  ),
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
  'translation': Headline(
    "the paper's case: a T5 that translates, a draft of some layers",
    'experiments/table.py leviathan_table2 --rows=translation',
    translation,
    'bash experiments/leviathan_table2/run.sh --rows=translation',
    'experiments/leviathan_table2/results/translation.json',
  ),
  'demo': Headline(
    'SmolLM2-135M blown up to float32',
    'scripts/bench.py --config=configs/smollm2.py --minutes=4',
    speeds,
    'bash scripts/demo.sh',
  ),
  'pools': Headline(
    'SmolLM2-135M, 64 answers: 8 refilled rows over batches of 8',
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
  """Returns where a headline's document is."""
  at = HEADLINES[name].at or f'experiments/headline/results/{name}.json'
  return ROOT / at


def measure(name: str) -> None:
  """Runs a headline's command and stores its document.

  Once more where a result is refuted by its own parts; then it says so. Raises
  ValueError if the command fails or its last line is no document.
  """
  asked = _TARGET, _DRAFT
  command = HEADLINES[name].command.format(**{x.name: x.value for x in asked})
  own = {'SPECDEC_JAX_ISA': 'avx2'} if name == 'avx2' else {}
  doc = _run(command, own)
  if HEADLINES[name].at:
    return
  if any(map(page.refuted, doc.get('rows', ()))):
    print('A result is not what its own parts explain: once more.')
    doc = _run(command, own)
  doc = {'command': command, 'machine': machine.describe(), **doc}
  (HERE / 'results').mkdir(exist_ok=True)
  files.write(path(name), printing.compact(doc))


def _run(command: str, own: dict[str, str]) -> dict[str, Any]:
  """Returns the document that a command prints last; own: its environment's."""
  ran = subprocess.run(
    [sys.executable, *shlex.split(command)],
    cwd=ROOT,
    env=os.environ | own,
    stdout=subprocess.PIPE,
    text=True,
  )
  lines = ran.stdout.splitlines()
  print('\n'.join(lines[:-1]))
  if ran.returncode or not lines:
    raise ValueError(f'{command}: status {ran.returncode}; nothing is stored')
  return json.loads(lines[-1])


def measured() -> dict[str, tuple[dict[str, Any], list[Figure] | str]]:
  """Reads each stored headline's document and figures."""
  docs = {x: files.read_json(path(x)) for x in HEADLINES if path(x).exists()}
  return {x: (doc, HEADLINES[x].figures(doc)) for x, doc in docs.items()}


def _figure(x: Figure) -> dict[str, Any]:
  near = page.near(x.gain) * (x.gain.value is not None)
  times = near + tables.show(x.gain.value, '{:.2f}x') + x.note
  return x._asdict() | {'times': times, 'ends': tables.ends(x.gain, to=' to ')}


def rows() -> list[str]:
  """Writes each headline's best method, then what is no speed."""
  table, lines = [], []
  for name, (doc, found) in measured().items():
    x, made = HEADLINES[name], doc['machine']
    on = made.get('card') or f'{made["cpu"]}, {made["cores"]} cores'
    on = f'{on} ({made["commit"][:7]})'
    command = f'`{x.shown or f"python {x.command}"}`'
    if isinstance(found, str):
      lines.append(f'* {x.what}: {found} ({on}; {command})')
    else:
      about = {'what': x.what, 'machine': on, 'command': command}
      table.append(about | _figure(found[0]))
  columns = tables.columns(
    'what, plain tok/s=plain:.0f, best method=method, times plain=times, '
    '95 % interval=ends, predicted=predicted.value:.2fx, machine, command'
  )
  return [*tables.markdown(table, columns), '', *lines]


def methods() -> list[str]:
  """Writes every method in each README row."""
  table = [
    {'what': HEADLINES[name].what} | _figure(x)
    for name, (_, found) in measured().items()
    for x in (() if isinstance(found, str) else found)
  ]
  columns = tables.columns(
    'what, plain tok/s=plain:.0f, method, times plain=times, '
    '95 % interval=ends, predicted (90 %)=predicted:.2fx'
  )
  return tables.markdown(table, columns)


def verdict() -> list[str]:
  """Quotes the demo's verdict for docs/benchmark.md."""
  wrap = textwrap.TextWrapper(92, subsequent_indent='      ')
  every = files.read_json(path('demo'))['verdict']
  return [y for x in every for y in wrap.wrap(f'    {x}')]


# Name: (page, its lines).
BLOCKS = {
  'headline': ('README.md', rows),
  'methods': ('experiments/headline/README.md', methods),
  'verdict': ('docs/benchmark.md', verdict),
}


def run(names: list[str]) -> bool:
  if set(names) - set(HEADLINES):
    raise ValueError(f'{" ".join(names)}: name some of {", ".join(HEADLINES)}')
  for name in () if _SHOW.value else names or HEADLINES:
    measure(name)
  for name, (path, lines) in BLOCKS.items():
    page.fill(ROOT / path, '\n'.join(lines()), name)
  return True


if __name__ == '__main__':
  program.launch(run, positional=True)
