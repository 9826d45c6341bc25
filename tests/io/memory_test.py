"""What models take is told before they are read, and refused if too much."""

import gguf
import pytest

from configs import pair
from specdec_jax import build, settings, sharding
from specdec_jax.drafters import lm
from specdec_jax.io import load, memory, plan, sources
from specdec_jax.kernels import library
from specdec_jax.models import work
from tests.drafters import dflash_test, draft_file_test, medusa_test
from tests.io import published_test, tiny

Q4_1 = gguf.GGMLQuantizationType.Q4_1
SIZES = dict(width=64, head_dim=16, mlp=96, vocab=640)


@pytest.fixture(autouse=True, scope='module')
def compiled():
  tiny.needs_kernels('Q8_0', 'Q4_1')


def source(form, folder) -> str:
  c = tiny.config(**SIZES)
  if form == 'floats':
    return str(tiny.write_folder(folder / 'a', c))
  return str(tiny.write_gguf(folder / 'a.gguf', c, quantise=Q4_1))


FLOATS = ['float32', 'bfloat16', 'int8', 'int4']


@pytest.mark.parametrize(
  'form, dtype',
  [*(('floats', x) for x in FLOATS), *(('quantised', x) for x in FLOATS)]
  + [('quantised', 'stored')],
)
def test_a_model_takes_what_was_said(tmp_path, form, dtype):
  """Norms are float32 in panels; of the embedding a pass reads rows."""
  opened = sources.open_source(source(form, tmp_path))
  params = load.load(opened, dtype=dtype).params
  said = plan.make(opened, dtype)
  assert said.bytes() == pytest.approx(work.tree_bytes(params), rel=0.01)
  assert said.step_bytes() == pytest.approx(work.step_bytes(params), rel=0.01)


@pytest.mark.parametrize('dtype', ['int8', 'int4'])
def test_other_groups_are_counted_without_the_kernels(
  tmp_path, dtype, monkeypatch
):
  """By what loads all of a benchmark, then by what loads a model."""
  c, checked = config(tmp_path, dtype), []
  check = lambda models, *_: checked.extend(models.values()) or ''
  monkeypatch.setattr(memory, 'check', check)
  c.target.kernels, c.decode.methods = 'xla', ('lookup',)
  params = settings.load(settings.settings(c)).target.params
  assert len(checked) == 2
  for said in checked:
    assert said.bytes() == pytest.approx(work.tree_bytes(params), rel=0.01)
    assert said.step_bytes() == pytest.approx(work.step_bytes(params), rel=0.01)


def test_only_what_is_rounded_takes_more_until_it_has_its_place(tmp_path):
  """Embedding and head come first; then all float32 is less than what is held
  in the end."""
  opened = sources.open_source(source('floats', tmp_path))
  most = {x: plan.make(opened, x).most() for x in ('float32', 'int4')}
  whole, last = plan.make(opened, 'float32').bytes(), 4 * 64 * 96
  assert whole < most['float32'] <= whole + last
  table = 640 * 64
  assert most['int4'] == table * (2 * 34 / 32 + 4)
  line = memory.check({'a': plan.make(opened, 'int4')})
  assert line.startswith('a 0.1 MB (int4), 0.3 MB while they are read; ')
  (tmp_path / 'b').mkdir()
  opened = sources.open_source(source('quantised', tmp_path / 'b'))
  stored = plan.make(opened, 'stored')
  assert stored.bytes() < stored.most() < stored.bytes() + last


