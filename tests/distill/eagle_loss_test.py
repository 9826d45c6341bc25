"""The losses of EAGLE, MTP and DFlash, and that they train what is decoded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build, forward
from specdec_jax.distill import eagle_loss, eagle_student, sections
from specdec_jax.models import eagle, lm
from tests import fakes
from tests.distill import runs
from tests.drafters import medusa_test, windows
from tests.io import tiny


@pytest.mark.more
@pytest.mark.parametrize(
  'temperature, kind',
  [(1.0, 'eagle'), (0.5, 'eagle'), (1.0, 'eagle3'), (1.0, 'mtp')],
)
def test_the_loss_is_the_divergence_from_the_teacher(x64, temperature, kind):
  """Of the first step, in NumPy, from the features alone; an EAGLE-3 reads a
  layer below, and has a head of its own; an MTP reads the normed state."""
  target = build.load('random:tiny', dtype='float64')
  scale = jnp.asarray(1 + np.random.default_rng(1).random(target.config.width))
  own = target.params | {'norm': {'scale': scale}}
  target = dataclasses.replace(target, params=own)
  model, eagle3 = target.model, kind == 'eagle3'
  config = eagle.settings(target.config, (1,))
  if kind != 'eagle':
    own = dict(kind=kind, taps=(0,) * eagle3)
    student = runs.settings(student=own).student
    config = eagle_student.config_of(student, target.config)
  ids = np.arange(3, 203, 2)
  draw = np.random.default_rng(0)
  tokens = jnp.asarray(draw.integers(0, 256, (2, 7)), jnp.int32)
  features = jnp.asarray(draw.normal(size=(2, 7, 64)))
  features = eagle.normed(features, 1)
  below = eagle.normed(jnp.asarray(draw.normal(size=(2, 7, 64))), 1)
  read = below if eagle3 else features
  full = np.asarray(model.head(target.params, features))
  mass = np.log(np.exp(full).sum(-1))
  counted = draw.random((2, 7)) < 0.7
  params = lm.nest(eagle.init(config, 0))
  weights = eagle.weights(params, ids, target.params)
  frozen = {n: weights[n] for n in ('target', 'head')}
  if eagle3:
    weights['head'] = jnp.asarray(draw.normal(size=(64, len(ids)))) / 8
  own = {'head': weights['head']} if eagle3 else {}
  settings = sections.Loss('forward_kl', temperature, 1, 0.8, 0.0)
  value, figures = eagle_loss.unrolled(config, model, settings)(
    params | own,
    frozen,
    {
      'tokens': tokens,
      'features': jnp.concatenate([read, features], -1) if eagle3 else read,
      'mass': jnp.asarray(mass),
      'counted': jnp.asarray(counted),
    },
    jax.random.key(0),
  )
  # q by the drafter's own view of the same features, shifted by one.
  if kind == 'mtp':
    read = model.norm(target.params, read)
  before = jnp.pad(read, ((0, 0), (1, 0), (0, 0)))[:, :7]
  reader = eagle.reader(
    config, model, eagle.features_of(params, config, before)
  )
  hidden, _, _ = forward.read(
    reader,
    weights,
    tokens,
    jnp.zeros(2, jnp.int32),
    eagle.init_cache(config, 2, 7),
    slots=7,
  )
  few = np.asarray(eagle.reduced(config, weights, hidden)) / temperature
  q = np.exp(few) / np.exp(few).sum(-1, keepdims=True)
  p = np.exp(full - mass[..., None])[..., ids]
  if temperature != 1:
    p = p ** (1 / temperature)
    p /= p.sum(-1, keepdims=True)
  # Index t predicts the token at t + 1.
  counted = np.pad(counted[:, 1:], ((0, 0), (0, 1)))
  want = (p * np.log(p / q)).sum(-1)[counted].mean()
  # The target's norm adds its epsilon once more to features of mean square 1.
  np.testing.assert_allclose(value, want, 1e-4)
  alpha = np.minimum(p, q).sum(-1)[counted].mean()
  np.testing.assert_allclose(figures['train_alpha'][0], alpha, 1e-4)


def test_a_step_attends_to_the_keys_that_its_chain_has_written():
  """As the module's example: step s at index t reads step 0's keys up to
  t - s, then each later step's own one, up to its own at t."""
  T = 7
  for step in range(4):
    mask = np.asarray(eagle_loss._mask(T, step, 1)).reshape(T, step + 1, T)
    for t in range(step + 1, T):
      want = {(0, i) for i in range(1, t - step + 1)}
      want |= {(s, t - step + s) for s in range(1, step + 1)}
      assert {*zip(*np.nonzero(mask[t]), strict=True)} == want, (step, t)


# --- blocks of masks ----------------------------------------------------------

