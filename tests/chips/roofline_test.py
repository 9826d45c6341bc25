"""The roofline's arithmetic against numbers counted by hand."""

import pytest

from specdec_jax.chips import roofline
from specdec_jax.models import config

# 2 layers of width 64, 4 query and 2 key/value heads of 16, MLP 128, 512 ids.
TINY = config.sized('tiny', dtype='bfloat16').running(scan_layers=True)
# q and o, k and v, gate, up and down; of a layer.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
HEAD = 64 * 512
NORMS = 2 * 2 * 64 + 64
DEVICE = roofline.Chip(1e6, 1e6, 1e9, 1e5)


def test_one_device_by_hand():
  s = roofline.share(TINY)
  count = 2 * LAYER + HEAD + NORMS
  assert (s.weights, s.read) == (2 * count, 2 * count)
  assert s.products == 2 * (2 * LAYER + HEAD)
  assert s.slot == 2 * 2 * 2 * 16 * 2  # k and v, layers, heads, channels, bytes
  # Scores and their product with v: 2 operations each, layers, heads, channels.
  assert s.scores == 2 * 2 * 2 * 4 * 16
  assert s.summed == 0


def test_two_devices_hold_half_and_sum():
  one, two = roofline.share(TINY), roofline.share(TINY, 2)
  norms = 2 * NORMS
  assert two.weights - norms == (one.weights - norms) / 2
  for name in ('products', 'scores', 'slot'):
    assert getattr(two, name) == getattr(one, name) / 2
  # After attention and MLP of 2 layers, and of the embedding; bf16.
  assert two.summed == 5 * 64 * 2
  # Four devices cannot split 2 key/value heads: attention is whole.
  four = roofline.share(TINY, 4)
  assert four.whole == ('heads', 'kv_heads')
  assert (four.slot, four.summed) == (one.slot, 3 * 64 * 2)


@pytest.mark.parametrize('kind, bits', [('int8', 8), ('int4', 4)])
def test_integers_and_their_scales_by_hand(kind, bits):
  """8 bytes for scale and offset of each column: none has two groups."""
  # q and o, k and v, gate and up, down; of both layers. The head has 8 bits.
  columns = 2 * (2 * 64 + 2 * 32 + 2 * 128 + 64)
  one, two = (roofline.share(TINY, n, kind) for n in (1, 2))
  codes = 2 * LAYER * bits // 8 + HEAD
  assert one.read == one.weights == codes + 8 * (columns + 512) + 2 * NORMS
  assert one.products == roofline.share(TINY).products
  # Rows of o and down are split, so that both devices have all their scales.
  whole = 2 * 2 * 64
  held = codes / 2 + 8 * ((columns - whole + 512) / 2 + whole) + 2 * NORMS
  assert two.weights == held and two.products == one.products / 2


def test_rows_of_tables_and_what_encoders_left_are_not_weights_of_a_pass():
  untied = roofline.share(config.sized('tiny', dtype='bfloat16', tied=False))
  assert untied.weights - untied.read == 2 * HEAD
  t5 = config.sized('t5_tiny', dtype='bfloat16')
  encoded, s = roofline.share(t5), roofline.share
  # A layer: q, k, v, o; q and o to the source; a gated MLP.
  layer = 6 * 64 * 64 + 3 * 64 * 128
  assert encoded.products == 2 * (2 * layer + HEAD)
  assert encoded.source_slot == encoded.slot == 2 * 2 * 4 * 16 * 2
  assert encoded.source_scores == encoded.scores == s(TINY).scores


def test_a_pass_by_hand():
  s = roofline.share(TINY, 2)
  found = roofline.forward(DEVICE, s, rows=3, tokens=5, slots=100)
  assert found.bytes == s.read + 3 * 100 * s.slot
  assert found.operations == 15 * (s.products + 100 * s.scores)
  assert found.sent == 15 * s.summed  # a ring of two sends each byte once
  least = max(found.bytes / 1e6, found.operations / 1e9)
  assert found.seconds == pytest.approx(least + found.sent / 1e5)


def test_prediction_is_the_formula_at_its_best_gamma():
  sizes = dict(rows=1, slots=100)
  s = roofline.share(TINY)
  found = roofline.predict(DEVICE, s, s, alphas=(0.5, 0.9), **sizes)
  assert found.c == 1 and found.v[1] == 1
  # A draft as slow as its target: Leviathan et al. 2023, corollary 3.9.
  assert found.best[0.9][0] == 0 and found.best[0.5][1] < 1
  free = s._replace(read=0, products=0, scores=0, slot=0)
  slow = DEVICE._replace(peak=2e6)  # so that a wide pass costs more
  found = roofline.predict(slow, s, free, alphas=(0.5,), **sizes)
  tokens = lambda g: sum(0.5**k for k in range(g + 1))
  gains = {g: tokens(g) / found.v[g + 1] for g in roofline.GAMMAS}
  assert found.best[0.5] == pytest.approx(
    (max(gains, key=gains.get), max(gains.values()))
  )


def test_room_by_hand():
  s = roofline.share(TINY)
  free = 1e6 - s.weights
  found = roofline.room(DEVICE, (s,), rows=2, slots=100, temporaries=1e5)
  assert found.slots == int((free - 1e5) / 2 / s.slot)
  assert found.rows == int(free / (100 * s.slot + 5e4))
  assert found.fits == (found.rows >= 2)
  assert not roofline.room(
    DEVICE,
    (s,),
    rows=found.rows + 1,
    slots=100,
    temporaries=5e4 * (found.rows + 1),
  ).fits
  none = roofline.room(DEVICE._replace(memory=1e3), (s,), rows=1, slots=100)
  assert none == (False, 0, 0)


def test_topologies():
  assert roofline.topology('v5e:2x4') == (roofline.CHIPS['v5e'], 8)
  half, devices = roofline.topology('tpu7x:2x2x1')
  assert devices == 8 and half.bandwidth == 3690e9
  assert roofline.topology('h100:8') == (roofline.CHIPS['h100'], 8)


def test_the_table_of_chips():
  kinds = [kind for x in roofline.CHIPS.values() for kind in x.kinds]
  assert len(kinds) == len(set(kinds)) >= len(roofline.CHIPS)
  assert roofline.called('TPU v5 lite') == 'v5e'
  assert roofline.called('NVIDIA H200') == 'h200'
  assert roofline.called('NVIDIA H20') == roofline.called('cpu') == ''
