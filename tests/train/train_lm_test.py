"""From a text to a model that decodes, on one device and on a mesh."""

import os
import shutil
import signal
from pydoc_data import topics

import numpy as np
import pytest

from configs import train_lm
from specdec_jax import api, build, machine
from specdec_jax.train import text
from specdec_jax.train import train_lm as train_lm_lib
from tests.train import runs


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
  monkeypatch.setattr(machine, 'matmul_flops', lambda dtype: 1e12)


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  path = tmp_path_factory.mktemp('text') / 'manual.txt'
  path.write_text('\n\n'.join(topics.topics.values())[:40_000])
  return path


def run(workdir, source, changed=False, **sections):
  few = dict(
    text=dict(source=str(source), vocab=300, length=32, rows=4),
    run=dict(steps=4, checkpoint_every=2, evaluate_every=2, log_every=1),
  )
  return runs.trained(train_lm, workdir, few, changed, **sections)


def losses(workdir):
  return [x['loss'] for x in runs.lines(workdir) if 'loss' in x]


@pytest.fixture(scope='module')
def alone(source, tmp_path_factory):
  """A run on one device."""
  folder = tmp_path_factory.mktemp('alone')
  return folder, run(folder, source)


def test_a_text_becomes_a_model_that_decodes(alone, source):
  folder, figures = alone
  found = losses(folder)
  assert figures['finished'] and len(found) == 4 and found[-1] < found[0]
  assert run(folder, source) == figures
  model = build.load(folder / 'model')
  assert api.generate(model, ['the '], max_new_tokens=4)[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
  'model', [dict(dtype='bfloat16'), dict(remat=True)], ids=str
)
def test_computes_otherwise_and_learns_the_same(model, alone, source, tmp_path):
  run(tmp_path, source, model=model)
  near = 1e-5 if 'remat' in model else 2e-2
  np.testing.assert_allclose(losses(tmp_path), losses(alone[0]), rtol=near)
  if 'dtype' in model:
    assert losses(tmp_path) != losses(alone[0])
  # What is trained and exported stays float32.
  params = build.load(tmp_path / 'model', kernels='xla').params
  assert params['head'].dtype == np.float32


@pytest.mark.slow
def test_a_mesh_changes_nothing_and_another_goes_on(
  alone, source, tmp_path, monkeypatch
):
  folder, figures = alone
  judge = train_lm_lib.held_out_loss

  def stops(*args):
    inner = judge(*args)

    def judged(params):
      head = params['head']
      assert head.addressable_shards[0].data.size * 4 == head.size
      os.kill(os.getpid(), signal.SIGTERM)
      return inner(params)

    return judged

  with monkeypatch.context() as patch:
    patch.setattr(train_lm_lib, 'held_out_loss', stops)
    mesh = dict(data=2, model=2, fsdp=True)
    begun = run(tmp_path, source, mesh=mesh)
  assert begun == {'step': 2, 'finished': False}
  wrong = 'mesh.data, mesh.fsdp, mesh.model; .*by --changed'
  with pytest.raises(ValueError, match=wrong):
    run(tmp_path, source, mesh=dict(data=4, model=1))
  ended = run(tmp_path, source, changed=True, mesh=dict(data=4, model=1))
  assert ended['step'] == figures['step']
  np.testing.assert_allclose(losses(tmp_path), losses(folder), rtol=1e-5)
  one, other = (
    build.load(x / 'model', kernels='xla').params['head']
    for x in (tmp_path, folder)
  )
  np.testing.assert_allclose(one, other, atol=1e-5)


def content(folder):
  return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def test_a_refused_run_leaves_the_workdir_as_it_was(alone, source, tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(alone[0], workdir)
  before = content(workdir)
  for wrong, key in (
    (dict(text=dict(vocab=310)), 'text.vocab'),
    (dict(model=dict(size='smollm2_135m')), 'model.size'),
    (dict(run=dict(seed=1)), 'run.seed'),
    (dict(optimiser=dict(muon=0.1)), 'optimiser.muon'),
    (dict(judge=dict(pairs=7)), 'judge.pairs'),
  ):
    with pytest.raises(ValueError, match=f'values of {key}, which cannot'):
      run(workdir, source, True, **wrong)
    assert content(workdir) == before


@pytest.mark.parametrize('ended', [True, False])
def test_a_text_that_changed_is_refused(ended, alone, source, tmp_path):
  """By a run that is finished too, whose figures are of the old one."""
  workdir = tmp_path / 'run'
  shutil.copytree(alone[0], workdir)
  if not ended:
    (workdir / 'ended.json').unlink()
  before = content(workdir / 'tokenizer')
  text_ = source.read_text()
  try:
    source.write_text(text_[:-1] + 'X')
    with pytest.raises(ValueError, match='values of read.text, which cannot'):
      run(workdir, source)
  finally:
    source.write_text(text_)
  assert content(workdir / 'tokenizer') == before
  made = {'model': str(workdir / 'model')}
  assert run(workdir, source) == alone[1] | made


def test_a_tokenizer_is_taken(alone, tmp_path):
  """That of a model, or a folder without one."""
  c = train_lm.get_config('tiny')
  for at, model in (
    ('random:tiny', 'random:tiny'),
    (alone[0] / 'tokenizer', alone[0] / 'model'),
  ):
    c.text.tokenizer = str(at)
    found = train_lm_lib._tokenizer(
      train_lm_lib.settings(c).text, text.Corpus('', (), ''), tmp_path, False
    )
    own = build.load(model).tokenizer
    assert found.fingerprint() == own.fingerprint()
