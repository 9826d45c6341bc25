"""Renders the experiment's page from its results."""

from collections.abc import Mapping
from typing import Any

from experiments import page

# Part: (what it says, columns of page.Part).
TABLES = {
  'bandwidth': (
    "**Memory**, read by the benchmark's own probe.",
    'read, GB/s=gb_s:.0f',
  ),
  'plain': (
    '**Plain decoding**, batch 1, every slot of a buffer of 4,096 in sight. '
    'Share: of the '
    'fastest read above. Kernels and host waits are of one step.',
    'size, dtype, GB a step=gb:.2f, ms=ms:.3f, GB/s=gb_s:.0f, share:.2f, '
    'kernels:.0f, their ms=busy_ms:.3f, host waits=waits:.0f, '
    'compiled in s=compiling:.0f',
  ),
  'widths': (
    '**v(n)**: a pass of n tokens over a plain step.',
    'buffer, n, ms:.3f, v:.3f',
  ),
  'drafts': (
    '**Drafting** a window of gamma tokens, in plain steps.',
    'drafter, gamma, window:.3f, c:.3f',
  ),
  'improvement': (
    '**Improvement** with scripted acceptance, greedy: the models do all their '
    "work, the draft's tokens are replaced by right ones with probability "
    'alpha. Predicted before, from v and c above; gamma by the prediction.',
    'alpha:.1f, accepted:.3f, gamma, predicted:.2fx, measured:.2fx, '
    'measured/predicted=ratio:.2f, plain tok/s=plain_tok_s:.0f, '
    'J a token plain=joules.0:.2f, speculative=joules.1:.2f',
  ),
  'loop': (
    '**The same step of the draft model, compiled in other ways.**',
    'way, tokens=n, ms:.3f, refused=refused:.60s',
  ),
  'windows': (
    '**Windows of 4 drafts** at alpha 0.8, with loops and conditionals in CUDA '
    'graphs and without.',
    'way, windows, ms a window=ms:.3f, kernels:.0f, their ms=busy_ms:.3f, '
    'host waits=waits:.1f',
  ),
  'prefill': (
    '**Prefill** of a prompt that fills the buffer, and its first token.',
    'tokens a pass=chunk, attention, ms:.0f, tok/s=tok_s:.0f',
  ),
  'batch': (
    '**Batches** of a shorter buffer: by v and c, the best gamma, 0 where none '
    'pays.',
    'rows, plain ms=ms:.2f, v(5)=v5:.2f, c:.3f, alpha:.1f, gamma, '
    'predicted:.2fx',
  ),
  'quantised': (
    '**Weights of integers**: int8 with a scale a column, int4 with one for '
    '128 rows of it. v: over one token of the same weights.',
    'size, dtype, n, GB a step=gb:.2f, ms=ms:.3f, GB/s=gb_s:.0f, share:.2f, '
    'v:.3f, kernels:.0f, host waits=waits:.0f, compiled in s=compiling:.0f',
  ),
  't5': (
    "**The paper's greedy rows at their real sizes**: T5-XXL and its drafts "
    "of random weights, the paper's alphas scripted.",
    'task, draft, gamma, alpha:.2f, c:.3f, paper c=paper_c:.2f, v:.2f, '
    'predicted:.2fx, measured:.2fx, paper:.1fx',
  ),
}


def part(name: str, found: Mapping[str, Any]) -> str:
  """Writes one part's table."""
  about, columns = TABLES[name]
  keys = {
    c.split(':')[0].rpartition('=')[2].split('.')[0]
    for c in columns.split(', ')
  }
  rows = [dict.fromkeys(keys) | row for row in found['rows']]
  return page.text(page.Part(about, columns, rows))


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes the measured parts' tables in order, each card and commit once."""
  out, before, parts = [], '', doc['parts']
  for name in TABLES:
    if name in parts:
      if (made := _made_on(parts[name]['machine'])) != before:
        out.append(made)
      out, before = [*out, part(name, parts[name])], made
  return '\n\n'.join(out)


def _made_on(m: Mapping[str, Any]) -> str:
  units = {
    'driver': 'driver {}',
    'sm_mhz': '{} MHz',
    'memory_mhz': 'memory {} MHz',
    'watts': '{:.0f} W',
  }
  card = ', '.join(x.format(m[key]) for key, x in units.items() if key in m)
  return f'{page.made_on(dict(m))} {card}'.strip()
