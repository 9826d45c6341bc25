"""Counters on traces small enough to count by hand, in exact integers."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from specdec_jax import decode, metrics, types
from specdec_jax.costs import scripted
from specdec_jax.verify import reject
from tests import fakes

V, K, L, START = 40, 3, 40, 2
MAKERS = 'PDRBS'  # prompt, drafted, recovered, bonus, plain (single)


class Trace(NamedTuple):
  """windows: drafts proposed and drafts that are right, of each. new: tokens
  asked for. stop: the new token that is a stop id, or -. made: who made each
  token. The rest are counters, by accepted drafts or by offset."""

  windows: str
  new: str
  stop: str
  made: str
  hist: str
  proposed: str
  tried: str
  accepted: str


# windows, new, stop, made, hist, proposed, tried, accepted; name
TABLE = """
33,33    8 - DDDBDDDB 0002 222 222 222 all accepted, uncut
30,30    2 - RR       2000 222 200 000 none accepted
31,32    5 - DRDDR    0110 222 221 210 one, then two
00,00,00 3 - SSS      3000 000 000 000 nothing proposed
11,22    5 - DBDDB    0110 210 210 210 short draft, whole
21       2 - DR       0100 110 110 100 short draft, refused
33       3 - DDD      0001 111 111 111 length cuts the bonus
33       1 - D        0100 111 100 100 length cuts drafts
32       3 - DDR      0010 111 111 110 length meets the recovered token
32       2 - DD       0010 111 110 110 length cuts the recovered token
33,33    8 5 DDDBDD   0011 222 221 221 stop among the accepted
31,33    8 1 DR       0100 111 110 100 stop is the recovered token
33,33    8 3 DDDB     0001 111 111 111 stop is the bonus
"""
TRACES = {
  name: Trace(*cells)
  for *cells, name in (x.split(None, 8) for x in TABLE.strip().splitlines())
}


def digits(text: str) -> list[int]:
  return [int(x) for x in text]


@pytest.fixture(scope='module')
def traces():
  """All traces, run as one batch: {name: Info of its row}."""
  model, (params, text) = fakes.table_model(V), fakes.table_text()
  rows = len(TRACES)
  scripts = np.tile(text, (rows, 1))
  counts = np.zeros((rows, L), np.int32)
  stop_BX = np.full((rows, 1), -1, np.int32)
  for b, trace in enumerate(TRACES.values()):
    at = START
    for proposed, right in map(digits, trace.windows.split(',')):
      counts[b, at] = proposed
      if right < proposed:
        scripts[b, at + right] = (text[at + right] + 1) % V
      at += right + 1
    if trace.stop != '-':
      stop_BX[b] = text[START + int(trace.stop)]
  new = [int(t.new) for t in TRACES.values()]
  request = fakes.request([[1, 2]] * rows, new, vocab=V, length=L)
  out = decode.programs(model, scripted.make(gamma=K), reject.RULE).generate(
    types.Weights(params, (scripts, counts)), request._replace(stop_BX=stop_BX)
  )
  for b, n in enumerate(out.lengths_B.tolist()):
    assert out.tokens_BL[b, :n].tolist() == text[:n].tolist()
  return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize('name', TRACES)
def test_counters_of_a_trace(traces, name):
  b = list(TRACES).index(name)
  info, wanted = traces.info, TRACES[name]
  made, hist = wanted.made, digits(wanted.hist)
  n, calls = len(made), sum(hist)
  assert traces.lengths_B[b] == START + n
  origins = ''.join(MAKERS[i] for i in info.origin_BL[b])
  assert origins == ('P' * START + made).ljust(L, 'P')
  assert info.hist_BN[b].tolist() == hist
  assert info.proposed_BK[b].tolist() == digits(wanted.proposed)
  assert info.tried_BK[b].tolist() == digits(wanted.tried)
  assert info.accepted_BK[b].tolist() == digits(wanted.accepted)
  assert info.calls_B[b] == calls
  windows = info.window_BL[b, START : START + n].tolist()
  assert (info.window_BL[b, START + n :] == -1).all()
  assert windows == sorted(windows) and set(windows) == set(range(calls))
  # Accepted drafts are counted, by every way of counting.
  assert sum(digits(wanted.accepted)) == made.count('D')
  assert sum(i * h for i, h in enumerate(hist)) == made.count('D')


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
        draft_acceptance_rate=1 / 2,
        acceptance_per_position=[1, 1 / 2, 0],
        conditional_acceptance_per_position=[1, 1 / 2, 0],
        proposal_rate=1,
        accepted_histogram=[0, 1, 1, 0],
      ),
    ),
    (
      ['length cuts the bonus', 'all accepted, uncut'],
      dict(block_efficiency=11 / 3),
    ),
    (
      ['nothing proposed', 'short draft, refused'],
      dict(
        draft_acceptance_rate=1 / 2,
        acceptance_per_position=[1, 0, None],
        conditional_acceptance_per_position=[1, 0, None],
        proposal_rate=1 / 4,
      ),
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
  big, info = 2**30, types.empty_info(4, 3, 1, 0)
  counts = ('hist_BN', 'proposed_BK', 'tried_BK', 'accepted_BK')
  full = {x: np.full_like(getattr(info, x), big) for x in counts}
  info = info._replace(**full, calls_B=np.full(4, big + 1, np.int32))
  got = metrics.summary(info)
  assert got.target_calls == 4 * (big + 1)
  assert got.drafted_tokens == 4 * big
  assert got.accepted_histogram == [4 * big] * 2
  assert got.acceptance_per_position == [1.0]
