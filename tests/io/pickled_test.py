"""PyTorch's files: their arrays, and whatever else a pickle could ask for."""

import pickle
import pickletools
import random
import zipfile

import numpy as np
import pytest

from specdec_jax.io.arrays import pickled, stored
from tests.io import torch_file as tf

# As torch 2.13 writes them; read back in test_files_of_torch_itself.
KINDS = [*tf.STORAGES]


def read(path):
  return {name: x.read() for name, x in stored.open_file(path).items()}


@pytest.fixture(name='path')
def _path(tmp_path):
  return tmp_path / 'pytorch_model.bin'


@pytest.mark.parametrize('kind', KINDS)
def test_arrays_of_each_type(path, kind):
  values = np.array([[0, 1, 2], [3, 100, 1]]).astype(np.dtype(kind))
  found = read(tf.save(path, {'a.weight': values, 'b': values[0, :1]}))
  assert list(found) == ['a.weight', 'b']
  for name, want in (('a.weight', values), ('b', values[0, :1])):
    assert found[name].dtype == want.dtype
    np.testing.assert_array_equal(found[name], want)
  codes = {x.dtype for x in stored.open_file(path).values()}
  assert codes <= {*'F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL'.split()}


def test_views_of_one_storage(path):
  flat = np.arange(12, dtype=np.float32)
  held = tf.storage('0', 'Float', 12)
  kept = held + b'q\x05', b'h\x05'  # named once, then looked up
  views = {
    'turned': tf.tensor(kept[0], 0, (4, 3), (1, 4)),
    'later': tf.tensor(kept[1], 5, (2, 3), (3, 1)),
    'number': tf.tensor(kept[1], 7, (), ()),
    'none': tf.tensor(kept[1], 0, (0, 3), (3, 1)),
    'same': tf.tensor(kept[1], 2, (3,), (0,)),
  }
  found = read(tf.zipped(path, tf.ordered(views), {'0': flat.tobytes()}))
  want = {
    'turned': flat.reshape(3, 4).T,
    'later': flat[5:11].reshape(2, 3),
    'number': flat[7],
    'none': np.zeros((0, 3)),
    'same': flat[[2, 2, 2]],
  }
  for name, x in want.items():
    np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_nothing_is_read_before_it_is_asked_for(path):
  x = pickled.read(tf.save(path, {'x': np.ones(3, np.float32)}))['x']
  assert not x.flags.writeable
  while not isinstance(x, np.memmap):
    assert x is not None
    x = x.base
  assert x.filename == path


ONE = tf.tensor(tf.storage('0', 'Float', 1), 0, (1,), (1,))
STORED = {'0': np.array([7], np.float32).tobytes()}
NAMED = b'}' + tf.text('a') + ONE + b's'


@pytest.mark.parametrize(
  'content',
  [
    b'}' + tf.text('model') + NAMED + b's',
    b'}K\x01' + ONE + b's',
    ONE,
    b'}',
  ],
)
def test_other_contents_are_refused(path, content):
  tf.zipped(path, content, STORED)
  with pytest.raises(ValueError, match=f"{path}: .*(of arrays|'items')"):
    pickled.read(path)


# --- what a pickle may not do ------------------------------------------------

RUN = tf.text('touch {}')  # the shell command of an attack
TOUCH = tf.tuple_of(RUN)


def glob(name):
  module, _, inner = name.rpartition('.')
  return f'c{module}\n{inner}\n'.encode()


FLOAT, OBJECT = glob('torch.FloatStorage'), tf.text('|O')
VIEW = 'torch._utils._rebuild_tensor_v2'


@pytest.mark.parametrize(
  'content, message',
  [
    (glob('os.system') + TOUCH + b'R', 'GLOBAL os system'),
    (b'\x8c\x02os\x8c\x06system\x93' + TOUCH + b'R', 'SHORT_BINUNICODE os'),
    (tf.text('os') + tf.text('system') + b'\x93', 'STACK_GLOBAL'),
    (b'(' + RUN + b'ios\nsystem\n', 'INST os system'),
    (b'(' + glob('collections.OrderedDict') + RUN + b'o', 'OBJ'),
    (glob('collections.OrderedDict') + TOUCH + b'\x81', 'NEWOBJ'),
    (
      glob('torch.storage._load_from_bytes') + TOUCH + b'R',
      'GLOBAL torch.storage _load_from_bytes',
    ),
    (glob('torch.Float8_e4m3fnStorage'), 'GLOBAL torch Float8_e4m3fnStorage'),
    (f'c{VIEW[:12]}\n{VIEW[13:]}.__globals__\n'.encode(), r'\.__globals__'),
    (b'\x82\x01', 'EXT1'),
    (b'Pos.system\n', 'PERSID os.system'),
    (tf.tuple_of(tf.text('module'), FLOAT) + b'Q', 'BINPERSID'),
    (tf.storage('0', 'Float', 1).replace(FLOAT, OBJECT), 'BINPERSID'),
    # A name that is allowed, called in another way or kept for later.
    (FLOAT + TOUCH + b'R', 'REDUCE'),
    (glob('collections.OrderedDict') + TOUCH + b'R', 'takes 0 positional'),
    (ONE + b')R', 'REDUCE'),
    (RUN + b'q\x01h\x01' + TOUCH + b'R', 'REDUCE'),
    (glob(VIEW) + b'q\x01h\x02', r'KeyError\(2\)'),
    (glob(VIEW) + TOUCH + b'R', 'missing'),
    (b'}(' + b')' + b'\x85' * 9 + RUN + b'u', 'SETITEMS'),
    (RUN + RUN + RUN + b's', "'update'|SETITEM"),
    (b't', 'pop from empty list'),
    (b'\xff', 'unknown'),
    (b'X\xff\xff\xff\x7f', 'expected .* bytes'),
  ],
)
def test_what_makes_no_array_is_named_and_not_run(path, content, message):
  touched = path.with_name('touched')
  command = RUN[5:]
  attack = content.replace(RUN, tf.text(f'touch {touched}'))
  assert command not in attack
  tf.zipped(path, b'}' + tf.text('a') + attack + b's', STORED)
  with pytest.raises(ValueError, match=f'^{path}: cannot .*{message}') as e:
    pickled.read(path)
  assert '\n' not in str(e.value) and len(str(e.value)) < 400
  assert not touched.exists()


