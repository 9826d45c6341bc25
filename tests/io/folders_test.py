"""Folders and paths that are not quite a model: loaded, or named with the way
out."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from specdec_jax.io import hf, sources
from specdec_jax.io.published import eagle_folder, medusa_heads
from tests.io import tiny, torch_file


def whole(folder, seed=0, shards=1):
  c = tiny.config()
  return tiny.write_folder(
    folder, c, weights=tiny.arrays(c, seed), shards=shards
  )


def pickle(folder):
  """The folder with PyTorch's files in place of the safetensors files."""
  rename = lambda x: x.replace('model', 'pytorch_model', 1).replace(
    '.safetensors', '.bin'
  )
  for path in folder.glob('*.safetensors*'):
    new = folder / rename(path.name)
    if path.suffix == '.json':
      where = json.loads(path.read_text())['weight_map']
      where = {name: rename(x) for name, x in where.items()}
      new.write_text(json.dumps({'weight_map': where}))
    else:
      torch_file.save(new, safetensors.numpy.load_file(path))
    path.unlink()
  return folder


def test_a_stale_index_beside_one_file(tmp_path):
  """transformers reads the single file, others the shards: both or neither."""
  new = whole(tmp_path / 'new', 1)
  folder = whole(whole(tmp_path / 'm', 0, shards=2), 1)
  with pytest.raises(ValueError, match='index.json: the weights .* not those'):
    tiny.read(folder)
  first, second = sorted(folder.glob('model-*'))
  content = second.read_bytes()
  second.unlink()
  with pytest.raises(ValueError, match='are not those of model.safetensors'):
    tiny.read(folder)
  first.unlink()  # nothing else could be meant
  tiny.check_equal(tiny.weights_of(folder), tiny.weights_of(new))
  second.write_bytes(content)
  whole(folder, 1, shards=2)
  tiny.check_equal(tiny.weights_of(folder), tiny.weights_of(new))
  more = safetensors.numpy.load_file(folder / hf.SINGLE) | {'x': np.ones(2)}
  safetensors.numpy.save_file(more, folder / hf.SINGLE)
  with pytest.raises(ValueError, match='are not those of model.safetensors'):
    tiny.read(folder)


@pytest.mark.parametrize('make', [lambda folder: folder, pickle])
def test_shards_need_no_index(tmp_path, make):
  folder = make(whole(tmp_path / 'm', shards=3))
  next(folder.glob('*.index.json')).unlink()
  tiny.check_equal(
    tiny.weights_of(folder), tiny.weights_of(whole(tmp_path / 'one'))
  )
  one, two, _ = sorted(folder.glob('*-of-*'))
  two.unlink()
  with pytest.raises(ValueError, match=f"here are .'{one.name}"):
    tiny.read(folder)


@pytest.mark.parametrize(
  'read',
  [
    lambda folder, target: tiny.read(folder),
    lambda folder, target: eagle_folder.fit(folder, 'eagle F', target),
    medusa_heads.fit,
  ],
)
def test_an_array_in_two_shards_is_refused(tmp_path, read):
  """A model's, and a draft's: which of the two is meant?"""
  folder = whole(tmp_path, shards=2)
  target = tiny.read(folder)
  shutil.copy(*sorted(folder.glob('*-of-*')))
  with pytest.raises(ValueError, match=': [a-z0-9_.]+ is there twice'):
    read(folder, target)


@pytest.mark.parametrize('shards', [1, 3])
def test_a_model_of_pytorchs_files(tmp_path, shards):
  """They are read only where there is no safetensors file."""
  folder = pickle(whole(tmp_path / 'm', shards=shards))
  want = tiny.weights_of(whole(tmp_path / 'one'))
  tiny.check_equal(tiny.weights_of(folder), want)
  for path in folder.glob('pytorch_model*'):
    if shards == 1 or path.suffix == '.json':
      assert sources.open_source(str(path)).label == 'm'
  whole(folder, seed=1)
  with pytest.raises(AssertionError):
    tiny.check_equal(tiny.weights_of(folder), want)


