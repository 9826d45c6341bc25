"""Texts of table models: p and q are known, and real decoding must agree."""

import dataclasses
import functools
import types as types_lib

import jax
import numpy as np
import pytest

from experiments import replay
from specdec_jax import build, forward, requests, sampling, types
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import predict
from specdec_jax.certify import table_model
from specdec_jax.drafters import early_exit, ngram
from specdec_jax.io import tokenizer
from specdec_jax.io.published import draft_file
from specdec_jax.models import lm
from tests import fakes

V, EOS, NEW, ROWS, GAMMA = 5, 4, 9, 512, 3
MODEL = table_model.make(V)
TARGET = table_model.table(0, V)
# A draft that is like the target.
DRAFT = TARGET + 0.6 * table_model.table(1, V)
RNG = np.random.default_rng(0)
ITEMS = requests.items(
  [RNG.integers(0, EOS, 1 + i % 3).tolist() for i in range(ROWS)]
)
ITEMS = tuple(item._replace(id=f'id {item.number}') for item in ITEMS)
BENCH = types_lib.SimpleNamespace(batch_size=ROWS)


def engine(gamma, rule='reject', draft=DRAFT):
  bytes_ = dataclasses.replace(
    tokenizer.from_bytes(512, 'bytes'), eos_ids=(EOS,)
  )
  # One body in the program instead of two.
  options = dataclasses.replace(build.default_options(chunk=8), widths=())
  model = lambda name, table: build.LanguageModel(
    source=name, label=name, tokenizer=bytes_, params=table, own=MODEL
  )
  target, small = model('target', TARGET), model('draft', draft)
  return build.engine(target, small, rule=rule, gamma=gamma, options=options)


def sampled(temperature=0.8, seed=7):
  return sampling.Sampling(temperature, seed=seed)


def recorded(temperature=0.8, seed=7, draft=DRAFT):
  plan = plan_lib.Plan(
    ITEMS[::2], ITEMS[1::2], NEW, 64, sampled(temperature, seed), BENCH
  )
  (found,) = replay.record(engine(0), [engine(1, draft=draft)], plan)
  return found


def decoded(rule, temperature, seed):
  """Info of real windows of GAMMA drafts."""
  e = engine(GAMMA, rule)
  how = dict(new=NEW, sampling=sampled(temperature, seed), stop_ids=(EOS,))
  items = [item._replace(**how) for item in ITEMS]
  request = requests.make(items, gamma=GAMMA)
  return jax.device_get(e.programs.generate(e.weights, request)).info


def test_p_and_q_are_those_of_the_tables():
  found = recorded()
  assert len(found) == ROWS
  p_RVV, q_RVV = (
    table_model.warped(x, temperature=0.8) for x in (TARGET, DRAFT)
  )
  prompts = {item.id: item.tokens for item in ITEMS}
  assert {text.tokens[-1] == EOS for text in found} == {True, False}
  for text in found[::97]:
    assert EOS not in text.tokens[:-1] and len(text.tokens) <= NEW
    for t, token in enumerate(text.tokens):
      prefix = [*prompts[text.id], *text.tokens[:t]]
      p_V = table_model.row_of(p_RVV, prefix)
      q_V = table_model.row_of(q_RVV, prefix)
      assert text.p[t] == pytest.approx(p_V[token], rel=1e-5)
      assert text.q[t] == pytest.approx(q_V[token], rel=1e-5)
      overlap = np.minimum(p_V, q_V).sum()
      assert text.overlap[t] == pytest.approx(overlap, rel=1e-5)


def test_the_target_reads_a_text_once_for_all_drafts():
  """And every draft's numbers have the bits of a trace of its own."""
  read = []

  def apply(*args, **settings):
    jax.debug.callback(read.append, 1)
    return MODEL.apply(*args, **settings)

  lms = [engine(1, draft=TARGET + x * DRAFT) for x in (0.1, 0.5, 2.0)]
  counted = MODEL._replace(apply=apply)
  target = dataclasses.replace(lms[0].target, own=counted)
  lms = [dataclasses.replace(x, target=target) for x in lms]
  plan = plan_lib.Plan(ITEMS[:8], (), NEW, 64, sampled(), BENCH)
  plan = plan._replace(bench=types_lib.SimpleNamespace(batch_size=8))
  record = functools.partial(replay.record, engine(0), plan=plan)
  apart = [record([x])[0] for x in lms]
  jax.effects_barrier()
  passes = len(read) // len(lms)
  assert passes > 0
  read.clear()
  assert record(lms) == apart
  jax.effects_barrier()
  assert len(read) == passes


def test_logits_of_the_prompt_are_left_out_and_change_nothing():
  """Chunks of 4: before index 9, none of those that predict 1 to 8."""
  config = fakes.tiny(dtype='float32')
  model, params = lm.make(config), lm.init(config, 0)
  tokens_BL = jax.random.randint(jax.random.key(0), (2, 12), 0, config.vocab)

  @jax.jit
  def first_logit(begin_B):
    columns = lambda index_T, logits_BTV: [logits_BTV[..., 0]]
    args = tokens_BL, begin_B, np.array([12, 12]), columns
    return forward.score([(model, params)], *args, chunk=4)[0]

  whole = first_logit(np.array([1, 1]))
  assert np.all(whole[:, 1:])
  for begin in range(2, 12):
    found = first_logit(np.array([begin, 11]))
    left_out = 1 + (begin - 1) // 4 * 4
    np.testing.assert_array_equal(found[:, left_out:], whole[:, left_out:])
    assert not np.any(found[:, :left_out])


