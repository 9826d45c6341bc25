"""Models that gguf-split has cut into files."""

import re
import shutil

import pytest

from specdec_jax.io import files, sources
from specdec_jax.io.gguf import container
from tests.io import tiny


@pytest.fixture(scope='module')
def cut(tmp_path_factory):
  """A folder with whole.gguf, and the same in parts (a-*, and b-*)."""
  folder, c = tmp_path_factory.mktemp('parts'), tiny.config(depth=1)
  weights = tiny.arrays(c)
  whole = tiny.write_gguf(folder / 'whole.gguf', c, weights=weights)
  tiny.write_gguf(folder / 'a.gguf', c, weights=weights, split_max_tensors=5)
  # As gguf-split --no-tensor-first-split: settings alone in the first part.
  more = dict(split_max_tensors=5, small_first_shard=True)
  tiny.write_gguf(folder / 'b.gguf', c, weights=weights, **more)
  return folder, whole


def test_the_first_part_is_the_model(cut):
  folder, whole = cut
  one = tiny.read(whole)
  for first in ('a-00001-of-00003.gguf', 'b-00001-of-00004.gguf'):
    model = tiny.read(folder / first)
    assert model.config == one.config
    tiny.check_equal(model.params, one.params)
    assert model.label == f'{first[0]} (F32)'
    assert model.tokenizer.fingerprint() == one.tokenizer.fingerprint()
    # All parts are in the digest.
    stem = first.split('-00001')[0]
    assert model.digest == files.digest(sorted(folder.glob(f'{stem}-*')))


def test_a_later_part_names_the_first(cut):
  folder, _ = cut
  for part in ('a-00002-of-00003.gguf', 'b-00004-of-00004.gguf'):
    first = re.sub('-0000.-', '-00001-', part)
    why = f'{part}: is one of {part[-6]} parts: give the first, {first}'
    with pytest.raises(ValueError, match=why):
      sources.open_source(str(folder / part))


def test_parts_that_are_missing_renamed_or_of_another_model(cut, tmp_path):
  folder, _ = cut
  names = [f'a-0000{i}-of-00003.gguf' for i in (1, 2, 3)]
  first = tmp_path / names[0]

  def refused(why):
    with pytest.raises(ValueError, match=why):
      container.parse(first)

  shutil.copy(folder / names[0], first)
  refused(f"missing are .'{names[1]}', '{names[2]}'")
  shutil.copy(folder / names[1], tmp_path / names[1])
  shutil.copy(folder / names[1], tmp_path / names[2])
  refused(f'{names[2]}: is not part 3 of 3 of {names[0]}: .*1, 3. and has')
  other = tiny.write_gguf(tmp_path / 'x.gguf', tiny.config(depth=1))
  shutil.move(other, tmp_path / names[2])
  refused(f'{names[2]}: is not part 3 of 3')
  shutil.copy(folder / 'b-00004-of-00004.gguf', tmp_path / names[2])
  refused(f'{names[2]}: is not part 3 of 3 .*: it says .3, 4.')
  first.unlink()
  first = tmp_path / 'renamed.gguf'
  shutil.copy(folder / names[0], first)
  refused('give the first, renamed-00001-of-00003.gguf, with all others')
