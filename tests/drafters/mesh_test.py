"""Published drafts on a mesh of two axes: the texts are those of one device."""

import functools

import pytest

from specdec_jax import build, requests, sharding
from specdec_jax.drafters import eagle
from tests import fakes
from tests.drafters import dflash_test, medusa_test
from tests.io import published_test

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

D, V = medusa_test.CONFIG.width, medusa_test.CONFIG.vocab


def medusa(folder):
  return medusa_test.save(folder, medusa_test.heads(), 'pt')


def mtp(folder):
  return published_test.mimo(folder), folder


KINDS = {
  'medusa': (medusa, medusa_test.UNMEASURED),
  'dflash': (dflash_test.save, dflash_test.UNMEASURED),
  'mtp': (mtp, functools.partial(eagle.Settings, check='off')),
}


@pytest.mark.slow
@pytest.mark.parametrize('kind', KINDS)
def test_on_a_mesh_the_texts_are_the_same(x64, tmp_path, kind):
  """Drafts are whole on every device, but for a matrix of ids of Medusa's."""
  save, settings = KINDS[kind]
  folder, source = save(tmp_path / 'm')
  load = functools.partial(build.load, str(folder), dtype='float64')
  plain = build.engine(load(), rule='coupled')
  target = load(mesh=sharding.make_mesh(2, 2))
  made = build.engine(target, settings(source), rule='coupled', gamma=2)
  ask = functools.partial(
    fakes.request,
    fakes.prompts(4, vocab=medusa_test.IDS, longest=9),
    16,
    vocab=medusa_test.IDS,
    length=32,
    temperature=[0.7, 1, 1, 0.0],
  )
  one = plain.programs.generate(plain.weights, ask())
  placed = requests.place(ask(), target.layout)
  two = made.programs.generate(made.weights, placed)
  assert fakes.texts(one) == fakes.texts(two)
  if kind == 'medusa':
    head = made.weights.draft['heads']['0']
    assert head['head'].sharding.shard_shape((D, V)) == (D, V // 2)
    assert head['layers']['0']['kernel'].sharding.is_fully_replicated
