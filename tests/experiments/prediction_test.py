"""Coverage, regret and choices by hand; a whole run on a tiny model."""

import json
import types

import pytest

from experiments.prediction import cells
from tests import programs


def cell(gamma, predicted, measured, low=None, high=None, drafter='lookup'):
  return cells.Cell(
    'm', 0.0, 'qa', drafter, gamma, predicted, low, high, measured
  )


def test_intervals_regret_and_choices():
  found = cells.summary(
    [
      # Gamma 2 is chosen, gamma 4 would be 20 % faster: one choice.
      cell(2, 1.5, 1.5, 1.4, 1.6),
      cell(4, 1.4, 1.8, 1.3, 1.5),
      # Plain decoding is chosen, and is best; both are rightly refused.
      cell(2, 0.9, 0.8, drafter='eagle'),
      cell(4, 0.8, 0.9, 0.7, 0.95, drafter='eagle'),
      # Near 1: not told. It is chosen, and costs 1 / 0.98.
      cell(1, 1.1, 0.98, drafter='lm'),
    ]
  )
  assert (found.sure, found.choices, found.told) == (3, 3, 4)
  assert found.covered == pytest.approx(2 / 3)
  assert found.worst == pytest.approx(0.2)
  assert found.regret == pytest.approx((0.2 + 0 + 1 / 0.98 - 1) / 3)
  assert found.right == 1.0
  wrong = cells.summary([cell(2, 1.1, 0.5), cell(2, 0.9, 2.0)])
  assert wrong.right == 0.0 and wrong.covered is None


def test_every_cell_is_read_from_a_document():
  n = types.SimpleNamespace
  predicted, fast = n(improvement=1.5, low=1.0, high=2.0), n(value=1.4)
  row = lambda gamma, improvement: n(
    name=f'lookup g={gamma}',
    drafter='lookup',
    gamma=gamma,
    predicted=predicted,
    improvement=improvement,
  )
  doc = n(
    setting=n(target='m', draft=None, sampling={'temperature': 1.0}),
    rows=[row(1, fast), row(2, fast)],
  )
  assert cells.of(doc) == [
    cells.Cell('m', 1.0, '', 'lookup', gamma, 1.5, 1.0, 2.0, 1.4)
    for gamma in (1, 2)
  ]


def test_the_figure_has_methods_and_their_categories():
  whole = cell(2, 1.5, 1.5, 1.4, 1.6)._replace(category='')
  alone, beside = (
    cells.figure([whole]),
    cells.figure([whole, cell(4, 1, 1)]),
  )
  assert alone.startswith(b'\x89PNG') and alone != beside


@pytest.mark.slow
def test_a_run_on_a_tiny_model_fills_its_folder(tmp_path):
  programs.run(
    'experiments/prediction/table.py',
    '--config=experiments/prediction/config.py:tiny',
    "--config.decode.methods=('lookup',)",
    '--config.decode.max_new_tokens=48',
    '--config.bench.prompt_tokens=20',
    f'--results={tmp_path}',
    '--temperatures=0,1',
  ).check()
  found = json.loads((tmp_path / 'prediction.json').read_text())['cells']
  keys = {(x['temperature'], x['gamma']) for x in found}
  assert len(keys) == len(found)
  assert keys == {(t, gamma) for t in (0.0, 1.0) for gamma in (1, 2)}
  assert (tmp_path / 'prediction.png').exists()
  text = (tmp_path / 'prediction.md').read_text()
  for warmth, gamma in keys:
    assert f'| lookup, T = {warmth:g} |' in text
    assert f'| lookup g={gamma}, T = {warmth:g} |' in text
