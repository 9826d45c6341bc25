"""The parts: each returns rows for its table.

Times are of steps inside one program, SAMPLES of them: the median, the least
and the most. A plain step is the unit of v and c.
"""

import functools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import papers
from experiments.gpu import programs
from specdec_jax.bench import intervals, timing
from specdec_jax.costs import cost
from specdec_jax.drafters import eagle, lm, lookup
from specdec_jax.models import alone, attention, work

WIDTHS = 1, 2, 3, 4, 5, 9, 16
GAMMAS = 1, 2, 3, 4, 8  # their widths are in WIDTHS
QUANTISED = 'bfloat16', 'int8', 'int4'
ALPHAS = 0.5, 0.6, 0.7, 0.8, 0.9
CHUNKS = 64, 256, 512
SCRIPTS = 6  # of acceptance: the units of an interval
# What XLA may put into a CUDA graph; by default all but the last two.
_GRAPHS = (
  'FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,'
  'CONDITIONAL'
)
WAYS: dict[str, dict[str, Any]] = {
  'as it is': {},
  'loops in CUDA graphs': {
    'xla_gpu_enable_command_buffer': _GRAPHS,
    'xla_gpu_graph_min_graph_size': 1,
  },
  'no CUDA graphs': {'xla_gpu_enable_command_buffer': ''},
  'no Triton products': {'xla_gpu_enable_triton_gemm': False},
}

Row = dict[str, Any]
Sizes = programs.Sizes


def bandwidth(s: Sizes, doc: Row) -> list[Row]:
  """Reads memory's speed by the benchmark's own probe."""
  found = timing.bandwidth(timing.reads('bfloat16', small=s == programs.TINY))
  return [{'read': name, 'gb_s': x} for name, x in found.items()]


def plain(s: Sizes, doc: Row) -> list[Row]:
  """Times plain decoding at batch 1 from a full buffer."""
  every = [(x, 'bfloat16') for x in (s.target, s.draft, s.small)]
  every += [(x, 'float32') for x in (s.draft, s.small)]
  rows = _passes(s, doc, [(*key, 1) for key in every])
  programs.free()
  return rows


def quantised(s: Sizes, doc: Row) -> list[Row]:
  """Times passes over n tokens with integer weights, from a full buffer."""
  programs.free()
  asked = [(s.target, x, n) for x in QUANTISED for n in (1, 5, 9)]
  rows = _passes(s, doc, asked + [(s.draft, x, 1) for x in QUANTISED])
  programs.free()
  return rows


def _passes(s: Sizes, doc: Row, asked: Sequence[tuple]) -> list[Row]:
  """Times passes over (size, dtype, tokens) in asked; v: over one token."""
  walks = {(*key, n): _full(programs.model(*key), s, n) for *key, n in asked}
  most = max(x['gb_s'] for x in doc['bandwidth']['rows'])
  every, rows = programs.seconds(walks, s), []
  for (size, dtype, n), found in every.items():
    m, walk = programs.model(size, dtype), walks[size, dtype, n]
    read = work.step_bytes(m.params) + work.slot_bytes(m.model, 1) * s.slots
    gb_s = programs.spread([read / x / 1e9 for x in found])
    own = dict(size=size, dtype=dtype, n=n, gb=read / 1e9, ms=_ms(found))
    own |= dict(gb_s=gb_s, share=gb_s['value'] / most)
    step = statistics.median(every[size, dtype, 1])
    own |= dict(v=programs.spread(found, step))
    own |= programs.profiled(functools.partial(walk.steps, 8), 8)
    rows.append(own | dict(compiling=walk.program.result()[0]))
  return rows


def _full(m, s: Sizes, n: int) -> programs.Walk:
  """Makes passes over n tokens at the buffer's end."""
  walk = programs.passes(m, s, n)
  slots = walk.asked.tokens_BL.shape[1]
  return walk.at(slots - programs.STEPS - n - 1 if slots > 128 else s.start)


_ms = functools.partial(programs.spread, unit=1e-3)


def widths(s: Sizes, doc: Row) -> list[Row]:
  """Times v(n): a pass over n tokens, over a plain step."""
  m = programs.model(s.target)
  walks = {n: _full(m, s, n) for n in WIDTHS}
  rows = []
  short = {n: walk.at(s.start) for n, walk in walks.items()}
  for name, some in {'full': walks, f'{s.start} tokens': short}.items():
    found = programs.seconds(some, s)
    step = statistics.median(found[1])
    for n, x in found.items():
      v = programs.spread(x, step)
      rows.append(dict(buffer=name, n=n, ms=_ms(x), v=v))
  return rows


def drafts(s: Sizes, doc: Row) -> list[Row]:
  """Times drafting a window, over a plain step; c is for each of its tokens."""
  made = {
    'lm': lm.Settings(programs.model(s.draft)),
    'eagle': eagle.Settings('random:0'),
    'lookup': lookup.Settings(),
  }
  walks = _walks(s, programs.model(s.target), made, GAMMAS, (1,))
  found, over = programs.seconds(walks, s), programs.spread
  step = statistics.median(found.pop(('pass', 1)))
  return [
    dict(drafter=name, gamma=g, window=over(x, step), c=over(x, g * step))
    for (name, g), x in found.items()
  ]


