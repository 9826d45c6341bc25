"""The table of drafters and rules."""

import json

import pytest

from experiments import page
from experiments.methods import render
from tests import programs
from tests.experiments import reports


def cell(drafter, rule, temperature, **changes):
  lossless = not rule.startswith('lenient')
  exact = 'distribution' if temperature else 'tokens'
  out = dict(
    name=f'{drafter} {rule}',
    drafter=drafter,
    rule=rule,
    lossless=lossless,
    temperature=temperature,
    improvement=reports.gain(1.0),
    counts=dict(block_efficiency=1.5),
    alpha=dict(alpha=0.25, total_variation=0.0 if lossless else 0.125),
    audit=reports.audit(exact if lossless else 'nothing'),
    failed=[],
  )
  return out | changes


def test_what_is_broken_or_lossy_is_said():
  cells = [
    cell('lm', 'block', 1.0),
    cell('lm', 'coupled', 0.0, audit=reports.audit('tokens', 'BUG')),
    cell('lm', 'lenient:0.5', 0.0, failed=['x']),
  ]
  doc = reports.stored('methods') | dict(cells=cells)
  doc['machine'] |= dict(commit='c' * 40, dirty=True, cores=2, cpu='A CPU')
  text = render.markdown(doc)
  assert (
    '| lm | coupled | ~1.00x (1.50) | = block | 0.25 | 1 of 7: 1 BUG' in text
  )
  assert '(1.50, TV 0.12)' in text and '| LOSSY 1 FAILED |' in text
  assert 'Commit cccccccccccc with changes, 2 cores, A CPU' in text


def test_results_of_ones_own_leave_the_readme(tmp_path):
  home = tmp_path / 'methods'
  (home / 'results').mkdir(parents=True)
  readme = home / 'README.md'
  readme.write_text('a\n{}\nold\n{}\nb\n'.format(*page.MARKS))
  page.save(None, home, {}, 'new')
  page.save(tmp_path, home, dict(x=1), 'new')
  assert 'old' in readme.read_text()
  assert json.loads((tmp_path / 'methods.json').read_text()) == dict(x=1)
  page.save(home / 'results', home, {}, 'new')
  assert readme.read_text() == 'a\n{}\n\nnew\n\n{}\nb\n'.format(*page.MARKS)
  with pytest.raises(ValueError, match='once'):
    page.filled('no marks', ['new'])


def run(*arguments, folder):
  return programs.run(
    'experiments/methods/table.py',
    '--config=experiments/methods/config.py:tiny',
    "--config.decode.methods=('lookup',)",
    f'--results={folder}',
    *arguments,
  )


@pytest.mark.more
def test_bad_input_is_one_sentence(tmp_path):
  gammas = '--config.decode.gammas=(1,2)'
  run(gammas, folder=tmp_path).check_refused('one gamma of 1 or more')
  run('--temperatures=0,-1', folder=tmp_path).check_refused('temperature=-1')
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_lossy_rule_beside_an_exact_one_on_a_tiny_model(tmp_path):
  done = run(
    '--config.decode.max_new_tokens=8',
    '--config.bench.prompts_per_category=1',
    '--config.bench.prompt_tokens=20',
    '--rules=reject,lenient:0.5',
    '--temperatures=0,1',
    folder=tmp_path,
  ).check()
  found = {(x['rule'], x['temperature']): x for x in done.document['cells']}
  assert len(found) == 4
  away = {key: x['alpha']['total_variation'] for key, x in found.items()}
  assert away['reject', 0] == away['reject', 1] == 0
  assert away['lenient:0.5', 0] > 0  # sampled, little repeats: no drafts
  assert found['reject', 0]['audit']['findings'] == []
  text = (tmp_path / 'methods.md').read_text('utf-8')
  assert '| lookup | lenient:0.5 (LOSSY) |' in text
