"""Coverage, regret and choices by hand; a whole run on a tiny model."""

import json
import math

import pytest
from scipy import stats

from experiments import page
from experiments.prediction import cells, stored
from specdec_jax.costs import calibration
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


def test_the_figure_has_methods_and_their_categories():
  whole = cell(2, 1.5, 1.5, 1.4, 1.6)._replace(category='')
  every = [whole], [whole, cell(4, 1, 1)]
  alone, beside = map(cells.figure, every)
  assert alone.startswith(b'\x89PNG') and alone != beside


def test_the_page_and_the_library_have_the_runs_that_are_stored():
  """Else: bash experiments/prediction/run.sh --show."""
  found = stored.runs()
  assert calibration.RUNS.read_text() == f'{stored.text(found)}\n'
  trees = json.loads((stored.ROOT / stored.TREES).read_text())
  lines = stored.markdown(found, trees).split('\n')
  readme = (stored.ROOT / 'experiments/prediction/README.md').read_text()
  assert readme == page.filled(readme, lines, 'stored')


def result(target, *rows, prompts=7):
  """A document. rows: drafter, gamma, predicted, high, measured, explained."""
  return {
    'machine': {'cpu': 'A', 'device': 'cpu', 'commit': 'c'},
    'setting': {
      'target': target,
      'dtype': 'float32',
      'other_prompts': prompts,
      'sampling': {'temperature': 0.0},
    },
    'rows': [
      {'drafter': 'autoregressive', 'explained': None},
      *(
        {
          'drafter': drafter,
          'gamma': gamma,
          'predicted': told
          and {'improvement': told, 'low': told**2 / high, 'high': high},
          'improvement': {'value': measured},
          'explained': {'improvement': explained},
        }
        for drafter, gamma, told, high, measured, explained in rows
      ),
    ],
  }


@pytest.fixture
def kept(tmp_path):
  """Runs of two files, one of which holds two."""
  docs = {
    'one': result(
      'm (Q4_1, stored)', ('lm', 1, 0.8, 0.9, 1.6, 0.8), ('lm', 2, 1.2, 2, 1, 1)
    ),
    'two': {
      'runs': [
        result('m (Q4_1, again int8)', ('eagle', 2, 1.5, 1.6, 0.5, 1.0)),
        result('m (F32)', ('lookup', 2, 1.5, 3.0, 0.8, 0.8), prompts=3),
      ]
    },
    'other': {'rows': 3},
  }
  for name, doc in docs.items():
    folder = tmp_path / 'experiments' / name / 'results'
    folder.mkdir(parents=True)
    (folder / f'{name}.json').write_text(json.dumps(doc))
  return stored.runs(tmp_path)


def test_every_run_has_its_cells_and_the_error_of_its_costs(kept):
  found = [x.cell[1:] for x in stored.cells(kept, {'rows': []})]
  low, measured = pytest.approx(0.8**2 / 0.9), 1.6
  assert found[0] == (0.0, '', 'lm', 1, 0.8, low, 0.9, measured)
  assert len(found) == 4
  assert [x.weights for x in kept] == ['stored', 'int8', 'float32']
  first, *_ = json.loads(stored.text(kept))['runs']
  where = 'experiments/one/results/one.json'
  want = {'cpu': 'A', 'device': 'cpu', 'from': where}
  assert first == want | {'over_explained': [2.0, 1.0]}
  # Twice as slow, as fast as told, 2 ** 0.5 times as fast; without the first.
  half = math.log(2)
  assert stored.error({}, kept)[0] == pytest.approx(
    half * ((0.25 + 1 + 0) / 3) ** 0.5
  )
  error = stored.error(kept[0].doc, kept)
  assert error == (pytest.approx(half / 2**0.5), 2)


def test_predictions_are_counted_by_kind_with_the_side_on_which_they_err(kept):
  trees = {
    'questions': {'questions': 32},
    'rows': [
      {'target': 'm (F32)', 'predicted': None},
      {
        'target': 'm (F32)',
        'predicted': {'value': 1.2, 'low': 1.1, 'high': 1.3},
        'improvement': {'value': 1.25},
        'differing': '1 of 16: 1 tie',
      },
    ],
  }
  lines = stored.markdown(kept, trees).split('\n')
  assert '5 methods were predicted in 4 runs, those of' in '\n'.join(lines)
  rows = {x.split(' | ')[0]: x.split(' | ')[1:] for x in lines}
  # The one from three prompts has no interval today.
  assert rows['| all'][:4] == ['60%', '5', '75%', '4']
  assert rows['| all'][-2:] == ['1', '2 |']
  assert rows['| a draft model'][-2:] == ['1', '0 |']
  assert rows['| EAGLE'][-4:] == ['50%', '2', '0', '1 |']
  assert rows['| target: stored'][-4:] == ['0%', '1', '1', '0 |']
  # Gamma 2 was chosen, and gamma 1 is 1.6 times as fast.
  assert rows['| a draft model'][4:7] == ['60.0%', '60.0%', '1']
  assert '| one | m (Q4_1, stored) | stored | 1.41 (!) |' in lines
  assert '| two | m (F32) | float32 | 1.00 |' in lines


def test_todays_interval_has_the_error_of_the_other_runs(kept):
  """Of 7 prompts: Student's t with 6 degrees of freedom is 1.943."""
  cell = next(x for x in stored.cells(kept, {'rows': []}))
  own, between = math.log(0.9 / 0.8) / 1.943, math.log(2) / 2**0.5
  total = own**2 + between**2
  freedom = total**2 / (own**4 / 6 + between**4 / 2)
  t = stats.t.ppf(0.95, freedom)
  found = stored.widened(cell, kept)
  assert found.high == pytest.approx(0.8 * math.exp(t * total**0.5), rel=1e-3)
  assert found.low * found.high == pytest.approx(0.8**2)


def test_runs_of_ones_own_are_kept_once(monkeypatch, tmp_path):
  monkeypatch.setenv('SPECDEC_JAX_CACHE', str(tmp_path / 'cache'))
  path = tmp_path / 'bench.json'
  path.write_text(json.dumps(result('m', ('lm', 1, None, None, 1.2, 1.0))))
  for _ in range(2):
    where = stored.add_own([str(path)])
    (run,) = json.loads(where.read_text())['runs']
    assert run['over_explained'] == [1.2]
  assert where == tmp_path / 'cache/runs.json'
  path.write_text('{"rows": []}')
  with pytest.raises(ValueError, match='no result of scripts/bench.py'):
    stored.add_own([str(path)])


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
    assert f'| lookup | {gamma} | {warmth:g} |' in text
