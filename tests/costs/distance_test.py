"""The distance from a reference, beside NumPy's."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import forward, requests, settings
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import verdict
from specdec_jax.costs import distance
from specdec_jax.io import load
from tests.io import tiny

PROMPTS = {'a': (5, 6, 7, 8, 9), 'b': (3, 1, 4, 1, 5, 9, 2, 6), 'c': (7, 7)}


@pytest.fixture(scope='module', name='asked')
def _asked():
  """(Setup, requests, prompts) of three, two to a batch: a copy fills it."""
  c = importlib.import_module('configs.pair').get_config('tiny').unlock()
  c.decode.methods, c.bench.batch_size = ('lookup',), 2
  e = settings.load(settings.settings(c))
  a, b, c = (requests.Item(x, 0, name) for name, x in PROMPTS.items())
  some = dict(sampling=e.settings.sampling, bench=e.settings.bench)
  plan = plan_lib.Plan((a, b), (c,), max_new_tokens=8, buffer=32, **some)
  groups = plan_lib.groups(plan_lib.arms(e), plan, plan.test + plan.calibration)
  return e, [x.full for x in groups], len(PROMPTS)


def between(asked, other):
  return distance.between(asked[0].target, other, *asked[1:], chunk=4)


def log_probabilities(model, tokens):
  """[T, V] float64, of the ids that are tokens."""
  read = jax.jit(lambda x: forward.hidden(model.model, model.params, x))
  hidden = read(jnp.array([[*tokens, *[0] * (8 - len(tokens))]]))
  x = np.asarray(model.model.head(model.params, hidden)[0], np.float64)
  x = x[: len(tokens), np.isfinite(x[0])]
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_each_figure_is_numpys(asked):
  own, other = (
    load.load(f'random:tiny:{seed}', kernels='xla') for seed in (0, 5)
  )
  found = between(asked, other)
  texts = PROMPTS.values()
  p, r = (
    np.concatenate([log_probabilities(m, x)[:-1] for x in texts])
    for m in (own, other)
  )
  nexts = np.concatenate([x[1:] for x in texts])
  each = np.arange(len(nexts))
  assert found.tokens == len(nexts) == 4 + 7 + 1
  both = np.exp(p), np.exp(r)
  figures = {
    'total_variation': np.abs(both[0] - both[1]).sum(-1).mean() / 2,
    'kl': (both[1] * (r - p)).sum(-1).mean(),
    'agreement': (p.argmax(-1) == r.argmax(-1)).mean(),
    'perplexity': np.exp(-p[each, nexts].mean()),
    'reference_perplexity': np.exp(-r[each, nexts].mean()),
  }
  for name, right in figures.items():
    np.testing.assert_allclose(getattr(found, name), right, 1e-4, err_msg=name)
  assert f'{found.kl:.2g} nats' in verdict.of_distance(found)


@pytest.mark.parametrize('apart', [1e-5, 1e-4, 0.02, 1.0])
def test_a_small_divergence_is_no_rounding(apart):
  """Of logits that are `apart`, in float32 beside NumPy's float64."""
  rng = np.random.default_rng(0)
  logits = 4 * rng.standard_normal((2, 4096))
  logits[1] = logits[0] + apart * rng.standard_normal(4096)
  logits = np.asarray(logits, np.float32)
  p, r = (x - np.log(np.exp(x).sum()) for x in logits.astype(np.float64))
  right = (np.exp(r) * (r - p)).sum()
  cast = [jax.nn.log_softmax(jnp.array(x)) for x in logits]
  np.testing.assert_allclose(distance.divergence(*cast), right, 0.02)
  # An id that the reference excludes.
  one = [jnp.log(jnp.array(x)) for x in ([0.5, 0.25, 0.25], [0.5, 0.5, 0.0])]
  found = distance.divergence(*one)
  np.testing.assert_allclose(found, 0.5 * np.log(2), 1e-6)


def test_a_model_is_not_off_itself(asked):
  found = between(asked, settings.reference(asked[0], 'float32'))
  assert found.total_variation < 1e-5 and abs(found.kl) < 1e-5
  assert found.agreement == 1
  other = between(asked, settings.reference(asked[0], 'random:tiny:3'))
  assert other.total_variation > 0.1


def test_a_reference_has_no_rows_of_int8_and_its_own_line(asked, capsys):
  """Of floats; beside a quantised target of coarser rows."""
  of = asked[0].settings
  coarse = dataclasses.replace(of.target, dtype='int8', kernels='int8')
  e = settings.load(dataclasses.replace(of, target=coarse))
  capsys.readouterr()
  found = settings.reference(e, 'float32')
  assert capsys.readouterr().err.startswith('memory: reference ')
  assert found.arithmetic == settings.reference(e, 'random:tiny').arithmetic
  assert found.arithmetic == 'float32'
  assert settings.reference(e, 'int4').arithmetic.endswith(', int8 rows')


def test_what_cannot_be_compared_is_refused(asked, tmp_path, monkeypatch):
  other = tiny.write_folder(tmp_path / 'a', tiny.config())
  with monkeypatch.context() as patch:
    patch.setattr(load, 'read', None)  # before any weight is read
    with pytest.raises(ValueError, match='different tokenizers'):
      settings.reference(asked[0], str(other))
  small = load.load('random:tiny')
  words = load.load(str(other)).tokenizer
  short = [x._replace(lengths_B=x.lengths_B * 0 + 1) for x in asked[1]]
  for what, reference, message in (
    (asked, dataclasses.replace(small, tokenizer=words), 'different tokenize'),
    ((asked[0], short, 3), small, 'no prompt has two tokens'),
    (asked, load.load('random:t5_tiny'), 'reference: distances are over the'),
  ):
    with pytest.raises(ValueError, match=message):
      between(what, reference)
