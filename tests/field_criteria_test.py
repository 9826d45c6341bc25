"""The criteria of other projects tell right from wrong, and the table renders.

The experiment itself is experiments/field_criteria/run.sh.
"""

import numpy as np
import pytest

from experiments.field_criteria import criteria, measure, samples, table


def expected(p_V, n):
  """Counts of n tokens as near to p as whole numbers can be."""
  exact = n * p_V
  counts = np.floor(exact)
  counts[np.argsort(counts - exact)[: round(n - counts.sum())]] += 1
  return counts


def drawn(p_V, n, seed=0):
  return np.random.default_rng(seed).multinomial(n, p_V).astype(float)


def hotter(p_V):
  return (x := p_V ** (1 / 1.1)) / x.sum()


def verdicts(change) -> dict[str, bool]:
  """Each criterion on the distribution that `change` makes of (p, q)."""
  flat, peaked, wide = samples.flat(), samples.peaked(), samples.truncated()
  others = samples.softmax(np.random.default_rng(3).random((100, samples.V)))
  shrinking = np.array([drawn(change(*flat), n) for n in criteria.SIZES])
  of = lambda n: expected(change(*peaked), n)
  p_V, n = peaked.p_V, samples.WINDOWS
  return {
    measure.VLLM: criteria.vllm_convergence(shrinking, flat.p_V, others),
    measure.TILEOPS: criteria.tileops_sigmas(of(65_536), p_V),
    measure.COSINE: criteria.flashinfer_cosine(of(5_000_000), p_V),
    measure.SMALL: criteria.chi_square(of(10_000), p_V, 0.01),
    measure.LARGE: criteria.chi_square(of(2_000_000), p_V, 1e-6),
    measure.KL: criteria.tensorrt_kl(
      drawn(change(*wide), n), drawn(wide.p_V, n, 1), wide.p_V
    ),
  }


def test_each_criterion_tells_right_from_wrong():
  assert all(verdicts(lambda p_V, q_V: p_V).values())
  assert not any(verdicts(lambda p_V, q_V: q_V).values())
  found = verdicts(lambda p_V, q_V: hotter(p_V))
  assert found[measure.KL] and found[measure.COSINE]
  assert not found[measure.LARGE]


@pytest.mark.parametrize(
  'at, equal, matches, similar',
  [(31, True, True, True), (7, True, False, False), (2, False, False, False)],
)
def test_texts_that_differ_from_some_token_on(at, equal, matches, similar):
  rng = np.random.default_rng(0)
  plain = rng.integers(0, 9, (100, 32)).tolist()
  texts = [text[:at] + [10 + t for t in text[at:]] for text in plain]
  assert criteria.hugging_face_equal(texts, plain) == equal
  assert criteria.vllm_matches(texts, plain, 0.6) == matches
  assert criteria.tensorrt_similar(texts, plain) == similar


def outcome(name, row, **changed):
  seen = {
    x: dict(passed=True, digest='a', why='') | changed.get(x, {})
    for x in measure.EVERY
  }
  return table.Outcome(name, 'specdec_jax/x.py', row, seen, 1.0)


def test_the_table_counts_what_is_missed_and_what_can_be_seen():
  plain = outcome('none', 0)
  caught = dict(passed=False, digest='b', why='tests/x_test.py::test_it')
  missed = dict(passed=True, digest='b', why='')
  found = [
    outcome('biased', 4, **{measure.KL: missed, measure.OURS: caught}),
    outcome('stale', 1, **{measure.EQUAL: caught, measure.OURS: caught}),
  ]
  row = lambda name: table.row(name, plain, found)[2:]
  kinds = ['1 of 1', '0 of 0', '1 of 1', '0 of 0']
  assert row(measure.KL) == ['2 of 2', '1 of 1', *kinds]
  assert row(measure.EQUAL)[:2] == ['1 of 2', '0 of 1']
  assert row(measure.OURS)[0] == '0 of 2'
  line = next(x for x in table.each(plain, found) if x.startswith('| biased'))
  assert '**missed**' in line and line.endswith('| x_test.py::test_it |')
