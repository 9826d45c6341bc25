"""The whole benchmark on tiny models; its numbers must agree, not be fast."""

import dataclasses
import importlib
import json
import math
import types

import pytest

from specdec_jax import program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import (
  benchmark,
  budget,
  predict,
  prompts,
  records,
  timing,
  verdict,
)
from specdec_jax.bench import plan as plan_lib
from specdec_jax.certify import table_model
from specdec_jax.io import load
from specdec_jax.kernels import library


def settings(methods=('lm', 'lookup'), **changes):
  c = importlib.import_module('configs.pair').get_config('tiny')
  c.decode.methods = methods
  c.decode.gammas = (2,)
  c.decode.max_new_tokens = 8
  c.bench.prompts_per_category = 1
  c.bench.prompt_tokens = 20
  c.update(changes)
  return c


def run(config, capsys, sizes=(), clock=budget.UNLIMITED):
  e = settings_lib.load(settings_lib.settings(config))
  chosen = prompts.builtin()[:16]
  doc = benchmark.run(
    plan_lib.arms(e),
    plan_lib.make(e, chosen, sizes),
    clock,
  )
  good = benchmark.finish(doc, config, None)
  printed = capsys.readouterr().out
  return good, doc, printed


def test_too_few_minutes_are_refused_as_soon_as_that_is_known(monkeypatch):
  """Before a compilation by what is read; else before a slow step is run."""
  e = settings_lib.load(settings_lib.settings(settings(('lookup',))))
  arms, plan = plan_lib.arms(e), plan_lib.make(e, prompts.builtin()[:16])
  never = lambda *_: pytest.fail('too late')
  monkeypatch.setattr(program, 'elapsed', lambda: 100.0)
  costs = lambda seconds, tok_s: benchmark._costs(
    arms, plan, budget.Clock(100 + seconds), tok_s
  )
  refused = lambda: pytest.raises(ValueError, match='a few short answers')
  monkeypatch.setattr(timing, 'turn', never)
  with monkeypatch.context() as patch:
    patch.setattr(timing, 'compile_arms', never)
    for seconds, tok_s in ((-50, 1e9), (600, 0.01)):
      with refused():
        costs(seconds, tok_s)
  monkeypatch.setattr(timing.parts, 'timed', lambda *_: (500.0, {}))
  with refused():
    costs(600, 1e9)


@pytest.mark.slow
def test_end_to_end(capsys, monkeypatch):
  monkeypatch.setattr(records, 'FEWEST', 2)
  # The draft is the target itself: everything it proposes is accepted.
  config = settings(draft={'source': 'random:tiny'})
  good, doc, printed = run(config, capsys, sizes=(2,))
  assert good
  assert max(map(len, printed.splitlines()[:-1])) <= 120
  plain, lm, lookup = doc.rows
  names = ['autoregressive', 'lm g=2', 'lookup g=2']
  assert [r.name for r in doc.rows] == names
  assert plain.counts.block_efficiency == 1
  assert plain.improvement.value == 1
  assert math.isclose(lm.alpha.alpha, 1, rel_tol=1e-5)
  # But for windows cut by length.
  assert lm.counts.draft_acceptance_rate > 0.6
  assert doc.calibration.propose['lm'][2] > 0
  for row in doc.rows:
    c = row.counts
    assert c.emitted_tokens == plain.counts.emitted_tokens
    assert sum(c.accepted_histogram) == c.target_calls
  for row in (lm, lookup):
    assert row.audit.findings == () and row.audit.requests == 2
    for p in (row.predicted, row.explained):
      assert math.isclose(p.improvement, p.tokens / p.window_cost)
    assert math.isclose(row.explained.tokens, row.counts.block_efficiency)
  weights = doc.setting.weights
  assert weights['lm'] == weights['target'] > 0 == weights['lookup']
  assert doc.calibration.verify[1] == 1
  (wide,) = doc.crossover
  assert wide.batch_size == 2 and not wide.failed
  # Two sets of one prompt: four of six requests end, and all are compared.
  assert wide.rows[1].audit.findings == () and wide.rows[1].audit.requests == 8
  assert 'Checked 20 texts' in printed
  assert doc.setting.judged_prompts == 2
  ceiling = doc.ceiling.gb_s['float32']
  assert ceiling['best'] >= ceiling['sustained'] > 0
  # What decodes with the kernels is bound by their reads, not by XLA's.
  assert ('kernel' in ceiling) == (not library.load(program.cache_folder()))
  assert f'reads of {doc.ceiling.between:.1f} GB/s' in printed
  last = json.loads(printed.splitlines()[-1])
  assert last['verdict'] and last['rows'][1]['name'] == 'lm g=2'
  assert last['rows'][2]['audit']['compared'] == list(lookup.audit.compared)


def test_the_ceiling_is_of_the_minutes_in_which_the_prompts_ran():
  ceiling = records.Ceiling({'float32': {'sustained': 40.0}}, tok_s=80.0)
  gb_s = []
  # The first read after other work is slow; so may another be.
  read = iter([5.0, 9.0, 20.0, 3.0, 20.0, 20.0] + 2 * [5.0, *5 * [10.0]])
  assert [*timing.reading('abc', read.__next__, gb_s)] == ['a', 'b', 'c']
  assert gb_s == [20.0, 10.0, 10.0]
  found = ceiling.beside('float32', gb_s)
  assert (found.between, found.tok_s) == (10.0, 20.0)


