"""Finds by measurement how a published draft is to be read.

Taps, norms, feedback and the order of what is joined differ from trainer to
trainer. A folder may not say what it has, or say it wrongly, and a draft that
is misread still drafts, a tenth as well. So under each reading that a format
leaves open the draft drafts in the target's own greedy text, teacher-forced,
and runs as it agrees best.
"""

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from specdec_jax import forward, hosts, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.io import files, load

# How a draft is read: for each question that its format leaves open an answer,
# or '', which is what its folder claims.
Reading = tuple[str, ...]
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
  """What was found of a draft for a target.

  reading: the one that it runs under.
  agreed: {words of a reading: the share of the text's tokens that are a draft's
    first choice, for the first draft of a window, the second, ...}.
  unigram: the share of the text's most frequent token.
  """

  reading: Reading
  agreed: dict[str, list[float]]
  unigram: float


def words(reading: Reading) -> str:
  return ', '.join(filter(None, reading)) or 'as it claims'


def find(
  target: load.LanguageModel,
  stamp: Sequence[Any],
  digest: Callable[[], str],
  questions: Callable[[], Sequence[Sequence[str]]],
  make: Callable[[Reading], tuple[types.Drafter, types.Params]],
) -> Result:
  """The reading under which a draft agrees best with a target.

  Measured once for both: the result is kept in the cache folder.

  stamp, digest: of the draft; the first differs once it has other content.
  questions: for each that the format leaves open, the answers besides ''.
  make: (drafter of DRAFTS tokens or fewer, weights.draft) under a reading.
  """
  if target.start is not None:
    raise ValueError(
      f'target {target.label} has an encoder: how its draft is to be read '
      'cannot be measured; give check=off to take it as it claims'
    )
  return target.once(
    ('check', *stamp), lambda: _kept(target, digest(), questions(), make)
  )


def _kept(target, draft: str, questions, make) -> Result:
  own = target.digest, target.arithmetic
  facts = json.dumps([*own, draft, questions, PROMPTS])
  name = f'{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json'
  path = files.cache_folder() / 'readings' / name
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
  tokens_BL, begin_B = own_text(target)
  at_BT = begin_B[:, None] + np.arange(BEGUN)[None]
  answers_BT = np.take_along_axis(tokens_BL, at_BT, 1)
  most = np.unique(answers_BT, return_counts=True)[1].max()
  unigram = float(most / answers_BT.size)
  features = functools.cache(
    lambda taps: _features(target.model, taps, target.params, tokens_BL)
  )

  tried: dict[Reading, np.ndarray] = {}

  def hits(reading: Reading) -> np.ndarray:
    """[X, K]: whether each draft of each window is the text's token."""
    if reading not in tried:
      drafter, params = made.pop(reading, None) or make(reading)
      args = types.Weights(target.params, params), tokens_BL, begin_B
      hits_TBK = _agrees(drafter, *args, features(drafter.taps))
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
  """Changes the answer to one question as long as that is better.

  If what is found is not what a draft should be, all readings are tried.
  """
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
  """Whether one agrees more often, by three standard errors."""
  won, lost = (one & ~other).sum(), (other & ~one).sum()
  return won - lost > 3 * np.sqrt(won + lost)


def judge(
  where: str, target: load.LanguageModel, result: Result | None
) -> Reading:
  """The reading that was found; a warning if it is not what is claimed, or bad.

  A draft that does no better than a unigram under any reading is refused.

  where: what errors and warnings begin with.
  result: of `find`; None: nothing was measured, and it runs as it claims.
  """
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


