"""EAGLE-3 as a student: three taps and a head of its own, saved and read."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build
from specdec_jax.distill import eagle_student
from specdec_jax.io.published import eagle_export, eagle_folder
from specdec_jax.models import lm
from tests.distill import runs

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

OWN = dict(kind='eagle3', taps=(0,), vocabulary=128)


def test_what_is_saved_is_read_bit_for_bit(tmp_path):
  target = build.load('random:tiny', kernels='xla')
  s = runs.settings(student=OWN | dict(taps=(0, 1)))
  start = eagle_student.begin(s.student, target, seed=0, fsdp=False)
  ids = np.sort(np.random.default_rng(0).permutation(target.ids)[:128])
  made = eagle_student.make(s.student, start, target, ids, s.loss, s.data)
  draw = np.random.default_rng(1).normal
  params = jax.tree.map(lambda x: draw(size=x.shape).astype('f4'), made.params)
  about = dict(target='a target')
  eagle_export.save(tmp_path / 'draft', start.config, params, ids, about)
  config, found = eagle_folder.fit(tmp_path / 'draft', '', target)
  np.testing.assert_array_equal(found['ids'], ids)
  np.testing.assert_array_equal(found['head'], params['head'])
  own = {n: x for n, x in params.items() if n != 'head'}
  block = eagle_folder.convert.fuse(
    start.config.block, {'layers': {'0': own['block']}}
  )[0]
  assert config.block == block
  assert (config.taps, config.tap_norm, config.last_norm) == (
    (0, 1),
    'each',
    'fed',
  )
  want, have = lm.flatten(own), lm.flatten(found['layer'])
  assert want.keys() == have.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(have[name], x)


@pytest.mark.slow
def test_a_killed_run_leaves_the_same_draft(tmp_path):
  """It has learnt, head and all; reads a layer below; and drafts."""
  whole, killed = runs.whole_and_killed(
    tmp_path, student=OWN, run=dict(steps=8), optimiser=dict(warmup=1)
  )
  assert whole == killed
  lines, _ = whole
  found = runs.losses(lines)
  assert len(found) == 8 and sum(found[-2:]) < sum(found[:2])
  folder = tmp_path / 'whole/run/draft'
  facts = json.loads((folder / 'config.json').read_text())
  assert facts['eagle_aux_hidden_state_layer_ids'] == [1]
  arrays = safetensors.numpy.load_file(folder / 'model.safetensors')
  target = build.load('random:tiny', kernels='xla')
  ids = np.flatnonzero(arrays['t2d'])
  first = np.asarray(target.params['head'])[:, ids].T
  assert abs(arrays['lm_head.weight'] - first).max() > 1e-3
  # Trained for a few steps, it agrees in too little to be measured.
  options = {'source': str(folder), 'check': 'off'}
  runs.assert_decodes_as_plain('eagle', draft_options=options)
