"""What a record says of a run, against the table models' exact law."""

import dataclasses

import jax
import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.analysis import record
from specdec_jax.certify import table_model as tables
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.verify import reject
from tests import fakes

V, K, NEW = 7, 3, 17
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 0]]
# Two rows sample, the last is greedy; the first stops somewhere at 0.
TEMPERATURES = (0.7, 1.3, 0.0)
TOP_P = (0.9, 1.0, 1.0)


@pytest.fixture(autouse=True, scope='module')
def compile_in_less_time():
  """As conftest's, for the whole module."""
  name = 'jax_disable_most_optimizations'
  before = jax.config.read(name)
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


@pytest.fixture(scope='module')
def ran():
  """(request, weights, Output of generate, Output and windows of record)."""
  with jax.enable_x64(True):
    model = fakes.table_model(V)
    drafter = lm_drafter.make(model, gamma=K)
    weights = types.Weights(
      fakes.table(1, V), fakes.table(1, V) + fakes.table(2, V, scale=0.7)
    )
    request = fakes.request(
      PROMPTS,
      NEW,
      vocab=V,
      gamma=K,
      temperature=TEMPERATURES,
      top_p=TOP_P,
      seed=4,
      stop_ids=(6,),
    )
    parts = model, drafter, reject.RULE, decode.Options(chunk=4)
    plain = decode.programs(*parts).generate(weights, request)
    out, rows = record.run(*parts, weights, request)
    yield request, weights, jax.device_get(plain), out, rows


@pytest.fixture(scope='module')
def described(ran):
  """Records with q from the draft model, and with what the drafter said."""
  request, weights, _, out, rows = ran
  with jax.enable_x64(True):
    model = fakes.table_model(V)
    make = lambda draft: record.describe(
      out,
      rows,
      request,
      target=(model, weights.target),
      draft=draft,
      chunk=4,
      tokenizer=None,
      setting={},
    )
    yield make((model, weights.draft)), make(None)


@pytest.mark.more
def test_it_is_the_run_that_generate_makes(ran):
  _, _, plain, out, _ = ran
  for one, two in zip(
    jax.tree.leaves(plain), jax.tree.leaves(out), strict=True
  ):
    np.testing.assert_array_equal(one, two)


def test_windows_are_what_the_counters_count(ran):
  request, _, _, out, rows = ran
  info = out.info
  for row, found in enumerate(rows):
    start, end = int(request.lengths_B[row]), int(out.lengths_B[row])
    text, origins = (
      out.tokens_BL[row, start:end],
      info.origin_BL[row, start:end],
    )
    assert sum(w.emitted for w in found) == end - start
    assert len(found) == info.calls_B[row]
    at = 0
    hist = np.zeros(K + 1, int)
    for w in found:
      assert w.start == at and len(w.draft) == len(w.q) == K
      kept = min(w.accepted, w.emitted)
      hist[kept] += 1
      assert tuple(text[at : at + kept]) == w.draft[:kept]
      assert set(origins[at : at + kept]) <= {types.DRAFTED}
      if w.emitted > w.accepted:
        last = types.RECOVERED if w.accepted < K else types.BONUS
        assert origins[at + kept] == last
      at += w.emitted
    np.testing.assert_array_equal(hist, info.hist_BN[row])
  assert any(w.accepted > w.emitted - 1 for found in rows for w in found)


def law(params, prefix, row):
  """The exact law after a prefix: at temperature 1, whole, if greedy."""
  t, top_p = TEMPERATURES[row], TOP_P[row]
  return tables.probabilities(tables.row_of(params, prefix), t or 1, 0, top_p)


def test_p_q_and_entropy_are_the_tables(ran, described):
  weights, refused = ran[1], 0
  for row, t in enumerate(described[0]):
    assert t.prompt == PROMPTS[row]
    for i, token in enumerate(t.tokens):
      prefix = t.prompt + t.tokens[:i]
      p_V = law(weights.target, prefix, row)
      q_V = law(weights.draft, prefix, row)
      np.testing.assert_allclose(t.p[i], p_V[token], atol=1e-12)
      np.testing.assert_allclose(t.q[i], q_V[token], atol=1e-12)
      some = p_V[p_V > 0]
      bits = -np.sum(some * np.log2(some))
      np.testing.assert_allclose(t.entropy[i], bits, atol=1e-12)
      if t.refused[i] >= 0:
        refused += 1
        assert t.refused[i] != token or t.p[i] < 1
        np.testing.assert_allclose(
          (t.refused_p[i], t.refused_q[i]),
          (p_V[t.refused[i]], q_V[t.refused[i]]),
          atol=1e-12,
        )
  assert refused > 3


def test_a_refused_draft_stands_where_its_window_says(ran, described):
  for found, t in zip(ran[4], described[0], strict=True):
    expected = {
      w.start + w.accepted: w.draft[w.accepted]
      for w in found
      if w.accepted < K and w.emitted == w.accepted + 1
    }
    seen = {i: x for i, x in enumerate(t.refused) if x >= 0}
    assert seen == expected


def test_what_the_drafter_says_of_its_q_is_the_models(described):
  checked = 0
  for one, two in zip(*described, strict=True):
    by_model = dataclasses.replace(one, q=two.q, refused_q=two.refused_q)
    assert by_model.p == two.p
    if not TEMPERATURES[described[0].index(one)]:
      continue  # Of a greedy drafter q is 1.
    for i, q in enumerate(two.q):
      if q is not None:
        np.testing.assert_allclose(q, one.q[i], atol=1e-12)
        checked += 1
      if two.refused_q[i] is not None:
        np.testing.assert_allclose(two.refused_q[i], one.refused_q[i])
        checked += 1
  assert checked > 8
