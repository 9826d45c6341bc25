"""A trace: text from plain decoding, with p and q of each token.

A JSONL file: a header, then a line for each text. From it `counterfactual`
computes the acceptance at other gammas and rules.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, machine, printing, program, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files
from specdec_jax.verify import chain

FORMAT = 'specdec_jax trace 5'


class Text(NamedTuple):
  """A text from plain decoding.

  id: the prompt's; a prompt may have several texts.
  seed: of the draws.
  tokens: without the prompt.
  p, q: of each token under target and draft, with the sampling settings.
  overlap: at each token, sum_x min(p(x), q(x)).
  rules: for each rule of the header, means over the tokens of its acceptance
    alpha and of the total variation between p and what it emits.
  """

  id: str
  seed: int
  tokens: Sequence[int]
  p: Sequence[float]
  q: Sequence[float]
  overlap: Sequence[float]
  rules: Sequence[Sequence[float]] = ()


class Trace(NamedTuple):
  """The contents of a trace file.

  header: format, models, sampling settings, lossy rules and machine.
  texts: in the order of the file.
  """

  header: dict[str, Any]
  texts: list[Text]


def record(
  plain: Any,
  engines: Sequence[Any],
  plan: plan_lib.Plan,
  *,
  samples: int,
  rules: Sequence[types.Rule] = (),
) -> list[Trace]:
  """Decodes every prompt plainly, `samples` times, and scores the texts.

  Args:
    plain: a build.Engine that decodes at gamma 0.
    engines: one or more, of the same target, whose drafters have a
      distribution q. That of an eagle is of a window's first draft only.
    plan: prompts, sampling settings and sizes; the first sample has the seed
      of its settings, the others those after it.
    samples: texts of each prompt.
    rules: lossy ones, for Text.rules.

  Returns:
    A trace of the same texts for each engine.

  Raises:
    ValueError: samples < 1, a drafter without q or one that stops early, a
      rule without kept or emitted, or logits that are not finite.
  """
  first = plan.sampling.seed
  if samples < 1 or first + samples > 2**32:
    raise ValueError(f'samples={samples}: want 1 or more, seeds below 2**32')
  for engine in engines:
    if engine.q is None:
      raise ValueError(
        f'{engine.drafter.name}: proposes without a distribution of its own; '
        'a trace needs lm, ngram, early_exit or eagle'
      )
    if engine.drafter.stops:
      raise ValueError(
        f'{engine.drafter.name}.min_confidence: a trace is of windows that '
        'propose all of gamma; set it to 0'
      )
  for rule in rules:
    if None in (rule.kept, rule.emitted):
      raise ValueError(f'rule {rule.name}: a trace needs its kept and emitted')
  found: list[list[Text]] = [[] for _ in engines]
  for seed in range(first, first + samples):
    sampling = dataclasses.replace(plan.sampling, seed=seed)
    each = _texts(plain, engines, plan._replace(sampling=sampling), rules)
    for texts, more in zip(found, each, strict=True):
      texts += more
  sizes = {'max_new_tokens': plan.max_new_tokens, 'samples': samples}
  header = {
    'format': FORMAT,
    'sampling': dataclasses.asdict(plan.sampling) | sizes,
    'rules': [rule.name for rule in rules],
    'machine': machine.describe(),
  }
  return [
    Trace(header | {'models': _models(engine)}, texts)
    for engine, texts in zip(engines, found, strict=True)
  ]


def _models(engine) -> list[list[str]]:
  """[label, digest] of target and draft; a drafter's name without a model."""
  named = [[x.label, x.digest] for x in (engine.target, engine.draft) if x]
  return named if engine.draft else [*named, [engine.drafter.name, '']]


def _texts(
  plain, engines, plan: plan_lib.Plan, rules: Sequence[types.Rule]
) -> list[list[Text]]:
  """A text of every prompt, scored with each engine."""
  items = plan.test + plan.calibration
  arm = plan_lib.Arm('autoregressive', 'autoregressive', 0, plain)
  found: list[list[Text]] = [[] for _ in engines]
  groups = plan_lib.groups([arm], plan, items)
  for group in printing.track(groups, f'texts of seed {plan.sampling.seed}'):
    out = jax.device_get(plain.programs.generate(plain.weights, group.full))
    request = group.full._replace(
      tokens_BL=out.tokens_BL, limit_B=out.lengths_B
    )
    answers = plan_lib.answers([group], [out])
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
      columns_BLX = np.stack([p_BL, *own], -1)
      texts += _scored(engine, group, answers, columns_BLX, plan)
  # The last batch is filled with copies.
  return [texts[: len(items)] for texts in found]


def _scored(engine, group, answers, columns_BLX, plan) -> list[Text]:
  """The texts of a group, from the columns of `scores`."""
  texts = []
  for row, answer in enumerate(answers):
    start = group.host.lengths_B[row]
    scored = columns_BLX[row, start : start + len(answer.tokens)]
    if answer.broken or not np.isfinite(scored).all():
      draft = engine.draft.label if engine.draft else engine.drafter.name
      raise ValueError(
        f'prompt {answer.item.id!r}: the logits of {engine.target.label} or of '
        f'{draft} are not finite: try another dtype, or leave the prompt out'
      )
    # Nine digits hold a float32.
    short = lambda values: [float(f'{x:.9g}') for x in values]
    p_q_overlap = map(short, scored[:, :3].T)
    pairs = scored[:, 3:].mean(0, dtype=np.float64).reshape(-1, 2)
    texts.append(
      Text(
        answer.item.id,
        plan.sampling.seed,
        answer.tokens,
        *p_q_overlap,
        rules=[*map(short, pairs)],
      )
    )
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

  Args:
    params, draft_params: of the target, and of each draft.
    request: the texts, prompts included; they end at limit_B.
    target, drafts: the models.
    rules: lossy ones.
    chunk: tokens that a model reads at a time.

  Returns:
    p as in Text; then of each draft q and overlap, and of each rule alpha and
    total variation, [B, L] each. p or q is NaN where the model's logits are
    not finite.
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
        off_BTV = jnp.abs(rule.emitted(p_BTV, q_BTV, given) - p_BTV)
        out.append(jnp.sum(rule.kept(p_BTV, q_BTV, given), -1))
        out.append(jnp.sum(off_BTV, -1) / 2)
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


def check_output(path: str) -> pathlib.Path:
  """The path of a new trace; raises ValueError before any work."""
  out = pathlib.Path(path)
  if not path or out.exists():
    raise ValueError(f'--output={path!r}: name a file that is not there yet')
  program.open_workdir(str(out.parent))
  return out


def write(path: pathlib.Path, found: Trace) -> None:
  """Writes the file atomically."""
  lines = [found.header, *(text._asdict() for text in found.texts)]
  files.write(path, '\n'.join(json.dumps(line) for line in lines))


def read(path: str) -> Trace:
  """Reads a trace.

  Raises:
    ValueError: not a trace, one of another version, or a damaged line.
  """
  rows = [row for _, row in files.read_jsonl(path)]
  try:
    header, texts = rows[0], [Text(**row) for row in rows[1:]]
  except (IndexError, TypeError):
    header, texts = {}, []
  if header.get('format') != FORMAT or not texts:
    raise ValueError(
      f'{path}: not a trace with texts, or of another version than '
      f'{FORMAT!r}: record it again'
    )
  return Trace(header, texts)
