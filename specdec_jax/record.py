"""Records every window of a run: drafts, p, q and entropy.

Runs decode.step from Python, with a drafter that also returns its proposals.
The text is then scored once more for its probabilities.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, debug, decode, forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.verify import chain

Array = types.Array


class Window(NamedTuple):
  """One target call of a row.

  start: index in the reply of its first emitted token.
  draft: the proposed tokens.
  q: the probability with which each was drawn; None for certain drafts.
  accepted: drafts that the rule accepted.
  emitted: tokens emitted: fewer than accepted + 1 where EOS or the length limit
    cut the window.
  """

  start: int
  draft: tuple[int, ...]
  q: tuple[float, ...] | None
  accepted: int
  emitted: int


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
  """A reply, with the probabilities of each of its tokens.

  Probabilities use the run's sampling settings, but temperature 1 if greedy,
  where they would be 0 and 1.

  prompt, tokens: ids.
  windows: the target calls, in order.
  p, q: of each token under target and draft. Without a draft model, q as the
    drafter reported it, None where it reported none.
  entropy: of the target's distribution, in bits.
  refused: the draft token rejected at each token's place, or -1.
  refused_p, refused_q: its probabilities.
  tokenizer: the target's.
  setting: models and settings, for display.
  """

  prompt: list[int]
  tokens: list[int]
  windows: list[Window]
  p: list[float]
  q: list[float | None]
  entropy: list[float]
  refused: list[int]
  refused_p: list[float]
  refused_q: list[float | None]
  tokenizer: Any
  setting: dict[str, Any]


def run(
  engine: build.Engine, request: decode.Request
) -> tuple[decode.Output, list[list[Window]]]:
  """Decodes as engine.programs.generate; also the windows of every row."""
  programs = decode.programs(
    engine.target.model,
    debug.watched(engine.drafter),
    engine.rule,
    engine.options,
  )
  state, info = programs.start(engine.weights, request)
  # Copies: the next step is donated these arrays.
  first_B = before_B = np.array(state.lengths_B)
  live_B = np.array(state.live_B)
  rows: list[list[Window]] = [[] for _ in first_B]
  while live_B.any():
    state, info = programs.step(engine.weights, request, state, info)
    inner, draft, outcome = state.drafter
    state, q_BK = state._replace(drafter=inner), None
    if draft.q_BKV is not None:
      q_BK = np.asarray(chain.pick(draft.q_BKV, draft.tokens_BK))
    tokens_BK = np.asarray(draft.tokens_BK)
    after_B = np.array(state.lengths_B)
    for row in np.flatnonzero(live_B):
      drafted = slice(int(outcome.verified_B[row]))
      rows[row].append(
        Window(
          int(before_B[row] - first_B[row]),
          tuple(tokens_BK[row, drafted].tolist()),
          None if q_BK is None else tuple(q_BK[row, drafted].tolist()),
          int(outcome.accepted_B[row]),
          int(outcome.emitted_B[row]),
        )
      )
    before_B, live_B = after_B, np.array(state.live_B)
  return jax.device_get(decode.Output(state.tokens_BL, before_B, info)), rows


def describe(
  engine: build.Engine,
  request: decode.Request,
  output: decode.Output,
  rows: list[list[Window]],
  setting: dict[str, Any],
) -> list[Record]:
  """A Record of every row, in order.

  Args:
    engine, request: as given to run.
    output, rows: from run.
    setting: see Record.
  """
  starts_B = np.asarray(request.lengths_B)
  refused_BL = _refused(output, rows, starts_B)
  text = request._replace(tokens_BL=output.tokens_BL, limit_B=output.lengths_B)
  read = lambda model, params: jax.device_get(
    score(params, text, refused_BL, model=model, chunk=engine.options.chunk)
  )
  p_BL, refused_p_BL, entropy_BL = read(
    engine.target.model, engine.weights.target
  )
  by_draft = None
  # With taps, q is a model of a window's first draft only.
  if engine.q is not None and not engine.drafter.taps:
    by_draft = read(engine.q, engine.weights.draft)[:2]
  records = []
  for row, found in enumerate(rows):
    start, end = int(starts_B[row]), int(output.lengths_B[row])
    part = lambda x_BL, row=row, at=slice(start, end): x_BL[row, at].tolist()
    if by_draft is None:
      q, refused_q = _own_q(found, end - start)
    else:
      q, refused_q = map(part, by_draft)
    records.append(
      Record(
        output.tokens_BL[row, :start].tolist(),
        part(output.tokens_BL),
        found,
        part(p_BL),
        q,
        part(entropy_BL),
        part(refused_BL),
        part(refused_p_BL),
        refused_q,
        engine.target.tokenizer,
        setting,
      )
    )
  return records


def setting(engine: build.Engine, wanted: Any) -> dict[str, Any]:
  """Names of models and settings; wanted is an api.Settings."""
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


def _refused(output, rows, starts_B) -> np.ndarray:
  """The draft rejected at each index of the buffer, -1 where there is none."""
  refused_BL = np.full(output.tokens_BL.shape, -1, np.int32)
  for row, found in enumerate(rows):
    for w in found:
      if w.accepted < min(len(w.draft), w.emitted):
        at = starts_B[row] + w.start + w.accepted
        refused_BL[row, at] = w.draft[w.accepted]
  return refused_BL


def _own_q(found: list[Window], length: int):
  """(q, refused_q) of a reply, as the drafter reported them."""
  q: list[float | None] = [None] * length
  refused_q = list(q)
  for w in found:
    for k, value in enumerate((w.q or ())[: w.emitted]):
      if k < w.accepted:
        q[w.start + k] = value
      elif k == w.accepted:
        refused_q[w.start + k] = value
  return q, refused_q


@functools.partial(jax.jit, static_argnames=('model', 'chunk'))
def score(
  params: types.Params,
  request: decode.Request,
  other_BL: Array,
  *,
  model: types.Model,
  chunk: int,
) -> list[Array]:
  """Scores texts teacher-forced, with temperature 1 for greedy rows.

  Args:
    params: of the model.
    request: the texts, prompts included, which end at limit_B; its sampling
      settings are used.
    other_BL: another token for each index; below 0 gives p 0.
    model: the model that scores.
    chunk: tokens that it reads at a time.

  Returns:
    p of the token, p of the other token, entropy in bits; [B, L] each. Indices
    of the prompt and past the end hold garbage.
  """
  greedy_B = sampling_lib.is_greedy(request.sampling)
  whole = sampling_lib.settings(len(greedy_B), 1.0)
  sampling = jax.tree.map(
    lambda off_B, x_B: jnp.where(greedy_B, off_B, x_B), whole, request.sampling
  )

  def columns(index_T, logits_BTV):
    p_BTV = sampling_lib.probabilities(logits_BTV, sampling)
    other_BT = forward.at(other_BL, index_T)
    other_p_BT = chain.pick(p_BTV, jnp.maximum(other_BT, 0))
    return (
      chain.pick(p_BTV, forward.at(request.tokens_BL, index_T)),
      jnp.where(other_BT < 0, 0, other_p_BT),
      jnp.sum(jax.scipy.special.entr(p_BTV), -1) / jnp.log(2.0),
    )

  return forward.score(
    [(model, params)],
    request.tokens_BL,
    request.lengths_B,
    request.limit_B,
    columns,
    chunk=chunk,
    source=request.source,
  )
