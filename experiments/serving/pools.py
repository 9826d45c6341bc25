"""Compares a pool of rows with batches that wait for their longest row.

bash experiments/serving/run.sh pools [--config=FILE] [--repeats=6]
"""

import collections
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np
from absl import flags

from experiments import page
from specdec_jax import (
  api,
  build,
  completion,
  hosts,
  pool,
  printing,
  program,
  requests,
)
from specdec_jax import settings as settings_lib
from specdec_jax.bench import intervals
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.serve import batch

HERE = pathlib.Path(__file__).parent
_CONFIG = program.config_flag('configs/smollm2.py')
_REQUESTS = flags.DEFINE_integer('requests', 64, 'of each repeat', 1)
_REPEATS = flags.DEFINE_integer('repeats', 6, 'each with other lengths', 1)
_ROWS = flags.DEFINE_integer('rows', 8, 'decoded together', 1)
_LONGEST = flags.DEFINE_integer('longest', 256, 'tokens of an answer', 16)
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')
WAYS = 'batches', 'pool'
_SHORTEST, _READ = 16, 128  # tokens of an answer, and of a prompt at most


def run() -> bool:
  """Returns whether every text is the same in a batch and in a pool."""
  folder = program.open_workdir(_RESULTS.value)
  config = batch.one_method(_CONFIG.value)
  e = settings_lib.load(s := settings_lib.settings(config))
  fast = build.measured(settings_lib.first(e, measure=False), _ROWS.value)
  found = prompts_lib.chosen(s.bench.prompts)
  items = [
    requests.item(e.target, x.given, 0, chat=s.bench.chat) for x in found
  ]
  items = [x._replace(tokens=x.tokens[-_READ:]) for x in items]
  same, cells = True, []
  for engine in (build.engine(e.target), fast):
    counts, seconds, texts = measured(engine, items, s)
    same &= texts['batches'] == texts['pool']
    of, took = (np.array([x[y] for y in WAYS]) for x in (counts, seconds))
    (gain,) = intervals.speedups(of, took)
    cell = dict(zip(WAYS, of.sum(1) / took.sum(1), strict=True))
    cell = {'decoding': engine.drafter.name} | cell
    cells.append(cell | {'gain': gain._asdict()})
  doc = {
    'machine': page.made_here(),
    'setting': {
      'target': e.target.label,
      'rows': _ROWS.value,
      'requests': _REQUESTS.value,
      'repeats': _REPEATS.value,
      'answers': [_SHORTEST, _LONGEST.value],
    },
    'same': same,
    'cells': cells,
  }
  text = _markdown(doc := page.plain(doc))
  print(text)
  printing.result(doc)
  page.save(folder, HERE, doc, text, 'pools')
  return same


def measured(engine: build.Engine, items, s: settings_lib.Settings):
  """Measures each repeat's tokens, seconds and texts, by 'batches' and 'pool'.

  A first repeat with short answers, which is not counted, compiles. Batches and
  pool take turns to be first.
  """
  rows, gamma = _ROWS.value, engine.drafter.gamma
  length = requests.bucket(_READ + _LONGEST.value + gamma)
  sizes = dict(length=length, stops=len(engine.target.tokenizer.eos_ids))
  held = pool.Pool.of(engine, rows=rows, **sizes)

  def batches(work):
    out = []
    for i in range(0, len(work), rows):
      some = work[i : i + rows]
      request = requests.make(some, gamma=gamma, rows=rows, **sizes)
      placed = requests.place(request, engine.target.layout)
      done = hosts.fetch(engine.programs.generate(engine.weights, placed))
      out += [requests.ended(request, done, b).tokens for b in range(len(some))]
    return out

  def in_a_pool(work):
    found = dict(held.answers(collections.deque(enumerate(work))))
    return [found[i].tokens for i in range(len(work))]

  ways = dict(zip(WAYS, (batches, in_a_pool), strict=True))
  counts, seconds, texts = ({way: [] for way in ways} for _ in range(3))
  for repeat in range(_REPEATS.value + 1):
    rng = np.random.default_rng(repeat)
    most = _LONGEST.value if repeat else _SHORTEST
    work = asked(engine, items, s, rng, most)
    for way in sorted(ways, reverse=bool(repeat % 2)):
      began = time.monotonic()
      found = ways[way](work)
      took = time.monotonic() - began
      if repeat:
        new = zip(found, work, strict=True)
        counts[way].append(sum(len(x) - len(i.tokens) for x, i in new))
        seconds[way].append(took)
        texts[way].append(found)
  return counts, seconds, texts


def asked(engine, items, s: settings_lib.Settings, rng, most: int):
  """Lists the requests, in any order."""
  order = rng.permutation(_REQUESTS.value)
  limits = rng.integers(_SHORTEST, most, len(order), endpoint=True)
  work = []
  for number, new in zip(order, limits, strict=True):
    item = items[number % len(items)]._replace(number=int(number))
    settings = completion.Settings(
      s.sampling.temperature, max_new_tokens=int(new)
    )
    work.append(api.ask(engine.target, item, settings).item)
  return work


def _markdown(doc) -> str:
  s = doc['setting']
  few, many = s['answers']
  about = (
    f'{page.made_on(doc["machine"])} {s["target"]}: {s["requests"]} '
    f'requests with answers of {few} to {many} tokens, by {s["rows"]} rows; '
    f'{s["repeats"]} repeats with other lengths, whose spread makes the 95 % '
    f'interval. Tokens a second, prompts read.'
  )
  columns = 'decoding, batches:.1f, pool:.1f, pool over batches=gain:.2fx'
  return page.text(page.Part(about, columns, doc['cells']))


if __name__ == '__main__':
  program.launch(run)
