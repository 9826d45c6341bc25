"""Planted ties are ties, planted bugs are bugs, in greedy and in sampling."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, requests, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.eval import audit
from specdec_jax.verify import coupled
from tests import fakes

V, LENGTH, GAMMA = 16, 32, 3
PROMPT = (3, 1, 4)


def noisy(model: types.Model, size: float) -> types.Model:
  """A model whose logits depend on the width of the pass."""

  def head(params, hidden):
    logits = model.head(params, hidden)
    shift = size * (hidden.shape[-2] > 1)
    sign = jnp.where(jnp.arange(V) % 2, 1.0, -1.0)
    return logits + shift * sign.reshape((1,) * (logits.ndim - 1) + (V,))

  return model._replace(head=head)


def run(model, params, **sampling):
  """Plain decoding of PROMPT, 8 tokens."""
  request = requests.make(
    [PROMPT], ids=V, context=64, max_new_tokens=8, length=LENGTH, **sampling
  )
  programs = decode.programs(model, decode.PLAIN, coupled.RULE)
  out = programs.generate(types.Weights(params), request)
  return np.asarray(out.tokens_BL)[0, 3 : int(out.lengths_B[0])].tolist()


def find(model, params, case, **changes):
  options = dict(gamma=GAMMA, chunk=8, length=LENGTH) | changes
  return audit.audit(model, params, case, **options)


@pytest.fixture(name='params')
def _params():
  return 3 * jax.random.normal(jax.random.key(0), (5, V, V))


def test_identical(params):
  text = run(fakes.table_model(V), params)
  found = find(fakes.table_model(V), params, audit.Case(PROMPT, text, text))
  assert found.verdict == 'identical'


def test_swapped_token_is_a_bug(params):
  model = noisy(fakes.table_model(V), 1e-4)
  text = run(model, params)
  wrong = text[:4] + [(text[4] + 1) % V] + text[5:]
  found = find(model, params, audit.Case(PROMPT, text, wrong))
  assert found.verdict == 'BUG'
  assert (found.position, found.plain, found.other) == (4, text[4], wrong[4])
  assert found.gap > 4 * found.noise > 0


def test_near_tie_is_a_tie_and_its_size_counts(params):
  """The runner-up is put `gap` below the best of the fifth step."""
  model = noisy(fakes.table_model(V), 1e-4)
  text = run(model, params)
  prefix = [*PROMPT, *text[:4]]
  row = params[fakes.prefix_hash(prefix) % 5, prefix[-1]]
  second = int(jnp.argsort(-row)[1])
  other = text[:4] + [second] + text[5:]
  for gap, verdict in ((1e-4, 'tie'), (3.9e-4, 'tie'), (4.3e-4, 'BUG')):
    near = params.at[fakes.prefix_hash(prefix) % 5, prefix[-1], second].set(
      row.max() - gap
    )
    found = find(model, near, audit.Case(PROMPT, text, other))
    assert found.verdict == verdict, (gap, found)
    np.testing.assert_allclose(found.gap, gap, rtol=0.02)
    np.testing.assert_allclose(found.noise, 1e-4, rtol=0.02)


def test_large_noise_is_itself_a_bug(params):
  model = noisy(fakes.table_model(V), 0.5)
  text = run(model, params)
  wrong = text[:4] + [(text[4] + 1) % V] + text[5:]
  case = audit.Case(PROMPT, text, wrong)
  assert 'relative noise' in find(model, params, case).reason
  assert 'relative' not in find(model, params, case, relative_limit=None).reason


def test_text_that_stops_early_is_a_bug(params):
  text = run(fakes.table_model(V), params)
  case = audit.Case(PROMPT, text, text[:-1])
  assert find(fakes.table_model(V), params, case).verdict == 'BUG'


@pytest.mark.parametrize(
  'settings',
  [
    dict(temperature=0.7),
    dict(temperature=1.3, top_k=4),
    dict(temperature=1.0, top_p=0.6),
    dict(temperature=0.9, top_k=6, top_p=0.8),
  ],
)
def test_sampled_token_needs_no_change(params, settings):
  """The race of the audit is the race of decoding: it names every token."""
  settings = dict(seed=11, request=5) | settings
  text = run(fakes.table_model(V), params, **settings)
  case = audit.Case(PROMPT, text, text, **settings)
  for i, token in enumerate(text):
    prefix = [*PROMPT, *text[:i]]
    logits_V = np.asarray(params[fakes.prefix_hash(prefix) % 5, prefix[-1]])
    needs = [audit.needed(logits_V, x, case, len(prefix)) for x in range(V)]
    assert needs[token] == 0
    assert sum(n == 0 for n in needs) == 1


def test_needed_is_what_moves_a_sampled_token(params):
  """Logits moved by a little more than `needed` do emit the other token."""
  case = audit.Case(PROMPT, (), (), temperature=0.8, seed=3, request=2)
  logits_V = np.asarray(params[0, 0])
  # By hand: the seed, the request, the role of emitted tokens, the position.
  key = jax.random.key(np.uint32(3))
  for part in (case.request, 2, 9):
    key = jax.random.fold_in(key, part)
  arrival_V = np.asarray(sampling_lib.exponential(key, V, jnp.float32))
  for token in range(V):
    need = audit.needed(logits_V, token, case, 9)
    for extra, wins in ((1e-3, True), (-1e-3, False)):
      moved_V = logits_V.astype(np.float64)
      moved_V[token] += need + extra
      emitted = int(np.argmax(moved_V / 0.8 - np.log(arrival_V)))
      if need or wins:
        assert (emitted == token) == wins


def test_token_at_the_edge_of_top_k_is_a_tie_and_one_far_out_is_not():
  logits_V = np.array([2.0, 1.0, 1.0 - 1e-5, -3.0])
  case = audit.Case(PROMPT, (), (), temperature=1.0, top_k=2)
  # Whatever the race: token 2 must pass the cut, 1e-5 away; 3 is far outside.
  for request in range(20):
    each = dataclasses.replace(case, request=request)
    needs = [audit.needed(logits_V, x, each, 9) for x in range(4)]
    assert needs[3] >= 3.9
    assert needs[2] >= 1e-5 * 0.99
    winner = needs.index(0)
    assert winner in (0, 1)