def _walks(s: Sizes, m, drafts, gammas, widths, **sizes):
  """Makes ('pass', tokens), and (draft's name, gamma): drafting a window."""
  walks = {('pass', n): programs.passes(m, s, n, **sizes) for n in widths}
  for name, draft in drafts.items():
    walk = programs.drafting(m, draft, s, max(gammas), **sizes)
    walks |= {(name, g): walk.wanting(g) for g in gammas}
  return walks


class Cell(NamedTuple):
  """A generation by a draft, and its prediction."""

  draft: str
  alpha: float
  gamma: int
  predicted: float


def improvement(s: Sizes, doc: Row) -> list[Row]:
  """Times generations with scripted acceptance, beside their predictions."""
  wide = [x for x in doc['widths']['rows'] if x['buffer'] != 'full']
  over = {('pass', x['n']): x['v']['value'] for x in wide}
  for x in doc['drafts']['rows']:
    over[x['drafter'], x['gamma']] = x['window']['value']
  cells = []
  for alpha in ALPHAS:
    gains = {g: _gain(over, 'lm', alpha, g) for g in GAMMAS}
    gamma = max(gains, key=gains.__getitem__)
    cells.append(Cell(s.draft, alpha, gamma, gains[gamma]))
  drafts = {s.draft: lm.Settings(programs.model(s.draft))}
  return _generated(s, programs.model(s.target), drafts, cells)


def _gain(over, name: str, alpha: float, gamma: int) -> float:
  """Predicts by theorem 3.8, from the costs of _walks over a plain step."""
  window = over[name, gamma] + over['pass', gamma + 1]
  return cost.expected_tokens(alpha, gamma) / window


def _generated(s: Sizes, m, drafts, cells: Sequence[Cell]) -> list[Row]:
  """Times cells by their drafts' Settings; all compile side by side."""
  model = programs.steered(m.model)
  plain = programs.generation(m, model, None, 0, s)
  runs = {
    key: programs.generation(m, model, drafts[key[0]], key[1], s)
    for key in dict.fromkeys((x.draft, x.gamma) for x in cells)
  }
  return [_one(s, plain, runs[x.draft, x.gamma], x) for x in cells]


def _one(s: Sizes, plain, speculative, cell: Cell) -> Row:
  """Times one cell: both arms take turns, over SCRIPTS scripts."""
  shape = speculative.asked.tokens_BL.shape
  script = lambda seed: programs.script(cell.alpha, *shape, seed)
  arms = (
    lambda new, seed: plain.run(new),
    lambda new, seed: speculative.run(new, script(seed)),
  )
  news, energy = (s.new, 2 * s.new), [0.0, 0.0]
  fills = [min(go(1, 0)[0] for _ in range(2)) for go in arms]
  seconds, infos = [], []
  for seed in range(SCRIPTS):
    took = []
    for i, go in enumerate(arms):
      before = programs.joules()
      second, out = go(news[i], seed)
      took.append(max(second - fills[i], 1e-9))
      if before is not None:
        energy[i] += (programs.joules() or before) - before
      end = int(out.lengths_B[0])
      text = np.asarray(out.tokens_BL)[0, end - news[i] : end]
      assert (text == programs.RIGHT).all(), 'the texts differ'
    seconds.append(took)
    infos.append(out.info)
  tokens = [[x - 1] * SCRIPTS for x in news]
  (found,) = intervals.speedups(tokens, np.transpose(seconds))
  tried = sum(int(x.tried_BK.sum()) for x in infos)
  accepted = sum(int(x.accepted_BK.sum()) for x in infos)
  return cell._asdict() | dict(
    accepted=accepted / max(tried, 1),
    measured=found._asdict(),
    ratio=found.value / cell.predicted,
    plain_tok_s=float(tokens[0][0] / np.mean(seconds, 0)[0]),
    joules=[x / SCRIPTS / n or None for x, n in zip(energy, news, strict=True)],
  )


def loop(s: Sizes, doc: Row) -> list[Row]:
  """Times draft model passes over 1 and 5 tokens, compiled in other ways."""
  m, gpu = programs.model(s.draft), jax.default_backend() == 'gpu'
  walks = {
    (name, n): programs.passes(m, s, n, options if gpu else {})
    for name, options in WAYS.items()
    for n in (1, 5)
  }
  with programs.changed(alone, 'ROWS', 1):
    walks['a token alone', 1] = programs.passes(m, s, 1)
  with programs.changed(attention, 'CUDNN_FROM', 1):
    walks |= {
      ("cuDNN's attention", n): programs.passes(m, s, n) for n in (1, 5)
    }
  rows = {}
  for key in list(walks):
    try:
      rows[key] = dict(compiling=walks[key].program.result()[0])
    except jax.errors.JaxRuntimeError as error:
      del walks[key]
      rows[key] = dict(refused=str(error)[:200])
  for key, x in programs.seconds(walks, s).items():
    rows[key]['ms'] = _ms(x)
  return [dict(way=key[0], n=key[1], **x) for key, x in rows.items()]