def own_text(target: load.LanguageModel) -> tuple[np.ndarray, np.ndarray]:
  """(prompts and the target's own greedy answers [B, L], where those begin).

  BEGUN * len(PROMPTS) tokens are compared.
  """
  encode, layout = target.tokenizer.encode, target.layout
  if target.tokenizer.chat_template:
    encode = lambda words: target.tokenizer.encode_chat(
      [{'role': 'user', 'content': words}]
    )
  # As many rows as a mesh divides.
  data = layout.mesh.shape['data'] if layout else 1
  count = -(-len(PROMPTS) // data) * data
  prompts = [encode(PROMPTS[i % len(PROMPTS)]) for i in range(count)]
  begin_B = np.array([len(x) for x in prompts], np.int32)
  new = BEGUN + DRAFTS - 1
  tokens_BL = np.zeros((count, begin_B.max() + new), np.int32)
  for row, prompt in zip(tokens_BL, prompts, strict=True):
    row[: len(prompt)] = prompt
  made_BL = _answered(target.model, new, target.params, tokens_BL, begin_B)
  return hosts.fetch(made_BL), begin_B


@functools.partial(jax.jit, static_argnums=(0, 1))
def _answered(model: types.Model, new: int, params, tokens_BL, begin_B):
  """The prompts with `new` greedy tokens behind each."""
  B, L = tokens_BL.shape
  cache = forward.open_cache(model, params, B, L)
  cache, _ = forward.prefill(
    model, params, tokens_BL, begin_B - 1, cache, chunk=L
  )

  def step(carry, i):
    tokens_BL, cache = carry
    at_B = begin_B - 1 + i
    last_B1 = jnp.take_along_axis(tokens_BL, at_B[:, None], 1)
    hidden, _, cache = forward.read(
      model, params, last_B1, at_B, cache, slots=L
    )
    next_B = jnp.argmax(model.head(params, hidden[:, 0]), -1)
    at = jnp.arange(B), at_B + 1
    return (tokens_BL.at[at].set(next_B.astype(jnp.int32)), cache), None

  return jax.lax.scan(step, (tokens_BL, cache), jnp.arange(new))[0][0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _features(model: types.Model, taps: tuple[int, ...], params, tokens_BL):
  """The taps of a text, [B, L, E]."""
  B, L = tokens_BL.shape
  cache, start_B = model.init_cache(B, L), jnp.zeros(B, jnp.int32)
  read = forward.read(
    model, params, tokens_BL, start_B, cache, slots=L, taps=taps
  )
  return forward.concat(read[1])


@functools.partial(jax.jit, static_argnums=0)
def _agrees(drafter, weights, tokens_BL, begin_B, features_BLE):
  """Whether a drafter's first choice is the text's token: [T, B, K].

  Each of T windows begins one token after the last. What is drawn in it is the
  text's token too.
  """
  B, K = len(begin_B), drafter.gamma

  def context(lengths_B) -> types.Context:
    sampling = sampling_lib.settings(B, 1.0)
    live_B, gamma_B = jnp.ones(B, bool), jnp.full(B, K, jnp.int32)
    return types.Context(tokens_BL, lengths_B, live_B, sampling, gamma_B)

  def window(state, lengths_B):
    at_BN = lengths_B[:, None] + jnp.arange(-1, K)[None]
    true_BK = jnp.take_along_axis(tokens_BL, at_BN[:, 1:], 1)
    noise = types.Noise(
      jnp.zeros((B, K)),
      lambda offset, q_BV: true_BK[:, offset],
      lambda offset_B, weights_BV: jnp.zeros(B, jnp.int32),
    )
    draft, state, _ = drafter.propose(
      weights, state, context(lengths_B), noise, None
    )
    one_B = jnp.ones(B, jnp.int32)
    outcome = types.Outcome(one_B, one_B, one_B)
    features_BNE = jnp.take_along_axis(features_BLE, at_BN[..., None], 1)
    after = context(lengths_B + 1)
    state = drafter.commit(state, after, outcome, features_BNE)
    return state, jnp.argmax(draft.q_BKV, -1) == true_BK

  state = drafter.init(weights, context(begin_B), features_BLE)
  starts_TB = begin_B[None] + jnp.arange(BEGUN)[:, None]
  return jax.lax.scan(window, state, starts_TB)[1]
