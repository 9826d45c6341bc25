"""Records every window of a run: what was drafted, and what became of it."""

from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import debug, decode
from specdec_jax.verify import chain, tree


class Window(NamedTuple):
  """One target call of a row.

  draft: the proposed tokens; of a tree, those accepted and, if one is tried
    after them, the first child.
  q: the probability with which each was drawn; None for certain drafts.
  accepted: drafts that the rule accepted.
  tokens: what was emitted: accepted drafts and one token more, or fewer where
    an end or the length limit cut the window.
  """

  draft: list[int]
  q: list[float] | None
  accepted: int
  tokens: list[int]


class Record(NamedTuple):
  """How a reply was made.

  prompt: token ids.
  windows: the target calls, in order.
  tokenizer: the target's.
  setting: models and settings, for display.
  """

  prompt: list[int]
  windows: list[Window]
  tokenizer: Any
  setting: dict[str, Any]


def run(
  engine: Any, request: decode.Request
) -> tuple[decode.Output, list[list[Window]]]:
  """Decodes as engine.programs.generate; also the windows of every row.

  It runs decode.step from Python, with a drafter that returns its proposals.
  engine: a build.Engine.
  """
  programs = decode.programs(
    engine.target.model,
    debug.watched(engine.drafter),
    engine.rule,
    engine.options,
  )
  state, info = programs.start(engine.weights, request)
  # Copies: the next step is donated these arrays.
  before_B, live_B = np.array(state.lengths_B), np.array(state.live_B)
  rows: list[list[Window]] = [[] for _ in live_B]
  while live_B.any():
    state, info = programs.step(engine.weights, request, state, info)
    inner, draft, outcome = state.drafter
    state, q_BK = state._replace(drafter=inner), None
    if draft.q_BKV is not None:
      q_BK = np.asarray(chain.pick(draft.q_BKV, draft.tokens_BK))
    tokens_BK, tokens_BL = map(np.asarray, (draft.tokens_BK, state.tokens_BL))
    after_B = np.array(state.lengths_B)
    for row in np.flatnonzero(live_B):
      drafted = tried(draft, outcome, int(row))
      window = Window(
        tokens_BK[row, drafted].tolist(),
        None if q_BK is None else q_BK[row, drafted].tolist(),
        int(outcome.accepted_B[row]),
        tokens_BL[row, before_B[row] : after_B[row]].tolist(),
      )
      rows[row].append(window)
    before_B, live_B = after_B, np.array(state.live_B)
  return jax.device_get(decode.Output(state.tokens_BL, before_B, info)), rows


def tried(draft, outcome, row: int) -> np.ndarray:
  """The indices of Window.draft in a row's tokens_BK."""
  count = int(outcome.verified_B[row])
  if draft.parents_BK is None:
    return np.arange(count)
  accepted = int(outcome.accepted_B[row])
  path = np.asarray(outcome.path_BK[row])[:accepted]
  if count == accepted:
    return path
  below_BK = tree.children(draft, outcome.accepted_B, outcome.path_BK)
  return np.append(path, np.argmax(below_BK[row]))


def setting(engine: Any, wanted: Any) -> dict[str, Any]:
  """Names of models and settings; wanted is a completion.Settings."""
  name = lambda model: model and f'{model.label}, {model.dtype}'
  sampling = ('temperature', 'top_k', 'top_p', 'seed', 'max_new_tokens')
  return {
    'target': name(engine.target),
    'draft': name(engine.draft),
    'drafter': engine.drafter.name,
    'gamma': engine.drafter.gamma,
    'rule': engine.rule.name + ' (LOSSY)' * (not engine.rule.lossless),
    **{key: getattr(wanted, key) for key in sampling},
  }
