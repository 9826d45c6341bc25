"""The windows of a record, against the counters and the table models."""

import dataclasses

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
def ran():
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
    )
    plain = engine.programs.generate(engine.weights, request)
    yield engine, request, jax.device_get(plain), *record.run(engine, request)


@pytest.mark.more
def test_windows_are_what_the_counters_count(ran):
  _, request, plain, out, rows = ran
  jax.tree.map(np.testing.assert_array_equal, plain, out)
  info = out.info
  for row, found in enumerate(rows):
    reply = slice(int(request.lengths_B[row]), int(out.lengths_B[row]))
    text, origins = out.tokens_BL[row, reply], info.origin_BL[row, reply]
    assert [t for w in found for t in w.tokens] == text.tolist()
    assert len(found) == info.calls_B[row]
    at = 0
    hist = np.zeros(K + 1, int)
    for w in found:
      assert len(w.draft) == len(w.q) == K
      kept = min(w.accepted, len(w.tokens))
      hist[kept] += 1
      assert w.tokens[:kept] == w.draft[:kept]
      assert set(origins[at : at + kept]) <= {types.DRAFTED}
      if len(w.tokens) > w.accepted:
        last = types.RECOVERED if w.accepted < K else types.BONUS
        assert origins[at + kept] == last
      at += len(w.tokens)
    np.testing.assert_array_equal(hist, info.hist_BN[row])
  assert any(w.accepted > len(w.tokens) - 1 for found in rows for w in found)


def test_q_is_what_each_draft_was_drawn_from(ran):
  """The table's own, under the row's settings; 1 in the greedy row."""
  engine, request, _, _, rows = ran
  for prompt, t, top_p, found in zip(
    PROMPTS, TEMPERATURES, TOP_P, rows, strict=True
  ):
    text = [*prompt]
    for w in found:
      for k, (token, q) in enumerate(zip(w.draft, w.q, strict=True)):
        row_V = tables.row_of(engine.weights.draft, text + w.draft[:k])
        q_V = tables.probabilities(row_V, t, 0, top_p)
        np.testing.assert_allclose(q, q_V[token], atol=1e-12)
      text += w.tokens


@pytest.mark.parametrize('levels', [(), (3, 2)])
def test_counts_tell_the_refused_drafts_of_the_last_window(ran, levels):
  """Those behind the accepted ones; of a tree the first that was refused."""
  engine, request, *_ = ran
  if levels:
    drafter = lm_drafter.make(engine.target.own, gamma=K, levels=levels)
    engine = dataclasses.replace(engine, drafter=drafter)
  loop = engine.target.model, engine.drafter, engine.rule, engine.options
  programs, weights = decode.programs(*loop), engine.weights
  _, rows = record.run(engine, request)
  state, info = programs.start(weights, request)
  seen = 0
  while np.asarray(state.live_B).any():
    live_B = np.array(state.live_B)
    state, info = programs.step(weights, request, state, info)
    for row, found in enumerate(rows):
      refused = [x for x in np.array(info.refused_BK[row]).tolist() if x >= 0]
      w = found[int(info.calls_B[row]) - 1]
      cut = len(w.tokens) <= w.accepted
      assert refused == ([] if cut else w.draft[w.accepted :])
      seen += live_B[row] * len(refused)
  assert seen > 4


def test_nothing_is_told_of_drafts_behind_a_cut(ran):
  """Rows of one token: what was refused behind one that was right."""
  engine = ran[0]
  prompts = [[i] for i in range(V)] * 5
  sampled = dict(temperature=1.0, seed=4)
  request = fakes.request(prompts, 1, vocab=V, gamma=K, **sampled)
  out, rows = record.run(engine, request)
  for told_K, (w,) in zip(out.info.refused_BK, rows, strict=True):
    wanted = [] if w.accepted else w.draft
    assert [x for x in told_K.tolist() if x >= 0] == wanted
  assert {0, 1, 2} <= {w.accepted for (w,) in rows}
