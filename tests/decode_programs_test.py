"""What compiled programs promise: invariance, one compilation, no host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.certify import base, load
from specdec_jax.costs import scripted
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.models import config as model_config
from specdec_jax.verify import coupled, reject
from tests import fakes

V, NEW, L, B = 13, 16, 32, 6


SETTINGS = dict(
  temperature=np.array([0.0, 0.8, 1.2, 0.8, 0.6, 1.0]),
  top_p=np.array([1.0, 0.9, 1.0, 1.0, 0.8, 0.95]),
  seed=3,
)


@pytest.mark.more
@pytest.mark.parametrize(
  'rule', [reject.RULE, coupled.RULE], ids=lambda r: r[0]
)
def test_fewer_new_tokens_are_a_prefix(x64, rule):
  model = fakes.table_model(V)
  weights = types.Weights(fakes.table(0, V), fakes.table(1, V))
  prompts = fakes.prompts(B, vocab=V)
  drafter = lm_drafter.make(model, gamma=2)
  generate = decode.programs(model, drafter, rule).generate
  ask = lambda new: fakes.request(prompts, new, vocab=V, length=L, **SETTINGS)
  run = lambda new: fakes.texts(generate(weights, ask(new)))
  whole = run(NEW)
  for new in range(1, NEW):
    for short, text, prompt in zip(run(new), whole, prompts, strict=True):
      assert short == text[: len(prompt) + new]


@pytest.fixture(scope='module')
def table():
  """(programs, weights, request(...)) of a sampled table, with log-probs."""
  model = fakes.table_model(V)
  drafter = fakes.ragged(lm_drafter.make(model, gamma=2))
  options = decode.Options(logprobs=3)
  programs = decode.programs(model, drafter, reject.RULE, options)
  weights = types.Weights(fakes.table(0, V), fakes.table(1, V))
  prompts = fakes.prompts(B, vocab=V)

  def request(**changes):
    changes = dict(length=L) | SETTINGS | changes
    return fakes.request(prompts, changes.pop('new', NEW), vocab=V, **changes)

  return programs, weights, request


@pytest.mark.more
def test_the_state_is_donated(table):
  _, weights, request = table
  drafter = lm_drafter.make(fakes.table_model(V), gamma=1)
  with jax.debug_nans(False):  # jax does not donate while it looks for NaN
    programs = decode.programs(fakes.table_model(V), drafter, reject.RULE)
    state, info = programs.start(weights, request())
    new, _ = programs.step(weights, request(), state, info)
    for old in jax.tree.leaves((state, info)):
      assert old.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match='deleted|donated'):
      programs.step(weights, request(), state, info)
  assert not any(x.is_deleted() for x in jax.tree.leaves(new))


@pytest.mark.more
def test_one_compilation_for_all_requests_of_a_bucket(table):
  programs, weights, request = table
  generate = programs.generate
  generate(weights, request())
  before = generate._cache_size()
  for changes in (
    dict(temperature=0.3, top_k=5, top_p=0.4, seed=9),
    dict(temperature=0.0, new=3, mixed=True),
    dict(stop_ids=[4], request=np.arange(B) + 100),
  ):
    generate(weights, request(**changes))
  assert generate._cache_size() == before
  generate(weights, request(length=48))
  assert generate._cache_size() == before + 1
  for seed in range(2):  # greedy ones have a smaller program
    generate(weights, request(temperature=0.0, seed=seed))
  assert generate._cache_size() == before + 2


@pytest.mark.more
def test_no_step_of_the_loop_speaks_to_the_host(table):
  """One call of one program, and nothing moves while it runs."""
  programs, *arguments, request = table
  arguments = jax.device_put((*arguments, request()))
  programs.generate(*arguments)
  with jax.transfer_guard('disallow'):
    jax.block_until_ready(programs.generate(*arguments))
  text = programs.generate.lower(*arguments).as_text()
  assert 'while' in text
  for word in ('callback', 'infeed', 'outfeed', 'stablehlo.send'):
    assert word not in text, word


def test_logprobs_are_those_of_a_teacher_forced_pass(table):
  """At temperature 1 and unfiltered, whatever the row's settings; and so are
  the likeliest in each place, whichever was drawn, and the entropies."""
  programs, weights, request = table
  req = request()
  out = programs.generate(weights, req)
  logprobs, ids, top = map(np.asarray, (out.info.logprob_BL, *out.info.top_BLX))
  entropies = np.asarray(out.info.entropy_BL)
  for b, text in enumerate(fakes.texts(out)):
    start = req.lengths_B[b]
    for i in range(start, len(text)):
      row_V = fakes.row_of(weights.target, text[:i]).astype(np.float64)
      wanted = row_V[text[i]] - np.log(np.exp(row_V).sum())
      assert logprobs[b, i] == pytest.approx(wanted, abs=1e-5)
      best = np.argsort(-row_V)[:3]
      assert ids[b, i].tolist() == best.tolist()
      np.testing.assert_allclose(
        top[b, i], row_V[best] - np.log(np.exp(row_V).sum()), atol=1e-5
      )
      p_V = np.exp(row_V) / np.exp(row_V).sum()
      wanted = -(p_V * np.log(p_V)).sum()
      assert entropies[b, i] == pytest.approx(wanted, abs=1e-5)
    assert (logprobs[b, :start] == 0).all()
    assert (logprobs[b, len(text) :] == 0).all()
    assert (entropies[b, len(text) :] == 0).all()


@pytest.mark.more
def test_an_empty_residual_falls_back_to_the_target(x64):
  """A rule that leaves no weights at all still says what the target says."""

  def nothing_left(noise, draft, p_BNV):
    verdict = reject.verify(noise, draft, p_BNV)
    return verdict._replace(weights_BV=0 * verdict.weights_BV)

  model = fakes.table_model(5)
  weights = types.Weights(
    fakes.table(0, 5), (np.zeros((B, L), np.int32), np.ones((B, L), np.int32))
  )
  request = fakes.request([[1]] * B, NEW, vocab=5, length=L)
  rule = types.Rule('nothing left', nothing_left)
  out = decode.programs(model, scripted.make(gamma=1), rule).generate(
    weights, request
  )
  for text in fakes.texts(out):
    for i in range(1, len(text)):
      assert text[i] == jnp.argmax(fakes.row_of(weights.target, text[:i]))


@pytest.mark.more
def test_programs_used_long_ago_are_let_go(monkeypatch):
  """Compiled code stays mapped for as long as its program is kept."""
  monkeypatch.setattr(decode, 'KEPT', 2)
  monkeypatch.setattr(decode, '_kept', {})
  request = fakes.request([[1, 2]], 2, vocab=V, length=16)
  weights = types.Weights(fakes.table(0, V))
  drafters = [decode.PLAIN._replace(name=name) for name in 'abc']
  of = lambda i: decode.programs(fakes.table_model(V), drafters[i], reject.RULE)
  first, second = of(0), of(1)
  for programs in (first, second):
    programs.generate(weights, request)
  assert of(0) is first  # used again: the second is the oldest now
  of(2).generate(weights, request)
  sizes = [x.generate._cache_size() for x in (first, second)]
  assert sizes == [1, 0] and of(0) is first


@pytest.mark.parametrize('encoder', [False, True])
@pytest.mark.parametrize('scan', [False, True])
@pytest.mark.parametrize('name', load.RECIPES)
def test_rows_come_first_in_every_state(name, scan, encoder):
  """Axis 0 of every leaf, of the target's cache and of the drafter's state."""
  run = model_config.Execution(scan_layers=scan)
  world = base.transformers(V, run=run, encoder=encoder)
  if encoder and name in ('eagle', base.TREE):
    with pytest.raises(AssertionError):
      load.RECIPES[name](world, 2)
    return
  drafter, draft = load.RECIPES[name](world, 2)
  request = base.make_request(world, [[1, 2]] * B, NEW, length=L)
  loop = decode.Loop(world.target, drafter, reject.RULE)
  state, _ = jax.eval_shape(
    functools.partial(decode.start, loop),
    types.Weights(world.weights.target, draft),
    request,
  )
  leaves = jax.tree_util.tree_leaves_with_path(state)
  late = [jax.tree_util.keystr(at) for at, x in leaves if x.shape[:1] != (B,)]
  assert not late
