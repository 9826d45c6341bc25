"""Finds by measurement how a published draft is to be read.

Taps, norms, feedback and the order in which inputs are joined differ from
trainer to trainer. A folder may not say what it has, or say it wrongly, and a
misread draft still drafts, a tenth as well. So the draft drafts in the target's
own greedy text, teacher-forced, under each reading that its format leaves open,
and runs as it agrees best.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from specdec_jax import along, decode, forward, hosts, program, requests, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.io import files, load
from specdec_jax.io.published.claims import Reading
from specdec_jax.verify import reject

PROMPTS = (
  'Explain how tides work.',
  'Write a short story about a lighthouse.',
  'How do I bake bread at home?',
  'Tell me about the history of Rome.',
  'Write a Python function that sorts a list.',
  'Why is the sky blue?',
  'Give me advice for a job interview.',
  'Describe the life of a honey bee.',
)
# Tokens of each answer at which a draft begins; drafts that are compared; the
# agreement of the first that is little for a draft of its target.
BEGUN, DRAFTS, LOW = 25, 3, 0.3


class Result(NamedTuple):
  """What was found for a draft and a target; it runs under `reading`.

  agreed: {words for a reading: the share of the text's tokens that are a
    draft's first choice, for the first draft in a window, the second, ...}.
  unigram: the most frequent token's share of the text.
  """

  reading: Reading
  agreed: dict[str, list[float]]
  unigram: float


def words(reading: Reading) -> str:
  return ', '.join(filter(None, reading)) or 'as it claims'


class Form(NamedTuple):
  """How a drafter of this name reads published drafts.

  paths: source -> a draft's files.
  questions: (source, target) -> for each that the format leaves open, the
    answers besides ''.
  fit: (source, target, reading) -> (settings, weights.draft).
  make: (settings, weights.draft, target's model) -> a drafter to check it with,
    which drafts DRAFTS tokens or fewer.
  """

  name: str
  paths: Callable[..., list[pathlib.Path]]
  questions: Callable[..., Sequence[Sequence[str]]]
  fit: Callable[..., tuple[Any, Any]]
  make: Callable[..., types.Drafter]


def find(
  form: Form, target: load.LanguageModel, source: str | os.PathLike
) -> Result:
  """Finds the reading under which a draft agrees best with a target. Measures
  once for both: the result is kept in the cache folder."""
  if target.start is not None:
    raise ValueError(
      f'target {target.label} has an encoder: how its draft is to be read '
      'cannot be measured; give check=off to take it as it claims'
    )
  paths = form.paths(source)

  def make(reading: Reading) -> tuple[types.Drafter, types.Params]:
    settings, params = form.fit(source, target, reading)
    return form.make(settings, params, target.model), params

  def kept() -> Result:
    questions = form.questions(source, target)
    return _kept(target, files.digest(paths), questions, make)

  return target.once(('check', form.name, *files.stamp(paths)), kept)


def _kept(target, draft: str, questions, make) -> Result:
  own = target.digest, target.arithmetic
  facts = json.dumps([*own, draft, questions, PROMPTS])
  name = f'{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json'
  path = program.cache_folder() / 'readings' / name
  kept: Any = hosts.from_first(lambda: files.read_json(path, {}))
  if kept:
    return Result(tuple(kept['reading']), kept['agreed'], kept['unigram'])
  result = _measured(target, questions, make)
  # A cache that cannot be written costs time alone.
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(result._asdict()))
  return result


def _measured(target, questions, make) -> Result:
  claimed = ('',) * len(questions)
  # A draft of another target is refused here, before anything is compiled.
  made: dict[Reading, Any] = {claimed: make(claimed)}
  text = own_text(target)
  tokens_BL, begin_B = hosts.fetch((text.tokens_BL, text.lengths_B))
  at_BT = begin_B[:, None] + np.arange(BEGUN)[None]
  answers_BT = np.take_along_axis(tokens_BL, at_BT, 1)
  most = np.unique(answers_BT, return_counts=True)[1].max()
  unigram = float(most / answers_BT.size)
  features = functools.cache(
    lambda taps: _features(target.model, taps, target.params, text.tokens_BL)
  )
  tried: dict[Reading, np.ndarray] = {}

  def hits(reading: Reading) -> np.ndarray:
    """Returns [X, K]: whether each window's drafts are the text's tokens."""
    if reading not in tried:
      drafter, params = made.pop(reading, None) or make(reading)
      loop = decode.Loop(target.model, drafter, reject.RULE)
      weights = types.Weights(target.params, params)
      hits_TBK = _hits(weights, text, features(drafter.taps), loop=loop)
      tried[reading] = hosts.fetch(hits_TBK).reshape(-1, drafter.gamma)
    return tried[reading]

  best = _best(questions, hits, unigram)
  agreed = {words(x): found.mean(0).tolist() for x, found in tried.items()}
  return Result(best, agreed, unigram)


def _best(
  questions: Sequence[Sequence[str]],
  hits: Callable[[Reading], np.ndarray],
  unigram: float,
) -> Reading:
  """Changes the answer to one question as long as that is better. If what is
  found is not what a draft should be, all readings are tried."""
  top = lambda readings: max(readings, key=lambda x: hits(x).sum())
  best: Reading = ('',) * len(questions)
  while True:
    near = [
      (*best[:i], answer, *best[i + 1 :])
      for i, answers in enumerate(questions)
      for answer in ('', *answers)
    ]
    other = top([best, *near])
    if not _beats(hits(other), hits(best)):
      break
    best = other
  if hits(best)[:, 0].mean() < max(LOW, unigram):
    other = top(itertools.product(*(('', *x) for x in questions)))
    best = other if _beats(hits(other), hits(best)) else best
  return best


def _beats(one: np.ndarray, other: np.ndarray) -> bool:
  """Tells whether one agrees more often, by three standard errors."""
  won, lost = (one & ~other).sum(), (other & ~one).sum()
  return won - lost > 3 * np.sqrt(won + lost)


def judge(
  where: str, target: load.LanguageModel, result: Result | None
) -> Reading:
  """Returns the reading that was found (`find`; None: runs as it claims); warns
  if it is not as claimed, or bad. Refuses a draft that does no better than a
  unigram under any reading. Errors and warnings begin with `where`."""
  if result is None:
    return ()
  agreed = result.agreed[words(result.reading)]
  share = f'{agreed[0]:.0%} of the tokens of {target.label}'
  if agreed[0] < result.unigram:
    raise ValueError(
      f'{where}: its first drafts are {share} under the best of '
      f'{len(result.agreed)} readings, and its most frequent token is '
      f"{result.unigram:.0%}; give a draft of this target, or check='off'"
    )
  if any(result.reading):
    claimed = result.agreed[words(())]
    mean = lambda x: f'{sum(x) / len(x):.0%}'
    logging.warning(
      '%s: is not what it claims, and runs with %s: its drafts are then %s of '
      'the tokens of %s, and as it claims %s',
      *(where, words(result.reading), mean(agreed)),
      *(target.label, mean(claimed)),
    )
  if agreed[0] < LOW:
    logging.warning('%s: its first drafts are only %s', where, share)
  return result.reading


# --- the text, and a draft in it ---------------------------------------------


def own_text(target: load.LanguageModel) -> decode.Request:
  """Generates the target's own greedy answers to the prompts, as on its
  devices: BEGUN * len(PROMPTS) tokens to compare."""
  tokenizer = target.tokenizer
  chat = bool(tokenizer.chat_template)
  # As many rows as a mesh divides.
  count = requests.rows_on(target.layout, len(PROMPTS))
  some = itertools.islice(itertools.cycle(PROMPTS), count)
  prompts = [requests.encode(tokenizer, words, chat=chat) for words in some]
  items = requests.items(prompts, new=BEGUN + DRAFTS - 1)
  request = requests.make(items)
  request = requests.place(request, target.layout)
  plain = decode.programs(target.model, decode.PLAIN, reject.RULE)
  made = plain.generate(types.Weights(target.params), request)
  return request._replace(
    tokens_BL=made.tokens_BL,
    limit_B=request.lengths_B + BEGUN,
    sampling=sampling_lib.settings(count, 1.0),
    gamma_B=np.full(count, DRAFTS, np.int32),
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(model: types.Model, taps: tuple[int, ...], params, tokens_BL):
  """Computes the taps over a text, [B, L, E]."""
  B, L = tokens_BL.shape
  cache, start_B = model.init_cache(B, L), jnp.zeros(B, jnp.int32)
  read = forward.read(
    model, params, tokens_BL, start_B, cache, slots=L, taps=taps
  )
  return forward.concat(read[1])


@functools.partial(jax.jit, static_argnames='loop')
def _hits(weights, request: decode.Request, features_BLE, *, loop: decode.Loop):
  """Tells whether a drafter's first choices are the text's tokens: [T, B, K].
  In BEGUN windows; what is drawn in one is the text's token too."""

  def text(lengths_B):
    at_BK = lengths_B[:, None] + jnp.arange(loop.drafter.gamma)[None]
    return jnp.take_along_axis(request.tokens_BL, at_BK, 1)

  def noise(seed_B, request_B, lengths_B, *_, **__) -> types.Noise:
    true_BK = text(lengths_B)
    draft = lambda offset, q_BV: true_BK[:, offset]
    return types.Noise(
      jnp.zeros(true_BK.shape), draft, lambda *_: true_BK[:, 0]
    )

  def turn(own, i):
    first_B = request.lengths_B + i
    at_BN = first_B[:, None] + jnp.arange(-1, loop.drafter.gamma)[None]
    features_BNE = jnp.take_along_axis(features_BLE, at_BN[..., None], 1)
    given = weights, request, i, own, None, features_BNE
    draft, own, _ = along.window(loop._replace(noise=noise), *given)
    assert draft.q_BKV is not None
    return own, jnp.argmax(draft.q_BKV, -1) == text(first_B)

  begun = along.context(loop, request, 0)
  own = loop.drafter.init(weights, begun, features_BLE)
  return jax.lax.scan(turn, own, jnp.arange(BEGUN, dtype=jnp.int32))[1]
