"""Traces of table models: p and q are known, and real decoding must agree."""

import dataclasses
import functools
import types as types_lib

import jax
import numpy as np
import pytest

from experiments import counterfactual, trace
from specdec_jax import build, forward, printing, requests, settings, types
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import predict
from specdec_jax.certify import table_model
from specdec_jax.drafters import draft_file, ngram
from specdec_jax.io import tokenizer
from specdec_jax.models import lm
from tests import fakes, programs

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

V, EOS, NEW, ROWS, GAMMA = 5, 4, 9, 512, 3
MODEL = table_model.make(V)
TARGET = table_model.table(0, V)
# A draft that is like the target.
DRAFT = TARGET + 0.6 * table_model.table(1, V)
RNG = np.random.default_rng(0)
ITEMS = requests.items(
  RNG.integers(0, EOS, 1 + i % 3).tolist() for i in range(ROWS)
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
  return settings.Sampling(temperature, 0, 1.0, seed)


def recorded(temperature=0.8, samples=1, draft=DRAFT):
  plan = plan_lib.Plan(
    ITEMS[::2], ITEMS[1::2], NEW, 64, sampled(temperature), BENCH
  )
  lm = engine(1, draft=draft)
  (found,) = trace.record(engine(0), [lm], plan, samples=samples)
  return found


def analysed(found, limit=GAMMA):
  return counterfactual.analyse(found, limit=limit)


def decoded(rule, temperature, seed):
  """Info of real windows of GAMMA drafts."""
  e = engine(GAMMA, rule)
  request = requests.make(
    ITEMS,
    ids=V,
    context=64,
    max_new_tokens=NEW,
    gamma=GAMMA,
    stop_ids=(EOS,),
    **dataclasses.asdict(sampled(temperature, seed)),
  )
  return jax.device_get(e.programs.generate(e.weights, request)).info


def test_p_and_q_are_those_of_the_tables(tmp_path):
  found = recorded(samples=2)
  trace.write(tmp_path / 't.jsonl', found)
  again = trace.read(str(tmp_path / 't.jsonl'))
  assert again.texts == found.texts and len(found.texts) == 2 * ROWS
  assert {text.seed for text in found.texts} == {7, 8}
  p_RVV, q_RVV = (
    table_model.warped(x, temperature=0.8) for x in (TARGET, DRAFT)
  )
  prompts = {item.id: item.tokens for item in ITEMS}
  assert {text.tokens[-1] == EOS for text in found.texts} == {True, False}
  for text in found.texts[::97]:
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
  record = functools.partial(trace.record, engine(0), plan=plan, samples=1)
  apart = [record([x])[0].texts for x in lms]
  jax.effects_barrier()
  passes = len(read) // len(lms)
  assert passes > 0
  read.clear()
  assert [x.texts for x in record(lms)] == apart
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


@pytest.mark.more
@pytest.mark.parametrize('rule', ['reject', 'block'])
def test_real_decoding_agrees_and_a_wrong_trace_does_not(rule):
  found = recorded(samples=2)
  info = decoded(rule, 0.8, seed=9)
  real = (info.origin_BL != types.PROMPT).sum() / info.calls_B.sum()
  row = analysed(found).rows[GAMMA]
  assert row.gain.low > 0
  at = getattr(row, rule)
  assert 0 < at.high - at.low < 0.2
  # The real run varies as much as the trace, with half of its texts.
  slack = 1.5 * (at.high - at.low)
  assert abs(real - at.value) < slack
  wrong = [x._replace(q=[0.5 * q for q in x.q]) for x in found.texts]
  at = getattr(analysed(found._replace(texts=wrong)).rows[GAMMA], rule)
  assert abs(real - at.value) > slack


def test_greedy_is_exact():
  analysis = analysed(recorded(0.0))
  hist_N = decoded('reject', 0.0, seed=7).hist_BN.sum(0)
  assert min(hist_N) > 0
  for windows in analysis.windows.values():
    np.testing.assert_allclose(windows, hist_N)
  np.testing.assert_allclose([row.gain.value for row in analysis.rows], 0)


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


def text(id, p, q):
  return trace.Text(id, 3, [7] * len(p), p, q, list(map(min, p, q)))


def by_hand():
  """Two requests, three texts; a p of the last one was rounded away."""
  texts = [
    text('a', [0.5, 0.5], [0.25, 0.5]),
    text('b', [0.5, 0.5], [0.5, 0.5]),
    text('b', [0.0, 0.5], [0.5, 0.5]),
  ]
  header = {
    'format': trace.FORMAT,
    'models': [['big', 'd0'], ['small', 'd1']],
    'sampling': dataclasses.asdict(sampled()),
  }
  return trace.Trace(header, texts)


def test_analysis_by_hand(capsys):
  found = analysed(by_hand(), 1)
  assert (found.requests, found.texts, found.tokens) == (2, 3, 6)
  assert found.rounded == 1
  assert found.alpha.value == pytest.approx((0.75 + 1 + 0.5) / 6)
  zero, one = found.rows
  assert zero.block.value == 1 == zero.independent
  # Calls: 1.5, 1, 1.5. Two requests are too few for an interval.
  assert one.reject == (pytest.approx(1.5), None, None)
  assert one.independent == pytest.approx(1 + 2.25 / 6)
  assert sum(found.windows['reject']) == pytest.approx(4)
  counterfactual.show(found, printing.console())
  assert ' 1.500 ' in capsys.readouterr().out
  # Six are enough.
  texts = [
    x._replace(id=f'{x.id}{i}') for i in range(3) for x in by_hand().texts
  ]
  six = analysed(by_hand()._replace(texts=texts), 1)
  assert six.requests == 6 and six.rows[1].reject.value == pytest.approx(1.5)
  low, high = six.rows[1].reject[1:]
  # Tokens less 1.5 calls are 2 - 2.25 and 4 - 3.75, over 2 calls a request.
  want = 2.571 * 0.125 / 5**0.5
  assert high - 1.5 == pytest.approx(1.5 - low) == pytest.approx(want, rel=0.1)
  counterfactual.show(six, printing.console())
  assert f'1.500 ({low:.3f} to {high:.3f})' in capsys.readouterr().out


def test_damaged_files_are_refused(tmp_path):
  path = tmp_path / 't.jsonl'
  trace.write(path, by_hand())
  head, *rest = path.read_text().splitlines()
  for lines, match in (
    ([], 'not a trace'),
    (rest, 'not a trace'),
    ([head], 'not a trace with texts'),
    ([head.replace('trace 5', 'trace 4'), *rest], 'another version'),
    ([head, rest[0], rest[1][:40]], 't.jsonl:3: not JSON'),
  ):
    path.write_text('\n'.join(lines))
    with pytest.raises(ValueError, match=match):
      trace.read(str(path))


def test_a_draft_that_stops_early_cannot_be_traced():
  lm = engine(1)
  stops = dataclasses.replace(lm, drafter=lm.drafter._replace(stops=True))
  plan = plan_lib.Plan(ITEMS, (), NEW, 64, sampled(), BENCH)
  with pytest.raises(ValueError, match='min_confidence: .* set it to 0'):
    trace.record(engine(0), [stops], plan, samples=1)


@pytest.mark.more
def test_alpha_is_that_of_bench_for_every_drafter_with_a_q(tmp_path):
  """Of an encoder-decoder on the same texts, under a lossy rule too."""
  target = build.load('random:t5_tiny')
  counts = ngram.count([range(50)], order=2, vocab=target.tokenizer.size)
  about = {'order': 2, 'tokenizer': target.tokenizer.fingerprint()}
  draft_file.write(ngram.FILE, tmp_path / 'n', counts._asdict(), about)
  made = functools.partial(build.engine, target, rule='lenient:0.5', gamma=1)
  engines = {
    'lm': made(build.load('random:t5_tiny:1')),
    'ngram': made('ngram', path=str(tmp_path / 'n')),
    'early_exit': made('early_exit', exit=1),
  }
  plain = build.engine(target, gamma=0)
  items = [
    requests.item(target, range(3, 6 + i), i, chat=False)._replace(id=f'{i}')
    for i in range(4)
  ]
  bench = types_lib.SimpleNamespace(batch_size=4)
  plan = plan_lib.Plan(tuple(items), (), 6, 16, sampled(1.0), bench, (), 9)
  rules = [engines['lm'].rule]
  traces = trace.record(
    plain, [*engines.values()], plan, samples=1, rules=rules
  )
  arms = [plan_lib.Arm('plain', 'plain', 0, plain)]
  arms += [plan_lib.Arm(n, n, 1, e) for n, e in engines.items()]
  groups = plan_lib.groups(arms, plan, plan.test)
  out = jax.device_get(plain.programs.generate(plain.weights, groups[0].full))
  alphas = predict.alphas(arms, groups, {'plain': [out]}, printing.track)
  assert len({found.alpha for found in alphas.values()}) == 3
  for name, found in zip(engines, traces, strict=True):
    sizes = [len(x.tokens) for x in found.texts]
    assert sum(sizes) == alphas[name].positions
    kept, away = np.average([x.rules[0] for x in found.texts], 0, sizes)
    assert kept == pytest.approx(alphas[name].alpha, rel=1e-5)
    assert away == pytest.approx(alphas[name].total_variation, rel=1e-5)
  assert traces[1].header['models'][1] == ['ngram', '']
  lookup = made('lookup')
  with pytest.raises(ValueError, match='lookup: proposes without a distr'):
    trace.record(plain, [lookup], plan, samples=1)
  silent = [rules[0]._replace(kept=None)]
  with pytest.raises(ValueError, match='lenient:0.5: a trace needs its kept'):
    trace.record(plain, [engines['lm']], plan, samples=1, rules=silent)


@pytest.mark.more
def test_the_script(tmp_path):
  file = tmp_path / 't.jsonl'
  run = functools.partial(programs.run, 'scripts/trace.py')
  record = ['record', '--config=configs/pair.py:tiny', f'--output={file}']
  run(*record, "--config.decode.methods=('lm',)", '--samples=2').check()
  (found,) = run('analyse', file, '--limit=2').check().document
  assert len(found['rows']) == 3 and found['texts'] == 2 * found['requests']
  run(*record).check_refused('is not there yet')
  run('replay').check_refused("'replay': want record, or analyse FILE")
