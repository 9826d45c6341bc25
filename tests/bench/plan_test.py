"""Batches of requests, which prompts test, and what drafting costs."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from specdec_jax import printing, requests
from specdec_jax import sampling as sampling_lib
from specdec_jax import settings as settings_lib
from specdec_jax.bench import budget, identity, prompts, tables
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration
from specdec_jax.verify import reject
from tests.bench import bench_test


def experiment(**changes):
  config = bench_test.settings(('lookup',), **changes)
  return settings_lib.load(settings_lib.settings(config))


FAR = prompts.Prompt('far', tokens=(1, 9999))
NONE = prompts.Prompt('none', tokens=())
WARM = sampling_lib.Sampling(0.8, 0, 1.0, 0)


@pytest.mark.parametrize(
  'call, said',
  [
    (lambda e: plan_lib.make(e, [FAR]), "prompt 'far': token id 9999"),
    (lambda e: plan_lib.make(e, [NONE]), "prompt 'none': empty"),
    (
      lambda _: plan_lib.make(experiment(decode={'max_new_tokens': 0}), []),
      'decode.max_new_tokens=0: here it must be at least 1',
    ),
    (lambda _: plan_lib.batch_sizes(['0']), 'batch_sizes=0: want whole'),
    (lambda _: budget.clock(-1), 'minutes=-1: must be 0'),
    (
      lambda _: identity.check_promise(reject.RULE, WARM),
      "rule=reject at temperature=0.8 does not promise plain decoding's tokens",
    ),
    (
      lambda e: identity.run(plan_lib.arms(e)[:1], None, {}, None),
      'name nothing to compare with plain decoding',
    ),
  ],
)
def test_bad_input_is_one_sentence(call, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    call(experiment())


def test_batches_are_full_of_live_rows_and_share_one_shape():
  """Also where a category has fewer prompts than a batch has rows."""
  e = experiment(bench={'batch_size': 2})
  arms = plan_lib.arms(e)
  items = tuple(
    requests.Item(tuple(range(1, 4 + i)), i, str(i), 'ab'[i % 2])
    for i in range(5)
  )
  plan = plan_lib.Plan(items, (), 8, 32, e.settings.sampling, e.settings.bench)
  groups = plan_lib.groups(arms, plan, items)
  assert [[i.id for i in g.items] for g in groups] == [
    ['0', '1'],
    ['2', '3'],
    ['4', '4'],
  ]
  # No two batches share a prompt; a copy draws its own noise.
  assert len({item.number for g in groups for item in g.items}) == 6
  assert len({g.full.tokens_BL.shape for g in groups}) == 1
  for group in groups:
    np.testing.assert_array_equal(group.full.limit_B, group.full.lengths_B + 8)
    for tokens, room in ((0, 0), (3, 3), (9, 8)):
      short = plan_lib.shortened(group.full, tokens)
      np.testing.assert_array_equal(short.limit_B - short.lengths_B, room)


def test_a_tree_has_its_own_gamma_room_and_timed_widths(monkeypatch):
  config = bench_test.settings(('lookup', 'eagle'))
  config.unlock()
  config.eagle.source, config.eagle.tree = 'random:0', '40,24'
  config.decode.gammas = (2,)
  e = settings_lib.load(settings_lib.settings(config))
  arms = plan_lib.arms(e, measure=False)
  assert [x.gamma for x in arms] == [0, 2, 64]
  plan = plan_lib.make(e, [prompts.Prompt('a', tokens=(1,) * 20)])
  assert plan.buffer >= 20 + e.settings.decode.max_new_tokens + 64
  for part in ('_verify', '_propose'):
    monkeypatch.setattr(calibration, part, lambda *_: None)
  found = calibration._parts([x.engine for x in arms[1:]], None, {0})
  assert {('verify', 3), ('verify', 65)} <= {*found}


def test_a_category_without_a_test_prompt_is_named(capsys):
  e = experiment()
  chosen = [
    prompts.Prompt(str(i), category, (f'tell {i}',))
    for i, category in enumerate(['a', 'a', 'b', 'c'])
  ]
  c = plan_lib.make(e, chosen[1:])  # one of each
  assert [x.category for x in c.test] == ['a', 'c']
  setting = plan_lib.setting(plan_lib.arms(e), c)
  assert setting.not_judged == ('b',) and setting.categories == 2
  tables.plan(setting, budget.UNLIMITED, 0.25, printing.console())
  out = capsys.readouterr().out
  assert '2 test prompts, 1 calibration' in out and 'no test prompt: b\n' in out
  assert 'about +-25%' in out
  timed = calibration.Calibration(0.1, {1: 1.0, 5: 1.5}, 1.1, {'lm': {4: 1.0}})
  tables.calibration(timed, 20.0, printing.console())
  out = capsys.readouterr().out
  assert 'plain step 100 ms; v(1) = 1.00, v(5) = 1.50; proposing nothing' in out
  assert 'c (a drafted token): lm 0.2500' in out
  both = plan_lib.make(e, chosen[:1])
  assert not plan_lib.setting(plan_lib.arms(e), both).not_judged


def test_repeats_of_a_prompt_draw_their_own_noise():
  """Copies that fill a batch would else all emit one text when sampling."""
  e = experiment(sampling={'temperature': 1.0}, bench={'batch_size': 4})
  plain = plan_lib.arms(e)[:1]
  plan = plan_lib.make(e, prompts.builtin()[:2])
  (group,) = plan_lib.groups(plain, plan, plan.test)
  assert [x.tokens for x in group.items] == [plan.test[0].tokens] * 4
  engine = plain[0].engine
  out = engine.programs.generate(engine.weights, group.full)
  answers = plan_lib.answers([group], [jax.device_get(out)])
  assert len({tuple(x.tokens) for x in answers.values()}) == 4


def test_a_prompt_and_a_method_given_twice_are_one():
  """A copy in the calibration would have seen the test; and in an interval."""
  whole = {'prompts_per_category': 0, 'prompt_tokens': 0}
  e = experiment(decode={'methods': ('lookup', 'lm', 'lookup')}, bench=whole)
  names = [x.name for x in plan_lib.arms(e, measure=False)]
  assert len(names) == len({*names})
  one, two, three = prompts.builtin()[:3]
  again = dataclasses.replace(one, id='again', category=three.category)
  plan = plan_lib.make(e, [one, again, two, three, again])
  found = sorted(x.id for x in plan.test + plan.calibration)
  assert found == sorted([one.id, two.id, three.id])
  # By its source, of a model with an encoder, which has no other prompt.
  e = experiment(target={'source': 'random:t5_tiny'}, bench=whole)
  some = [
    prompts.Prompt(str(i), 'ab'[i % 2], (f'tell {i}',)) for i in range(12)
  ]
  plan = plan_lib.make(e, [*some, dataclasses.replace(some[0], id='again')])
  items = plan.test + plan.calibration
  assert sorted(x.id for x in items) == sorted(x.id for x in some)


def test_pools_on_a_mesh_have_rows_that_it_divides():
  e = experiment(mesh={'data': 2})
  assert plan_lib.batch_sizes(['4', '1', '4']) == (1, 4)
  plan = plan_lib.make(e, prompts.builtin()[:2], (1, 2, 3))
  assert plan.batch_sizes == (2, 4)


def test_sources_are_cut_and_read_before_the_first_token():
  """Those of a batch share a buffer; a prefill and a calibration read them."""
  e = experiment(target={'source': 'random:t5_tiny'})
  arms = plan_lib.arms(e)
  plan = plan_lib.make(e, prompts.builtin()[:12])
  end = e.target.tokenizer.eos_ids[0]
  items = plan.test + plan.calibration
  # One of each of three categories: the empty prompts are no copies.
  assert (len(plan.test), len(plan.calibration)) == (2, 1)
  assert {len(x.source) for x in items} == {20} and plan.sources == 20
  assert all(x.source[-1] == end and x.tokens == (0,) for x in items)
  first = next(p for p in prompts.builtin() if p.id == items[0].id).turns[0]
  assert bytes(items[0].source[:-1]).decode() == first[:19]
  (group,) = plan_lib.groups(arms, plan, plan.test[:1])
  for request in group.full, plan_lib.middle(arms, plan, 4).full:
    assert request.source.tokens_BI.shape == (1, 32)
    assert request.source.lengths_B.tolist() == [20]
  plain = arms[0].engine
  none = plan_lib.shortened(group.full, 0)
  out = plain.programs.generate(plain.weights, none)
  assert not out.info.calls_B.any()


def test_methods_that_differ_in_gamma_share_a_program():
  e = experiment(decode={'gammas': (0, 1, 3)})
  arms = plan_lib.arms(e)
  assert [(x.name, x.gamma) for x in arms] == [
    ('autoregressive', 0),
    ('lookup g=1', 1),
    ('lookup g=3', 3),
  ]
  one, three = arms[1:]
  assert one.engine is three.engine and three.engine.drafter.gamma == 3
  plan = plan_lib.make(e, prompts.builtin()[:2])
  (group,) = plan_lib.groups(arms, plan, plan.test)
  most = [int(plan_lib.capped(x, group.full).gamma_B[0]) for x in arms]
  assert most == [0, 1, 3]