def windows(s: Sizes, doc: Row) -> list[Row]:
  """Times windows with 4 drafts at alpha 0.8: loops in CUDA graphs, and not."""
  m, draft = programs.model(s.target), lm.Settings(programs.model(s.draft))
  model, gpu = programs.steered(m.model), jax.default_backend() == 'gpu'
  rows = []
  for name in ('as it is', 'loops in CUDA graphs'):
    options = WAYS[name] if gpu else {}
    x = programs.generation(m, model, draft, 4, s, options)
    script_BL = programs.script(0.8, *x.asked.tokens_BL.shape, 0)
    go = functools.partial(x.run, 2 * s.new, script_BL)
    calls = int(go()[1].info.calls_B.max())
    ms = _ms([go()[0] / calls for _ in range(3)])
    told = programs.profiled(go, calls)
    rows.append(dict(way=name, windows=calls, ms=ms, **told))
  return rows


def prefill(s: Sizes, doc: Row) -> list[Row]:
  """Times prompts that fill the buffer, by chunk and attention (cuDNN, XLA)."""
  m = programs.model(s.target)
  made = {(chunk, 'cuDNN'): programs.prefill(m, s, chunk) for chunk in CHUNKS}
  with programs.changed(attention, 'CUDNN_FROM', 10**9):
    made |= {(chunk, 'XLA'): programs.prefill(m, s, chunk) for chunk in CHUNKS}
  rows = []
  for (chunk, name), x in made.items():
    _, *seconds = (x.run(1)[0] for _ in range(1 + programs.SAMPLES))
    tokens = int(x.asked.lengths_B[0])
    tok_s = programs.spread([tokens / y for y in seconds])
    rows.append(dict(chunk=chunk, attention=name, ms=_ms(seconds), tok_s=tok_s))
  return rows


def batch(s: Sizes, doc: Row) -> list[Row]:
  """Finds where the best gamma falls to 0, by rows, from v and c."""
  m, draft = programs.model(s.target), lm.Settings(programs.model(s.draft))
  gammas, rows, every = (1, 2, 4), [], {}
  for B in s.rows:  # all compile side by side
    given = {'lm': draft}, gammas, (1, *(g + 1 for g in gammas))
    every[B] = _walks(s, m, *given, rows=B, slots=s.batch_slots)
  for B, walks in every.items():
    ms, over = _timed(s, walks)
    for alpha in ALPHAS[1::2]:
      gains = {g: _gain(over, 'lm', alpha, g) for g in gammas}
      row = dict(rows=B, ms=ms, alpha=alpha)
      row |= dict(v5=over['pass', 5], c=over['lm', 4] / 4)
      row |= dict(gamma=cost.best(gains), predicted=max(gains.values()))
      rows.append(row)
  return rows


def _timed(s: Sizes, walks):
  """Returns (a plain step's ms, all costs over it)."""
  found = programs.seconds(walks, s)
  plain = found['pass', 1]
  step = statistics.median(plain)
  return _ms(plain), {k: statistics.median(x) / step for k, x in found.items()}


def t5(s: Sizes, doc: Row) -> list[Row]:
  """Times the paper's greedy rows at its real sizes, its alphas scripted."""
  m = programs.model(s.t5)
  asked = [x for x in papers.TABLE4 if x.temperature == 0]
  gammas = sorted({x.gamma for x in asked})
  names = 'T5-small', 'T5-base', 'T5-large'
  models = map(programs.model, s.t5_drafts)
  drafts = dict(zip(names, map(lm.Settings, models), strict=True))
  walks = _walks(s, m, drafts, gammas, (1, *(g + 1 for g in gammas)))
  ms, over = _timed(s, walks)
  cells, told = [], []
  for x in asked:
    predicted = _gain(over, x.draft, x.alpha, x.gamma)
    cells.append(Cell(x.draft, x.alpha, x.gamma, predicted))
    c, v = over[x.draft, x.gamma] / x.gamma, over['pass', x.gamma + 1]
    row = dict(task=x.task, c=c, v=v, paper_c=x.c, paper=x.emp)
    told.append(row | dict(step_ms=ms))
  rows = _generated(s, m, drafts, cells)
  return [row | x for row, x in zip(rows, told, strict=True)]


PARTS = {
  x.__name__: x
  for x in (
    bandwidth, plain, widths, drafts, improvement, loop, windows, prefill,
    batch, quantised, t5,
  )
}  # fmt: skip
# What a part reads of others.
NEEDS = {
  'plain': {'bandwidth'},
  'quantised': {'bandwidth'},
  'improvement': {'widths', 'drafts'},
}
