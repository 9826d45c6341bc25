"""Medusa's heads: what they are trained for, and what is left of a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build
from specdec_jax.distill import medusa_student, sections
from specdec_jax.drafters import medusa
from specdec_jax.io.published import medusa_heads
from specdec_jax.models import eagle
from tests.distill import runs

OWN = dict(kind='medusa', vocabulary=0)


def law(logits, temperature=1.0):
  x = np.exp((logits - logits.max(-1, keepdims=True)) / temperature)
  return x / x.sum(-1, keepdims=True)


@pytest.mark.more
@pytest.mark.parametrize('temperature, own', [(1.0, False), (0.5, True)])
def test_a_head_learns_the_teachers_law_of_the_token_it_drafts(
  x64, temperature, own
):
  """Of every head, in NumPy, row by row and token by token."""
  target = build.load('random:tiny', dtype='float64', kernels='xla')
  c, model = target.config, target.model
  draw, B, T, count = np.random.default_rng(0), 2, 9, 3
  scale = jnp.asarray(1 + draw.random(c.width))
  params = target.params | {'norm': {'scale': scale}}
  features = eagle.normed(jnp.asarray(draw.normal(size=(B, T, c.width))), 1)
  full = np.asarray(model.head(params, features))
  state = np.asarray(model.norm(params, features))
  counted = draw.random((B, T)) < 0.7
  matrix = lambda *shape: draw.normal(size=shape) / 8
  D, heads = c.width, {}
  for i in range(count):
    layer = dict(kernel=matrix(D, D), bias=matrix(D))
    more = dict(head=matrix(D, c.vocab)) if own else {}
    heads[str(i)] = dict(layers={'0': layer}, **more)
  batch = {
    'tokens': jnp.zeros((B, T), jnp.int32),
    'features': features,
    'mass': jnp.asarray(np.log(np.exp(full).sum(-1))),
    'counted': jnp.asarray(counted),
  }
  read = medusa.Heads(model, target.ids, c.depth, D, c.activations)
  settings = sections.Loss('forward_kl', temperature, count, 0.8, 0.0)
  weights = lambda heads, target: {'heads': heads, 'target': target}
  loss = medusa_student.ahead(read, weights, settings)
  value, figures = loss(heads, params, batch, jax.random.key(0))
  each, alphas, matrix_DV = [], [], np.asarray(params['head'])
  for i, head in enumerate(heads.values()):
    found, alpha = [], []
    for b in range(B):
      for t in range(T - 2 - i):
        if not counted[b, t + 2 + i]:
          continue
        x, layer = state[b, t], head['layers']['0']
        y = x @ layer['kernel'] + layer['bias']
        x = x + y / (1 + np.exp(-y))
        logits = (x @ head.get('head', matrix_DV))[: target.ids]
        # The law of token t + 2 + i is what the teacher says after the last.
        p = law(full[b, t + 1 + i, : target.ids], temperature)
        q = law(logits, temperature)
        found.append((p * np.log(p / q)).sum())
        alpha.append(np.minimum(p, q).sum())
    each.append(np.mean(found))
    alphas.append(np.mean(alpha))
  weights = 0.8 ** np.arange(count)
  # The target's norm adds its epsilon once more to features of mean square 1.
  np.testing.assert_allclose(value, weights @ each / weights.sum(), 1e-4)
  np.testing.assert_allclose(figures['train_alpha'], alphas, 1e-4)


@pytest.mark.parametrize('share', [True, False])
def test_heads_begin_as_the_teachers_own_prediction(share):
  target = build.load('random:tiny', kernels='xla')
  s, made = runs.made(target, student=OWN | dict(share=share))
  assert len(made.params) == s.loss.unroll
  c, weights = target.config, made.weights(made.params)
  heads = medusa.Heads(target.model, target.ids, c.depth, c.width, 'float32')
  assert ('head' in weights['heads']['0']) != share
  x_1TD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, c.width)))
  want = target.model.project(target.params, x_1TD.astype('float32'))
  for i in range(s.loss.unroll):
    found = heads.logits(weights, i, x_1TD.astype('float32'))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.more
def test_heads_learn_and_are_read_as_published_ones(tmp_path):
  student = OWN | dict(share=False)
  _, lines = runs.run(tmp_path, student=student, run=dict(steps=8))
  found = runs.losses(lines)
  assert len(found) == 8 and sum(found[-2:]) < sum(found[:2])  # an epoch each
  folder = tmp_path / 'run/draft'
  arrays = safetensors.numpy.load_file(folder / medusa_heads.FILE)
  facts = json.loads((folder / 'config.json').read_text())
  assert facts['medusa_num_heads'] == 2
  target = build.load('random:tiny', kernels='xla')
  again = medusa_heads.stored_as(medusa_heads.fit(folder, target))
  assert again.keys() == arrays.keys()
  for name, x in again.items():
    assert x.astype(np.float16).tobytes() == arrays[name].tobytes()
  # Trained for a few steps, they agree in too little to be measured.
  options = {'source': folder, 'check': 'off'}
  runs.assert_decodes_as_plain('medusa', draft_options=options)
  with pytest.raises(ValueError, match='other values of loss.unroll, which'):
    more = dict(loss=dict(unroll=3), run=dict(steps=8))
    runs.run(tmp_path, student=student, **more)