LIMIT = {
  'memory.max': '500000',
  'memory.current': '450000',
  'memory.stat': 'anon 9\ninactive_file 40000\nactive_file 60000\n',
}
FIRST = {
  'memory.limit_in_bytes': '600000',
  'memory.usage_in_bytes': '450000',
  'memory.stat': 'inactive_file 7\ntotal_inactive_file 20000\n',
}
# What a process says of its groups, their folders with files, and what is free.
GROUPS = {
  'none': ('', {}, 1_024_000),
  'version 2': ('0::/a/b\n', {'a/b': LIMIT}, 150_000),
  'of one around it': ('0::/a/b\n', {'a': LIMIT, 'a/b': {}}, 150_000),
  'of a container': ('0::/\n', {'': LIMIT}, 150_000),
  'no limit': ('0::/a\n', {'a': LIMIT | {'memory.max': 'max'}}, 1_024_000),
  'version 1': ('5:cpu:/\n4:memory:/a\n0::/\n', {'memory/a': FIRST}, 170_000),
  'under another path': ('4:memory:/x/y\n', {'memory': FIRST}, 170_000),
  'of another controller': ('4:cpu:/a\n', {'memory/a': FIRST}, 1_024_000),
  'used up': ('0::/\n', {'': LIMIT | {'memory.current': '900000'}}, 0),
}


@pytest.mark.parametrize('case', GROUPS)
def test_what_is_free_is_what_control_groups_leave(tmp_path, case):
  said, groups, free = GROUPS[case]
  written = {
    'proc/meminfo': 'MemFree: 1 kB\nMemAvailable:    1000 kB\n',
    'proc/self/cgroup': said,
  }
  for folder, each in groups.items():
    at = f'sys/fs/cgroup/{folder}'
    written |= {f'{at}/{name}': text for name, text in each.items()}
  for name, text in written.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  assert memory.free(tmp_path) == free
  assert memory.free(tmp_path / 'none') == float('inf')


def config(folder, dtype: str):
  c = pair.get_config('tiny')
  c.target.source, c.draft.source = (
    source(form, folder) for form in ('quantised', 'floats')
  )
  c.target.dtype, c.bench.prompt_tokens = dtype, 0
  return c


def test_a_draft_in_the_targets_cache_has_no_other(tmp_path, capsys):
  """Of the same file, at int4: beside an `lm` of it there are two caches."""
  lines = []
  for method in 'lm', 'self':
    c = config(tmp_path, 'float32')
    c.draft.source, c.draft.dtype = c.target.source, 'int4'
    c.decode.methods, c.decode.max_new_tokens = (method,), 900
    c.bench.prompt_tokens = 100
    # A server's rows are its own.
    settings.load(settings.settings(c), tokens=4000)
    assert f'caches {2 if method == "self" else 4}.' in capsys.readouterr().err
    settings.load(settings.settings(c))
    line, _, free = capsys.readouterr().err.splitlines()[0].rpartition('; ')
    assert free.endswith(' GB of memory are free')
    lines.append(line)
  two, one = lines
  assert two.startswith('memory: target 0.6 MB (float32), draft 0.1 MB (int4)')
  assert two.endswith(', caches 1.0 MB')
  assert one == two.replace('draft', 'self').replace('1.0 MB', '0.5 MB')


def layers(folder):
  return 'random:tiny', draft_file_test.layers(folder, 'tiny')[0]


# Folders of a target and a draft, which may be inside of it.
DRAFTS = {
  'draft': ('lm', layers),
  'medusa': ('medusa', lambda x: medusa_test.save(x, 'inside')),
  'eagle': ('eagle', lambda x: 2 * (published_test.mimo(x),)),
  'dflash': ('dflash', dflash_test.save),
}


@pytest.mark.parametrize('name', DRAFTS)
def test_a_draft_of_a_file_takes_what_was_said(tmp_path, monkeypatch, name):
  """In the target's float32, whatever the file has.

  Without the kernels, whose panels fill up, and what a draft of fewer ids
  copies of the target.
  """
  (method, save), folder = DRAFTS[name], tmp_path / 'a'
  folder.mkdir()
  target, draft = map(str, save(folder))
  c, said = pair.get_config('tiny'), []
  check = memory.check
  monkeypatch.setattr(memory, 'check', lambda *x: said.append(x) or check(*x))
  c.target.source, c.decode.methods = target, (method,)
  c.target.kernels, c[name].source = 'xla', draft
  if name != 'draft':
    c[name].check = 'off'
  loaded = settings.load(settings.settings(c))
  params = settings.engine(loaded, method, 1, measure=False).weights.draft
  params = params['layers'] if name == 'draft' else params
  own = work.tree_bytes(work.own_leaves(params, loaded.target.params))
  models, tokens, numbers = said[0]
  assert 4 * numbers[name] == pytest.approx(own, rel=0.03)
  size = memory._gb(4 * numbers[name])
  assert f', {name} {size}, caches' in check(models, tokens, numbers)
  have = models['target'].bytes() + own / 2
  monkeypatch.setattr(memory, 'free', lambda: have)
  check(models)
  with pytest.raises(ValueError, match=f', {name} {size}; .* are free: give'):
    check(models, 0, numbers)


