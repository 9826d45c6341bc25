"""A language model's loss against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward, types
from specdec_jax.distill import lm_student, sections, students
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, eagle, lm
from tests.distill import divergences_test

pytestmark = pytest.mark.usefixtures('x64')

CONFIG, T5 = (
  model_config.sized(size).running(dtype='float64')
  for size in ('tiny', 't5_tiny')
)
SOME = (3, 17, 40, 299)


def a_batch():
  draw = np.random.default_rng(0)
  tokens = draw.integers(0, 300, (3, 9)).astype(np.int32)
  counted = draw.random((3, 9)) < 0.6
  return {'tokens': jnp.asarray(tokens), 'counted': jnp.asarray(counted)}


def with_sources(batch):
  """Sources of 1, 5 and 8 ids, with others behind them."""
  draw = np.random.default_rng(1)
  source = jnp.asarray(draw.integers(0, 300, (3, 8)), jnp.int32)
  return batch | {'source': source, 'source_length': jnp.array([1, 5, 8])}


def reduced(ids, config, seed=0):
  """(config, params) of a model that proposes these ids, () for all."""
  params = lm.init(config, seed)
  return convert.reduce(config, params, ids) if ids else (config, params)


def value_of(student, teacher, kind, temperature, frozen, batch):
  """params -> (value, figures)."""
  settings = sections.Loss(kind, temperature, 1, 1.0, 0.0)
  loss = lm_student.distilled(student, teacher, settings, ids=300)
  frozen = {'teacher': frozen, 'shared': {}}
  return lambda params: loss(params, frozen, batch, jax.random.key(0))


def probabilities(model, params, batch, temperature):
  """With other ids behind each source, and the rows in another order."""
  source = None
  if 'source' in batch:
    ids_BI, ends_B = batch['source'], batch['source_length']
    mine_BI = jnp.arange(8)[None] < ends_B[:, None]
    ids_BI = jnp.pad(jnp.where(mine_BI, ids_BI, 299), ((0, 0), (0, 4)))
    source = types.Source(ids_BI[::-1], ends_B[::-1])

  @jax.jit
  def logits(params, tokens_BT):
    hidden = forward.hidden(model, params, tokens_BT, source)
    return model.head(params, hidden)[::-1, :-1, :300]

  x = np.exp(np.asarray(logits(params, batch['tokens'][::-1])) / temperature)
  return x / x.sum(-1, keepdims=True)


@pytest.mark.more
@pytest.mark.parametrize(
  ('config', 'kind', 'temperature', 'ids'),
  [
    (CONFIG, 'reverse_kl', 2.0, ()),
    (CONFIG, 'forward_kl', 1.0, SOME),
    (CONFIG, 'reverse_kl', 1.0, SOME),
    (CONFIG, 'log_alpha', 1.0, SOME),
    (T5, 'total_variation', 2.0, ()),
    (T5, 'forward_kl', 1.0, SOME),
    (T5, 'jensen_shannon:0.1', 1.0, SOME),
  ],
)
def test_is_the_mean_divergence_over_the_ids_of_the_student(
  config, kind, temperature, ids
):
  batch, given = a_batch(), lm.init(config, 1)
  if config is T5:
    batch = with_sources(batch)
  own, params = reduced(ids, config)
  one = value_of(own, config, kind, temperature, given, batch)
  both = jax.jit(jax.value_and_grad(one, has_aux=True))
  (value, figures), slopes = both(params)
  p, q = (
    probabilities(m, x, batch, temperature)
    for m, x in (
      (lm.make(config, ids=300), given),
      (lm.make(own, ids=300, vocab=config.vocab), params),
    )
  )
  kept = list(ids or range(300))
  assert not np.delete(q, kept, -1).any()
  counted = np.asarray(batch['counted'])[:, 1:]
  alpha = np.minimum(p, q).sum(-1)
  p, q = p[..., kept], q[..., kept]
  want = divergences_test.FORMULAS[kind](p, q)
  np.testing.assert_allclose(value, want[counted].mean(), 1e-9)
  np.testing.assert_allclose(
    figures['train_alpha'], alpha[counted].mean(), 1e-9
  )
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
  # The teacher itself has nothing to learn.
  if kind == 'reverse_kl' and not ids:
    (value, _), slopes = both(given)
    assert abs(value) < 1e-12
    for x in jax.tree.leaves(slopes):
      np.testing.assert_allclose(x, 0, atol=1e-10)


@pytest.mark.more
@pytest.mark.parametrize('ids', [(), SOME])
@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_a_record_of_the_teacher_is_as_good_as_the_teacher(ids, temperature):
  batch, given = a_batch(), lm.init(CONFIG, 1)
  model, (own, params) = lm.make(CONFIG, ids=300), reduced(ids, CONFIG)

  def slopes(teacher, given, batch):
    one = value_of(
      own, teacher, 'jensen_shannon:0.5', temperature, given, batch
    )
    return jax.tree.leaves(jax.value_and_grad(lambda x: one(x)[0])(params))

  want = slopes(CONFIG, given, batch)
  features = forward.hidden(model, given, batch['tokens'])
  mass = jax.nn.logsumexp(model.head(given, features), -1)
  # As they are kept: of no certain size, which the last norm does not see.
  record = batch | {'features': eagle.normed(features, 1), 'mass': mass}
  of = [(CONFIG, given)]
  if ids and not temperature:
    of.append(reduced(ids, CONFIG, 1))
  for teacher, ends in of:
    for a, b in zip(slopes(teacher, ends, record), want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_a_record_is_not_rounded_to_bfloat16():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  model, params = lm.make(config, ids=300), lm.init(config, 1)
  draw = np.random.default_rng(0)
  features = jnp.asarray(draw.normal(size=(2, 5, config.width)), jnp.float16)
  logits = model.head(params, features.astype(jnp.float32))
  mass = jax.nn.logsumexp(logits, -1)
  log_p = students.teacher_log_p(
    model, params, {'features': features, 'mass': mass}, 1.0
  )
  np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1, rtol=1e-5)
