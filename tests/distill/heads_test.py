"""The vocabulary, the rows and the loss of EAGLE drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build
from specdec_jax.distill import divergences, heads, on_policy, teacher
from specdec_jax.io import eagles
from specdec_jax.models import eagle, lm

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')


def answers(**changes) -> teacher.Answers:
  tokens = np.array([[9, 9, 4, 4, 7, 0], [9, 1, 4, 7, 7, 7]], np.int32)
  return teacher.Answers(
    tokens=tokens,
    spans=np.array([[2, 5], [1, 6]], np.int32),
    features=np.zeros((2, 6, 8), np.float16),
    mass=np.zeros((2, 6), np.float32),
  )._replace(**changes)


def test_the_commonest_ids_of_the_answers():
  # Said: 4 4 7 and 1 4 7 7 7: four 7s, three 4s, one 1; 9 was asked only.
  rows = on_policy.rows_of(answers().tokens, answers().spans)
  of = lambda size: heads.vocabulary(rows, size, 10).tolist()
  assert (of(1), of(2), of(5)) == ([7], [4, 7], [0, 1, 2, 4, 7])
  assert of(10) == list(range(10))
  for size in (0, 11):
    with pytest.raises(ValueError, match=f"vocabulary={size}: .* teacher's 10"):
      of(size)


def test_what_counts_is_the_token_before_an_answered_one():
  rows = heads.rows(answers(), (0, 1), (1,))
  assert rows['counted'].astype(int).tolist() == [
    [0, 1, 1, 1, 0, 0],
    [1, 1, 1, 1, 1, 0],
  ]
  with pytest.raises(ValueError, match=r'taps=\(2,\): .* features of \(0, 1\)'):
    heads.rows(answers(), (0, 1), (2,))
  with pytest.raises(ValueError, match='without features'):
    heads.rows(answers(features=None), (0, 1), (1,))


def test_columns_of_some_taps():
  assert heads.columns((3, 5, 9), (3, 9), 2).tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize('temperature', (1.0, 0.5))
def test_the_loss_is_the_divergence_from_the_teachers_law(x64, temperature):
  """Of the first step, in NumPy, from the features alone."""
  target = build.load('random:tiny', dtype='float64')
  model = build.target_model(target)
  config = eagle.settings(target.config, (1,))
  ids = np.arange(3, 203, 2)
  draw = np.random.default_rng(0)
  tokens = jnp.asarray(draw.integers(0, 256, (2, 7)), jnp.int32)
  features = jnp.asarray(draw.normal(size=(2, 7, 64)))
  features = eagle.normed(features, 1)
  full = np.asarray(model.head(target.params, features))
  mass = np.log(np.exp(full).sum(-1))
  counted = draw.random((2, 7)) < 0.7
  params = lm.nest(eagle.init(config, 0))
  weights = eagles.weights(params, ids, target.params)
  settings = heads.Loss('forward_kl', temperature, 1, 0.8, 0.0)
  value, figures = heads.loss(config, model, settings, (1,))(
    params,
    {'target': target.params, 'head': weights['head']},
    {
      'tokens': tokens,
      'features': features,
      'mass': jnp.asarray(mass),
      'counted': jnp.asarray(counted),
    },
    jax.random.key(0),
  )
  # q by the drafter's own view of the same features, shifted by one.
  before = jnp.pad(features, ((0, 0), (1, 0), (0, 0)))[:, :7]
  reader = eagle.reader(
    config, model, eagle.features_of(params, config, before)
  )
  from specdec_jax import forward

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
  want = (p * np.log(p / q)).sum(-1)[counted].mean()
  # The target's norm adds its epsilon once more to features of mean square 1.
  np.testing.assert_allclose(value, want, 1e-4)
  alpha = np.minimum(p, q).sum(-1)[counted].mean()
  np.testing.assert_allclose(figures['train_alpha'][0], alpha, 1e-4)


def test_masters_are_multiplied_in_the_teachers_dtype():
  target = build.load('random:tiny', dtype='bfloat16')
  model = build.target_model(target)
  config = eagle.settings(target.config, (1,))
  masters = eagle.settings(target.config, (1,), dtype='float32')
  params = lm.nest(eagle.init(masters, 0))
  ids = np.arange(8)
  settings = heads.Loss('forward_kl', 1.0, 2, 0.8, 0.0)
  trace = jax.make_jaxpr(heads.loss(config, model, settings, (1,)))(
    params,
    {'target': target.params, 'head': target.params['head'][:, ids]},
    {
      'tokens': jnp.zeros((2, 7), jnp.int32),
      'features': jnp.zeros((2, 7, 64), jnp.float16),
      'mass': jnp.zeros((2, 7)),
      'counted': jnp.ones((2, 7), bool),
    },
    jax.random.key(0),
  )
  sizes = {x.shape for x in jax.tree.leaves(params) if x.ndim == 2}
  seen = list(multiplied(trace.jaxpr, sizes))
  # Two steps of: join, q with k and v, o, gate with up, down.
  assert len(seen) == 10 and {str(x) for x in seen} == {'bfloat16'}


def multiplied(jaxpr, sizes):
  """The dtype of every factor of one of these shapes."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield from (x.aval.dtype for x in eqn.invars if x.aval.shape in sizes)
    for inner in eqn.params.values():
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from multiplied(inner, sizes)


@pytest.mark.parametrize(
  ('changes', 'why'),
  [
    (dict(unroll=0), 'unroll=0'),
    (dict(decay=0.0), 'decay=0.0'),
    (dict(temperature=-1.0), 'temperature=-1.0'),
    (dict(noise=-0.1), 'noise=-0.1'),
    (dict(divergence='kl'), "divergence='kl'"),
  ],
)
def test_refuses_settings(changes, why):
  good = dict(
    divergence='forward_kl', temperature=1.0, unroll=2, decay=0.8, noise=0.0
  )
  heads.Loss(**good)
  assert divergences.divergence_of('forward_kl')
  with pytest.raises(ValueError, match=why):
    heads.Loss(**good | changes)