def test_each_file_is_opened_once(tmp_path, monkeypatch):
  """To see what it takes; the target's for its rounded copy too."""
  opened, open_source = [], sources.open_source
  monkeypatch.setattr(
    sources, 'open_source', lambda x: opened.append(x) or open_source(x)
  )
  c = config(tmp_path, 'float32')
  c.decode.methods = 'lm', 'self'
  loaded = settings.load(settings.settings(c))
  made = [settings.engine(loaded, x, 1, measure=False) for x in ('lm', 'self')]
  assert opened == [c.target.source, c.draft.source]
  assert [x.draft.source for x in made] == opened[::-1]


def test_a_draft_of_another_tokenizer_is_refused_before_it_is_read(
  tmp_path, monkeypatch
):
  target = load.load(source('floats', tmp_path))
  monkeypatch.setattr(load, 'read', None)
  c = config(tmp_path, 'float32')
  c.draft.source = 'random:tiny'
  with pytest.raises(ValueError, match='have different tokenizers'):
    settings.load(settings.settings(c))
  with pytest.raises(ValueError, match='have different tokenizers'):
    build.engine(target, lm.Settings('random:tiny'), gamma=1)
  with pytest.raises(ValueError, match='an encoder: both need one'):
    build.engine(target, lm.Settings('random:t5_tiny'), gamma=1)


BOTH = 'target 0.6 MB (float32), draft 0.6 MB (float32), caches 0.0 MB; '
# Bytes that are free, and what is said of target and draft.
REFUSED = [
  (
    1_100_000,
    "1.1 MB of memory are free: give target.dtype='stored', which takes 0.7",
  ),
  (
    660_000,
    "0.7 MB of memory are free: give target.dtype='bfloat16' and draft.dtype="
    "'bfloat16', which takes 0.6 MB",
  ),
  (300_000, '0.3 MB of memory are free: give a smaller model'),
]


@pytest.mark.parametrize('have, message', REFUSED)
def test_what_does_not_fit_is_refused_before_it_is_read(
  tmp_path, monkeypatch, have, message
):
  def read(*_, **__):
    raise AssertionError('read')

  monkeypatch.setattr(memory, 'free', lambda: have)
  monkeypatch.setattr(load, 'read', read)
  with pytest.raises(ValueError) as caught:
    settings.load(settings.settings(config(tmp_path, 'float32')))
  assert str(caught.value).startswith(BOTH + message)
  one = source('floats', tmp_path)
  monkeypatch.setattr(memory, 'free', lambda: 300_000)
  with pytest.raises(ValueError, match='a 0.6 MB .float32.; 0.3 MB of'):
    load.load(one)


@pytest.mark.parametrize('why', ['kernels', 'mesh', 'compiler'])
def test_stored_is_offered_where_it_would_be_taken(tmp_path, monkeypatch, why):
  one, more = source('quantised', tmp_path), {}
  monkeypatch.setattr(memory, 'free', lambda: 400_000)
  with pytest.raises(ValueError, match="free: give dtype='stored', which"):
    load.load(one, dtype='float32')
  if why == 'compiler':
    monkeypatch.setattr(library, 'ready', lambda *_: False)
  else:
    mesh = sharding.make_mesh(1, 2)
    more = dict(mesh=dict(mesh=mesh), kernels=dict(kernels='xla'))[why]
  with pytest.raises(ValueError, match='(float32).* give dtype=.bfloat16., w'):
    load.load(one, **more)
