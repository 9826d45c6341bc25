"""The formulas reproduce the print, and the pages show what they give."""

import importlib
import pathlib

import matplotlib.image
import pytest

from experiments import analytic, page
from specdec_jax.analysis import plots

ROOT = pathlib.Path(__file__).parents[2]
NAMES = (
  'leviathan_table1',
  'leviathan_fig2',
  'leviathan_fig3',
  'leviathan_fig4',
  'leviathan_table4_exp',
  'leviathan_lenience_speed',
)


def module(name):
  return importlib.import_module(f'experiments.{name}.table')


table1, fig2, fig3, fig4, table4, lenience = map(module, NAMES)


def tokens(alpha, gamma):
  """Equation 1 as a sum."""
  return sum(alpha**k for k in range(gamma + 1))


def speed(alpha, gamma, c):
  return tokens(alpha, gamma) / (gamma * c + 1)


# --- the print, from formulas written here ------------------------------------


def test_table_1():
  for alpha, gamma, operations, faster in table1.PRINT:
    assert round((gamma + 1) / tokens(alpha, gamma), 2) == operations
    assert round(speed(alpha, gamma, 0), 2) == faster
    mine = table1.ours(alpha, gamma)
    assert [round(x, 2) for x in mine] == [operations, faster]


def test_ends_of_figures_2_and_4():
  for gamma, (first, last) in fig2.PRINT.items():
    of = lambda a, g=gamma: tokens(a, min(g, 10_000))
    assert (round(of(0.5), 3), round(of(0.899), 2)) == (first, last)
    assert fig2.tokens(0.7, gamma) == pytest.approx(of(0.7))
  for gamma, ends in fig4.PRINT.items():
    found = [(gamma + 1) / tokens(a, gamma) for a in (0.5, 0.899)]
    assert tuple(round(x, 3) for x in found) == ends


@pytest.mark.parametrize('c', fig3.PRINT)
def test_figure_3(c):
  curve, found = fig3.PRINT[c], fig3.steps(c)
  best = lambda a: max(range(1, 40), key=lambda g: speed(a, g, c))
  assert (best(fig3.FIRST), best(fig3.LAST)) == curve[:2]
  assert len(found) == len(curve.steps) == curve.last - curve.first
  assert found == pytest.approx(curve.steps, abs=6e-4)
  for i, alpha in enumerate(found):
    around = best(alpha - 1e-6), best(alpha + 1e-6)
    assert around == (curve.first + i, curve.first + i + 1)


def test_table_4_is_equal_in_9_rows_and_in_reach_in_12():
  unequal = [
    (r.task, r.draft, r.temperature)
    for r in table4.PRINT
    if round(speed(r.alpha, r.gamma, r.c), 1) != r.exp
  ]
  wanted = [('EnDe', 'T5-base'), ('EnDe', 'T5-large'), ('CNNDM', 'T5-large')]
  assert unequal == [(*x, 1) for x in wanted]
  assert [r for r in table4.PRINT if not table4.equal(r)] == [
    r for r in table4.PRINT if (r.task, r.draft, r.temperature) in unequal
  ]
  assert len(table4.PRINT) == 12 and all(map(table4.inside, table4.PRINT))
  # Far enough off, a row is neither.
  wrong = table4.PRINT[0]._replace(exp=3.4)
  assert not table4.equal(wrong) and not table4.inside(wrong)


def test_lenience_is_equal_at_0_and_out_of_reach_at_1():
  for alpha, faster in lenience.PRINT[0]:
    assert round(speed(alpha, 8, 0.015), 1) == faster
  for alpha, faster in lenience.PRINT[1]:
    reach = max(speed(alpha + 0.005, g, 0.0145) for g in range(1, 64))
    assert reach == pytest.approx(lenience.most(alpha))
    assert reach < faster - 0.05
    assert lenience.best(alpha)[1] < reach
  said = [x for x in lenience.compute().lines if x.startswith('Temperature')]
  assert ['LOSSY' in x for x in said] == [True, True]


# --- the pages ----------------------------------------------------------------


