"""The drafter that is a model: what it samples, and what it has read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, sampling, types
from specdec_jax.drafters import branch, lm
from specdec_jax.io import sources
from specdec_jax.models import eagle
from tests import fakes

V, L, GAMMA = 7, 16, 3


def start(texts, top_p=1.0, model=None):
  """(drafter, weights, context, state) after these texts."""
  drafter = lm.make(model or fakes.table_model(V), gamma=GAMMA)
  weights = types.Weights((), jnp.asarray(fakes.table(0, V)))
  context = types.Context(
    jnp.asarray(fakes.pad(texts, L)),
    jnp.array([len(text) for text in texts], jnp.int32),
    jnp.ones(len(texts), bool),
    sampling.settings(len(texts), 0.9, 0, top_p),
    jnp.full(len(texts), GAMMA),
  )
  return drafter, weights, context, drafter.init(weights, context, None)


def drawing(choose, rows: int) -> types.Noise:
  """Noise that draws what `choose` makes of each row of q."""
  draw = lambda offset, q_BV: choose(q_BV, -1).astype(jnp.int32)
  return types.Noise(jnp.zeros((rows, GAMMA)), draw, draw)


def test_what_is_sampled_is_what_is_told():
  """The array that is drawn from is the q of the draft, to the last bit."""
  drafter, weights, context, cache = start([[1, 2, 3], [4, 5]])
  given = []

  def draw(offset, q_BV):
    jax.debug.callback(given.append, q_BV, ordered=True)
    return jnp.argmin(q_BV, -1).astype(jnp.int32)  # not the likeliest

  noise = types.Noise(jnp.zeros((2, GAMMA)), draw, draw)
  draft, _, _ = drafter.propose(weights, cache, context, noise, ())
  jax.effects_barrier()
  given_BKV = np.stack(given, 1)
  np.testing.assert_array_equal(given_BKV, draft.q_BKV)
  np.testing.assert_array_equal(given_BKV.argmin(-1), draft.tokens_BK)
  assert draft.count_B.tolist() == [GAMMA] * 2


def test_nothing_is_drafted_past_the_context_of_the_draft():
  """Of 5 tokens it may read all, to draw the sixth."""
  model = fakes.table_model(V)._replace(context=5)
  texts = [[1] * n for n in (3, 4, 5, 6, 9)]
  drafter, weights, context, state = start(texts, model=model)
  noise = drawing(jnp.argmax, len(texts))
  draft, _, _ = drafter.propose(weights, state, context, noise, ())
  assert draft.count_B.tolist() == [3, 2, 1, 0, 0]


def test_a_draft_with_a_shorter_context_is_said(monkeypatch):
  said = []
  log = lambda level, form, n, *x: said.append(form % x)
  monkeypatch.setattr(lm.logging, 'log_first_n', log)
  opened = sources.open_source('random:tiny')
  sizes = dict(lm_config=opened.config, params={})
  target = build.LanguageModel('x', 'a target', opened.tokenizer, **sizes)
  config = dataclasses.replace(target.config, context=64)
  short = dataclasses.replace(target, lm_config=config, label='a draft')
  for draft in (target, short):
    build.engine(target, draft, gamma=1)
  (line,) = said
  assert line.startswith('draft a draft reads texts of up to 64 tokens, target')


@pytest.mark.more
def test_q_is_the_law_after_everything_said_so_far():
  """Each q follows the prompt and the proposals before it, in any window."""
  drafter, weights, context, cache = start([[1, 2, 3], [4]], top_p=0.8)

  @jax.jit
  def propose(weights, cache, context):
    noise = drawing(jnp.argmax, 2)
    return drafter.propose(weights, cache, context, noise, ())

  texts = [[1, 2, 3], [4]]
  # Windows that emit all drafts and one more, or only one token.
  for emitted_B in ((GAMMA + 1, 1), (2, GAMMA + 1), (1, 1)):
    draft, cache, _ = propose(weights, cache, context)
    for b, text in enumerate(texts):
      said = list(text)
      for k in range(GAMMA):
        wanted = sampling.probabilities(
          fakes.row_of(weights.draft, said)[None, None],
          jax.tree.map(lambda x, b=b: x[b : b + 1], context.sampling),
        )[0, 0]
        np.testing.assert_array_equal(draft.q_BKV[b, k], wanted)
        said.append(int(draft.tokens_BK[b, k]))
      # As if all but the last of these had been accepted.
      text += [*said[len(text) :], 0][: emitted_B[b] - 1] + [6 - b]
    context = context._replace(
      tokens_BL=jnp.asarray(fakes.pad(texts, L)),
      lengths_B=jnp.array([len(text) for text in texts], jnp.int32),
    )
    emitted = types.Outcome(None, None, jnp.array(emitted_B))
    cache = drafter.commit(cache, context, emitted, None)


def test_drafting_stops_where_the_draft_is_not_sure():
  """Before the first law whose peak, at temperature 1, is low; row by row."""
  least = 0.45
  drafter, weights, context, cache = start([[1, 2, 3], [4], [2, 2], [5, 6]])
  drafter = lm.make(fakes.table_model(V), gamma=GAMMA, min_confidence=least)
  noise = drawing(jnp.argmin, 4)
  draft, _, _ = drafter.propose(weights, cache, context, noise, ())
  counts = []
  for text in ([1, 2, 3], [4], [2, 2], [5, 6]):
    said, going = list(text), 0
    for _ in range(GAMMA):
      row_V = np.asarray(fakes.row_of(weights.draft, said), np.float64)
      if (np.exp(row_V) / np.exp(row_V).sum()).max() < least:
        break
      going += 1
      # An unlikely token says nothing of whether to go on.
      said.append(int(np.argmin(row_V)))
    counts.append(going)
  assert draft.count_B.tolist() == counts
  assert len(set(counts)) > 1


@pytest.mark.parametrize('temperature', [None, 0.0, 1.0])
def test_a_draft_of_few_ids_draws_as_one_of_all(temperature):
  """Greedily from these alone; where no row can be else, without a q."""
  rng, ids = np.random.default_rng(0), jnp.array([6, 1, 4])
  some = jnp.asarray(rng.normal(size=(8, 1, 3)), jnp.float32)
  few = eagle.Logits(some, ids, 7)
  all_B1V = np.full((8, 1, 7), -np.inf, np.float32)
  all_B1V[..., ids] = some
  settings = sampling.settings(8, temperature or 0.0)
  if temperature is None:
    settings = settings._replace(temperature_B=None)
  rows = jnp.arange(8, dtype=jnp.uint32)
  noise = sampling.noise(rows, rows, rows, settings, gamma=2, coupled=False)
  context = types.Context(*[None] * 5)._replace(sampling=settings)
  one, two = (
    branch.draw(noise, context, eagle.every(x), 0)
    for x in (few, jnp.asarray(all_B1V))
  )
  for x, y in zip(one, two, strict=True):
    if x is not None or y is not None:
      np.testing.assert_array_equal(x, y)
  assert (one[1] is None) == (temperature is None)
  if not temperature:
    np.testing.assert_array_equal(one[0], all_B1V[:, 0].argmax(-1))
