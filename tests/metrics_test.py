"""Counts, ratios and times by hand; summary's own in decode_info_test."""

import math

import numpy as np
import pytest

from specdec_jax import decode, metrics, types
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, work


def test_runs_are_joined():
  made_BL = np.array([[0, 0, 1, 2, 1, 2, 4, 0]])
  info = types.empty_info(1, 8, 2, 0)._replace(origin_BL=made_BL)
  both = metrics.join([decode.Output(None, None, info)] * 2)
  assert both.hist_BN.shape == (2, 3)
  assert metrics.summary(both).emitted_tokens == 10


def test_a_pass_reads_a_few_rows_of_its_tables():
  sizes = dict(head=(4, 16), embed=(16, 4), positions=(32, 4))
  params = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
  params['norm'] = {'scale': np.ones(4, np.float32)}
  assert work.step_parameters(params) == 4 * 16 + 4
  assert work.step_bytes(params) == 4 * (4 * 16 + 4)
  assert work.step_parameters([np.ones(3), (np.ones(2),)]) == 5
  assert work.step_parameters(np.ones(3)) == 3
  learned, rope = (
    lm.init(model_config.sized('tiny', position=position), 0)
    for position in ('learned', 'rope')
  )
  assert work.tree_bytes(learned) > work.tree_bytes(rope)
  assert work.step_bytes(learned) == work.step_bytes(rope)


@pytest.mark.parametrize('scan', [False, True])
def test_a_pass_reads_what_the_encoder_left_and_not_the_encoder(scan):
  """2 layers of 4 heads of 16 channels, width 64, MLP 128, 512 ids."""
  config = model_config.sized('t5_tiny').running(scan_layers=scan)
  params = lm.init(config, 0)
  layer = 4 * 64 * 64 + 2 * 64 * 64 + 3 * 64 * 128 + 3 * 64
  whole = 2 * layer + 64 * 512 + 64 + 32 * 4
  assert work.step_parameters(params) == whole
  encoder = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 32 * 4
  found = work.row_products(params, 5, 7)
  assert found == 5 * whole + 7 * encoder
  share = work.layers_share(params, 1)
  assert math.isclose(share, layer / whole)
  model = lm.make(config)
  # Keys and values, and one byte of the mask.
  found = work.source_bytes(model, params, 3)
  assert found == 3 * (2 * 2 * 4 * 16 * 4 + 1)
  assert work.slot_bytes(model, 3) == 3 * 2 * 2 * 4 * 16 * 4
  assert work.source_bytes(lm.make(config.encoder), {}, 3) == 0


@pytest.mark.parametrize('packed', [False, True])
def test_a_slot_has_a_key_and_a_value_of_every_layer(packed):
  """However many slots a packed model's panels have room for."""
  config = model_config.sized('smollm2_135m', depth=2)
  config = config.running(fused=True, packed=packed)
  assert work.slot_bytes(lm.make(config), 3) == 3 * 2 * 2 * 3 * 64 * 4


@pytest.mark.parametrize('scan_layers', [False, True])
def test_the_first_layers_share_of_a_step(scan_layers):
  config = model_config.sized('tiny', depth=4).running(scan_layers=scan_layers)
  params = lm.init(config, 0)
  layer = sum(
    x.nbytes for k, x in lm.flatten(params).items() if k.startswith('layers/')
  )
  step = work.step_bytes(params)
  assert 0 < layer < step
  for count in range(5):
    share = work.layers_share(params, count)
    assert math.isclose(share, count / 4 * layer / step)