@pytest.mark.parametrize('name', NAMES)
def test_the_page_says_what_the_code_gives(name, tmp_path, capsys):
  experiment = module(name).EXPERIMENT
  assert experiment.name == name
  assert analytic.run(experiment, str(tmp_path))
  fresh = (tmp_path / f'{name}.md').read_text()
  assert capsys.readouterr().out == fresh
  commit, lines = fresh.split('\n', 1)
  assert commit.startswith('Commit ') and '| --- |' in lines
  home = ROOT / 'experiments' / name
  kept = (home / 'results' / f'{name}.md').read_text()
  assert kept.split('\n', 1)[1] == lines
  # Committed numbers come from committed code.
  assert 'with changes' not in kept
  readme = (home / 'README.md').read_text()
  assert page.filled(readme, kept.rstrip('\n').split('\n')) == readme
  assert f'bash experiments/{name}/run.sh' in readme
  for folder in (tmp_path, home / 'results'):
    _has_ink(folder / f'{name}.png', experiment.size)


def _has_ink(path, size):
  """Dark pixels in every quarter of the picture, and mostly white."""
  picture = matplotlib.image.imread(path)[..., :3].mean(-1)
  tall, wide = picture.shape
  assert abs(wide - 160 * size[0]) <= 1 and abs(tall - 160 * size[1]) <= 1
  assert picture.mean() > 0.8
  for rows in (slice(0, tall // 2), slice(tall // 2, tall)):
    for columns in (slice(0, wide // 2), slice(wide // 2, wide)):
      assert (picture[rows, columns] < 0.5).sum() > 100


def test_a_number_that_is_not_the_prints_is_a_gap(monkeypatch):
  assert analytic.gap(1.53, 1.5306, 2) == '0'
  assert analytic.gap(2.4, 2.347, 1) == '-0.1'
  rows = list(table1.PRINT)
  rows[2] = (0.8, 2, 1.23, 2.45)
  monkeypatch.setattr(table1, 'PRINT', rows)
  found = table1.compute()
  assert not found.good and '5 of 6 rows' in found.lines[-1]
  assert '| 2.45 | 2.4400 | -0.01 |' in found.lines[4]


@pytest.mark.parametrize('name', ('leviathan_fig3', 'leviathan_table4_exp'))
def test_a_formula_that_is_off_is_no_reproduction(name, monkeypatch):
  from specdec_jax.bench import cost

  right = cost.improvement
  monkeypatch.setattr(cost, 'improvement', lambda a, g, c: right(a, g, 1.5 * c))
  assert not module(name).compute().good


def test_an_empty_figure_has_no_ink(tmp_path):
  blank = plots.png(lambda axes: axes.set_axis_off(), size=(2, 1))
  (tmp_path / 'blank.png').write_bytes(blank)
  with pytest.raises(AssertionError):
    _has_ink(tmp_path / 'blank.png', (2, 1))


def test_nothing_global_is_changed_by_a_figure():
  before = dict(matplotlib.rcParams)
  plots.png(lambda axes: plots.label(axes, 'x', 'y'), size=(1, 1))
  assert dict(matplotlib.rcParams) == before


def test_a_page_without_marks_is_refused():
  with pytest.raises(ValueError, match='needs each of'):
    page.filled('no marks', ['| a |'])


def test_run_all_names_every_analytic_experiment():
  text = (ROOT / 'experiments/run_all.sh').read_text()
  for name in NAMES:
    assert name in text
  for path in (ROOT / 'experiments').glob('*/run.sh'):
    assert path.parent.name in text, f'run_all.sh neither runs nor names {path}'


def test_a_folder_that_cannot_be_written_is_one_sentence(capsys):
  with pytest.raises(ValueError) as error:
    analytic.run(table1.EXPERIMENT, '/proc/nowhere')
  assert str(error.value).startswith('workdir /proc/nowhere: cannot be written')
  assert not capsys.readouterr().out


@pytest.mark.parametrize('name', NAMES)
def test_run_sh_runs_this_experiment(name):
  text = (ROOT / 'experiments' / name / 'run.sh').read_text()
  assert f'exec python -m experiments.{name}.table "$@"' in text
