"""What a trace says of every rule and gamma, and whether real runs agree."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax import requests
from specdec_jax.analysis import counterfactual, intervals
from specdec_jax.analysis import trace as trace_lib
from specdec_jax.bench import cost
from specdec_jax.bench import plan as plan_lib

# How often a check passes if the trace is right: all its cells together.
CHECK_LEVEL = 0.99


def analyse(
  trace: trace_lib.Trace, *, limit: int, resamples: int
) -> dict[str, Any]:
  """alpha, block efficiencies for gamma 0 to limit, and lenience.

  Intervals are 95 %, bootstrapped over requests; the texts of one prompt stay
  together. rows: by gamma, each rule, and `gain`, block less reject, paired;
  `independent` is Leviathan's equation 1 at alpha, which knows no end of a
  text. windows: by rule, expected windows by accepted drafts at the largest
  gamma. rounded: tokens whose p was 0 when scored (see ratios). lenience: by
  lenience, the drafts kept and the total variation from the target.

  Raises:
    ValueError: limit outside 0 to 256, or too few resamples.
  """
  sums = functools.partial(_sums, trace)
  again_RB = intervals.resamples(len(_requests(trace)), resamples)
  share = lambda top_B, bottom_B: intervals.ratio(top_B, bottom_B, again_RB)
  tokens_B = sums([len(text.tokens) for text in trace.texts])
  means = lambda name: [
    intervals.interval(share(top_B, tokens_B))
    for top_B in sums([np.sum(getattr(x, name), -1) for x in trace.texts]).T
  ]
  kept = means('kept')
  # Sums of float32 may end a rounding above 1.
  alpha = min(kept[0]['value'], 1.0)
  counts = _counts(trace, limit)
  rows = []
  for gamma in range(limit + 1):
    found = {
      name: share(tokens_B, sums(c.calls_BG[:, gamma]))
      for name, c in counts.items()
    }
    rows.append(
      {
        'gamma': gamma,
        **{name: intervals.interval(x) for name, x in found.items()},
        'gain': intervals.interval(found['block'] - found['reject']),
        'independent': cost.expected_tokens(alpha, gamma),
      }
    )
  leniences = trace.header['leniences']
  return {
    'trace': trace.header,
    'requests': len(_requests(trace)),
    'texts': len(trace.texts),
    'tokens': int(tokens_B.sum()),
    'resamples': resamples,
    'rounded': int(sum(np.sum(np.equal(t.p, 0)) for t in trace.texts)),
    'alpha': kept[0],
    'rows': rows,
    'windows': {
      name: c.windows_BGN[:, limit].sum(0).tolist()
      for name, c in counts.items()
    },
    'lenience': [
      {'lenience': l, 'kept': x, 'total_variation': off}
      for l, x, off in zip(leniences, kept, means('distance'), strict=True)
    ],
  }


def ratios(text: trace_lib.Text) -> np.ndarray:
  """q / p of each token.

  Where rounding between two programs left an emitted token without p, at the
  edge of a top-k or a greedy tie, p is taken as 1: plain decoding chose it.
  Exact when greedy, else a lower bound.
  """
  p_T, q_T = np.asarray(text.p), np.asarray(text.q)
  return q_T / np.where(p_T > 0, p_T, 1)


def _counts(trace: trace_lib.Trace, limit: int):
  each = [ratios(text) for text in trace.texts]
  return {
    name: counterfactual.count(each, rule, limit)
    for name, rule in counterfactual.RULES.items()
  }


def _requests(trace: trace_lib.Trace) -> list[str]:
  """Ids of the prompts, in the trace's order; a prompt may have many texts."""
  return list(dict.fromkeys(text.id for text in trace.texts))


def _sums(trace: trace_lib.Trace, values) -> np.ndarray:
  """Values of texts, [texts, ...], added over the texts of each request."""
  values = np.asarray(values, float)
  number = {id: i for i, id in enumerate(_requests(trace))}
  out = np.zeros((len(number), *values.shape[1:]))
  np.add.at(out, [number[text.id] for text in trace.texts], values)
  return out


# --- against real decoding ---------------------------------------------------


