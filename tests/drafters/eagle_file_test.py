"""Files of EAGLE drafts: what is read fits its target, or an error says why."""

import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.drafters import draft_file, eagle_file
from specdec_jax.io import tokenizer
from specdec_jax.models import eagle, lm
from tests import fakes

OWN = tokenizer.from_bytes(300, 'bytes 300')
LISTED = 'damaged: its vocabulary is not a list of different ids below 258'


def saved(taps=(0, 1), ids=(4, 1, 257), **about) -> eagle_file.Saved:
  c = eagle.settings(fakes.tiny(vocab=264, dtype='float32'), taps)
  layer = {name: np.asarray(x) for name, x in eagle.init(c, 0).items()}
  facts = {'tokenizer': OWN.fingerprint(), 'who': 'a test'}
  return eagle_file.Saved(taps, layer, np.array(ids), facts | about)


def fit(made: eagle_file.Saved, **changes):
  """(settings, weights.draft, the target)."""
  config = fakes.tiny(**dict(vocab=264, dtype='float32') | changes)
  target = python_types.SimpleNamespace(
    config=config, params=lm.init(config, 0), tokenizer=OWN, ids=258
  )
  return *eagle_file.fit(made, 'F', target), target


def test_what_is_written_is_read(tmp_path):
  made = saved()
  eagle_file.write(tmp_path / 'draft', made)
  again = eagle_file.read(tmp_path / 'draft')
  assert (again.taps, again.about) == (made.taps, made.about)
  assert again.ids.dtype == np.int32 and again.ids.tolist() == [4, 1, 257]
  assert set(again.layer) == set(made.layer)
  for name, x in made.layer.items():
    np.testing.assert_array_equal(again.layer[name], x)


def test_a_draft_gets_its_columns_of_the_targets_head():
  config, made, target = fit(saved())
  assert config == eagle.settings(target.config, (0, 1))
  assert made['target'] is target.params
  np.testing.assert_array_equal(made['ids'], [4, 1, 257])
  wanted = target.params['head'][:, [4, 1, 257]]
  np.testing.assert_array_equal(made['head'], wanted)
  shapes = {name: x.shape for name, x in lm.flatten(made['layer']).items()}
  assert shapes == {name: x.shape for name, x in eagle.shapes(config).items()}


def test_a_draft_is_read_in_the_targets_type():
  _, made, _ = fit(saved(), dtype='bfloat16')
  own = {name: x for name, x in made.items() if name not in ('ids', 'target')}
  assert {x.dtype for x in jax.tree.leaves(own)} == {jnp.dtype('bfloat16')}


@pytest.mark.parametrize(
  'made, message',
  [
    (saved(tokenizer='x'), 'made with another tokenizer than that of bytes'),
    (saved()._replace(taps=(0, 2)), r'taps=\(0, 2\): needs .* at last layer 1'),
    (saved()._replace(taps=(1,)), r'fuse/kernel is \(32, 16\), .* needs None'),
    (
      saved()._replace(layer=saved((1,)).layer),
      r'fuse/kernel is None, this target needs \(32, 16\); train one',
    ),
    (saved(ids=(1, 1)), LISTED),
    (saved(ids=(1, 258)), LISTED),
    (saved(ids=(-1, 3)), LISTED),
    (saved(ids=()), LISTED),
    (saved(ids=((1, 2),)), LISTED),
    (saved(ids=(1.5,)), LISTED),
  ],
)
def test_a_draft_of_something_else(made, message):
  with pytest.raises(ValueError, match=f'^eagle F: {message}'):
    fit(made)


def test_another_width_is_named():
  with pytest.raises(ValueError, match=r'^eagle F: block/attn/o/kernel is \(1'):
    fit(saved(), width=24)


@pytest.mark.parametrize('taps', [None, '[1', 1])
def test_a_file_without_its_taps_is_damaged(tmp_path, taps):
  arrays, about = {'ids': np.array([1], np.int32)}, {'tokenizer': 'x'}
  about |= {} if taps is None else {'taps': taps}
  draft_file.write(eagle_file.KIND, tmp_path / 'draft', arrays, about)
  with pytest.raises(ValueError, match='^eagle .*: damaged, or not a file of '):
    eagle_file.read(tmp_path / 'draft')
