"""What a record holds, against the table models' exact distributions."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specdec_jax import build, decode, record, types
from specdec_jax.certify import table_model as tables
from specdec_jax.drafters import lm as lm_drafter
from tests import fakes

V, K, NEW = 7, 3, 17
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 0]]
# Two rows sample, the last is greedy; the first stops somewhere at 0.
TEMPERATURES = (0.7, 1.3, 0.0)
TOP_P = (0.9, 1.0, 1.0)


@pytest.fixture(scope='module')
def ran(all_compile_in_less_time):
  """(engine, request, Output of generate, Output and windows of record)."""
  with jax.enable_x64(True):
    model = fakes.table_model(V)
    own = dict(source='', label='', tokenizer=None, own=model)
    target = build.LanguageModel(params=fakes.table(1, V), **own)
    near = fakes.table(1, V) + fakes.table(2, V, scale=0.7)
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
    drafter = lm_drafter.make(model, gamma=K)
    options = decode.Options(chunk=4)
    engine = dataclasses.replace(
      build.engine(target, drafter, options=options),
      weights=types.Weights(target.params, near),
      q=model,
    )
    plain = engine.programs.generate(engine.weights, request)
    yield engine, request, jax.device_get(plain), *record.run(engine, request)


@pytest.fixture(scope='module')
def described(ran):
  """Records with q from the draft model, and with what the drafter reports."""
  engine, request, _, out, rows = ran
  with jax.enable_x64(True):
    yield [
      record.describe(
        dataclasses.replace(engine, q=q), request, out, rows, setting={}
      )
      for q in (engine.q, None)
    ]


def test_windows_are_what_the_counters_count(ran):
  _, request, plain, out, rows = ran
  jax.tree.map(np.testing.assert_array_equal, plain, out)
  info = out.info
  for row, found in enumerate(rows):
    reply = slice(int(request.lengths_B[row]), int(out.lengths_B[row]))
    text, origins = out.tokens_BL[row, reply], info.origin_BL[row, reply]
    assert sum(w.emitted for w in found) == len(text)
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


def distribution(params, prefix, row):
  """The exact one after a prefix: at temperature 1, whole, if greedy."""
  t, top_p = TEMPERATURES[row], TOP_P[row]
  return tables.probabilities(tables.row_of(params, prefix), t or 1, 0, top_p)


def test_p_q_and_entropy_are_the_tables(ran, described):
  weights, refused = ran[0].weights, 0
  same = functools.partial(np.testing.assert_allclose, atol=1e-12)
  for row, t in enumerate(described[0]):
    assert t.prompt == PROMPTS[row]
    for i, token in enumerate(t.tokens):
      prefix = t.prompt + t.tokens[:i]
      p_V = distribution(weights.target, prefix, row)
      q_V = distribution(weights.draft, prefix, row)
      bits = -np.sum(p_V[p_V > 0] * np.log2(p_V[p_V > 0]))
      same((t.p[i], t.q[i], t.entropy[i]), (p_V[token], q_V[token], bits))
      if (x := t.refused[i]) >= 0:
        same((t.refused_p[i], t.refused_q[i]), (p_V[x], q_V[x]))
    expected = {
      w.start + w.accepted: w.draft[w.accepted]
      for w in t.windows
      if w.accepted < K and w.emitted == w.accepted + 1
    }
    assert {i: x for i, x in enumerate(t.refused) if x >= 0} == expected
    refused += len(expected)
  assert refused > 3


def test_what_the_drafter_says_of_its_q_is_the_models(described):
  checked = 0
  # Of a greedy drafter, the last row, q is 1.
  for by_model, own in list(zip(*described, strict=True))[:-1]:
    assert by_model.p == own.p
    for name in ('q', 'refused_q'):
      pairs = zip(getattr(by_model, name), getattr(own, name), strict=True)
      known = np.array([x for x in pairs if x[1] is not None]).reshape(-1, 2)
      np.testing.assert_allclose(known[:, 0], known[:, 1], atol=1e-12)
      checked += len(known)
  assert checked > 8
