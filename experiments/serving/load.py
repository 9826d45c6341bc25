"""A server under load: is every answer whole, and how long does each wait?

bash experiments/serving/run.sh load [--config=FILE] [--requests=1000] [...]
"""

import logging
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import numpy as np
import psutil
from absl import flags

from experiments import page
from experiments.serving import clients as clients_lib
from experiments.serving import render
from specdec_jax import api, completion, printing, program, requests
from specdec_jax import settings as settings_lib
from specdec_jax.bench import intervals
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.costs import parts
from specdec_jax.serve import batch

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag('configs/smollm2.py')
_REQUESTS = flags.DEFINE_integer('requests', 1000, 'of the load test', 8)
_CLIENTS = flags.DEFINE_integer('clients', 64, 'of the load test', 1)
_TIMED = flags.DEFINE_integer('timed', 32, 'requests of a timed round', 1)
_ROUNDS = flags.DEFINE_integer('rounds', 6, 'of each timed cell', 1)
_LONGEST = flags.DEFINE_integer('longest', 32, 'tokens of an answer', 1)
_ROWS = flags.DEFINE_integer('rows', 8, 'of the server', 1)
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')
_BESIDE = 1, 4, 16  # clients of the timed cells
_READ = 64  # tokens of a prompt, at most


def run() -> bool:
  """Returns whether no answer was lost, cut or another's, and memory level.

  And if `adaptive`, which may draft nothing, is nowhere slower than plain.
  """
  logging.getLogger('httpx2').setLevel(logging.WARNING)  # each request
  folder = program.open_workdir(_RESULTS.value)
  config = batch.one_method(_CONFIG.value)
  e = settings_lib.load(s := settings_lib.settings(config))
  engine = settings_lib.first(e)
  found = prompts_lib.chosen(s.bench.prompts)
  items = [
    requests.item(e.target, x.given, 0, chat=s.bench.chat) for x in found
  ]
  texts = [[*x.tokens[-_READ:]] for x in items]
  asks = clients_lib.asks(
    texts, _REQUESTS.value, _LONGEST.value, s.sampling.temperature
  )
  process, url = server()
  try:
    levels, watch = [], psutil.Process(process.pid)
    note = lambda: levels.append(watch.memory_info().rss)
    replies = clients_lib.run(url, asks, _CLIENTS.value, after=note)
    cells = [x for clients in _BESIDE for x in timed(url, texts, clients)]
  finally:
    process.terminate()
    status = process.wait()
  wrong = judged(engine, asks, replies)
  own = drafting_begins(engine, texts)
  for x in cells:
    x['init_share'] = 1e3 * own / x['ttft_p95_ms']
  quarter = len(levels) // 4
  grown = max(levels[-quarter:]) / max(levels[quarter : 2 * quarter])
  doc = {
    'machine': page.made_here(),
    'target': e.target.label,
    'drafter': f'{engine.drafter.name}, gamma {engine.drafter.gamma}',
    'clients': _CLIENTS.value,
    'requests': len(asks),
    'kinds': {k: sum(x.kind == k for x in asks) for k in clients_lib.KINDS},
    'wrong': wrong,
    'told_to_wait': sum(x.waited for x in replies),
    'memory_grown': grown,
    'status': status,
    'cells': cells,
  }
  text = render.markdown(doc := page.plain(doc))
  print(text)
  printing.result(doc)
  page.save(folder, HERE, doc, text, picture=render.figure(doc))
  good = not wrong and grown < 1.05 and status == 0
  return good and (
    engine.drafter.name != 'adaptive' or clients_lib.keeps_up(cells)
  )


