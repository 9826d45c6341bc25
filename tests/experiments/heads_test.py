"""Kinds of drafts beside each other: the page of a document, and a tiny run."""

import json
import re

import jax
import numpy as np
import pytest
import safetensors.numpy

from experiments.heads import answers, render
from specdec_jax import build, requests
from specdec_jax.distill import teacher
from tests import programs
from tests.distill import runs
from tests.experiments import reports


def test_a_choice_is_of_what_was_trained_here():
  doc = reports.stored('heads')
  efficiency = {'autoregressive': 1.0, render.SHIPPED: 3.0, 'mtp': 2.5}
  for x in doc['rows']:
    x['counts']['block_efficiency'] = efficiency.get(x['drafter'], 1.5)
    x['counts']['conditional_acceptance_per_position'][1:2] = [None]
  shipped, mtp = render.markdown(doc).splitlines()[4:6]
  assert shipped.startswith('| shipped eagle | 4.9 | 1,680 | - | 0.')
  assert re.match(r'\| mtp \| \d.\d \| .* \| 0.\d\d \| - \| 0', mtp)
  assert '`mtp` emits the most, 2.50 tokens' in render.markdown(doc)


def test_an_unknown_kind_is_refused(tmp_path):
  programs.run(
    'experiments/heads/train.py', '--kinds=eagle,lm', f'--workdir={tmp_path}'
  ).check_refused('kinds=lm: allowed are eagle, eagle3, mtp, medusa, dflash')


def test_fewer_layers_of_answers_are_those_that_the_teacher_records(tmp_path):
  target, items = build.load('random:tiny'), requests.items([[5, 6, 7], [9]])

  def of(name, taps):
    data = runs.settings(data=dict(length=18, folder=str(tmp_path / name))).data
    return teacher.answer(data, target, items, taps)

  of('all', (0, 1))
  new = of('new', (1,))
  answers.fewer(tmp_path / 'all', tmp_path / 'fewer', [1])
  same = jax.tree.map(np.array_equal, of('fewer', (1,)), new)
  assert all(jax.tree.leaves(same)), same
  for name in ('facts.json', 'spans.npy', 'features.npy'):
    one, other = (tmp_path / x / name for x in ('fewer', 'new'))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.slow
def test_a_tiny_run(tmp_path):
  question = dict(question_id=1, category='math', turns=['Count to two.'])
  (tmp_path / 'question.jsonl').write_text(json.dumps(question))
  for program in ('train', 'table'):
    done = programs.run(
      f'experiments/heads/{program}.py',
      '--size=tiny',
      '--kinds=medusa',
      '--minutes=0.001',
      '--prompts=8',
      '--tokens=4',
      f'--questions={tmp_path}/question.jsonl',
      f'--workdir={tmp_path}',
      f'--results={tmp_path}/results',
    ).check()
  assert done.document['trained'][0]['parameters'] > 0
  assert {x['drafter'] for x in done.document['rows'][1:]} == {
    *(render.SHIPPED, 'medusa')
  }
  assert (tmp_path / 'results/heads.md').read_text() in done.out
  assert (tmp_path / 'results/heads.png').exists()


@pytest.mark.parametrize(
  'kind, frozen', [('eagle3', 'embed_tokens'), ('dflash', 'lm_head')]
)
def test_parameters_of_the_target_are_not_counted(tmp_path, kind, frozen):
  half = lambda *shape: np.zeros(shape, np.float16)
  arrays = {f'{frozen}.weight': half(30, 5), 'fc.weight': half(4, 5)}
  safetensors.numpy.save_file(arrays, tmp_path / 'model.safetensors')
  assert render.parameters(kind, tmp_path) == 20 / 1e6
  assert render.parameters('mtp', tmp_path) == 170 / 1e6