@pytest.mark.parametrize('asked, read', [(1, 32), (40, 40)])
def test_as_many_bytes_are_read_as_a_step_reads(asked, read):
  packed = not library.load(program.cache_folder())
  programs = timing.reads('float32', asked * 2**20, packed=packed)
  assert len(programs) == 4 + packed
  for name, made in programs.items():
    assert 0.9 < made.args[-1].nbytes / (read * 2**20) <= 1, name


@pytest.mark.parametrize('prompts', [3, 4])
def test_three_prompts_predict_nothing(prompts, monkeypatch):
  """A batch is a prompt, or several that share their passes."""
  s = settings_lib.settings(settings())
  plan = plan_lib.Plan((), (), 8, 32, s.sampling, s.bench)
  arms = [
    plan_lib.Arm(x, x, i, None)  # pyright: ignore
    for i, x in enumerate(('plain', 'lm'))
  ]
  told = types.SimpleNamespace(output='output')
  for module, name, result in (
    (plan_lib, 'groups', [None] * prompts),
    (plan_lib, 'answers', {}),
    (timing, 'turn', {x.name: told for x in arms}),
    (predict, 'gains', {'lm': [1.0] * prompts}),
    (predict, 'improvement', 'known'),
  ):
    monkeypatch.setattr(module, name, lambda *_, result=result: result)
  speed = budget.Speed(1.0, 1.0, 1.0, 1, {}, 0, 1.0)
  given = arms, {}, plan, None, speed, budget.UNLIMITED
  _, _, predicted, *_ = benchmark._expectations(*given)
  assert predicted == ({'lm': 'known'} if prompts == 4 else {})


@pytest.mark.more
def test_what_cannot_win_is_not_run_on_the_test_prompts(capsys, monkeypatch):
  left = {'lm g=2': '0.10x to 0.20x'}
  monkeypatch.setattr(records, 'FEWEST', 2)
  monkeypatch.setattr(budget, 'left_out', lambda *_: left)
  asked, expected = [], budget.expected
  monkeypatch.setattr(
    budget, 'expected', lambda *x: asked.append(x[0]) or expected(*x)
  )
  slow = {'lookup g=1': 'no time for it', 'lm g=1': 'no time for it'}
  monkeypatch.setattr(
    budget, 'afford', lambda _, __, speed, *___: (speed, slow)
  )
  # Time that is over: one block is run all the same.
  monkeypatch.setattr(budget, 'check', lambda *_, **__: None)
  config, clock = settings(), budget.Clock(1e-3)
  config.decode.gammas = (1, 2)
  good, doc, printed = run(config, capsys, clock=clock)
  assert good and doc.left_out == slow | left
  assert [row.name for row in doc.rows] == ['autoregressive', 'lookup g=2']
  assert doc.rows[1].alpha is not None
  # How many prompts fit is asked again without it.
  assert [arm.name for arm in asked[-1]] == [row.name for row in doc.rows]
  assert [*doc.predicted] == ['lm g=2', 'lookup g=2']
  assert 'Left out by the calibration' in printed


@pytest.mark.slow
def test_batches_larger_than_one(capsys):
  """What rows share is no improvement.

  The draft is the target, so a window of gamma 2 emits three tokens a row but
  for cuts, and a plain window of four rows four in all.
  """
  config = settings(
    draft={'source': 'random:tiny'},
    decode={'methods': ('lm',)},
    bench={'batch_size': 4, 'prompts_per_category': 2},
  )
  good, doc, printed = run(config, capsys)
  assert good and not doc.categories
  plain, lm = doc.rows
  # Four categories of two: each half fills a batch.
  assert plain.counts.target_calls == plain.counts.emitted_tokens == 4 * 8
  found = lm.explained
  assert 2 < found.tokens <= 3 and lm.predicted is None
  assert found.improvement == pytest.approx(found.tokens / found.window_cost)
  assert 'Not predicted: 1 batches of calibration prompts, 4 are' in printed


@pytest.mark.slow
def test_a_crossover_when_sampling(capsys):
  """Copies of a prompt draw their own noise, and are compared one by one."""
  config = settings(
    ('lookup',),
    decode={'rule': 'coupled'},
    sampling={'temperature': 0.8},
    lookup={'min_match': 1},
  )
  good, doc, printed = run(config, capsys, sizes=(3,), clock=budget.clock(60))
  (wide,) = doc.crossover
  assert good and wide.batch_size == 3
  audit = wide.rows[1].audit
  assert audit.promised == 'tokens' and audit.requests == 12
  assert audit.findings == () and 0 < audit.tokens <= 12 * 8
  assert 'By batch size' in printed and '0 of 12' in printed


@pytest.mark.more
def test_a_model_of_ones_own_is_benchmarked(capsys):
  """Its parameters are one array, and nothing is known of its layers."""
  e = settings_lib.load(
    settings_lib.settings(settings(('lookup',), lookup={'min_match': 1}))
  )
  V = 300
  own = load.wrap(table_model.make(V), table_model.table(0, V))
  e = dataclasses.replace(e, target=own)
  doc = benchmark.run(
    plan_lib.arms(e),
    plan_lib.make(e, prompts.builtin()[:2]),
  )
  assert verdict.sound(doc) and doc.rows[1].audit.findings == ()
  assert doc.setting.weights['target'] == own.params.nbytes
  assert 'a model of your own' in capsys.readouterr().out
