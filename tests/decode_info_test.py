"""Counters on traces small enough to count by hand, in exact integers."""

import itertools

import jax
import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.bench import metrics
from specdec_jax.drafters import scripted
from specdec_jax.verify import reject
from tests import fakes

V, K, L, START = 40, 3, 40, 2
P, D, R, B, S = range(5)  # prompt, drafted, recovered, bonus, plain (single)

# name: windows as (proposed, right), new tokens, stop at new token (or None);
# then what was emitted by whom, hist, proposed, tried, accepted, whole, calls.
TRACES = {
  'all accepted, uncut': (
    [(3, 3), (3, 3)],
    8,
    None,
    [D, D, D, B, D, D, D, B],
    [0, 0, 0, 2],
    [2, 2, 2],
    [2, 2, 2],
    [2, 2, 2],
    [0, 0, 0, 2],
    2,
  ),
  'none accepted': (
    [(3, 0), (3, 0)],
    2,
    None,
    [R, R],
    [2, 0, 0, 0],
    [2, 2, 2],
    [2, 0, 0],
    [0, 0, 0],
    [2, 0, 0, 0],
    2,
  ),
  'one, then two': (
    [(3, 1), (3, 2)],
    5,
    None,
    [D, R, D, D, R],
    [0, 1, 1, 0],
    [2, 2, 2],
    [2, 2, 1],
    [2, 1, 0],
    [0, 1, 1, 0],
    2,
  ),
  'nothing proposed': (
    [(0, 0), (0, 0), (0, 0)],
    3,
    None,
    [S, S, S],
    [3, 0, 0, 0],
    [0, 0, 0],
    [0, 0, 0],
    [0, 0, 0],
    [3, 0, 0, 0],
    3,
  ),
  'short draft, whole': (
    [(1, 1), (2, 2)],
    5,
    None,
    [D, B, D, D, B],
    [0, 1, 1, 0],
    [2, 1, 0],
    [2, 1, 0],
    [2, 1, 0],
    [0, 1, 1, 0],
    2,
  ),
  'short draft, refused': (
    [(2, 1)],
    2,
    None,
    [D, R],
    [0, 1, 0, 0],
    [1, 1, 0],
    [1, 1, 0],
    [1, 0, 0],
    [0, 1, 0, 0],
    1,
  ),
  'length cuts the bonus': (
    [(3, 3)],
    3,
    None,
    [D, D, D],
    [0, 0, 0, 1],
    [1, 1, 1],
    [1, 1, 1],
    [1, 1, 1],
    [0, 0, 0, 0],
    1,
  ),
  'length cuts drafts': (
    [(3, 3)],
    1,
    None,
    [D],
    [0, 1, 0, 0],
    [1, 1, 1],
    [1, 0, 0],
    [1, 0, 0],
    [0, 0, 0, 0],
    1,
  ),
  'length meets the recovered token': (
    [(3, 2)],
    3,
    None,
    [D, D, R],
    [0, 0, 1, 0],
    [1, 1, 1],
    [1, 1, 1],
    [1, 1, 0],
    [0, 0, 1, 0],
    1,
  ),
  'length cuts the recovered token': (
    [(3, 2)],
    2,
    None,
    [D, D],
    [0, 0, 1, 0],
    [1, 1, 1],
    [1, 1, 0],
    [1, 1, 0],
    [0, 0, 0, 0],
    1,
  ),
  'stop among the accepted': (
    [(3, 3), (3, 3)],
    8,
    5,
    [D, D, D, B, D, D],
    [0, 0, 1, 1],
    [2, 2, 2],
    [2, 2, 1],
    [2, 2, 1],
    [0, 0, 0, 1],
    2,
  ),
  'stop is the recovered token': (
    [(3, 1), (3, 3)],
    8,
    1,
    [D, R],
    [0, 1, 0, 0],
    [1, 1, 1],
    [1, 1, 0],
    [1, 0, 0],
    [0, 1, 0, 0],
    1,
  ),
  'stop is the bonus': (
    [(3, 3), (3, 3)],
    8,
    3,
    [D, D, D, B],
    [0, 0, 0, 1],
    [1, 1, 1],
    [1, 1, 1],
    [1, 1, 1],
    [0, 0, 0, 1],
    1,
  ),
}


@pytest.fixture(scope='module')
def traces():
  """All traces, run as one batch: {name: Info of its row}."""
  model = fakes.table_model(V)
  for seed in range(100):
    params = fakes.table(seed, V, hashes=7, scale=3)
    request = fakes.request([[1, 2]], 12, vocab=V, length=L)
    out = decode.programs(model, decode.PLAIN, reject.RULE).generate(
      types.Weights(params), request
    )
    text = np.asarray(out.tokens_BL)[0]
    if len(set(text[2:12].tolist())) == 10:
      break
  rows = len(TRACES)
  scripts = np.tile(text, (rows, 1))
  counts = np.zeros((rows, L), np.int32)
  stop_BX = np.full((rows, 1), -1, np.int32)
  for b, (windows, _, stop, *_) in enumerate(TRACES.values()):
    at = START
    for proposed, right in windows:
      counts[b, at] = proposed
      if right < proposed:
        scripts[b, at + right] = (text[at + right] + 1) % V
      at += right + 1
    if stop is not None:
      stop_BX[b] = text[START + stop]
  request = fakes.request(
    [[1, 2]] * rows, [t[1] for t in TRACES.values()], vocab=V, length=L
  )
  out = decode.programs(model, scripted.make(gamma=K), reject.RULE).generate(
    types.Weights(params, (scripts, counts)), request._replace(stop_BX=stop_BX)
  )
  for b, n in enumerate(out.lengths_B.tolist()):
    assert out.tokens_BL[b, :n].tolist() == text[:n].tolist()
  return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize('name', TRACES)