@pytest.mark.parametrize('name', ['config.json', hf.SINGLE])
def test_a_file_of_a_folder_stands_for_it(tmp_path, name):
  opened = sources.open_source(str(whole(tmp_path) / name))
  assert opened.label == tmp_path.name


def moved(old, new):
  return lambda folder: (folder / old).rename(folder / new)


def arrays(change):
  """Changes the arrays of a folder."""

  def edit(folder):
    weights = safetensors.numpy.load_file(folder / hf.SINGLE)
    change(weights)
    safetensors.numpy.save_file(weights, folder / hf.SINGLE)

  return edit


def content(name, change):
  """Changes the bytes of a file."""
  of = lambda x: x.read_bytes() if x.exists() else b''
  return lambda x: (x / name).write_bytes(change(of(x / name)))


def index_of(name):
  about = json.dumps({'weight_map': {'lm_head.weight': name}})
  return content(hf.INDEX, lambda _: about.encode())


UP, NORM = 'model.layers.0.mlp.up_proj.weight', 'model.norm.weight'
EXTRA = {'model.extra.weight': np.ones((2, 2)), 'more': np.ones(2)}
LFS = b'version https://git-lfs.github.com/spec/v1\noid sha256:0'
OUTSIDE = ('../secret.safetensors', '/etc/x.safetensors', 'a\\b', 'x.bin', '..')


@pytest.mark.parametrize(
  'change, message',
  [
    (
      lambda x: (x / 'adapter_config.json').write_text('{}'),
      'an adapter, .*merge_and_unload.*move the adapter else',
    ),
    (moved(hf.SINGLE, 'adapter_model.safetensors'), 'an adapter'),
    (moved(hf.SINGLE, 'x.safetensors'), "here are .'x.safetensors'"),
    (
      moved(hf.SINGLE, 'consolidated.00.pth'),
      "or from pytorch_model.bin or .*here are .'consolidated.00.pth'",
    ),
    (
      moved(hf.SINGLE, 'pytorch_model.bin'),
      'pytorch_model.bin: cannot be read: File is not a zip file; give what',
    ),
    (
      moved('tokenizer.json', 'tokenizer.model'),
      'no tokenizer.json; .*tokenizer.model.*AutoTokenizer.*save_pretrained',
    ),
    (moved('config.json', 'c'), 'config.json: no such file; a model folder'),
    (content('config.json', lambda _: b'[' * 100_000), 'config.json: not JSON'),
    (
      lambda x: tiny.write_folder(x, tiny.config(vocab=258)),
      'tokenizer has 260 ids, the model 258',
    ),
    (
      arrays(lambda w: w.update(EXTRA | {'x': w.pop(NORM)})),
      r'no place for \[.*model.extra.weight, more.*\]; nothing for \[model.no',
    ),
    (
      arrays(lambda w: w.update({UP: np.ascontiguousarray(w[UP].T)})),
      r'up_proj.* \(32, 48\).*need \(48, 32\)',
    ),
    (
      arrays(lambda w: w.update({NORM: w[NORM] * np.nan})),
      f'{NORM} has 32 values that are not fin',
    ),
    (content(hf.SINGLE, lambda _: LFS), 'git lfs pull'),
    (lambda x: (x / hf.SINGLE).unlink(), 'no such file; weights are read from'),
    *(
      (content(hf.SINGLE, lambda x, n=n: x[:n]), 'safetensors: not a whole')
      for n in (0, 4, 9, 200, -1)
    ),
    *((index_of(name), 'weight_map names') for name in OUTSIDE),
  ],
)
def test_a_folder_that_is_no_whole_model_names_the_way(
  tmp_path, change, message
):
  change(whole(tmp_path))
  with pytest.raises(ValueError, match=message):
    tiny.read(tmp_path)