GAMMA, B, IDS = medusa_test.GAMMA, medusa_test.B, medusa_test.IDS


def a_dflash(folder):
  """(target, config, Student) of two layers that draft some ids."""
  tiny.write_folder(folder, medusa_test.CONFIG, weights=medusa_test.MODEL)
  target = build.load(
    str(folder), dtype='float64', scan_layers=False, kernels='xla'
  )
  own = dict(kind='dflash', layers=(1, 0), taps=(0, 1))
  changes = dict(teacher=dict(dtype='float64'), loss=dict(unroll=GAMMA))
  ids = np.arange(1, IDS, 2)
  s, made = runs.made(target, ids, student=own, **changes)
  config = eagle_student.config_of(s.student, target.config)
  return target, config, made, ids


def a_batch(target, taps, tokens_BL, counted_BL):
  """A batch of recorded features, here not rounded."""
  given = target.model, target.params, tokens_BL, taps
  hidden, tapped = windows.tapped(*given)
  features, scale = eagle.scaled(tapped, len(taps))
  full = target.model.head(target.params, hidden)
  batch = dict(tokens=jnp.asarray(tokens_BL), features=features, scale=scale)
  mass = jax.nn.logsumexp(full, -1)
  return batch | dict(mass=mass, counted=jnp.asarray(counted_BL)), full


def logits_of(made, config, target, batch, start_B):
  """What the loss computes of blocks that are cut from start_B on."""
  mask = eagle_student.mask_id(target)
  blocks = eagle.Blocks(config, mask, GAMMA + 1)
  weights = made.weights(made.params)
  raw = eagle_loss._raw_taps(config, batch['features'], batch)
  tokens = batch['tokens']
  found = eagle_loss.in_blocks(
    blocks, target.model, weights, tokens, raw, jnp.asarray(start_B)
  )
  return eagle.reduced(config, weights, found)


@pytest.mark.more
def test_blocks_are_trained_as_they_are_decoded(x64, tmp_path):
  """All q of all windows of a text are those of the blocks that the loss reads
  at once, wherever a row is cut."""
  target, config, made, ids = a_dflash(tmp_path / 'm')
  texts, seen = medusa_test.proposals(
    target, made.drafter(GAMMA), made.weights(made.params)
  )
  tokens = np.asarray(fakes.pad(texts, medusa_test.L))
  batch, _ = a_batch(target, config.taps, tokens, tokens < 0)
  size, found = GAMMA + 1, []
  for cut in range(size):
    logits = logits_of(made, config, target, batch, np.full(B, cut))
    found.append(np.asarray(jax.nn.softmax(logits, -1)))
  compared = 0
  for b, n, _, q_KV, _ in seen:
    if 0 < b < B - 1:  # of temperature 1
      block, cut = divmod(n - 1, size)
      want = found[cut][b, block, 1:]
      np.testing.assert_allclose(q_KV[:, ids], want, rtol=0, atol=1e-9)
      assert not np.delete(q_KV, ids, -1).any()
      compared += 1
  assert compared > 10


@pytest.mark.more
def test_the_loss_of_blocks(x64, tmp_path):
  """Of one way to cut a row, in NumPy; the keys of steps give every way."""
  target, config, made, ids = a_dflash(tmp_path / 'm')
  draw, T, size = np.random.default_rng(0), 10, GAMMA + 1
  tokens = draw.integers(0, IDS, (1, T)).astype(np.int32)
  counted = np.arange(T)[None] >= 2
  batch, full = a_batch(target, config.taps, tokens, counted)
  p_TV = np.asarray(jax.nn.softmax(full, -1))[0][:, ids]
  wanted = []
  for cut in range(size):
    logits = logits_of(made, config, target, batch, [cut])
    q_ASV, sums = np.asarray(jax.nn.softmax(logits, -1))[0], []
    for k in range(1, size):
      each = []
      for block in range(len(q_ASV)):
        at = cut + block * size + k
        if 2 <= at < T:
          p, q = p_TV[at - 1], q_ASV[block, k]
          each.append((p * np.log(p / q)).sum())
      sums.append(np.mean(each))
    weights = 0.8 ** np.arange(GAMMA)
    wanted.append(weights @ sums / weights.sum())
  assert len({round(x, 6) for x in wanted}) == size
  loss = jax.jit(made.loss)
  found = set()
  for seed in range(16):
    key = jax.random.key(seed)
    value, figures = loss(made.params, made.frozen, batch, key)
    cut = int(np.argmin(np.abs(np.array(wanted) - value)))
    np.testing.assert_allclose(value, wanted[cut], 1e-4)
    found.add(cut)
    assert figures['train_alpha'].shape == (GAMMA,)
  assert found == set(range(size))