def check_rules(rules: Sequence[str]) -> None:
  """Raises ValueError unless these are rules that a trace says something of."""
  allowed = ', '.join(counterfactual.RULES)
  if not rules:
    raise ValueError(f'no rule to check: allowed are {allowed}')
  for name in rules:
    if name not in counterfactual.RULES:
      raise ValueError(
        f'rule={name!r}: has no counterfactual; allowed are {allowed}'
      )


def check_settings(trace: trace_lib.Trace, settings) -> None:
  """Raises ValueError unless experiment.Settings decode what was recorded."""
  now = dataclasses.asdict(settings.sampling) | {
    'max_new_tokens': settings.decode.max_new_tokens
  }
  was = trace.header['sampling'] | {
    'max_new_tokens': trace.header['max_new_tokens']
  }
  for name in now:
    if now[name] != was.get(name):
      raise ValueError(
        f'the trace was recorded with {name}={was.get(name)}, the config says '
        f'{now[name]}: give the config that it was recorded with'
      )


def check_models(trace: trace_lib.Trace, target, draft) -> None:
  """Raises ValueError unless these models are the ones that were recorded."""
  was, now = trace.header['models'], trace_lib.models(target, draft)
  for name in now:
    if now[name] != was.get(name):
      raise ValueError(
        f'the trace was recorded with another {name}: sha256 '
        f'{str(was.get(name))[:12]}, now {now[name][:12]}: give the models '
        'that it was recorded with'
      )


def check(
  trace: trace_lib.Trace,
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  track: plan_lib.Track,
) -> dict[str, Any]:
  """Decodes the trace's prompts under every arm and compares block efficiency.

  arms: plain decoding first; the others' rules (see check_rules) and gammas are
  the cells. plan: its sampling and batch size are used. The seeds are those
  after the trace's.
  cells: each one's figures, and the difference with its interval. All intervals
  together cover 0 with a chance of CHECK_LEVEL or more (Bonferroni). They err
  together: the cells share the trace's texts and the real runs' seeds.

  Raises:
    ValueError: no cells, or one request.
  """
  cells = arms[1:]
  if not cells:
    raise ValueError('decode.gammas names nothing to check: want 1 or more')
  if len(_requests(trace)) < 2:
    raise ValueError('the trace is of 1 request: a check needs two or more')
  sums = functools.partial(_sums, trace)
  tokens_B = sums([len(text.tokens) for text in trace.texts])
  counts = _counts(trace, max(arm.gamma for arm in cells))
  level = 1 - (1 - CHECK_LEVEL) / len(cells)
  rows = []
  for arm in cells:
    calls_B = sums(counts[arm.engine.rule.name].calls_BG[:, arm.gamma])
    real = _real(trace, arms[0], arm, plan, track)
    less = intervals.difference(tokens_B, calls_B, *real, level=level)
    rows.append(
      {
        'gamma': arm.gamma,
        'rule': arm.engine.rule.name,
        'counterfactual': float(tokens_B.sum() / calls_B.sum()),
        'real': float(real[0].sum() / real[1].sum()),
        'windows': int(real[1].sum()),
        'difference': less,
        # Greedy runs are equal but for the last digit.
        'covers': less['low'] - 1e-9 <= 0 <= less['high'] + 1e-9,
      }
    )
  return {'trace': trace.header, 'level': level, 'cells': rows}


def _real(trace, plain, arm, plan: plan_lib.Plan, track: plan_lib.Track):
  """(tokens_B, calls_B) of real runs, by request in the trace's order."""
  first = {text.id: text for text in reversed(trace.texts)}
  ids = _requests(trace)
  items = tuple(
    requests.Item(first[i].prompt, first[i].number, i, first[i].category)
    for i in ids
  )
  plan = plan._replace(judged=items, others=())
  found = {i: np.zeros(2) for i in ids}
  samples = trace.header['samples']
  recorded = trace.header['sampling']['seed']
  for seed in trace_lib.seeds(recorded + samples, samples):
    groups = trace_lib.groups_of([plain, arm], plan, seed)
    for group in track(groups, f'{arm.engine.rule.name} g={arm.gamma}'):
      out = trace_lib.decoded(arm, group)
      emitted_B = out.lengths_B - group.host.lengths_B
      for row, item in enumerate(group.items):
        found[item.id] += (emitted_B[row], out.info.calls_B[row])
  return np.stack([found[i] for i in ids]).T
