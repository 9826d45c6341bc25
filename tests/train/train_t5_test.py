"""From pairs of texts to an encoder-decoder that answers."""

import functools

import numpy as np
import pytest

from configs import train_t5
from specdec_jax import api, build, machine
from specdec_jax.io import export, sources
from specdec_jax.models import lm
from specdec_jax.train import text, text_loss, text_metrics
from specdec_jax.train import train_lm as train_lib
from tests.io import tiny
from tests.train import runs

FEW = dict(
  model=dict(dropout=0.1),
  text=dict(vocab=270, length=10, source_length=6, rows=4),
  run=dict(steps=4, checkpoint_every=2, evaluate_every=2, log_every=1),
  judge=dict(pairs=6),
  # More, and every answer is the same after these steps.
  optimiser=dict(learning_rate=5e-4),
)


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
  monkeypatch.setattr(machine, 'matmul_flops', lambda dtype: 1e12)


@pytest.fixture(scope='module', autouse=True)
def seen():
  """What is scored, in place of BLEU: the answers and the references."""
  found = []

  def noted(*texts):
    found.append([list(x) for x in texts])
    return 1.0

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(text_metrics, 'metric_of', lambda name: noted)
    yield found


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  folder = tmp_path_factory.mktemp('alone')
  return folder, runs.trained(train_t5, folder, FEW)


@pytest.mark.more
def test_the_scored_answers_and_the_loss_are_those_of_the_saved_model(
  alone, seen
):
  folder, figures = alone
  assert figures['finished'] and figures['bleu'] == 1.0
  assert figures['step'] == 4  # the last evaluation is the best
  model = build.load(folder / 'model')
  t = model.tokenizer
  assert (model.start, t.eos_ids, t.size) == (0, (1,), 270)
  corpus = text.read('numbers', field='words', source_field='digits')
  _, held = text.held_out(corpus, 20)
  found, wanted = seen[1]
  assert wanted == list(held.documents[:6]) and len(set(found)) > 1
  ours = api.generate(model, held.sources[:6], max_new_tokens=9)
  assert [x.text for x in ours] == found
  drafted = api.generate(
    model, held.sources[:6], max_new_tokens=9, draft='lookup'
  )
  assert [x.tokens for x in drafted] == [x.tokens for x in ours]
  # Without dropout.
  read = tiny.read(folder / 'model')
  rows = text.pair_rows(held, t, 0, 10, 6)
  rows = {name: x[:64] for name, x in rows.items()}
  loss = text_loss.cross_entropy(read.config, ids=t.size, remat=False)
  want = train_lib.held_out_loss(loss, rows)(read.params)['held_out_loss']
  np.testing.assert_allclose(figures['held_out_loss'], want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['t5', 'decoder'])
def test_a_model_goes_on_with_its_tokenizer(kind, alone, tmp_path):
  """At a learning rate of nothing it stays what it was, bit for bit."""
  source = str(alone[0] / 'model')
  changes: dict = dict(text={}, judge={})
  if kind == 'decoder':
    c = tiny.config()
    source = str(tmp_path / 'source')
    tokenizer = sources.open_source('random:tiny').tokenizer
    export.save(source, c, lm.init(c, 0), tokenizer)
    changes = dict(text=dict(source_field=''), judge=dict(metric=''))
  changes['model'] = dict(size='', source=source)
  changes['optimiser'] = dict(learning_rate=1e-30)
  run = functools.partial(runs.trained, train_t5, tmp_path / 'run', FEW)
  figures = run(**changes)
  before, after = (tiny.read(x) for x in (source, tmp_path / 'run/model'))
  assert after.config == before.config
  tiny.check_equal(after.params, before.params)
  assert after.tokenizer.fingerprint() == before.tokenizer.fingerprint()
  if kind == 't5':
    near = alone[1]['held_out_loss']
    np.testing.assert_allclose(figures['held_out_loss'], near, 1e-5)
    # The same run cannot go on from another model.
    with pytest.raises(ValueError, match='other values of .*model.source, re'):
      changes['model']['source'] = 'random:t5_tiny'
      run(True, **changes)
