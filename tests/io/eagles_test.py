"""Files of EAGLE drafts: what is written is read, and fits or says why not."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax.io import eagles, tokenizer
from specdec_jax.models import eagle, lm
from tests import fakes

OWN = tokenizer.from_bytes(300, 'bytes 300')
TARGET = fakes.tiny(vocab=264, dtype='float32')


def draft(taps=(0, 1), ids=(4, 1, 257), **about) -> eagles.Draft:
  c = eagle.settings(TARGET, taps)
  layer = {name: np.asarray(x) for name, x in eagle.init(c, 0).items()}
  facts = {'tokenizer': OWN.fingerprint(), 'steps': 3, 'who': 'a test'}
  return eagles.Draft(
    taps, layer, np.array(ids), eagles.describe(facts | about)
  )


def fit(made: eagles.Draft, target=TARGET, own=OWN):
  params = lm.init(target, 0)
  return *eagles.fit(made, 'F', target, params, own), params


def test_what_is_written_is_read(tmp_path):
  made = draft()
  eagles.write(tmp_path / 'draft', made)
  again = eagles.read(tmp_path / 'draft')
  assert again.taps == (0, 1)
  assert again.about == made.about == made.about | {'steps': '3'}
  assert again.ids.dtype == np.int32 and again.ids.tolist() == [4, 1, 257]
  assert set(again.layer) == set(made.layer)
  for name, x in made.layer.items():
    np.testing.assert_array_equal(again.layer[name], x)
  with pytest.raises(
    ValueError, match='^output .*: cannot be written: No such'
  ):
    eagles.write(tmp_path / 'no' / 'where', made)
  assert [x.name for x in tmp_path.iterdir()] == ['draft']


def test_a_draft_gets_its_columns_of_the_targets_head():
  config, made, params = fit(draft())
  assert config == eagle.settings(TARGET, (0, 1))
  assert made['target'] is params
  np.testing.assert_array_equal(made['ids'], [4, 1, 257])
  np.testing.assert_array_equal(made['head'], params['head'][:, [4, 1, 257]])
  shapes = {name: x.shape for name, x in lm.flatten(made['layer']).items()}
  assert shapes == {name: x.shape for name, x in eagle.shapes(config).items()}


def test_a_draft_is_read_in_the_targets_type():
  _, made, _ = fit(draft(), fakes.tiny(vocab=264, dtype='bfloat16'))
  own = {name: x for name, x in made.items() if name not in ('ids', 'target')}
  assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype('bfloat16')}


@pytest.mark.parametrize(
  'made, message',
  [
    (
      draft(tokenizer='x'),
      'trained with another tokenizer than that of bytes 300; train one for',
    ),
    (draft()._replace(taps=(0, 2)), r'taps=\(0, 2\): needs .* at last layer 1'),
    (draft()._replace(taps=(1,)), r'fuse/kernel is \(32, 16\), .* needs None'),
    (
      draft()._replace(layer=draft((1,)).layer),
      r'fuse/kernel is None, this target needs \(32, 16\); train one',
    ),
    (draft(ids=(1, 1)), 'damaged: its vocabulary is not .* ids below 258'),
    (
      draft(ids=(1, 258)),
      'damaged: its vocabulary is not a list of different ids',
    ),
    (
      draft(ids=(-1, 3)),
      'damaged: its vocabulary is not a list of different ids',
    ),
    (draft(ids=()), 'damaged: its vocabulary is not a list of different ids'),
    (
      draft(ids=((1, 2),)),
      'damaged: its vocabulary is not a list of different ids',
    ),
    (
      draft(ids=(1.5,)),
      'damaged: its vocabulary is not a list of different ids',
    ),
  ],
)
def test_a_draft_of_something_else(made, message):
  with pytest.raises(ValueError, match=f'^eagle F: {message}'):
    fit(made)


def test_another_width_is_named():
  with pytest.raises(
    ValueError, match=r'^eagle F: block/attn/o/kernel is \(16'
  ):
    fit(draft(), fakes.tiny(vocab=264, dtype='float32', width=24))


def test_what_is_no_file_of_a_draft(tmp_path):
  made = draft()
  path = tmp_path / 'draft'
  eagles.write(path, made)
  (tmp_path / 'cut').write_bytes(path.read_bytes()[:-9])
  (tmp_path / 'text').write_text('to be or not to be')
  save = lambda name, about, **arrays: safetensors.numpy.save_file(
    made.layer | arrays, tmp_path / name, about
  )
  ours = {'format': 'specdec_jax eagle 1'}
  ids = np.array([1], np.int32)
  save('other', None, ids=ids)
  save('untapped', ours, ids=ids)
  save('unlisted', ours | {'taps': '[1]'})
  save('garbled', ours | {'taps': '[1'}, ids=ids)
  save('number', ours | {'taps': '1'}, ids=ids)
  form = 'a file of scripts/distill.py, or zoo:NAME'
  for name, message in (
    ('cut', f'damaged, or not {form}'),
    ('text', f'damaged, or not {form}'),
    ('other', f'not {form}'),
    ('untapped', f"damaged, or not {form}: 'taps'"),
    ('unlisted', f"damaged, or not {form}: 'ids'"),
    ('garbled', f'damaged, or not {form}'),
    ('number', f'damaged, or not {form}'),
    ('.', f'no such file; give {form}'),
    ('absent', f'no such file; give {form}'),
  ):
    with pytest.raises(ValueError, match=f'^eagle {tmp_path}.*: ({message})'):
      eagles.read(tmp_path / name)


def test_the_zoo_is_a_folder_of_drafts(tmp_path, monkeypatch):
  monkeypatch.setattr(eagles, 'ZOO', tmp_path)
  with pytest.raises(
    ValueError, match='^eagle zoo:a: the zoo has no draft yet'
  ):
    eagles.read('zoo:a')
  (tmp_path / 'one').mkdir()
  eagles.write(tmp_path / 'one' / 'draft.safetensors', draft())
  assert eagles.read('zoo:one').taps == (0, 1)
  with pytest.raises(ValueError, match='^eagle zoo:two: the zoo has one$'):
    eagles.read('zoo:two')


def test_facts_are_texts():
  facts = eagles.describe({'a': 'b', 'loss': 0.5, 'taps': (1, 2)})
  assert facts == {'a': 'b', 'loss': '0.5', 'taps': json.dumps([1, 2])}
