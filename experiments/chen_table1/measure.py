"""Times plain and speculative sampling, and computes figure 1 against K."""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import empirical, papers, replay
from experiments import loaded as loaded_lib
from experiments.chen_table1 import texts
from specdec_jax import build, decode, metrics, printing
from specdec_jax import settings as settings_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import timing

# Of a text of the paper: its samplings, as (name, temperature, top_p).
SAMPLINGS = {
  texts.XSUM: (('nucleus', 1.0, 0.8), ('greedy', 0.0, 1.0)),
  texts.HUMANEVAL: (('nucleus', 0.8, 0.95),),
}
SWEPT = 1, 2, papers.CHEN_K, 8
LIMIT = 12  # the largest K of the curves


def measure(loaded: loaded_lib.Loaded, asked: empirical.Asked):
  """A cell for each sampling, draft and K; a quarter of table 2's prompts."""
  most = max(1, asked.prompts // 4)
  asked = asked._replace(repeats=min(2, asked.repeats))
  chosen, wanted = texts.read(loaded.row.name, most)
  loaded = loaded._replace(prompts=tuple(chosen), references=wanted)
  cells = []
  for name, temperature, top_p in SAMPLINGS[loaded.row.theirs]:
    plan = loaded_lib.plan(loaded, temperature, asked.seed, 1)
    sampling = settings_lib.Sampling(temperature, 0, top_p, asked.seed)
    found = _cells(loaded, plan._replace(sampling=sampling), asked)
    cells += [{'sampling': name} | x for x in found]
  return cells


def _cells(loaded: loaded_lib.Loaded, plan: plan_lib.Plan, asked):
  plain = plan_lib.Arm('autoregressive', 'autoregressive', 0, loaded.plain)
  gammas = [x for x in asked.gammas if x in SWEPT]
  arms = [plain] + [
    plan_lib.Arm(f'{name} K={k}', name, k, engine)
    for name, engine in loaded.engines.items()
    for k in gammas
  ]
  groups = plan_lib.groups(arms, plan, plan.test)
  programs = timing.compile_arms(arms, groups[0].full, printing.track)
  runs, outputs = empirical.timed(arms, groups, programs, asked.repeats)
  scores = {
    name: _rouge(loaded, loaded_lib.answers_of(loaded, groups, x))
    for name, x in outputs.items()
  }
  curves = {
    name: curve(loaded, engine, plan, groups, outputs[plain.name])
    for name, engine in loaded.engines.items()
  }
  speeds = {name: timing.tok_s(r) for name, r in runs.items()}
  ms = {name: x and 1000 / x for name, x in speeds.items()}
  return [
    {
      'draft': arm.drafter,
      'k': arm.gamma,
      'texts': len(plan.test),
      'ms': [ms[plain.name], ms[arm.name]],
      'speed': timing.improvement(runs[arm.name], runs[plain.name]),
      'rouge': [scores[plain.name], scores[arm.name]],
      'efficiency': metrics.summary(
        metrics.join(outputs[arm.name])
      ).block_efficiency,
      'curve': curves[arm.drafter],
    }
    for arm in arms[1:]
  ]


def _rouge(loaded: loaded_lib.Loaded, found: Mapping[str, str]) -> list[float]:
  """Of each answer, in the order of the prompts; [] without references."""
  wanted = loaded.references
  return [rouge2(found[x], wanted[x]) for x in sorted(wanted, key=int)]


def rouge2(found: str, wanted: str) -> float:
  """F1 of the two texts' pairs of neighbouring words, without stemming.

  Lin 2004, https://aclanthology.org/W04-1013.
  """
  pairs = []
  for x in (found, wanted):
    words = re.findall('[a-z0-9]+', x.lower())
    pairs.append(collections.Counter(zip(words, words[1:], strict=False)))
  total = sum(x.total() for x in pairs)
  return 2 * (pairs[0] & pairs[1]).total() / total if total else 0.0


def curve(
  loaded: loaded_lib.Loaded,
  engine: build.Engine,
  plan: plan_lib.Plan,
  groups: Sequence[plan_lib.Group],
  outputs: Sequence[decode.Output],
) -> list[float]:
  """Expected tokens a window at K = 1, 2, ... under token verification.

  From the target's text alone; [] for a drafter whose windows cannot be
  replayed on it.
  """
  if engine.q is not None and not engine.drafter.taps:
    rows = plan._replace(bench=loaded_lib.plan(loaded, 0.0, 0, 16).bench)
    (texts,) = replay.record(loaded.plain, [engine], rows)
    found = replay.efficiencies(texts, LIMIT)
    return [x.reject.value or 0.0 for x in found[1:]]
  if engine.drafter.name != 'lookup':
    return []
  kept_BTN, tokens_B = certain(engine, groups, outputs)
  windows = lambda k: replay.walk(replay.accepted(kept_BTN, k), tokens_B)
  most = kept_BTN.shape[-1]
  return [tokens_B.sum() / windows(k).sum() for k in range(1, most)]


def certain(
  engine: build.Engine,
  groups: Sequence[plan_lib.Group],
  outputs: Sequence[decode.Output],
) -> tuple[np.ndarray, np.ndarray]:
  """Which drafts of a drafter that only looks at the text are accepted.

  A draft x without a distribution is accepted with probability p(x), and what
  is emitted after a rejection is not x: given the text, it is accepted exactly
  where it is the text's next token.

  Returns:
    (kept_BTN, tokens_B): whether a window that starts at t accepts at least n
    drafts, as replay.at_least, and the length of every text.
  """
  drafter, kept, sizes = engine.drafter, [], []

  @jax.jit
  def proposed(request, tokens_BL, lengths_B):
    live_B = lengths_B > 0
    context = decode.context_of(drafter, request, tokens_BL, lengths_B, live_B)
    return drafter.propose(engine.weights, (), context, None, None)[0]

  each = zip(outputs, groups, strict=True)
  longest = max(int((x.lengths_B - y.host.lengths_B).max()) for x, y in each)
  for group, out in zip(groups, outputs, strict=True):
    for row, start in enumerate(np.asarray(group.host.lengths_B)):
      size = int(out.lengths_B[row] - start)
      text_L = np.asarray(out.tokens_BL[row])
      at_T = start + np.minimum(np.arange(longest), size - 1)
      one = jax.tree.map(lambda x, row=row: x[row : row + 1], group.full)
      same_TL = np.broadcast_to(text_L, (longest, len(text_L)))
      draft = jax.device_get(proposed(_repeated(one, longest), same_TL, at_T))
      steps_K = np.arange(draft.tokens_BK.shape[1])
      index_TK = at_T[:, None] + steps_K
      inside_TK = (index_TK < start + size) & (steps_K < draft.count_B[:, None])
      next_TK = text_L[np.minimum(index_TK, len(text_L) - 1)]
      good_TK = inside_TK & (draft.tokens_BK == next_TK)
      kept_TN = np.cumprod(good_TK, 1)
      kept.append(np.pad(kept_TN, ((0, 0), (1, 0)), constant_values=1))
      sizes.append(size)
  return np.stack(kept).astype(float), np.array(sizes)


def _repeated(request: decode.Request, rows: int) -> Any:
  """A request of one row, `rows` times."""
  return jax.tree.map(lambda x: np.repeat(np.asarray(x), rows, 0), request)