@pytest.mark.slow
@pytest.mark.parametrize('rule', ['reject', 'block'])
def test_real_decoding_agrees_and_wrong_texts_do_not(rule):
  found = recorded() + recorded(seed=8)
  info = decoded(rule, 0.8, seed=9)
  real = (info.origin_BL != types.PROMPT).sum() / info.calls_B.sum()
  row = replay.efficiencies(found, GAMMA)[GAMMA]
  assert row.gain.low > 0
  at = getattr(row, rule)
  assert 0 < at.high - at.low < 0.2
  # The real run varies as much as the texts, with half of them.
  slack = 1.5 * (at.high - at.low)
  assert abs(real - at.value) < slack
  wrong = [x._replace(q=[0.5 * q for q in x.q]) for x in found]
  at = getattr(replay.efficiencies(wrong, GAMMA)[GAMMA], rule)
  assert abs(real - at.value) > slack


def test_greedy_is_exact():
  found = recorded(0.0)
  hist_N = decoded('reject', 0.0, seed=7).hist_BN.sum(0)
  assert min(hist_N) > 0
  ratios = [replay.ratios(x) for x in found]
  for rule in replay.RULES.values():
    windows_BGN = replay.count(ratios, rule, GAMMA)
    np.testing.assert_allclose(windows_BGN[:, GAMMA].sum(0), hist_N)
  rows = replay.efficiencies(found, GAMMA)
  np.testing.assert_allclose([row.gain.value for row in rows], 0)


@pytest.mark.parametrize('temperature', [0.0, 0.8])
def test_a_draft_that_is_not_finite_is_refused(temperature):
  """A greedy q is a one-hot whatever the logits are."""
  broken = DRAFT.copy()
  broken[:, 2] = np.nan
  with (
    jax.debug_nans(False),
    pytest.raises(ValueError, match="prompt 'id .*of draft are not finite"),
  ):
    recorded(temperature, draft=broken)


def test_efficiencies_by_hand():
  """Windows at gamma 1: 1.5 and 2.5; one p was rounded away, so it is 1."""
  text = lambda p, q: replay.Text('a', [7] * len(p), p, q, [])
  texts = [
    text([0.5, 0.5], [0.25, 0.5]),
    text([0.5, 0.5, 0.0, 0.5], [0.5, 0.5, 0.5, 0.5]),
  ]
  zero, one = replay.efficiencies(texts, 1)
  assert zero.block.value == 1
  # Two texts are too few for an interval.
  assert one.reject == (pytest.approx(1.5), None, None)
  found = replay.efficiencies(texts * 3, 1)[1].reject
  assert found.value == pytest.approx(1.5)
  # Tokens less 1.5 windows are 2 - 2.25 and 4 - 3.75, over 2 windows a text.
  want = 2.571 * 0.125 / 5**0.5
  ends = found.high - 1.5, 1.5 - found.low
  assert ends == pytest.approx((want, want), rel=0.1)


@pytest.mark.slow
def test_alpha_is_that_of_bench_for_every_drafter_with_a_q(tmp_path):
  """Of an encoder-decoder on the same texts, under a lossy rule too."""
  target = build.load('random:t5_tiny')
  counts = ngram.count([range(50)], order=2, vocab=target.tokenizer.size)
  about = {'order': 2, 'tokenizer': target.tokenizer.fingerprint()}
  draft_file.write(draft_file.NGRAM, tmp_path / 'n', counts._asdict(), about)
  made = functools.partial(build.engine, target, rule='lenient:0.5', gamma=1)
  engines = {
    'lm': made(build.load('random:t5_tiny:1')),
    'ngram': made(ngram.Settings(tmp_path / 'n')),
    'early_exit': made(early_exit.Settings(exit=1)),
  }
  plain = build.engine(target, gamma=0)
  items = [
    requests.item(target, range(3, 6 + i), i, chat=False)._replace(id=f'{i}')
    for i in range(4)
  ]
  bench = types_lib.SimpleNamespace(batch_size=4)
  plan = plan_lib.Plan(tuple(items), (), 6, 16, sampled(1.0), bench, (), 9)
  rules = [engines['lm'].rule]
  each = replay.record(plain, [*engines.values()], plan, rules=rules)
  arms = [plan_lib.Arm('plain', 'plain', 0, plain)]
  arms += [plan_lib.Arm(n, n, 1, e) for n, e in engines.items()]
  groups = plan_lib.groups(arms, plan, plan.test)
  out = jax.device_get(plain.programs.generate(plain.weights, groups[0].full))
  alphas = predict.alphas(arms, groups, [out])
  assert len({found.alpha for found in alphas.values()}) == 3
  for name, texts in zip(engines, each, strict=True):
    sizes = [len(x.tokens) for x in texts]
    kept, away = np.average([x.rules[0] for x in texts], 0, sizes)
    assert kept == pytest.approx(alphas[name].alpha, rel=1e-5)
    assert away == pytest.approx(alphas[name].total_variation, rel=1e-5)
