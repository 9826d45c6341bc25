"""Computes a rule's acceptance at any gamma from one run of plain decoding.

A lossless rule's text follows the target's distribution, whatever was drafted.
So take a text x_1, x_2, ... of the target, and let r_i = q(x_i) / p(x_i) and
R_k = r_1 ... r_k from a window's start. Given the text, the window drafts x_1
... x_k and keeps them with a known probability: the joint one of drafting,
accepting and emitting these tokens, over the target's probability of them. It
depends on the ratios alone:

    reject    min(1, r_1) ... min(1, r_k)
    block     min(1, R_1, ..., R_k)

Neither depends on gamma, except that the window ends there. A window that keeps
k drafts starts the next one k + 1 tokens later. Summed over all ways to walk
along a text, that gives its expected windows; all tokens over all windows are
the block efficiency, without taking positions to be independent.

Not so for a drafter that proposes by what it sees at a window's start (lookup,
eagle) or stops early, nor for a lossy rule, which emits another text. Ties that
rounding flips in a real run are not modelled.

    B  texts    T  tokens of a text    K  offsets looked at    N  K + 1
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import resampled
from specdec_jax import decode, forward, printing, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import intervals, predict
from specdec_jax.bench import plan as plan_lib
from specdec_jax.verify import chain

# --- the estimator, in NumPy and float64 --------------------------------------


def reject(log_ratio_XK: np.ndarray) -> np.ndarray:
  """Computes log P(k drafts equal the text, accepted | text), k = 1 to K.

  A draft x is drawn and accepted with probability min(p, q); over p: min(1, r).
  Leviathan et al. 2023, Algorithm 1 (https://arxiv.org/abs/2211.17192).
  """
  return np.cumsum(np.minimum(log_ratio_XK, 0), -1)


def block(log_ratio_XK: np.ndarray) -> np.ndarray:
  """Computes the same for block verification: the least of 1, R_1, ..., R_k.

  R_k = r_1 ... r_k. Sun et al. 2024, Algorithm 2 (2403.10444) draws x_1..x_k
  and keeps them with probability q(x_1..x_k) w_k, w_k = min(w_{k-1} p / q, 1);
  over p(x_1..x_k) that is R_k w_k = min(R_{k-1} w_{k-1}, R_k).
  """
  total_XK = np.cumsum(log_ratio_XK, -1)
  return np.minimum.accumulate(np.minimum(total_XK, 0), -1)


RULES = {'reject': reject, 'block': block}


def count(
  ratios: Sequence[np.ndarray],
  rule: Callable[[np.ndarray], np.ndarray],
  limit: int,
) -> np.ndarray:
  """Counts each text's expected windows by accepted drafts: [B, 1 + limit, N].

  [:, gamma] is for gamma 0 to the limit, and counts the accepted drafts that
  were emitted, as types.Info.hist_BN does.

  ratios: each text's, by token. rule: one of RULES. limit: the largest gamma.
  """
  tokens_B = np.array([len(r) for r in ratios], int)
  ratio_BT = np.zeros((len(ratios), max(tokens_B, default=0)))
  for row, ratio in zip(ratio_BT, ratios, strict=True):
    row[: len(ratio)] = ratio
  kept_BTN = at_least(ratio_BT, rule, limit)
  windows_BGN = np.zeros((len(ratios), limit + 1, limit + 1))
  for gamma in range(limit + 1):
    found_BN = walk(accepted(kept_BTN, gamma), tokens_B)
    windows_BGN[:, gamma, : gamma + 1] = found_BN
  return windows_BGN


def at_least(ratio_BT, rule, limit: int) -> np.ndarray:
  """Computes P(a window from t accepts at least n drafts | text): [B, T, N].

  1 for n = 0; the same for every gamma >= n. Past the text's end ratios are 0,
  so that no accepted draft lies beyond the emitted tokens.
  """
  T = ratio_BT.shape[1]
  padded_BP = np.pad(ratio_BT, ((0, 0), (0, limit)))
  with np.errstate(divide='ignore'):
    log_BTK = np.log(padded_BP[:, np.arange(T)[:, None] + np.arange(limit)])
  kept_BTK = np.exp(rule(log_BTK))
  return np.pad(kept_BTK, ((0, 0), (0, 0), (1, 0)), constant_values=1)


def accepted(kept_BTN, gamma: int) -> np.ndarray:
  """Computes P(exactly n of gamma drafts kept | text): [B, T, gamma + 1]."""
  kept = kept_BTN[..., : gamma + 1]
  return kept - np.pad(kept[..., 1:], ((0, 0), (0, 0), (0, 1)))


def walk(accepted_BTN, tokens_B) -> np.ndarray:
  """Counts expected windows by accepted drafts [B, N], over every way to cut.

  A window that starts at t and accepts n drafts emits n + 1 tokens, so the next
  one starts at t + n + 1, unless the text ends before.

  Worked example: gamma 1, two tokens, the first draft accepted with probability
  1/2. The first window emits two tokens or one, and in half of the cases a
  second window is needed: 1.5 windows.
  """
  B, T, N = accepted_BTN.shape
  windows_BN = np.zeros((B, N))
  starts_BP = np.zeros((B, T + N + 1))  # P(a window starts at each index)
  starts_BP[:, 0] = 1
  for t in range(T):
    here_B = starts_BP[:, t] * (t < tokens_B)
    here_BN = here_B[:, None] * accepted_BTN[:, t]
    starts_BP[:, t + 1 : t + 1 + N] += here_BN
    windows_BN += here_BN
  return windows_BN


# --- of texts -----------------------------------------------------------------


class Text(NamedTuple):
  """A plainly decoded text, scored by a target and a draft."""

  id: str  # the prompt's
  tokens: Sequence[int]  # without the prompt
  p: Sequence[float]  # of each token under the target
  q: Sequence[float]  # and under the draft, with the sampling settings
  overlap: Sequence[float]  # at each token, sum_x min(p(x), q(x))
  # Of each lossy rule means over the tokens: its acceptance alpha, and the
  # total variation between p and what it emits.
  rules: Sequence[Sequence[float]] = ()


class Row(NamedTuple):
  """Block efficiency at one gamma under each rule; gain: of block, paired."""

  gamma: int
  reject: intervals.Interval
  block: intervals.Interval
  gain: intervals.Interval


def efficiencies(texts: Sequence[Text], limit: int) -> list[Row]:
  """Computes block efficiency to gamma `limit`; 95 % intervals over texts."""
  times_RB = resampled.draws(len(texts))
  tokens_R = times_RB @ [float(len(text.tokens)) for text in texts]
  each = [ratios(text) for text in texts]
  windows = {name: count(each, rule, limit) for name, rule in RULES.items()}
  out = []
  for gamma in range(limit + 1):
    values = {
      name: tokens_R / (times_RB @ x_BGN[:, gamma].sum(-1))
      for name, x_BGN in windows.items()
    }
    values['gain'] = values['block'] - values['reject']
    shown = {k: resampled.interval(x, len(texts)) for k, x in values.items()}
    out.append(Row(gamma, **shown))
  return out


def ratios(text: Text) -> np.ndarray:
  """Computes q / p at each token.

  Two programs round differently, so an emitted token can have p = 0 here, at
  the edge of a top-k or at a greedy tie. p is set to 1 there, as plain decoding
  chose the token: exact when greedy, else a lower bound.
  """
  p_T, q_T = np.asarray(text.p), np.asarray(text.q)
  return q_T / np.where(p_T > 0, p_T, 1)


# --- p and q of the texts -----------------------------------------------------


def record(
  plain: Any,
  engines: Sequence[Any],
  plan: plan_lib.Plan,
  *,
  rules: Sequence[types.Rule] = (),
) -> list[list[Text]]:
  """Decodes every prompt plainly and scores the texts with each engine.

  plain: a build.Engine that decodes at gamma 0. engines: one or more with the
  same target, whose q is a model. rules: lossy ones, for Text.rules. Returns
  for each engine the same texts, in the prompts' order. Raises ValueError for
  logits that are not finite.
  """
  for engine in engines:
    name = engine.drafter.name
    assert isinstance(engine.q, types.Model), f'{name} is read by no model'
  items = plan.test + plan.calibration
  arm = plan_lib.Arm('autoregressive', 'autoregressive', 0, plain)
  found: list[list[Text]] = [[] for _ in engines]
  groups = plan_lib.groups([arm], plan, items)
  for group in printing.track(groups, f'texts of seed {plan.sampling.seed}'):
    out = jax.device_get(plain.programs.generate(plain.weights, group.full))
    request = group.full._replace(
      tokens_BL=out.tokens_BL, limit_B=out.lengths_B
    )
    answers = [*plan_lib.answers([group], [out]).values()]
    p_BL, *columns = scores(
      engines[0].weights.target,
      [engine.weights.draft for engine in engines],
      request,
      target=engines[0].target.model,
      drafts=tuple(engine.q for engine in engines),
      rules=tuple(rules),
      chunk=engines[0].options.chunk,
    )
    size = len(columns) // len(engines)
    for i, (texts, engine) in enumerate(zip(found, engines, strict=True)):
      own = columns[i * size : (i + 1) * size]
      texts += _scored(engine, answers, np.stack([p_BL, *own], -1))
  # The last batch is filled with copies.
  return [texts[: len(items)] for texts in found]


def _scored(engine, answers, columns_BLX) -> list[Text]:
  """Makes a group's texts from the columns that `scores` returns."""
  texts = []
  for row, answer in enumerate(answers):
    start = len(answer.item.tokens)
    scored = columns_BLX[row, start : start + len(answer.tokens)]
    if answer.broken or not np.isfinite(scored).all():
      draft = engine.draft.label if engine.draft else engine.drafter.name
      raise ValueError(
        f'prompt {answer.item.id!r}: the logits of {engine.target.label} or of '
        f'{draft} are not finite: try another dtype, or leave the prompt out'
      )
    pairs = scored[:, 3:].mean(0, dtype=np.float64).reshape(-1, 2)
    p_q_overlap = scored[:, :3].T.tolist()
    rules = pairs.tolist()
    texts.append(Text(answer.item.id, answer.tokens, *p_q_overlap, rules=rules))
  return texts


@functools.partial(
  jax.jit, static_argnames=('target', 'drafts', 'rules', 'chunk')
)
def scores(
  params: types.Params,
  draft_params: Sequence[types.Params],
  request: decode.Request,
  *,
  target: types.Model,
  drafts: tuple[types.Model, ...],
  rules: tuple[types.Rule, ...] = (),
  chunk: int,
) -> list[jax.Array]:
  """Scores texts with the target, once, and with every draft, teacher-forced.

  request: the texts, prompts included; they end at limit_B. rules: lossy ones.
  chunk: tokens that a model reads at a time. Returns p as in Text; then for
  each draft q and overlap, and for each rule alpha and total variation, [B, L]
  each. p or q is NaN where the model's logits are not finite.
  """

  def columns(index_T, *logits):
    given = types.Scores(logits[0], request.sampling)
    tokens_BT = forward.at(request.tokens_BL, index_T)
    p_BTV, *q = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    # Greedy p and q are one-hot even where the logits are NaN.
    picked = [
      jnp.where(jnp.isfinite(jnp.max(x, -1)), chain.pick(y, tokens_BT), jnp.nan)
      for x, y in zip(logits, (p_BTV, *q), strict=True)
    ]
    out = picked[:1]
    for q_BT, q_BTV in zip(picked[1:], q, strict=True):
      out += [q_BT, jnp.sum(jnp.minimum(p_BTV, q_BTV), -1)]
      for rule in rules:
        assert rule.kept is not None and rule.emitted is not None, rule.name
        out += predict.under(rule, p_BTV, q_BTV, given)
    return out

  return forward.score(
    [(target, params), *zip(drafts, draft_params, strict=True)],
    request.tokens_BL,
    request.lengths_B,
    request.limit_B,
    columns,
    chunk=chunk,
    source=request.source,
  )
