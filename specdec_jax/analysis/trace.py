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

from specdec_jax import decode, forward, requests, runtime, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import machine
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files
from specdec_jax.verify import chain, lenient

FORMAT = 'specdec_jax trace 3'
# The first is lossless: it accepts drafts with probability alpha.
LENIENCES = (1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1, 0.05)


class Text(NamedTuple):
  """A text from plain decoding.

  id: the prompt's; a prompt may have several texts.
  seed: of the draws.
  tokens: without the prompt.
  p, q: of each token under target and draft, with the sampling settings.
  kept: for each lenience and token, the probability that a draft is accepted.
  distance: likewise, total variation between p and what is emitted.
  """

  id: str
  seed: int
  tokens: Sequence[int]
  p: Sequence[float]
  q: Sequence[float]
  kept: Sequence[Sequence[float]]
  distance: Sequence[Sequence[float]]


class Trace(NamedTuple):
  """The contents of a trace file.

  header: models, sampling settings, format and leniences.
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
  wanted = dataclasses.asdict(plan.sampling)
  seeds = range(wanted['seed'], wanted['seed'] + samples)
  if samples < 1 or seeds[-1] >= 2**32:
    raise ValueError(f'samples={samples}: want 1 or more, seeds below 2**32')
  if lm.drafter.stops:
    raise ValueError(
      'draft.min_confidence: a trace is of windows that propose all of gamma; '
      'set it to 0'
    )
  items, rows = plan.judged + plan.others, plan.bench.batch_size
  longest = max(len(item.tokens) for item in items) + plan.max_new_tokens
  batches = [
    (seed, items[i : i + rows])
    for seed in seeds
    for i in range(0, len(items), rows)
  ]
  texts = []
  for seed, batch in runtime.track(batches, 'texts'):
    request = requests.make(
      batch,
      ids=plain.target.ids,
      context=plain.target.context,
      max_new_tokens=plan.max_new_tokens,
      stop_ids=plain.target.tokenizer.eos_ids,
      rows=requests.rows_on(plain.target.layout, rows),
      length=requests.bucket(longest),
      **wanted | {'seed': seed},
    )
    texts += _texts(plain, lm, batch, request, seed)
  wanted |= {'max_new_tokens': plan.max_new_tokens, 'samples': samples}
  header = {
    'format': FORMAT,
    'leniences': LENIENCES,
    'models': [[x.label, x.digest] for x in (lm.target, lm.draft)],
    'sampling': wanted,
    'machine': machine.describe(),
  }
  return Trace(header, texts)


def _texts(plain, lm, batch, request, seed: int) -> list[Text]:
  placed = requests.place(request, plain.target.layout)
  out = jax.device_get(plain.programs.generate(plain.weights, placed))
  found = scores(
    lm.weights,
    placed._replace(tokens_BL=out.tokens_BL, limit_B=out.lengths_B),
    target=lm.target.model,
    draft=lm.q,
    chunk=lm.options.chunk,
  )
  texts = []
  for row, item in enumerate(batch):
    new = slice(int(request.lengths_B[row]), int(out.lengths_B[row]))
    # Nine digits hold a float32.
    p, q, *rest = (
      [float(f'{x:.9g}') for x in x_BL[row, new]] for x_BL in np.asarray(found)
    )
    if out.info.broken_B[row] or not np.isfinite([p, q]).all():
      raise ValueError(
        f'prompt {item.id!r}: the logits of {lm.target.label} or of '
        f'{lm.draft.label} are not finite: try another dtype, or leave the '
        'prompt out'
      )
    tokens = out.tokens_BL[row, new].tolist()
    kept, distance = rest[: len(LENIENCES)], rest[len(LENIENCES) :]
    texts.append(Text(item.id, seed, tokens, p, q, kept, distance))
  return texts


@functools.partial(jax.jit, static_argnames=('target', 'draft', 'chunk'))
def scores(
  weights: types.Weights,
  request: decode.Request,
  *,
  target: types.Model,
  draft: types.Model,
  chunk: int,
) -> jax.Array:
  """Scores texts with both models, teacher-forced.

  Args:
    weights: of both models.
    request: the texts, prompts included; they end at limit_B.
    target, draft: the models.
    chunk: tokens that a model reads at a time.

  Returns:
    [2 + 2 X, B, L]: p, q, then `kept` and `distance` of each of X leniences, as
    in Text. p or q is NaN where the model's logits are not finite.
  """

  def columns(index_T, *logits):
    p_BTV, q_BTV = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    scored = types.Scores(logits[0], request.sampling)
    kept, emitted = [jnp.minimum(p_BTV, q_BTV)], [p_BTV]
    for lenience in LENIENCES[1:]:
      kept.append(lenient.kept(lenience, p_BTV, q_BTV, scored))
      emitted.append(lenient.emitted(lenience, p_BTV, q_BTV, scored))
    tokens_BT = forward.at(request.tokens_BL, index_T)
    # Greedy p and q are one-hot even where the logits are NaN.
    both = [
      jnp.where(jnp.isfinite(jnp.max(x, -1)), chain.pick(y, tokens_BT), jnp.nan)
      for x, y in zip(logits, (p_BTV, q_BTV), strict=True)
    ]
    return [
      *both,
      *(jnp.sum(x_BTV, -1) for x_BTV in kept),
      *(jnp.sum(jnp.abs(x_BTV - p_BTV), -1) / 2 for x_BTV in emitted),
    ]

  readers = (target, weights.target), (draft, weights.draft)
  found = forward.score(
    readers,
    request.tokens_BL,
    request.limit_B,
    columns,
    chunk=chunk,
    source=request.source,
  )
  return jnp.stack(found)


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