def test_the_attacks_would_run_in_pickle(path):
  """Else the test above would prove nothing."""
  touched = path.with_name('touched')
  attack = glob('os.system') + tf.tuple_of(tf.text(f'touch {touched}')) + b'R.'
  pickle.loads(attack)
  assert touched.exists()


@pytest.mark.parametrize(
  'first, shape, strides',
  [
    (1, (4,), (1,)),
    (-1, (2,), (1,)),
    (0, (-2,), (1,)),
    (2**31 - 1, (1,), (1,)),
    (0, (2**30, 2**30, 2**30, 2**30), (0, 0, 0, 2**30)),
  ],
)
def test_an_array_lies_in_its_storage(path, first, shape, strides):
  one = tf.tensor(tf.storage('0', 'Float', 4), first, shape, strides)
  tf.zipped(path, tf.ordered({'a': one}), {'0': bytes(16)})
  with pytest.raises(ValueError, match=f'{path}: cannot be read: .*(str|off)'):
    pickled.read(path)


# --- archives ----------------------------------------------------------------


def test_other_files_are_refused_by_name(path):
  def refused(message):
    with pytest.raises(ValueError, match=f'^{path}: .*{message}') as e:
      stored.open_file(path)
    assert '\n' not in str(e.value)

  refused('No such file')
  path.write_bytes(b'\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.')
  refused('not a zip file; give what PyTorch writes since 1.6')
  path.write_bytes(b'')
  refused('not a zip file')
  path.write_bytes(b'version https://git-lfs.github.com/spec/v1\noid sha256:0')
  refused('git lfs pull')
  tf.zipped(path, NAMED, STORED, method=zipfile.ZIP_DEFLATED)
  refused('data.pkl is compressed')
  tf.zipped(path, NAMED, STORED, dict(byteorder=b'big'))
  refused('big-endian')
  tf.zipped(path, NAMED, {'1': bytes(4)})
  refused('data/0')
  tf.zipped(path, NAMED, {'0': bytes(3)})
  refused('size')
  tf.zipped(path, NAMED, STORED, {'more/data.pkl': b''})
  refused('too many values')
  whole = tf.zipped(path, NAMED, STORED, dict(byteorder=b'little')).read_bytes()
  assert read(path)['a'] == 7
  for keep in range(0, len(whole) - 1, 7):
    path.write_bytes(whole[:keep])
    refused('not a zip file')


@pytest.mark.filterwarnings('ignore:invalid escape')  # of pickletools
def test_a_damaged_file_is_an_error_or_another_array(path):
  weights = {f'layers.{i}': np.ones((3, 2), np.float32) for i in range(3)}
  whole, draw = tf.save(path, weights).read_bytes(), random.Random(0)
  refused = 0
  for _ in range(500):
    new = bytearray(whole)
    for _ in range(draw.randint(1, 3)):
      new[draw.randrange(len(new))] = draw.randrange(256)
    path.write_bytes(new)
    try:
      assert all(x.sum() is not None for x in read(path).values())
    except ValueError as e:
      refused += str(path) in str(e)
  assert 50 < refused < 475


@pytest.mark.parity
def test_files_of_torch_itself(path):
  torch = pytest.importorskip('torch', reason='needs torch (extra parity)')
  tensors = {}
  for kind in KINDS:
    tensors[kind] = torch.arange(24).reshape(4, 6).to(getattr(torch, kind))
    tensors[f'{kind}.turned'] = tensors[kind].T[1:, ::2]
  tensors['none'], tensors['one'] = torch.zeros(0, 3), torch.tensor(2.5)
  model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
  for saved in (tensors, model.state_dict()):
    torch.save(saved, path)
    found = read(path)
    assert found.keys() == saved.keys()
    for name, x in saved.items():
      want = x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy()
      assert found[name].dtype.name == str(x.dtype).removeprefix('torch.')
      np.testing.assert_array_equal(found[name].astype(want.dtype), want)
  names = {op.name for op, _, _ in pickletools.genops(pickle_of(path))}
  assert {'BUILD', 'BINPERSID', 'REDUCE'} <= names
  torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
  with pytest.raises(ValueError, match='since 1.6'):
    read(path)
  torch.save(model, path)
  with pytest.raises(ValueError, match='GLOBAL torch.nn.modules.container Seq'):
    read(path)


def pickle_of(path) -> bytes:
  with zipfile.ZipFile(path) as archive:
    return archive.read(next(x for x in archive.namelist() if 'data.pkl' in x))
