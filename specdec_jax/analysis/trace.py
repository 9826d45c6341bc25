"""A trace: text from plain decoding, with p and q of each token.

A JSONL file: a header, then a line for each text. From it `counterfactual`
computes the acceptance at other gammas and rules.
"""

import copy
import functools
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, requests, runtime, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import machine, prompts
from specdec_jax.io import files
from specdec_jax.verify import chain, lenient

FORMAT = 'specdec_jax trace 3'
# Lenience 1 is lossless: it keeps drafts with probability alpha.
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


def with_draft_model(config):
  """A copy of a ConfigDict with the draft model as its only method.

  Raises:
    ValueError: no draft model among the methods, or one that stops early.
  """
  config = copy.deepcopy(config)
  if 'lm' not in config.decode.methods:
    raise ValueError(
      f'decode.methods={tuple(config.decode.methods)}: a trace needs a draft '
      'model: what other drafters propose depends on where a window starts; '
      'add lm'
    )
  if config.draft.min_confidence:
    raise ValueError(
      f'draft.min_confidence={config.draft.min_confidence}: a trace is of '
      'windows that propose all of gamma; set it to 0'
    )
  config.decode.methods, config.decode.gammas = ('lm',), (1,)
  config.decode.rule = 'reject'
  return config


def items(chosen: Sequence[Any], target, bench) -> list[requests.Item]:
  """The first turns of bench.prompts.Prompts as items.

  Args:
    chosen: the prompts.
    target: the LanguageModel that answers them.
    bench: settings.Bench, for chat and prompt_tokens.
  """
  encode = lambda x: requests.encode(target.tokenizer, x, chat=bench.chat)
  tokens = [encode(x.turns[0]) if x.turns else x.tokens for x in chosen]
  return [
    requests.Item(
      tuple(ids[-bench.prompt_tokens :]), prompts.request_number(x.id), x.id
    )
    for x, ids in zip(chosen, tokens, strict=True)
  ]


def record(
  plain: Any,
  lm: Any,
  items: Sequence[requests.Item],
  *,
  wanted: dict[str, Any],
  max_new_tokens: int,
  rows: int,
  samples: int,
  track: Callable[..., Iterable],
) -> Trace:
  """Decodes every prompt plainly, `samples` times, and scores the texts.

  Args:
    plain: a build.Engine that decodes at gamma 0.
    lm: a build.Engine of the same target with a draft model.
    items: the prompts.
    wanted: temperature, top_k, top_p and the first seed; samples have the seeds
      after it.
    max_new_tokens: of each text.
    rows: prompts that are decoded together.
    samples: texts of each prompt.
    track: shows progress: (batches, description) -> batches.

  Raises:
    ValueError: samples < 1, a prompt that does not fit, or logits that are not
      finite.
  """
  target, first = plain.target, wanted['seed']
  if samples < 1 or first + samples > 2**32:
    raise ValueError(
      f'samples={samples}: must be 1 or more, with seeds below 2**32'
    )
  longest = max(len(item.tokens) for item in items) + max_new_tokens
  texts = []
  batches = [
    (seed, items[i : i + rows])
    for seed in range(first, first + samples)
    for i in range(0, len(items), rows)
  ]
  for seed, batch in track(batches, 'texts'):
    request = requests.make(
      batch,
      ids=target.ids,
      context=target.context,
      max_new_tokens=max_new_tokens,
      stop_ids=target.tokenizer.eos_ids,
      rows=requests.rows_on(target.layout, rows),
      length=requests.bucket(longest),
      **wanted | {'seed': seed},
    )
    texts += _texts(plain, lm, batch, request, seed)
  header = {
    'format': FORMAT,
    'leniences': LENIENCES,
    'models': [[x.label, x.digest] for x in (target, lm.draft)],
    'sampling': wanted | {'max_new_tokens': max_new_tokens, 'samples': samples},
    'machine': machine.describe(),
  }
  return Trace(header, texts)


def _texts(plain, lm, batch, request, seed: int) -> list[Text]:
  placed = requests.place(request, plain.target.layout)
  out = jax.device_get(plain.programs.generate(plain.weights, placed))
  columns = np.asarray(
    scores(
      lm.weights,
      placed._replace(tokens_BL=out.tokens_BL, limit_B=out.lengths_B),
      target=lm.target.model,
      draft=lm.q,
      chunk=lm.options.chunk,
    )
  )
  texts = []
  for row, item in enumerate(batch):
    new = slice(int(request.lengths_B[row]), int(out.lengths_B[row]))
    # Nine digits hold a float32.
    p, q, *rest = (
      [float(f'{x:.9g}') for x in column] for column in columns[:, row, new]
    )
    if out.info.broken_B[row] or not all(map(math.isfinite, (*p, *q))):
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
  rules = [lenient.make(l) for l in LENIENCES]

  def columns(index_T, *logits):
    p_BTV, q_BTV = (
      sampling_lib.probabilities(x, request.sampling) for x in logits
    )
    scored = types.Scores(logits[0], request.sampling)
    kept, distance = [], []
    for rule in rules:
      kept_BTV, emitted_BTV = jnp.minimum(p_BTV, q_BTV), p_BTV
      if rule.kept is not None and rule.emitted is not None:
        kept_BTV = rule.kept(p_BTV, q_BTV, scored)
        emitted_BTV = rule.emitted(p_BTV, q_BTV, scored)
      kept.append(jnp.sum(kept_BTV, -1))
      distance.append(jnp.sum(jnp.abs(emitted_BTV - p_BTV), -1) / 2)
    tokens_BT = forward.at(request.tokens_BL, index_T)
    # Greedy p and q are one-hot even where the logits are NaN.
    both = [
      jnp.where(jnp.isfinite(jnp.max(x, -1)), chain.pick(y, tokens_BT), jnp.nan)
      for x, y in zip(logits, (p_BTV, q_BTV), strict=True)
    ]
    return [*both, *kept, *distance]

  readers = (target, weights.target), (draft, weights.draft)
  found = forward.score(
    readers, request.tokens_BL, request.limit_B, columns, chunk=chunk
  )
  return jnp.stack(found)


def check_output(path: str) -> pathlib.Path:
  """Checks the path of a new trace before any work.

  Raises:
    ValueError: no path, no folder to write in, or an existing file.
  """
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
  lines = list(files.read_jsonl(path))
  header = lines[0][1] if lines else {}
  if header.get('format') != FORMAT or len(lines) < 2:
    raise ValueError(
      f'{path}: not a trace with texts, or of another version than '
      f'{FORMAT!r}: record it again'
    )
  texts = []
  for where, row in lines[1:]:
    try:
      text = Text(**row)
      columns = [text.p, text.q, *text.kept, *text.distance]
      lengths = {len(x) for x in (text.tokens, *columns)}
      whole = len(columns) == 2 + 2 * len(header['leniences'])
    except TypeError:
      lengths, whole = set(), False
    if not whole or len(lengths) != 1 or lengths == {0}:
      raise ValueError(f'{where}: not a text of a trace: record it again')
    texts.append(text)
  return Trace(header, texts)
