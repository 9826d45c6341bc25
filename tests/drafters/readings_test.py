"""Medusa's heads and DFlash's blocks are read as they agree with their target.

Drafts that know what their target says if they are read in one way are measured
in all.
"""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from specdec_jax.drafters import dflash, medusa, readings
from specdec_jax.io import load
from specdec_jax.io.published import dflash_folder, medusa_heads
from tests.drafters import dflash_test
from tests.io import readings_test, tiny

target, cache = readings_test.target, readings_test.cache
D, V, DEPTH = readings_test.D, readings_test.V, readings_test.CONFIG.depth
H, COUNT = 128, 4  # the width of a DFlash draft, and heads
DRAFTERS = {'medusa': medusa, 'dflash': dflash}


def text(given, taps):
  """(tokens [B, L], features [B, L, E], starts of windows [B, T])."""
  *read, begin_B = readings_test.text(given, taps)
  return *read, begin_B[:, None] + np.arange(readings.BEGUN)[None]


def ahead(tokens_BL, starts_BT, k):
  return np.take_along_axis(tokens_BL, starts_BT + k, 1)


# --- drafts that agree under one reading --------------------------------------


def random_heads(folder, seed):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype('f4') / D**0.5
  arrays = {}
  for i in range(COUNT):
    arrays[f'{i}.0.linear.weight'] = draw(D, D)
    arrays[f'{i}.0.linear.bias'] = draw(D)
    arrays[f'{i}.1.weight'] = draw(V, D)
  safetensors.numpy.save_file(arrays, folder / medusa_heads.FILE)
  return arrays


def plant_heads(folder, given, reading, seed):
  """Heads that are trained for the text, as this reading has them."""
  arrays = random_heads(folder, seed)
  model, begun = medusa.fit(folder, given, reading=reading)
  tokens_BL, states_BLD, starts_BT = text(given, (model.tap,))
  at_BT = starts_BT - 2  # the last token has not been read
  states_BTD = np.take_along_axis(states_BLD, at_BT[..., None], 1)

  def loss(heads):
    params = {'heads': heads, 'target': given.params}
    total = 0.0
    for k in range(readings.DRAFTS):
      logits_BTV = model.logits(params, k, states_BTD)[..., : given.ids]
      total += optax.softmax_cross_entropy_with_integer_labels(
        logits_BTV, ahead(tokens_BL, starts_BT, k)
      ).mean()
    return total

  heads = readings_test.minimised(loss, begun['heads'], 0.03, steps=200)
  found = medusa_heads.stored_as(heads)
  arrays |= {n: np.ascontiguousarray(x) for n, x in found.items()}
  safetensors.numpy.save_file(arrays, folder / medusa_heads.FILE)


def random_block(folder, seed):
  """A draft whose logits are its states, as its authors save it."""
  c = tiny.config('qwen3', vocab=V, width=H, depth=1, mlp=H)
  rng = np.random.default_rng(seed)
  found = tiny.arrays(c, seed)
  arrays = {n.removeprefix('model.'): x for n, x in found.items()}
  arrays['fc.weight'] = rng.normal(size=(H, 2 * D)).astype('f4')
  arrays['hidden_norm.weight'] = np.ones(H, 'f4')
  for name in arrays:
    if 'norm' in name:  # less 1 they are something else, but not nothing
      arrays[name] = np.exp(arrays[name] / 2).astype('f4')
  facts = tiny.settings(c, 'qwen3') | dict(
    architectures=['DFlashDraftModel'],
    block_size=readings.DRAFTS + 1,
    target_hidden_size=D,
    dflash_config=dict(mask_token_id=261, target_layer_ids=[1, 3]),
  )
  arrays['lm_head.weight'] = np.eye(V, H, dtype='f4')
  (folder / 'config.json').write_text(json.dumps(facts))
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
  return arrays


