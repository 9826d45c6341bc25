"""What is promised, what failed, and how sure zero bugs in n tokens are."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from specdec_jax import requests, settings
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import benchmark, identity, records
from specdec_jax.bench import plan as plan_lib
from specdec_jax.models import convert
from specdec_jax.verify import coupled, reject
from tests.bench import bench_test


@pytest.mark.parametrize(
  'rule, temperature, expected',
  [
    (reject.RULE, 0.0, 'tokens'),
    (reject.RULE, 0.8, 'distribution'),
    (coupled.RULE, 0.8, 'tokens'),
    (coupled.RULE._replace(lossless=False), 0.0, 'nothing'),
  ],
)
def test_promise(rule, temperature, expected):
  sampling = sampling_lib.Sampling(temperature)
  assert identity.promise(rule, sampling) == expected


def audited(*compared, wrong=None):
  """An audit; wrong: (verdict, position) of the first request's difference."""
  findings = ()
  if wrong:
    found = records.Finding(wrong[0], wrong[1], id='0')
    findings = (found,)
  return records.Audit('tokens', len(compared), compared, findings)


def total(audits, names):
  """identity.total of one answer to sources of these names."""
  item = lambda name: requests.Item((0,), 0, source=(ord(name),))
  return identity.total(
    audits, [records.Answer(item(x), [1, 2]) for x in names]
  )


def test_total():
  one = total([audited(60, 40), audited(50, 40, wrong=('tie', 49))], 'ab')
  assert (one.texts, one.tokens, one.identical, one.ties) == (4, 190, 3, 1)
  # With bugs it is above the rate found; all wrong is 1.
  bug = audited(100, wrong=('BUG', 99))
  assert 46 < total([bug], 'a').bugs_at_most < 47
  worst = audited(1, wrong=('BUG', 0))
  assert total([worst], 'a').bugs_at_most == 1000


def test_the_bound_counts_a_position_once_however_many_arms_read_it():
  """60 + 40 positions, though two arms and equal texts read 290 tokens."""
  audits = [audited(60, 40, 60), audited(50, 40, 40)]
  found = total(audits, 'aba')
  assert (found.tokens, found.positions) == (290, 100)
  np.testing.assert_allclose(found.bugs_at_most, 1000 * (1 - 0.05 ** (1 / 100)))
  # The same bug of two arms is one.
  bugs = [audited(50, wrong=('BUG', 49))] * 2
  one = total(bugs[:1], 'a')
  assert total(bugs, 'a').bugs_at_most == one.bugs_at_most


@pytest.fixture(scope='module', name='failing')
def _failing():
  """(arms, plan): the third token that plain decoding emits is poison."""
  c = bench_test.settings(('lookup',), bench=dict(repeats=1))
  e = untied(settings.load(settings.settings(c)))
  good = requests.Item((5, 6, 5, 6, 5), 0, 'good')
  bad = requests.Item((9, 8, 7, 9, 8, 7, 9, 8), 1, 'bad')
  plan = plan_lib.Plan(
    (bad,),
    (good,),
    max_new_tokens=8,
    buffer=32,
    sampling=e.settings.sampling,
    bench=e.settings.bench,
  )
  plain = plan_lib.arms(e)[0]
  texts = []
  for group in plan_lib.groups([plain], plan, [bad, good]):
    out = plain.engine.programs.generate(plain.engine.weights, group.full)
    texts += plan_lib.answers([group], [jax.device_get(out)]).values()
  texts = [x.tokens for x in texts]
  poison = texts[0][2]
  assert poison not in (*texts[0][:2], *texts[1], *good.tokens, *bad.tokens)
  with jax.debug_nans(False):
    embed = e.target.params['embed'].at[poison].set(float('nan'))
    yield plan_lib.arms(untied(e, embed=embed)), plan


def untied(e: settings.Setup, embed=None):
  """The same model with its token table apart from its head."""
  params = e.target.params
  _, flat = convert.plain(e.target.config, params)
  table = flat['head'].T if embed is None else embed
  target = dataclasses.replace(
    e.target,
    lm_config=dataclasses.replace(e.target.config, tied=False),
    params=params | {'embed': table},
  )
  return dataclasses.replace(e, target=target)


@pytest.mark.more
def test_a_failed_request_is_named_and_is_no_bug(failing, capsys, tmp_path):
  with jax.debug_nans(False):
    assert not identity.run(*failing, {}, tmp_path)
  printed = capsys.readouterr().out
  report = json.loads(printed.splitlines()[-1])
  first, second = report['failed']
  assert first == {'method': 'autoregressive', 'id': 'bad', 'tokens': 3}
  assert (second['method'], second['id']) == ('lookup g=2', 'bad')
  assert report['rows'][0]['audit']['findings'] == []
  assert report['total']['tokens'] == 8 + second['tokens']
  assert "FAILED: prompt 'bad' after 3 new tokens (autoregress" in printed
  assert 'try dtype float32' in ' '.join(printed.split())


@pytest.mark.more
def test_the_benchmark_stops_at_a_failed_request(failing, capsys, tmp_path):
  with jax.debug_nans(False):
    doc = benchmark.run(*failing)
  assert not benchmark.finish(doc, bench_test.settings(), tmp_path)
  lines = capsys.readouterr().out.splitlines()
  assert any("FAILED: prompt 'bad' after 3 new tokens" in x for x in lines)
  last = json.loads(lines[-1])
  failed = {'method': 'autoregressive', 'id': 'bad', 'tokens': 3}
  assert last['failed'][0] == failed and last['rows'] == []
  assert last['verdict'][-1] == 'No figures, for texts are cut short.'
  assert json.loads((tmp_path / 'results/bench.json').read_text()) == last
