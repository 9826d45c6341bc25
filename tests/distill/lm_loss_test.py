"""A language model's loss against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.distill import divergences, lm_loss
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.train import lm_loss as text_loss

pytestmark = pytest.mark.usefixtures('x64', 'compile_in_less_time')

CONFIG = dataclasses.replace(model_config.sized('tiny'), dtype='float64')


def loss_of(divergence: str, temperature: float) -> divergences.Loss:
  return divergences.Loss(divergence, temperature, 1, 1.0, 0.0)


def a_batch(seed: int = 0, rows: int = 3, length: int = 9):
  draw = np.random.default_rng(seed)
  tokens = draw.integers(0, 300, (rows, length)).astype(np.int32)
  counted = draw.random((rows, length)) < 0.6
  return {'tokens': jnp.asarray(tokens), 'counted': jnp.asarray(counted)}


def test_only_completions_count():
  tokens = np.arange(1, 11).reshape(2, 5)
  rows = lm_loss.rows(tokens, np.array([[2, 4], [1, 5]]))
  assert rows['tokens'].tolist() == [[1, 2, 3, 4, 0], [6, 7, 8, 9, 10]]
  assert rows['counted'].astype(int).tolist() == [
    [0, 0, 1, 1, 0],
    [0, 1, 1, 1, 1],
  ]


def logits_of(model, params, tokens):
  x = model.head(params, text_loss.hidden(model, params, tokens))
  return np.asarray(x)


def test_rematerialised_slopes_are_the_same():
  batch, params = a_batch(), lm.init(CONFIG, 0)
  frozen = {'teacher': lm.init(CONFIG, 1), 'shared': {}}
  model = lm.make(CONFIG)

  def slopes(remat):
    loss = lm_loss.distilled(
      model,
      'float64',
      model,
      loss_of('forward_kl', 0.7),
      remat=remat,
    )
    grad = jax.grad(lambda p: loss(p, frozen, batch, jax.random.key(0))[0])
    return jax.jit(grad)(params)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12),
    slopes(True),
    slopes(False),
  )


@pytest.mark.more
def test_distilled_is_the_mean_divergence_and_0_at_the_teacher():
  params, given, batch = lm.init(CONFIG, 0), lm.init(CONFIG, 1), a_batch()
  model = lm.make(CONFIG, ids=300)
  loss = lm_loss.distilled(
    model,
    'float64',
    model,
    loss_of('reverse_kl', 2.0),
    remat=False,
  )
  frozen = {'teacher': given, 'shared': {}}
  value, figures = loss(params, frozen, batch, jax.random.key(0))
  p, q = (
    np.exp(logits_of(model, x, batch['tokens']) / 2.0) for x in (given, params)
  )
  p, q = (
    x[:, :-1, :300] / x[:, :-1, :300].sum(-1, keepdims=True) for x in (p, q)
  )
  counted = np.asarray(batch['counted'])[:, 1:]
  want = (q * np.log(q / p)).sum(-1)[counted].mean()
  np.testing.assert_allclose(value, want, 1e-9)
  alpha = np.minimum(p, q).sum(-1)[counted].mean()
  np.testing.assert_allclose(figures['train_alpha'], alpha, 1e-9)
  same = lambda x: loss(x, frozen, batch, jax.random.key(0))[0]
  assert abs(same(given)) < 1e-12
  for x in jax.tree.leaves(jax.grad(same)(given)):
    np.testing.assert_allclose(x, 0, atol=1e-10)


@pytest.mark.more
@pytest.mark.parametrize('ids', [(), (3, 17, 40, 299)])
@pytest.mark.parametrize('temperature', [0.0, 1.0, 0.7])
def test_a_record_of_the_teacher_is_as_good_as_the_teacher(ids, temperature):
  batch, given = a_batch(), lm.init(CONFIG, 1)
  config, params = CONFIG, lm.init(CONFIG, 0)
  if ids:
    config, params = lm.reduce(CONFIG, params, ids)
  student, model = (lm.make(c, ids=300) for c in (config, CONFIG))

  def slopes(model, given, batch):
    loss = lm_loss.distilled(
      student,
      'float64',
      model,
      loss_of('jensen_shannon:0.5', temperature),
      remat=False,
      ids=ids,
    )
    frozen = {'teacher': given, 'shared': {}}
    one = lambda x: loss(x, frozen, batch, jax.random.key(0))[0]
    return jax.tree.leaves(jax.value_and_grad(one)(params))

  want = slopes(model, given, batch)
  features = text_loss.hidden(model, given, batch['tokens'])
  logits = jnp.asarray(logits_of(model, given, batch['tokens']))
  # As they are kept: of no certain size, which the last norm does not see.
  features = eagle.normed(features, 1)
  mass = jax.nn.logsumexp(logits, -1)
  record = batch | {'features': features, 'mass': mass}
  ends = {name: x for name, x in given.items() if name != 'layers'}
  of = [(model, ends)]
  if ids and temperature != 0.7:
    few, ends = lm.reduce(CONFIG, ends, ids)
    of.append((lm.make(few, ids=300), ends))
  for model, ends in of:
    for a, b in zip(slopes(model, ends, record), want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_a_record_is_not_rounded_to_bfloat16():
  config = dataclasses.replace(CONFIG, dtype='bfloat16')
  model, params = lm.make(config, ids=300), lm.init(config, 1)
  draw = np.random.default_rng(0)
  features = jnp.asarray(draw.normal(size=(2, 5, config.width)), jnp.float16)
  logits = model.head(params, features.astype(jnp.float32))
  mass = jax.nn.logsumexp(logits, -1)
  log_p = lm_loss.teacher_log_p(
    model, params, {'features': features, 'mass': mass}, 1.0
  )
  np.testing.assert_allclose(jnp.exp(log_p).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize('kind', ['forward_kl', 'reverse_kl', 'log_alpha'])
def test_a_student_of_some_ids_learns_what_the_teacher_leaves_to_them(kind):
  ids, batch = (3, 17, 40, 299), a_batch()
  given = lm.init(CONFIG, 1)
  few, params = lm.reduce(CONFIG, lm.init(CONFIG, 0), ids)
  model, student = (lm.make(c, ids=300) for c in (CONFIG, few))
  loss = lm_loss.distilled(
    student, 'float64', model, loss_of(kind, 1.0), remat=False, ids=ids
  )
  frozen = {'teacher': given, 'shared': {}}
  one = lambda params: loss(params, frozen, batch, jax.random.key(0))
  (value, figures), slopes = jax.value_and_grad(one, has_aux=True)(params)
  p, q = (
    np.exp(logits_of(m, x, batch['tokens'])[:, :-1, :300])
    for m, x in ((model, given), (student, params))
  )
  p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  assert not np.delete(q, ids, -1).any() and p[..., ids].sum(-1).max() < 1
  counted = np.asarray(batch['counted'])[:, 1:]
  alpha = np.minimum(p, q).sum(-1)
  p, q = p[..., ids], q[..., ids]
  want = {
    'forward_kl': lambda: (p * np.log(p / q)).sum(-1),
    'reverse_kl': lambda: (q * np.log(q / p)).sum(-1),
    'log_alpha': lambda: -np.log(alpha),
  }[kind]()
  np.testing.assert_allclose(value, want[counted].mean(), 1e-9)
  np.testing.assert_allclose(
    figures['train_alpha'], alpha[counted].mean(), 1e-9
  )
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
