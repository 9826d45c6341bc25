"""The formulas reproduce the print, and the page shows what they give."""

import pathlib

import matplotlib.image
import pytest

from experiments import page, papers
from experiments import table as pages
from experiments.leviathan_analytic import table
from specdec_jax.costs import cost

ROOT = pathlib.Path(__file__).parents[2]


def tokens(alpha, gamma):
  """Equation 1 as a sum."""
  return sum(alpha**k for k in range(gamma + 1))


def speed(alpha, gamma, c):
  return tokens(alpha, gamma) / (gamma * c + 1)


# --- the print, from formulas written here ------------------------------------


def test_table_1_and_ends_of_figures_2_and_4():
  for alpha, gamma, *printed in papers.TABLE1:
    by_hand = (gamma + 1) / tokens(alpha, gamma), speed(alpha, gamma, 0)
    for found in (by_hand, table.free(alpha, gamma)):
      assert [round(x, 2) for x in found] == printed
  for gamma, (first, last) in papers.FIG2.items():
    of = lambda a, g=gamma: tokens(a, min(g, 10_000))
    assert (round(of(0.5), 3), round(of(0.899), 2)) == (first, last)
    assert table.tokens(0.7, gamma) == pytest.approx(of(0.7))
  for gamma, ends in papers.FIG4.items():
    found = [(gamma + 1) / tokens(a, gamma) for a in (0.5, 0.899)]
    assert tuple(round(x, 3) for x in found) == ends


@pytest.mark.parametrize('c', papers.FIG3)
def test_figure_3(c):
  (first, last, steps), found = papers.FIG3[c], table.steps(c)
  best = lambda a: max(range(1, 40), key=lambda g: speed(a, g, c))
  assert (best(papers.FIRST), best(papers.LAST)) == (first, last)
  assert len(found) == len(steps) == last - first
  assert found == pytest.approx(steps, abs=6e-4)
  for i, alpha in enumerate(found):
    around = best(alpha - 1e-6), best(alpha + 1e-6)
    assert around == (first + i, first + i + 1)


def test_table_4_is_equal_in_9_rows_and_in_reach_in_12():
  name = lambda row: (row.task, row.draft, row.temperature)
  off = lambda row: round(speed(row.alpha, row.gamma, row.c), 1) != row.exp
  unequal = [name(row) for row in papers.TABLE4 if off(row)]
  wanted = [('EnDe', 'T5-base'), ('EnDe', 'T5-large'), ('CNNDM', 'T5-large')]
  assert unequal == [(*x, 1) for x in wanted]
  assert unequal == [name(x) for x in papers.TABLE4 if not table.equal(x)]
  assert len(papers.TABLE4) == 12 and all(map(table.inside, papers.TABLE4))
  # Far enough off, a row is neither.
  wrong = papers.TABLE4[0]._replace(exp=3.4)
  assert not table.equal(wrong) and not table.inside(wrong)


def test_lenience_is_equal_at_0_and_out_of_reach_at_1():
  for alpha, faster in papers.A5[0]:
    assert round(speed(alpha, 8, 0.015), 1) == faster
  for alpha, faster in papers.A5[1]:
    reach = max(speed(alpha + 0.005, g, 0.0145) for g in range(1, 64))
    assert reach == pytest.approx(table.most(alpha))
    assert reach < faster - 0.05
    assert table.best(alpha)[1] < reach
  lines = table.lenience_speed().lines
  heads = [x for x in lines if x.startswith('Temperature')]
  assert ['LOSSY' in x for x in heads] == [True, True]


# --- the page -----------------------------------------------------------------


@pytest.mark.parametrize('name', pages.COMPUTED)
def test_the_page_shows_what_the_code_gives(name, tmp_path, capsys):
  assert pages.compute(name, str(tmp_path))
  printed, home = capsys.readouterr().out, pages.empirical.HOMES / name
  readme = (home / 'README.md').read_text()
  for table_name in pages.COMPUTED[name].TABLES:
    commit, lines = (tmp_path / f'{table_name}.md').read_text().split('\n', 1)
    assert commit.startswith('Commit ') and '| --- |' in lines
    assert lines in printed
    kept = (home / f'results/{table_name}.md').read_text()
    assert kept.split('\n', 1)[1] == lines
    # Committed numbers come from committed code.
    assert 'with changes' not in kept
    assert (
      page.filled(readme, kept.rstrip('\n').split('\n'), table_name) == readme
    )
  for figure in pages.COMPUTED[name].FIGURES:
    for folder in (tmp_path, home / 'results'):
      _has_ink(folder / f'{figure}.png')


def _has_ink(path):
  """Dark pixels in every quarter of the picture, and mostly white."""
  picture = matplotlib.image.imread(path)[..., :3].mean(-1)
  tall, wide = picture.shape
  assert abs(wide - 160 * 6.4) <= 1 and abs(tall - 160 * 4.0) <= 1
  assert picture.mean() > 0.8
  for rows in (slice(0, tall // 2), slice(tall // 2, tall)):
    for columns in (slice(0, wide // 2), slice(wide // 2, wide)):
      assert (picture[rows, columns] < 0.5).sum() > 100


def test_a_number_that_is_not_the_prints_is_a_gap(monkeypatch):
  assert table.compared(1.53, 1.5306, 2) == ['1.53', '1.531', '0']
  assert table.compared(2.4, 2.347, 1) == ['2.4', '2.347', '-0.1']
  rows = list(papers.TABLE1)
  rows[2] = (0.8, 2, 1.23, 2.45)
  monkeypatch.setattr(papers, 'TABLE1', rows)
  found = table.table1()
  assert not found.good and '5 of 6 rows' in found.lines[0]
  assert '| 2.45 | 2.440 | -0.01 |' in found.lines[6]


@pytest.mark.parametrize('compute', [table.fig3, table.table4_exp])
def test_a_formula_that_is_off_is_no_reproduction(compute, monkeypatch):
  right = cost.improvement
  monkeypatch.setattr(cost, 'improvement', lambda a, g, c: right(a, g, 1.5 * c))
  assert not compute().good


def test_run_all_names_every_experiment():
  text = (ROOT / 'experiments/run_all.sh').read_text()
  for path in (ROOT / 'experiments').glob('*/run.sh'):
    assert path.parent.name in text, f'run_all.sh neither runs nor names {path}'
