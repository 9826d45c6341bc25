"""Where students begin, and what of them is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import build
from specdec_jax.distill import lm_student, students, teacher
from specdec_jax.io import export
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, work
from tests.distill import runs


def made(target, ids=None, **student):
  """A Student of configs/distill.py with these settings."""
  return runs.made(target, ids, student=student)[1]


@pytest.mark.parametrize(
  'own', [dict(), dict(kind='lm', layers=(1,), share=False)]
)
def test_what_is_trained_is_float32_where_the_teacher_is_not(own):
  target = build.load('random:tiny', dtype='bfloat16', kernels='xla')
  student = made(target, np.arange(256), **own)
  kinds = {str(x.dtype) for x in jax.tree.leaves(student.params)}
  assert kinds == {'float32'}
  batch = {
    'tokens': jnp.zeros((2, 7), jnp.int32),
    'features': jnp.zeros((2, 7, 64), jnp.float16),
    'mass': jnp.zeros((2, 7)),
    'counted': jnp.ones((2, 7), bool),
  }
  trace = jax.make_jaxpr(student.loss)(
    student.params, student.frozen, batch, jax.random.key(0)
  )
  # The matrices of its layers are multiplied in the teacher's dtype.
  layers = student.params.get('layers', student.params)
  sizes = {x.shape for x in jax.tree.leaves(layers) if x.ndim == 2}
  found = list(factors(trace.jaxpr, sizes))
  assert len(found) >= 4 and {str(x) for x in found} == {'bfloat16'}


def factors(jaxpr, sizes):
  """The dtype of every factor of one of these shapes."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield from (x.aval.dtype for x in eqn.invars if x.aval.shape in sizes)
    for inner in eqn.params.values():
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from factors(inner, sizes)


def test_the_most_frequent_ids():
  # Of completions: four 7s, three 4s, one 1; 9 is in prompts only.
  tokens = np.array([[9, 9, 4, 4, 7, 0], [9, 1, 4, 7, 7, 7]])
  spans = np.array([[2, 5], [1, 6]])
  rows = teacher.rows({'tokens': tokens, 'spans': spans})
  of = lambda size: students.vocabulary(size, 10, rows).tolist()
  assert (of(1), of(2), of(5)) == ([7], [4, 7], [0, 1, 2, 4, 7])
  assert of(10) == of(0) == list(range(10))


def test_a_student_shares_as_its_teacher_does():
  target = build.load('random:tiny', kernels='xla')
  s = runs.settings(student=runs.LM | dict(share=True))
  for tied in (True, False):
    own = dataclasses.replace(target.config, tied=tied)
    given = dataclasses.replace(target, lm_config=own, params=lm.init(own, 3))
    made = lm_student.make(s, given, np.arange(given.ids))
    frozen = made.frozen['shared']
    assert 'head' in frozen and 'layers' in made.params
    assert not frozen.keys() & made.params.keys()
    for name, x in frozen.items():
      np.testing.assert_array_equal(x, given.params[name])
    scaled = dataclasses.replace(own, head_scale=0.7)
    scaled = dataclasses.replace(given, lm_config=scaled)
    config, _ = lm_student.config_of(s.student, scaled)
    # Of the head that it shares.
    assert (config.tied, config.head_scale) == (tied, 0.7)


@pytest.mark.parametrize('temperature, few', [(1.0, True), (2.0, False)])
def test_p_sums_to_1_over_all_ids_at_every_temperature(temperature, few):
  """Without a record of the mass the teacher's head has all its columns."""
  target = build.load('random:tiny', kernels='xla')
  ids, data = np.arange(0, 64, 2), dict(completions='teacher', keep=True)
  student = runs.LM | dict(vocabulary=len(ids))
  changes = dict(loss=dict(temperature=temperature), data=data)
  _, made = runs.made(target, ids, student=student, **changes)
  width = made.frozen['teacher']['head'].shape[-1]
  assert width == (len(ids) if few else target.config.vocab)


def test_pruning_keeps_the_layers_that_are_named():
  config = dataclasses.replace(
    model_config.sized('tiny'),
    depth=4,
    windows=(0, 4),
    rotated=(True, True, True, False),
  )
  params = lm.init(config, 0)
  own, same = lm_student.pruned(config, params, range(4))
  assert own.kinds == config.kinds and same == params
  few, some = lm_student.pruned(config, params, (1, 3))
  assert few.depth == 2 and few.windows == (4,)
  assert few.rotated == (True, False)
  assert some['layers']['1'] is params['layers']['3']


def test_a_draft_of_some_ids_keeps_them(tmp_path):
  target, size = build.load('random:tiny'), model_config.sized('tiny')
  folder, ids = tmp_path / 'few', (1, 2)
  export.save(folder, size, lm.init(size, 0), target.tokenizer, draft_ids=ids)
  own = runs.LM | dict(size='', source=str(folder))
  with pytest.raises(ValueError, match='proposes 2 ids; set student.vocab'):
    made(target, **own | dict(vocabulary=3))
  student = made(target, **own | dict(vocabulary=2))
  written = student.write(tmp_path, student.params, {})
  again = build.load(str(written), kernels='xla')
  few = build.load(folder, kernels='xla')
  assert again.draft_ids == ids
  np.testing.assert_array_equal(again.params['head'], few.params['head'])
  # Held beside the same weights with all ids.
  both = work.tree_bytes(work.own_leaves((few.as_draft[1], few.params), {}))
  size = work.tree_bytes(few.params)
  assert size < both < size + work.tree_bytes(few.params['head']) * 1.1
  mark = folder / export.MARK
  whole = mark.read_text()
  for other in ('9999', '"2"'):
    mark.write_text(whole.replace('2', other))
    with pytest.raises(ValueError, match='draft_ids is no list of ids'):
      made(target, **own | dict(vocabulary=2))