def plant_block(folder, given, reading, seed):
  """A random draft with the head that says the text from its states, as this
  reading has them."""
  arrays = random_block(folder, seed)
  blocks, params = dflash_folder.fit(folder, given, reading=reading)
  tokens_BL, features_BLE, starts_BT = text(given, blocks.config.taps)
  of = functools.partial(dflash_test.after, blocks, given.model, params)
  each = jax.vmap(jax.vmap(of, (None, None, 0)))
  logits_BTSV = each(jnp.asarray(tokens_BL), features_BLE, starts_BT)
  drafts = slice(blocks.first, blocks.first + readings.DRAFTS)
  x_XH = np.asarray(logits_BTSV)[:, :, drafts, :H].reshape(-1, H)
  wanted = [ahead(tokens_BL, starts_BT, k) for k in range(readings.DRAFTS)]
  y_XV = np.eye(V)[np.stack(wanted, -1).reshape(-1)]
  square_HH = x_XH.T @ x_XH + 1e-3 * np.eye(H)
  head_HV = np.linalg.solve(square_HH, x_XH.T @ y_XV)
  arrays['lm_head.weight'] = np.ascontiguousarray(head_HV.T, np.float32)
  safetensors.numpy.save_file(arrays, folder / 'model.safetensors')


PLANT = {'medusa': plant_heads, 'dflash': plant_block}


# --- what is found ------------------------------------------------------------

SLOW, MORE = pytest.mark.slow, pytest.mark.more
RAW = "states before the target's norm"
MISREAD = [
  ('medusa', (RAW,)),
  ('dflash', ('norms stored less 1', '', '')),
  ('dflash', ('', 'taps one layer lower', '')),
  ('dflash', ('', 'taps one layer higher', '')),
  ('dflash', ('', '', 'a norm of each tap')),
]
OFTEN = [('medusa', RAW, 0), ('dflash', 'taps one layer lower', 0)]
CASES = [
  pytest.param(
    name,
    reading,
    seed,
    id=f'{name}: {readings.words(reading)} {seed}',
    marks=MORE if (name, readings.words(reading), seed) in OFTEN else SLOW,
  )
  for name, reading in MISREAD
  for seed in range(2)
]


@pytest.mark.parametrize('name, reading, seed', CASES)
def test_what_is_misread_is_found(name, reading, seed, tmp_path, caplog):
  """And runs."""
  given, module, right = target(seed), DRAFTERS[name], readings.words(reading)
  PLANT[name](tmp_path, given, reading, seed)
  _, made = readings_test.corrected(module, given, tmp_path, right, caplog)
  claimed = module.Settings(tmp_path, check='off')
  other = module.for_target(given, claimed, gamma=2, chunk=8)
  if made.drafter is other.drafter:  # the arrays alone differ
    both = made.params['layer'], other.params['layer']
    assert not jax.tree.all(jax.tree.map(np.array_equal, *both))


@pytest.mark.parametrize(
  'name, seed',
  [
    pytest.param(name, seed, marks=SLOW if seed else [])
    for name in DRAFTERS
    for seed in range(2)
  ],
)
def test_a_draft_that_is_what_it_claims_is_never_refused(
  name, seed, tmp_path, caplog, monkeypatch, cache
):
  """And is measured once for a target and a draft."""
  given, module = target(seed), DRAFTERS[name]
  PLANT[name](tmp_path, given, (), seed)
  settings = module.Settings(tmp_path)
  make = lambda given, settings: module.for_target(
    given, settings, gamma=2, chunk=8
  )
  with caplog.at_level(logging.WARNING):
    made = make(given, settings)
  assert not caplog.records
  claimed = module.Settings(tmp_path, check='off')
  assert make(given, claimed).drafter is made.drafter


@pytest.mark.more
def test_a_target_that_reads_sources_is_refused():
  given = load.load('random:t5_tiny')
  with pytest.raises(ValueError, match='has an encoder: .* give check=off'):
    readings.find(medusa.FORM, given, 'x')


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, begin, count',
  [('medusa', random_heads, 2), ('dflash', random_block, 12)],
)
def test_a_draft_of_nothing_is_refused(name, begin, count, tmp_path):
  """All readings are tried: two may hide each other."""
  begin(tmp_path, 0)
  readings_test.refused(DRAFTERS[name], tmp_path, count)