def server() -> tuple[subprocess.Popen, str]:
  """Starts a server with this program's config; returns it and its address."""
  given = [x for x in sys.argv[1:] if x.startswith('--config')]
  given = given or ['--config=configs/smollm2.py']
  length = _READ + _LONGEST.value
  more = f'--port=0 --rows={_ROWS.value} --queue=64 --length={length}'
  command = [sys.executable, str(ROOT / 'scripts/serve.py'), *given]
  process = subprocess.Popen(
    [*command, *more.split()], stdout=subprocess.PIPE, text=True, cwd=ROOT
  )
  assert process.stdout
  for line in process.stdout:
    if line.startswith('http'):
      return process, line.strip()
  raise ValueError(f'the server ended with status {process.wait()}')


def judged(engine, asks, replies) -> dict[str, int]:
  """Counts replies of each kind that are not what generate says."""
  items = [requests.Item(x.body['prompt'], 0) for x in asks]
  each = [
    completion.Settings(
      x.body['temperature'],
      seed=x.body['seed'],
      max_new_tokens=x.body['max_tokens'],
    )
    for x in asks
  ]
  asked = [api.ask(engine.target, *x) for x in zip(items, each, strict=True)]
  texts = {i: x.text for i, x in api.answers(engine, asked, rows=_ROWS.value)}
  wrong = {}
  for i, (ask, reply) in enumerate(zip(asks, replies, strict=True)):
    good = reply.status == 200 and reply.text == texts[i]
    if ask.kind == 'cancelled':
      good = reply.status == 200 and texts[i].startswith(reply.text)
    if ask.kind == 'malformed':
      good = reply.status == 400
    if not good:
      wrong[ask.kind] = wrong.get(ask.kind, 0) + 1
  return wrong


def drafting_begins(engine, texts) -> float:
  """Times Drafter.init alone, one call for a prompt read: median seconds."""
  room = _READ + _LONGEST.value + engine.drafter.gamma
  p, took = engine.programs, []
  for text in (texts[0], *texts):  # the first compiles
    item = requests.Item(text, 0, new=1)
    request = requests.make([item], length=room, mixed=True)
    given = engine.weights, jax.device_put(request)
    reading = jax.block_until_ready(p.read(*given, p.opened(*given)))
    took.append(parts.timed(p.begin, *given, reading)[0])
  return statistics.median(took[1:])


def timed(url: str, texts, clients: int) -> list[dict[str, Any]]:
  """Times so many clients' waits, without speculation and with it, in turns.

  `ratio` is tokens a second, over those without; its interval, over rounds.
  """
  ways = 'off', 'on'
  replies, counts, seconds = ({way: [] for way in ways} for _ in range(3))
  for turn in range(_ROUNDS.value):
    asks = [
      clients_lib.Ask('stream', x.body | {'stream': True})
      for x in clients_lib.asks(texts, _TIMED.value, _LONGEST.value, 0.0, turn)
    ]
    for way in sorted(ways, reverse=bool(turn % 2)):
      headers = {'X-Speculation': way}
      got = clients_lib.run(url, asks, clients, headers=headers)
      began = min(x.times[0] for x in got)
      counts[way].append(sum(sum(x.counts) for x in got))
      seconds[way].append(max(x.times[-1] for x in got) - began)
      replies[way] += got
  (ratio,) = intervals.speedups(
    *([x[y] for y in ways] for x in (counts, seconds))
  )
  ratios = {'off': intervals.Interval(1.0), 'on': ratio}
  return [
    {
      'clients': clients,
      'speculation': way,
      'tokens_per_second': sum(counts[way]) / sum(seconds[way]),
      'ratio': ratios[way]._asdict(),
      **waits(replies[way]),
    }
    for way in ways
  ]


def waits(replies: Sequence[clients_lib.Reply]) -> dict[str, float]:
  """Computes milliseconds to the first token and between tokens."""
  first = [x.times[1] - x.times[0] for x in replies]
  between = [
    (x.times[-1] - x.times[1]) / (sum(x.counts) - 1)
    for x in replies
    if sum(x.counts) > 1
  ]
  return {
    f'{name}_p{p}_ms': 1e3 * float(np.percentile(x, p))
    for name, x in (('ttft', first), ('itl', between))
    for p in (50, 95)
  }


if __name__ == '__main__':
  program.launch(run)
