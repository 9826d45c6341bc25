"""The windows of a record, and the refused drafts that counts tell."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from specdec_jax import api, build, completion, debug, decode, requests, types
from specdec_jax.certify import table_model as tables
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import tokenizer
from tests import fakes

V, K, NEW = 7, 3, 17
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 0]]
# Two rows sample, the last is greedy; the first stops somewhere.
TEMPERATURES = (0.7, 1.3, 0.0)
TOP_P = (0.9, 1.0, 1.0)
SAMPLED = dict(temperature=TEMPERATURES, top_p=TOP_P, seed=4, stop_ids=(6,))


@pytest.fixture
def engine(x64):
  model = fakes.table_model(V)
  words = tokenizer.from_bytes(256, 'bytes')
  own = dict(source='', label='', tokenizer=words, own=model)
  target = build.LanguageModel(params=fakes.table(1, V), **own)
  near = fakes.table(1, V) + fakes.table(2, V, scale=0.7)
  drafter = lm_drafter.make(model, gamma=K)
  options = decode.Options(chunk=4)
  return dataclasses.replace(
    build.engine(target, drafter, options=options),
    weights=types.Weights(target.params, near),
  )


def test_a_record_has_the_windows_of_an_answer_and_what_they_were_drawn_from(
  engine,
):
  """q is the table's own, under the row's settings; 1 in the greedy row."""
  items = requests.items(PROMPTS)
  each = [
    completion.Settings(
      t, top_p=p, seed=4, max_new_tokens=NEW, stop_ids=6, record=True
    )
    for t, p in zip(TEMPERATURES, TOP_P, strict=True)
  ]
  answered = lambda each: dict(
    api.answers(engine, [*map(ask, items, each)], rows=3)
  )
  ask = functools.partial(api.ask, engine.target)
  found = answered(each)
  plain = [dataclasses.replace(x, record=False) for x in each]
  assert found == answered(plain)
  for i, x in found.items():
    text, windows = [*PROMPTS[i]], x.record.windows
    assert len(windows) == x.metrics['target_calls']
    for w in windows:
      drafts = w.tokens[: w.origins.count('drafted')]
      drafts += [token for token, _ in w.refused]
      for k, (token, q) in enumerate(zip(drafts, w.q, strict=True)):
        row_V = tables.row_of(engine.weights.draft, text + drafts[:k])
        q_V = tables.probabilities(row_V, TEMPERATURES[i], 0, TOP_P[i])
        np.testing.assert_allclose(q, q_V[token], atol=1e-12)
      text += w.tokens
    assert text == [*PROMPTS[i], *x.tokens]
    assert [o for w in windows for o in w.origins] == x.origins


def children(parents_K, node: int) -> list[int]:
  return [k for k, parent in enumerate(parents_K) if parent == node]


@pytest.mark.parametrize('levels, new', [((), NEW), ((3, 2), NEW), ((), 1)])
def test_counts_tell_the_refused_drafts_of_the_last_window(engine, levels, new):
  """Those behind the accepted ones; of a tree the first that was refused.

  Of none behind a cut: of many rows of one token, some end at one that was
  right.
  """
  drafter = lm_drafter.make(engine.target.own, gamma=K, levels=levels)
  loop = engine.target.model, debug.watched(drafter), engine.rule
  programs, weights = decode.programs(*loop, engine.options), engine.weights
  prompts, how = PROMPTS, SAMPLED
  if new == 1:
    prompts, how = [[i] for i in range(V)] * 5, dict(temperature=1.0, seed=4)
  request = fakes.request(prompts, new, vocab=V, gamma=drafter.gamma, **how)
  state, info = programs.start(weights, request)
  seen, cut = 0, 0
  while np.asarray(state.live_B).any():
    live_B = np.array(state.live_B)
    state, info = programs.step(weights, request, state, info)
    inner, *window = state.drafter
    state = state._replace(drafter=inner)
    draft, outcome = jax.device_get(window)
    for row in np.flatnonzero(live_B):
      accepted, behind = outcome.accepted_B[row], []
      if levels:
        path = outcome.path_BK[row, :accepted]
        last = path[-1] if accepted else -1
        behind = children(draft.parents_BK[row], last)[:1]
      elif draft.count_B[row] > accepted:
        behind = range(accepted, draft.count_B[row])
      whole = outcome.emitted_B[row] > accepted
      wanted = [draft.tokens_BK[row, k] for k in behind] if whole else []
      refused = [x for x in np.array(info.refused_BK[row]).tolist() if x >= 0]
      assert refused == wanted
      seen += len(refused)
      cut += not whole
  assert seen > 4 and cut
