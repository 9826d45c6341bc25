"""Counts, ratios and times by hand; summary's own in decode_info_test."""

import math

import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.bench import metrics, timing
from specdec_jax.models import config as model_config
from specdec_jax.models import lm


def trace() -> types.Info:
  """2 wide and 1 narrow window of gamma 2, emitting 5 tokens."""
  return types.Info(
    hist_BN=np.array([[1, 2, 0]]),
    proposed_BK=np.array([[2, 2]]),
    tried_BK=np.array([[2, 2]]),
    accepted_BK=np.array([[2, 0]]),
    whole_BN=np.array([[1, 2, 0]]),
    calls_B=np.array([3]),
    wide=np.int32(2),
    calls=np.int32(3),
    origin_BL=np.array([[0, 0, 1, 2, 1, 2, 4, 0]]),
    window_BL=np.zeros((1, 8), np.int32),
    broken_B=np.array([False]),
    logprob_BL=None,
  )


def output(info):
  return decode.Output(None, None, info)


def test_runs_are_joined():
  info = trace()
  assert metrics.tokens_per_window(info) == 5 / 3
  both = metrics.join([output(info)] * 2)
  assert int(both.calls) == 6 and both.hist_BN.shape == (2, 3)
  assert metrics.summary(both).emitted_tokens == 10


def test_a_pass_reads_a_few_rows_of_its_tables():
  sizes = dict(head=(4, 16), embed=(16, 4), positions=(32, 4))
  params = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
  params['norm'] = {'scale': np.ones(4, np.float32)}
  assert metrics.step_parameters(params) == 4 * 16 + 4
  assert metrics.step_bytes(params) == 4 * (4 * 16 + 4)
  assert metrics.step_parameters([np.ones(3), (np.ones(2),)]) == 5
  assert metrics.step_parameters(np.ones(3)) == 3
  learned, rope = (
    lm.init(model_config.sized('tiny', position=position), 0)
    for position in ('learned', 'rope')
  )
  assert metrics.tree_bytes(learned) > metrics.tree_bytes(rope)
  assert metrics.step_bytes(learned) == metrics.step_bytes(rope)


@pytest.mark.parametrize('packed', [False, True])
def test_a_slot_has_a_key_and_a_value_of_every_layer(packed):
  """However many slots a packed model's panels have room for."""
  config = model_config.sized(
    'smollm2_135m', depth=2, fused=True, packed=packed
  )
  assert metrics.slot_bytes(lm.make(config), 3) == 3 * 2 * 2 * 3 * 64 * 4


@pytest.mark.parametrize('scan_layers', [False, True])
def test_the_first_layers_share_of_a_step(scan_layers):
  config = model_config.sized('tiny', depth=4, scan_layers=scan_layers)
  params = lm.init(config, 0)
  layer = sum(
    x.nbytes for k, x in lm.flatten(params).items() if k.startswith('layers/')
  )
  step = metrics.step_bytes(params)
  assert 0 < layer < step
  for count in range(5):
    share = metrics.layers_share(params, count)
    assert math.isclose(share, count / 4 * layer / step)


def test_latency_of_bursts():
  gaps = metrics.inter_token([[0.0, 0.0, 2.0, 2.0, 4.0], [1.0]])
  assert gaps.p50 == 1.0 and gaps.p95 > 1.9
  assert metrics.inter_token([[1.0]]) == (None, None)


# Two groups; the prefill of each takes 1 and 2 s at its fastest, and usually
# 1.5 and 2.5 s: a decode time under 1 s is not told from nothing.
@pytest.mark.parametrize(
  'total, speed', [(5, 5.0), (4.5, 10 / 1.5), (4, None), (3, None), (2, None)]
)
def test_a_decode_shorter_than_the_noise_has_no_speed(total, speed):
  runs = timing.Runs(
    outputs=[output(trace())] * 2,
    total_RG=np.array([[total / 2, total / 2], [3.0, 5.0], [3.0, 5.0]]),
    prefill_RG=np.array([[1.0, 2.5], [1.5, 2.0], [2.0, 4.0]]),
    first_RG=np.zeros((3, 2)),
    compile_seconds=0.0,
  )
  found = timing.speeds(runs)
  assert found[1:] == [2.0, 2.0]
  assert found[0] == (speed and pytest.approx(speed))


def test_repeats_without_a_speed_are_left_out(monkeypatch):
  assert metrics.spread([1.0, None, 4.0, None]) == (2.5, 1.0, 4.0, 2)
  monkeypatch.setattr(timing, 'speeds', lambda runs, pick: runs)
  plain, mine = [1.0, None, 4.0, None], [2.0, 3.0, None, None]
  found = timing.improvement(mine, plain)
  assert (found.median, found.too_short) == (2.0, 3)
  assert found.outcome == 'win'
  nothing = timing.improvement([None], [1.0])
  assert nothing == (None, None, None, 1)
  assert nothing.outcome == 'too short'
