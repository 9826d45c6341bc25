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

from specdec_jax import decode, forward, runtime, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import machine
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files
from specdec_jax.verify import chain

FORMAT = 'specdec_jax trace 4'


class Text(NamedTuple):
  """A text from plain decoding.

  id: the prompt's; a prompt may have several texts.
  seed: of the draws.
  tokens: without the prompt.
  p, q: of each token under target and draft, with the sampling settings.
  overlap: at each token, sum_x min(p(x), q(x)).
  """

  id: str
  seed: int
  tokens: Sequence[int]
  p: Sequence[float]
  q: Sequence[float]
  overlap: Sequence[float]


class Trace(NamedTuple):
  """The contents of a trace file.

  header: format, models, sampling settings and machine.
  texts: in the order of the file.
  """

  header: dict[str, Any]
  texts: list[Text]


def record(
  plain: Any,
  lm: Any,
  plan: plan_lib.Plan,
  *,
  samples: int,
) -> Trace:
  """Decodes every prompt plainly, `samples` times, and scores the texts.

  Args:
    plain: a build.Engine that decodes at gamma 0.
    lm: a build.Engine of the same target with a draft model.
    plan: prompts, sampling settings and sizes; the first sample has the seed
      of its settings, the others those after it.
    samples: texts of each prompt.

  Raises:
    ValueError: samples < 1, a draft that stops early, or logits that are not
      finite.
  """
  first = plan.sampling.seed
  if samples < 1 or first + samples > 2**32:
    raise ValueError(f'samples={samples}: want 1 or more, seeds below 2**32')
  if lm.drafter.stops:
    raise ValueError(
      'draft.min_confidence: a trace is of windows that propose all of gamma; '
      'set it to 0'
    )
  texts = []
  for seed in range(first, first + samples):
    sampling = dataclasses.replace(plan.sampling, seed=seed)
    texts += _texts(plain, lm, plan._replace(sampling=sampling))
  sizes = {'max_new_tokens': plan.max_new_tokens, 'samples': samples}
  header = {
    'format': FORMAT,
    'models': [[x.label, x.digest] for x in (lm.target, lm.draft)],
    'sampling': dataclasses.asdict(plan.sampling) | sizes,
    'machine': machine.describe(),
  }
  return Trace(header, texts)


def _texts(plain, lm, plan: plan_lib.Plan) -> list[Text]:
  """A text of every prompt."""
  items = plan.judged + plan.others
  arm = plan_lib.Arm('autoregressive', 'autoregressive', 0, plain)
  texts = []
  groups = plan_lib.groups([arm], plan, items)
  for group in runtime.track(groups, f'texts of seed {plan.sampling.seed}'):
    out = jax.device_get(plain.programs.generate(plain.weights, group.full))
    request = group.full._replace(
      tokens_BL=out.tokens_BL, limit_B=out.lengths_B
    )
    found = scores(
      lm.weights,
      request,
      target=lm.target.model,
      draft=lm.q,
      chunk=lm.options.chunk,
    )
    columns = np.stack(found, -1)
    for row, answer in enumerate(plan_lib.answers([group], [out])):
      start = group.host.lengths_B[row]
      scored = columns[row, start : start + len(answer.tokens)]
      if answer.broken or not np.isfinite(scored).all():
        raise ValueError(
          f'prompt {answer.item.id!r}: the logits of {lm.target.label} or of '
          f'{lm.draft.label} are not finite: try another dtype, or leave the '
          'prompt out'
        )
      # Nine digits hold a float32.
      each = ([float(f'{x:.9g}') for x in column] for column in scored.T)
      texts.append(
        Text(answer.item.id, plan.sampling.seed, answer.tokens, *each)
      )
  return texts[: len(items)]  # the last batch is filled with copies


@functools.partial(jax.jit, static_argnames=('target', 'draft', 'chunk'))
def scores(
  weights: types.Weights,
  request: decode.Request,
  *,
  target: types.Model,
  draft: types.Model,
  chunk: int,
) -> list[jax.Array]:
  """Scores texts with both models, teacher-forced.

  Args:
    weights: of both models.
    request: the texts, prompts included; they end at limit_B.
    target, draft: the models.
    chunk: tokens that a model reads at a time.

  Returns:
    p, q and overlap as in Text, [B, L] each. p or q is NaN where the model's
    logits are not finite.
  """

  def columns(index_T, *logits):
    both = [sampling_lib.probabilities(x, request.sampling) for x in logits]
    tokens_BT = forward.at(request.tokens_BL, index_T)
    # Greedy p and q are one-hot even where the logits are NaN.
    p_and_q = [
      jnp.where(jnp.isfinite(jnp.max(x, -1)), chain.pick(y, tokens_BT), jnp.nan)
      for x, y in zip(logits, both, strict=True)
    ]
    return [*p_and_q, jnp.sum(jnp.minimum(*both), -1)]

  return forward.score(
    [(target, weights.target), (draft, weights.draft)],
    request.tokens_BL,
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
  runtime.open_workdir(str(out.parent))
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
