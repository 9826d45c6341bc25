"""Chen et al.'s table 1: replayed lookup against decoding, scores, the page."""

import dataclasses
import json
import types as types_lib

import jax
import numpy as np
import pytest

from experiments import claims, page
from experiments import rows as rows_lib
from experiments.chen_table1 import measure, render, texts
from specdec_jax import build, requests, settings
from specdec_jax.bench import plan as plan_lib
from specdec_jax.certify import table_model
from specdec_jax.io import tokenizer

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

V, EOS, NEW, K = 5, 4, 40, 3
# Mostly a chain of tokens, so that texts repeat, and not for ever.
PARAMS = table_model.table(0, V)[:1] + 0.3 * table_model.table(1, V)
RNG = np.random.default_rng(0)
ITEMS = requests.items(
  RNG.integers(0, EOS, 3 + i % 4).tolist() for i in range(6)
)


def engine(draft, gamma, **settings):
  bytes_ = tokenizer.from_bytes(512, 'bytes')
  target = build.LanguageModel(
    source='',
    label='target',
    tokenizer=dataclasses.replace(bytes_, eos_ids=(EOS,)),
    params=PARAMS,
    own=table_model.make(V),
  )
  options = dataclasses.replace(build.default_options(chunk=8), widths=())
  return build.engine(target, draft, gamma=gamma, options=options, **settings)


def test_replayed_lookup_is_what_decoding_does():
  """Greedy, so that decoding itself has no draws: equal at every K."""
  found = engine('lookup', K, min_match=1)
  bench = types_lib.SimpleNamespace(batch_size=3)
  sampling = settings.Sampling(0.0, 0, 1.0, 0)
  plan = plan_lib.Plan(tuple(ITEMS), (), NEW, 64, sampling, bench)
  arms = [plan_lib.Arm('plain', 'plain', 0, engine(None, 0))]
  arms += [plan_lib.Arm(f'K={k}', 'lookup', k, found) for k in (1, 2, K)]
  groups = plan_lib.groups(arms, plan, plan.test)
  run = lambda arm: [
    jax.device_get(
      arm.engine.programs.generate(
        arm.engine.weights, plan_lib.capped(arm, x.full)
      )
    )
    for x in groups
  ]
  replayed = measure.curve(None, found, plan, groups, run(arms[0]))
  assert len(replayed) == K and len({*replayed}) == K
  for arm, expected in zip(arms[1:], replayed, strict=True):
    outputs = run(arm)
    calls = sum(x.info.calls_B.sum() for x in outputs)
    pairs = zip(outputs, groups, strict=True)
    emitted = sum((x.lengths_B - y.host.lengths_B).sum() for x, y in pairs)
    assert expected == pytest.approx(emitted / calls)


def test_rouge_2():
  assert measure.rouge2('The cat sat.', 'the cat ran') == 0.5
  assert measure.rouge2('a b a b', 'a b') == pytest.approx(2 * 1 / 4)
  assert measure.rouge2('', 'one') == 0


def test_a_column_that_is_not_there_is_named(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_text(json.dumps({'document': 'long', 'highlights': 'short'}))
  with pytest.raises(ValueError, match="no text in 'summary'; it has document"):
    texts._columns('xsum', str(path), 'document', 'summary')
  with pytest.raises(ValueError, match='--xsum=/nowhere: no such file'):
    texts._columns('xsum', '/nowhere', 'document', 'summary')


def cell(draft, k, speed, **more):
  found = {
    'draft': draft,
    'sampling': 'nucleus',
    'k': k,
    'texts': 2,
    'ms': [20.0, 20.0 / speed],
    'speed': dict(value=speed, low=speed - 0.1, high=speed + 0.1),
    'rouge': [[0.1, 0.2] * 3, [0.1, 0.3] * 3],
    'efficiency': 1 + 0.3 * k,
    'curve': [1.3, 1.6, 1.9, 2.2] if draft == 'lookup' else [],
  }
  return found | more


def test_the_page_and_the_claims():
  drafts = ('lookup', 'eagle')
  cells = {'xsum': [cell(x, k, 1.5) for x in drafts for k in (2, 4)]}
  every = {'xsum': rows_lib.Row('xsum', '', (), '', theirs=texts.XSUM)}
  ours, curves, theirs = map(page.lines, render.parts(cells, every))
  assert '| XSum (ROUGE-2) | greedy | 14.1 | 7.00 | 2.01x |' in theirs[5]
  assert (
    '| xsum | lookup | nucleus | 4 | 20.00 | 13.33 | 1.50x (1.40x to 1.60x) '
    '| 2.20 | 0.150 | 0.200 |'
  ) in ours
  (curve,) = curves[4:-1]
  assert curve.startswith('| xsum | lookup | nucleus | 1.30 | 1.60 | 1.90 |')
  found = render.claims(cells, every)
  wanted = ['same direction', 'reproduced'] * 2
  assert [claims.outcome(x) for x in found] == wanted
  assert found[1].ours.value == pytest.approx(0.05)