def test_counters_of_a_trace(traces, name):
  b = list(TRACES).index(name)
  *_, origins, hist, proposed, tried, accepted, whole, calls = TRACES[name]
  info = traces.info
  n = len(origins)
  assert traces.lengths_B[b] == START + n
  assert info.origin_BL[b].tolist() == [P] * 2 + origins + [P] * (L - 2 - n)
  assert info.hist_BN[b].tolist() == hist
  assert info.proposed_BK[b].tolist() == proposed
  assert info.tried_BK[b].tolist() == tried
  assert info.accepted_BK[b].tolist() == accepted
  assert info.whole_BN[b].tolist() == whole
  assert info.calls_B[b] == calls
  windows = info.window_BL[b, START : START + n].tolist()
  assert (info.window_BL[b, START + n :] == -1).all()
  assert windows == sorted(windows) and set(windows) == set(range(calls))
  # Emitted is counted, by every way of counting.
  assert sum(hist) == calls
  assert sum(accepted) == origins.count(D)
  assert sum(i * h for i, h in enumerate(hist)) == origins.count(D)
  last = [o for o in origins if o != D]
  assert n == origins.count(D) + len(last)


def test_the_batch_is_the_sum_of_its_rows(traces):
  parts = [
    metrics.summary(metrics.rows(traces.info, slice(b, b + 1)))
    for b in range(len(TRACES))
  ]
  whole = metrics.summary(traces.info)
  for name in (
    'emitted_tokens',
    'target_calls',
    'drafted_tokens',
    'accepted_tokens',
  ):
    assert getattr(whole, name) == sum(getattr(part, name) for part in parts)
  assert whole.emitted_tokens == sum(len(t[3]) for t in TRACES.values())
  assert int(traces.info.calls) == max(t[-1] for t in TRACES.values())


@pytest.mark.parametrize(
  'names, wanted',
  [
    (
      ['one, then two'],
      dict(
        emitted_tokens=5,
        target_calls=2,
        drafted_tokens=6,
        accepted_tokens=3,
        block_efficiency=5 / 2,
        block_efficiency_uncut=5 / 2,
        draft_acceptance_rate=1 / 2,
        acceptance_per_position=[1, 1 / 2, 0],
        conditional_acceptance_per_position=[1, 1 / 2, 0],
        proposal_rate=1,
        accepted_histogram=[0, 1, 1, 0],
      ),
    ),
    (
      ['length cuts the bonus', 'all accepted, uncut'],
      dict(
        emitted_tokens=11,
        target_calls=3,
        block_efficiency=11 / 3,
        block_efficiency_uncut=4,
        draft_acceptance_rate=1,
      ),
    ),
    (
      ['nothing proposed', 'short draft, refused'],
      dict(
        emitted_tokens=5,
        target_calls=4,
        drafted_tokens=2,
        block_efficiency=5 / 4,
        draft_acceptance_rate=1 / 2,
        acceptance_per_position=[1, 0, None],
        conditional_acceptance_per_position=[1, 0, None],
        proposal_rate=1 / 4,
      ),
    ),
    (
      ['stop among the accepted', 'none accepted'],
      dict(
        emitted_tokens=8,
        target_calls=4,
        drafted_tokens=12,
        accepted_tokens=5,
        block_efficiency=2,
        block_efficiency_uncut=2,
        draft_acceptance_rate=5 / 12,
        acceptance_per_position=[1 / 2, 1 / 2, 1 / 4],
        conditional_acceptance_per_position=[1 / 2, 1, 1],
      ),
    ),
    (
      ['length cuts drafts'],
      dict(block_efficiency=1, block_efficiency_uncut=None),
    ),
  ],
  ids=lambda x: '+'.join(x) if isinstance(x, list) else '',
)
def test_summary_of_hand_traces(traces, names, wanted):
  pick = np.array([list(TRACES).index(name) for name in names])
  got = metrics.summary(metrics.rows(traces.info, pick))
  assert {key: getattr(got, key) for key in wanted} == wanted


def test_repeated_ngrams():
  assert metrics.repeated_ngrams([[1, 2, 3, 1, 2, 3]], 3) == 1 / 4
  assert metrics.repeated_ngrams([[1] * 10], 2) == 8 / 9
  assert metrics.repeated_ngrams([[1, 2]], 3) is None


def test_counts_survive_two_to_the_24():
  """Sums are integers of 64 bits, whatever the counters hold."""
  big = 2**30
  info = types.Info(
    **{
      name: np.full((4, width), big, np.int32)
      for name, width in dict(
        hist_BN=2, proposed_BK=1, tried_BK=1, accepted_BK=1, whole_BN=2
      ).items()
    },
    calls_B=np.full(4, big + 1, np.int32),
    wide=np.int32(1),
    calls=np.int32(1),
    origin_BL=np.ones((4, 3), np.int8),
    window_BL=np.zeros((4, 3), np.int32),
    broken_B=np.zeros(4, bool),
    logprob_BL=None,
  )
  got = metrics.summary(info)
  assert got.target_calls == 4 * (big + 1)
  assert got.drafted_tokens == 4 * big
  assert got.accepted_histogram == [4 * big] * 2
  assert list(itertools.chain(got.acceptance_per_position)) == [1.0]
