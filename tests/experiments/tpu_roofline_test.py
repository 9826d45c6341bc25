"""The claims of the roofline page."""

import dataclasses

import pytest

from experiments.tpu_roofline import table
from specdec_jax.chips import roofline


@pytest.mark.parametrize('chip', roofline.TPUS)
def test_high_batches_lose_at_short_contexts_only(chip):
  """From the limit of a large batch: caches over bandwidth, products over
  peak."""
  where = 'llama3_8b + llama3_1b', chip, 1
  target, draft = (roofline.share(c) for c in table.PAIRS[where[0]])
  device = roofline.TPUS[chip]
  slower = lambda s, n, context: max(
    context * s.slot / device.bandwidth,
    n * (s.products + context * s.scores) / device.peak,
  )
  for context in (table.CONTEXTS[0], table.CONTEXTS[-1]):
    step = slower(target, 1, context)
    c = slower(draft, 1, context) / step
    limit = max(
      sum(table.ALPHA**k for k in range(g + 1))
      / (g * c + slower(target, g + 1, context) / step)
      for g in roofline.GAMMAS
    )
    assert table.gain(*where, context, 2**30)[1] == pytest.approx(
      limit, rel=1e-3
    )
    assert (limit > 1) == (context == table.CONTEXTS[-1])


def test_a_claim_that_fails_is_told(monkeypatch):
  slow = {
    name: (target, dataclasses.replace(target))
    for name, (target, _) in table.PAIRS.items()
  }
  monkeypatch.setattr(table, 'PAIRS', slow)  # drafts as slow as their targets
  assert not table.stops().good
