"""Costs that adaptive drafting chooses by."""

import numpy as np

from specdec_jax import build
from specdec_jax.costs import parts, window
from specdec_jax.io import load


def test_costs_by_number_of_drafts(monkeypatch):
  """Widths hold what is not timed; what seems to fall with more is noise."""
  timed = {
    ('verify', 0): 2.0,
    ('verify', 1): 1.5,
    ('verify', 2): 2.5,
    ('verify', 3): 4.0,
    ('lm', 0): 0.0,
    ('lm', 1): 1.0,
    ('lm', 3): 2.0,
  }

  def seconds(walks, rounds):
    assert set(walks) == set(timed)
    return {key: [x + noise for noise in (0, 0, 9)] for key, x in timed.items()}

  monkeypatch.setattr(parts, 'seconds', seconds)
  target = load.load('random:tiny')
  engine = build.engine(
    target,
    'adaptive',
    gamma=3,
    drafter='lm',
    lm=dict(source='random:tiny:1'),
    options=build.default_options(widths=(0, 1, 2)),
  )
  assert engine.costs == window.measure(engine)
  np.testing.assert_allclose(engine.costs['verify'], [1, 1, 1.25, 2])
  np.testing.assert_allclose(engine.costs['lm'], [0, 0.5, 0.75, 1])
