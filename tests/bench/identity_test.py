"""What is promised, what failed, and how sure zero bugs in n tokens are."""

import dataclasses
import importlib
import json

import jax
import numpy as np
import pytest

from specdec_jax import requests, settings
from specdec_jax.bench import (
  audit_report,
  benchmark,
  identity,
  report,
  tables,
  timing,
  verdict,
)
from specdec_jax.verify import coupled, reject

TRACK = lambda items, text: items


pytestmark = pytest.mark.usefixtures('compile_in_less_time')


@pytest.mark.parametrize(
  'rule, temperature, expected',
  [
    (reject.RULE, 0.0, 'tokens'),
    (reject.RULE, 0.8, 'in law'),
    (coupled.RULE, 0.8, 'tokens'),
    (coupled.RULE._replace(lossless=False), 0.0, 'nothing'),
  ],
)
def test_promise(rule, temperature, expected):
  sampling = settings.Sampling(temperature, 0, 1.0, 0)
  assert identity.promise(rule, sampling) == expected
  if expected != 'tokens':
    with pytest.raises(
      ValueError, match='there is nothing to audit: set --config'
    ):
      identity.check_promise(rule, sampling)


def counts(**changes):
  return dict(requests=1, differing=0, tokens=100, ties=0, bugs=0) | changes


def test_total():
  one = identity.total([counts(), counts(differing=1, ties=1, tokens=50)])
  assert (one['texts'], one['identical'], one['ties']) == (2, 1, 1)
  assert one['per_1000_tokens'] == 1000 / 150
  np.testing.assert_allclose(
    one['bugs_at_most'], 1000 * (1 - 0.05 ** (1 / 150))
  )
  # With bugs it is above the rate found; all wrong, or nothing seen, is 1.
  two = identity.total([counts(differing=2, bugs=2)])
  assert 60 < two['bugs_at_most'] < 65
  for worst in ([], [counts(tokens=1, differing=1, bugs=1)]):
    assert identity.total(worst)['bugs_at_most'] == 1000


@pytest.fixture(scope='module', name='failing')
def _failing():
  """(arms, plan): the third token that plain decoding emits is poison."""
  c = importlib.import_module('configs.smollm2').get_config('tiny')
  c.decode.gammas = (2,)
  c.decode.max_new_tokens = 8
  e = untied(settings.from_config(c))
  good = requests.Item((5, 6, 5, 6, 5), 0, 'good')
  bad = requests.Item((9, 8, 7, 9, 8, 7, 9, 8), 1, 'bad')
  plan = timing.Plan(
    (bad,),
    (good,),
    max_new_tokens=8,
    sampling=e.settings.sampling,
    repeats=1,
    windows=4,
    stream_prompts=0,
    small=True,
  )
  plain = settings.arms(e)[0]
  texts = []
  for group in timing.grouper([plain], plan)([bad, good]):
    out = plain.engine.programs.generate(plain.engine.weights, group.full)
    texts += timing.texts([group], [jax.device_get(out)])
  poison = texts[0][2]
  assert poison not in (*texts[0][:2], *texts[1], *good.tokens, *bad.tokens)
  with jax.debug_nans(False):
    embed = e.target.params['embed'].at[poison].set(float('nan'))
    yield settings.arms(untied(e, embed=embed)), plan


def untied(e: settings.Experiment, embed=None):
  """The same model with its token table apart from its head."""
  params = e.target.params
  table = params['head'].T if embed is None else embed
  target = dataclasses.replace(
    e.target,
    config=dataclasses.replace(e.target.config, tied=False),
    params=params | {'embed': table},
  )
  return dataclasses.replace(e, target=target)


def test_a_failed_request_is_named_and_is_no_bug(failing, capsys):
  with jax.debug_nans(False):
    doc = identity.run(*failing, TRACK)
  plain, lookup = doc['rows']
  assert plain['broken'] == [{'id': 'bad', 'tokens': 3}]
  assert [x['id'] for x in lookup['broken']] == ['bad']
  assert lookup['audit']['bugs'] == lookup['audit']['differing'] == 0
  assert lookup['audit']['tokens'] == 8 + lookup['broken'][0]['tokens']
  assert not audit_report.finish(doc, None)
  printed = capsys.readouterr().out
  assert "FAILED: prompt 'bad' after 3 new tokens (autoregress" in printed
  assert 'try dtype float32' in ' '.join(printed.split())


def test_the_benchmark_stops_at_a_failed_request(failing, capsys):
  with jax.debug_nans(False):
    doc = benchmark.run(*failing, track=TRACK, show=report.show)
  assert not report.finish(doc)
  lines = capsys.readouterr().out.splitlines()
  assert any(x.split() == ['bad', 'autoregressive', '3'] for x in lines)
  assert any("FAILED: prompt 'bad' after 3 new tokens" in x for x in lines)
  last = json.loads(lines[-1])
  assert last['rows'][0]['broken'] == [{'id': 'bad', 'tokens': 3}]
  assert last['verdict'][-1] == 'No figures, for texts are cut short.'


def test_differences_and_failures_of_the_crossover_count():
  bug = {'promised': 'tokens', 'requests': 4, 'differing': 1, 'bugs': 1}
  row = lambda broken=(), **audit: {
    'audit': audit or None,
    'broken': [{'id': x, 'tokens': 2} for x in broken],
  }
  at = lambda **rows: {
    'rows': [],
    'crossover': [{'batch_size': 4, 'rows': rows}],
  }
  assert verdict.sound(verdict.named_rows(at(plain=row())))
  wrong = at(plain=row(), lookup=row(**bug, ties=0))
  assert not verdict.sound(verdict.named_rows(wrong))
  assert 'BUG[/red]: 1 of 4' in verdict._identity_sentence(wrong)
  assert tables.identity([row(), row(**bug, ties=0)]).startswith('1 of 4: ')
  failed = verdict.named_rows(at(plain=row('abcdefg'), lookup=row('a')))
  assert not verdict.sound(failed)
  said = verdict.failures(failed)
  assert '(plain at batch 4, lookup at batch 4)' in said[0]
  assert len(said) == 6 and said[-1] == 'And 2 more failed so.'
