"""notebooks/specdec_tpu.ipynb runs, and names what exists."""

import base64
import importlib
import io
import re

import matplotlib.image
import nbclient
import nbformat
import pytest

from tests import programs

PATH = programs.ROOT / 'notebooks/specdec_tpu.ipynb'


def notebook():
  return nbformat.read(PATH, as_version=nbformat.NO_CONVERT)


def execute(pages, folder):
  """Runs every cell in a folder, with tiny random models on the CPU."""
  client = nbclient.NotebookClient(
    pages, timeout=None, resources={'metadata': {'path': folder}}
  )
  client.execute()


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
  env = programs.FAST | {
    'SPECDEC_NOTEBOOK': 'tiny',
    'PYTHONPATH': str(programs.ROOT),
    'IPYTHONDIR': str(tmp_path / 'ipython'),
    'JUPYTER_RUNTIME_DIR': str(tmp_path / 'jupyter'),
  }
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  monkeypatch.delenv('MPLBACKEND', raising=False)


@pytest.mark.slow
def test_it_runs_from_the_first_to_the_last_cell(tmp_path):
  pages = notebook()
  execute(pages, tmp_path)
  printed, figures = {}, []
  for cell in pages.cells:
    for out in cell.get('outputs', ()):
      printed[cell.id] = printed.get(cell.id, '') + out.get('text', '')
      if png := out.get('data', {}).get('image/png'):
        figures.append(_picture(png))
  assert 'plain, 1.00 tokens a target pass' in printed['generate-code']
  assert 'speculative, ' in printed['generate-code']
  for name in ('bench-code', 'bars-code'):
    assert 'Checked 14 texts token for token' in printed[name]
    assert 'Predicted before the run: ' in printed[name]
  assert '28 texts, ' in printed['audit-code']
  assert ' 0 BUG.' in printed['audit-code']
  assert '"block_efficiency":' in printed['distil-code']
  assert len(figures) == 3
  for pixels in figures:
    assert (pixels < 0.5).sum() > 500
  made = {path.name for path in (tmp_path / 'runs').iterdir()}
  assert made == {'bench', 'audit', 'draft'}


def _picture(png: str):
  """Brightness of the pixels, 0 to 1."""
  file = io.BytesIO(base64.b64decode(png))
  return matplotlib.image.imread(file)[..., :3].mean(-1)


@pytest.mark.more
@pytest.mark.parametrize(
  'source',
  [
    "run(PYTHON, 'scripts/bench.py', '--config=configs/none.py')",
    '%%script {PYTHON}\nimport specdec_jax\nspecdec_jax.load("random:none")',
  ],
)
def test_a_program_that_fails_fails_the_notebook(tmp_path, source):
  pages = notebook()
  first = [x for x in pages.cells if x.id in ('install-code', 'choose-code')]
  pages.cells = [*first, nbformat.v4.new_code_cell(source)]
  with pytest.raises(nbclient.exceptions.CellExecutionError, match='none'):
    execute(pages, tmp_path)
  assert not (tmp_path / 'repository').exists()


def test_it_is_valid_and_has_no_outputs():
  pages = notebook()
  nbformat.validate(pages)
  code = [cell for cell in pages.cells if cell.cell_type == 'code']
  assert code
  for cell in code:
    assert not cell.outputs and cell.execution_count is None, cell.id
  assert 'Nobody has run this on a TPU yet' in pages.cells[0].source


@pytest.mark.parametrize('size', ['full', 'tiny'])
def test_all_that_it_names_exists(size):
  for cell in notebook().cells:
    configs = []
    for name in re.findall(r'(?:scripts|configs|docs)/\w+\.\w+', cell.source):
      assert (programs.ROOT / name).is_file(), name
      if name.startswith('configs/'):
        module = importlib.import_module(name[:-3].replace('/', '.'))
        configs.append(module.get_config(size))
    for section, key in re.findall(r'--config\.(\w+)\.(\w+)=', cell.source):
      assert all(key in config[section] for config in configs)
