"""The README's headline figures, each from the stored document of a command.

bash experiments/headline/run.sh             # every command, then the README
bash experiments/headline/run.sh demo kills  # these
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
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_SHOW = flags.DEFINE_bool('show', False, 'measure nothing')
_TARGET = flags.DEFINE_string('pair_target', '', "the pair's 1.5B, in Q4_K_M")
_DRAFT = flags.DEFINE_string('pair_draft', '', 'its 0.5B')
_QUESTIONS = flags.DEFINE_string('questions', '', "MT-Bench's question.jsonl")


class Headline(NamedTuple):
  """A figure of the README.

  what: was measured, as the README says it.
  command: whose last line is a JSON document; what follows `python`.
  figure: the document's figure in words.
  shown: the command that the README names, if it is another.
  at: where the command itself stores the document, if it does.
  """

  what: str
  command: str
  figure: Callable[[dict[str, Any]], str]
  shown: str = ''
  at: str = ''


def speeds(doc: dict[str, Any]) -> str:
  """Plain decoding's speed, and every drafter's verdict up to its interval."""
  heads = [re.match(r'(\w+: .*?x \([^)]*\))', x) for x in doc['verdict']]
  plain = f'plain {doc["rows"][0]["tok_s"]:.0f} tok/s'
  return '; '.join([plain, *(x[1] for x in heads if x)])


def categories(doc: dict[str, Any]) -> str:
  """Every method's improvement, of Spec-Bench's document."""
  rows = [(x['name'], x['improvement']) for x in doc['rows'] if x['gamma']]
  ends = lambda x: f'(95 %: {x["low"]:.2f} to {x["high"]:.2f})'
  return '; '.join(f'{name} {x["value"]:.2f}x {ends(x)}' for name, x in rows)


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
    f'roofline c {told["c"]:.2f}, v({width}) {told["v"][str(width)]:.2f}, '
    f'{gain:.2f}x at alpha 0.7'
  )


def pools(doc: dict[str, Any]) -> str:
  """A pool's speed and its gain over batches, by what decodes."""
  name = {'autoregressive': 'plain'}
  return '; '.join(
    f'{name.get(x["decoding"], x["decoding"])} {x["pool"]:.0f} tok/s, '
    f'{x["gain"]["value"]:.2f}x (95 %: {x["gain"]["low"]:.2f} to '
    f'{x["gain"]["high"]:.2f})'
    for x in doc['cells']
  )


def gpu(doc: dict[str, Any]) -> str:
  parts = {name: part['rows'] for name, part in doc['parts'].items()}
  plain, wide = parts['plain'][0], parts['widths']
  v5 = next(x for x in wide if x['n'] == 5 and x['buffer'] != 'full')
  row = next(x for x in parts['improvement'] if x['alpha'] == 0.8)
  low, high = row['measured']['low'], row['measured']['high']
  return (
    f'plain {1e3 / plain["ms"]["value"]:.0f} tok/s, {plain["share"]:.2f} of '
    f"memory's measured speed; v(5) {v5['v']['value']:.2f}; at alpha 0.8 "
    f'{row["measured"]["value"]:.2f}x (95 %: {low:.2f} to {high:.2f}), '
    f'predicted {row["predicted"]:.2f}x'
  )


def promise(doc: dict[str, Any]) -> str:
  (row,) = doc['promises']
  return row['reached']


HEADLINES = {
  'pair': Headline(
    'Qwen2.5-Coder 1.5B with 0.5B from Q4_K_M files, greedy, 2 CPU cores '
    '(95 % interval)',
    'scripts/bench.py --config=configs/pair.py '
    '--config.target.source={pair_target} '
    '--config.draft.source={pair_draft}',
    speeds,
    'python scripts/bench.py --config=configs/pair.py '
    '--config.target.source=1.5B.gguf --config.draft.source=0.5B.gguf',
  ),
  'demo': Headline(
    'SmolLM2-135M in float32, the same',
    'scripts/bench.py --config=configs/smollm2.py --minutes=4',
    speeds,
    'bash scripts/demo.sh',
  ),
  'stored': Headline(
    'the same from its stored Q4_1 blocks',
    'scripts/bench.py --config=configs/smollm2.py '
    '--config.target.dtype=stored --minutes=4',
    speeds,
  ),
  'specbench': Headline(
    'the same in float32, 16 questions of MT-Bench, 128 tokens',
    'experiments/specbench/table.py --questions={questions} --limit=2 '
    '--config.decode.max_new_tokens=128',
    categories,
    'bash experiments/specbench/run.sh --questions=PATH --limit=2 '
    '--config.decode.max_new_tokens=128',
    'experiments/specbench/results/specbench.json',
  ),
  'titles': Headline(
    'Flan-T5-small that writes titles, a draft of one layer',
    'scripts/bench.py --config=configs/t5.py --minutes=4',
    speeds,
  ),
  'pools': Headline(
    'SmolLM2 in float32, 64 answers of 16 to 256 tokens: 8 rows that are '
    'refilled, over batches of 8',
    'experiments/serving/pools.py',
    pools,
    'bash experiments/serving/run.sh pools',
    'experiments/serving/results/pools.json',
  ),
  'kernels': Headline(
    "greedy tokens on the CPU kernels that are not plain decoding's",
    'scripts/certify.py --only=kernel-identity --tier=full',
    promise,
  ),
  'kills': Headline(
    'kills survived by a training run, restored byte for byte',
    'scripts/kill_matrix.py',
    kills,
  ),
  'gpu': Headline(
    'Llama 3 8B with 1B, random weights, bfloat16, acceptance scripted',
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


def stored(name: str) -> dict[str, Any]:
  path = HEADLINES[name].at or f'experiments/headline/results/{name}.json'
  return json.loads((ROOT / path).read_text('utf-8'))


def measure(name: str) -> None:
  """Runs a headline's command and stores its document.

  Raises:
    ValueError: the command fails or its last line is no document.
  """
  asked = _QUESTIONS, _TARGET, _DRAFT
  command = HEADLINES[name].command.format(**{x.name: x.value for x in asked})
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
  if HEADLINES[name].at:
    return
  doc = json.loads(lines[-1])
  doc = {'command': command, 'machine': machine.describe(), **doc}
  (HERE / 'results').mkdir(exist_ok=True)
  files.write(HERE / 'results' / f'{name}.json', printing.compact(doc))


def rows() -> list[str]:
  """The README's table of results, from what is stored."""
  out = []
  for name, x in HEADLINES.items():
    doc = stored(name)
    made = doc['machine']
    where = f'{made["commit"][:7]}, {made.get("card", made["cpu"])}'
    shown = x.shown or f'python {x.command}'
    out.append([x.what, x.figure(doc), f'`{shown}` ({where})'])
  return page.table(['what', 'result', 'command'], out)


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
