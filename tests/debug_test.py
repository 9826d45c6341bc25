"""The debug checks: silent on what is right, exact about what is planted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import debug, decode, types
from specdec_jax.debug import watch
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import lookup, scripted
from specdec_jax.models import lm
from specdec_jax.verify import coupled, reject
from tests import fakes

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

V, L, NEW, GAMMA, B = 13, 32, 12, 3, 3
TABLE = fakes.table_model(V)
INNER = lm_drafter.make(TABLE, gamma=GAMMA)
ROW = 1  # where things are planted
# One body and no second: checks compile faster.
OPTIONS = decode.Options(narrow=False)


def request(**changes):
  settings = dict(
    temperature=np.array([0.0, 0.8, 1.0]), seed=3, request=[40, 41, 42]
  )
  prompts = fakes.prompts(B, vocab=V, seed=5)
  return fakes.request(
    prompts, NEW, vocab=V, gamma=GAMMA, length=L, **settings | changes
  )


def forgetful(model):
  """The model with params (its own, slot): that slot is lost in ROW.

  A slot of -1 loses nothing. A prefill never loses any.
  """

  def apply(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, **taps):
    params, slot = params
    rows_B1 = jnp.arange(tokens_BT.shape[0])[:, None]
    if tokens_BT.shape[1] <= GAMMA + 1:
      lost_BT = (rows_B1 == ROW) & (slots_BT == slot)
      slots_BT = jnp.where(lost_BT, mask_BTS.shape[-1], slots_BT)
    return model.apply(
      params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, **taps
    )

  return model._replace(
    apply=apply, head=lambda params, hidden: model.head(params[0], hidden)
  )


def weights_of(target, draft=(), slot=-1):
  return types.Weights((target, np.int32(slot)), draft)


# --- the library's own parts, and a slot that is lost ------------------------


def test_finished_rows_are_nobodys_fault():
  rng = np.random.default_rng(0)
  script = rng.integers(0, V, (B, L)).astype(np.int32)
  everything = np.full((B, L), GAMMA, np.int32)
  weights = types.Weights(fakes.table(0, V), (script, everything))
  req = request(stop_ids=[4])
  args = TABLE, scripted.make(gamma=GAMMA), coupled.RULE, weights, req
  debug.check_values(*args, decode.Options(narrow=True))


CASES = {
  # name: (drafter of a model, rule)
  'table': (lambda model: fakes.ragged(INNER), reject.RULE),
  'layers': (lambda model: lm_drafter.make(model, gamma=GAMMA), coupled.RULE),
  'scan': (lambda model: lookup.make(gamma=GAMMA, min_match=1), reject.RULE),
}


@pytest.mark.parametrize('kind', CASES)
def test_a_lost_slot_is_named_and_nothing_else(kind):
  """layers: float64; scan: float32, and its values are checked too."""
  with jax.enable_x64(kind == 'layers'):
    if kind == 'table':
      model, params = TABLE, (fakes.table(0, V), fakes.table(1, V))
    else:
      dtype = 'float64' if kind == 'layers' else 'float32'
      config = fakes.tiny(dtype=dtype, scan_layers=kind == 'scan')
      model = lm.make(config)
      params = lm.init(config, 0), lm.init(config, 1)
    make, rule = CASES[kind]
    drafter = make(model)
    args, req, slot = (forgetful(model), drafter, rule), request(), 9
    debug.check_cache(*args, weights_of(*params), req, OPTIONS)
    if kind == 'scan':
      debug.check_values(*args, weights_of(*params), req, OPTIONS)
    weights = weights_of(*params, slot)
    with pytest.raises(debug.CacheMismatch) as caught:
      debug.check_cache(*args, weights, req, OPTIONS)
    state, info = ran(watch.programs(*args, OPTIONS).step, args, weights, req)
  # A slot counts once the token after it is there.
  window = int(info.window_BL[ROW, slot + 1])
  found = caught.value
  assert (found.row, found.window, found.slot) == (ROW, window, slot)
  token = int(state.tokens_BL[ROW, slot])
  assert f'(request 41), window {window}, slot {slot}: ' in str(found)
  assert f'stale for token {token}' in str(found)


def ran(step, args, weights, req):
  """The last (State, Info) of a whole run, whatever the checks say of it."""
  state, info = watch.programs(*args, OPTIONS).start(weights, req)
  while np.asarray(state.live_B).any():
    state, info, _ = step(weights, req, state, info)
  return state, info


def test_a_drafter_that_reads_too_little_is_named():
  """The cache hole: a fresh state has read all, a window reads one token."""
  hole = TABLE._replace(apply=reads_one)
  drafter = lm_drafter.make(hole, gamma=GAMMA)

  def init(weights, context, features):
    longer = context._replace(lengths_B=context.lengths_B + 1)
    return drafter.init(weights, longer, features)

  params = fakes.table(0, V)  # the same twice: everything is accepted
  weights = types.Weights(params, params)
  args = TABLE, drafter._replace(init=init), reject.RULE
  req = request(temperature=0.8)
  with pytest.raises(debug.DraftMismatch) as caught:
    debug.check_cache(*args, weights, req, OPTIONS)
  found = caught.value
  n = int(req.lengths_B[ROW]) + GAMMA + 1
  assert (found.row, found.window, found.slot) == (ROW, 1, n)
  assert f'first differs in slot {n - 2}' in str(found)
  debug.check_cache(*args, weights, req, OPTIONS, proposals=False)


def reads_one(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, **_):
  """TABLE.apply that loses the first of two tokens in ROW."""
  if tokens_BT.shape[1] == 2:
    rows_B1 = jnp.arange(B)[:, None]
    lost_BT = (rows_B1 == ROW) & (jnp.arange(2)[None] == 0)
    slots_BT = jnp.where(lost_BT, L, slots_BT)
  return TABLE.apply(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache)


# --- values ------------------------------------------------------------------

BUGS = {
  # name: (offset of the slot from the row's length, part of the message)
  'id V': (1, 'draft 1 is token id 13, allowed are 0 to 12'),
  'id -1': (1, 'draft 1 is token id -1'),
  'q NaN': (1, 'q of draft 1 is nan for id 2'),
  'q sum': (1, 'q of draft 1 sums to 2'),
  'q token': (1, 'gives its own token'),
  'count': (0, 'count_B is 4, allowed are 0 to 3'),
  'index': (-1, 'index 13 is out of bounds for axis 1 with size 13, in step'),
  'NaN': (-1, 'nan generated by primitive: log, in step'),
  'rule accepts': (3, 'accepted_B is 3, allowed are 0 to 2'),
  'rule weights': (-1, 'weights_BV is -1.0 for id 0, in step'),
  'rule NaN': (-1, '_attempt (decode.py:'),
}
NAMES = list(BUGS)


def saboteur():
  """A drafter and a rule with every bug; weights.draft[1] says which is on.

  A bug strikes in one row, once it holds 8 tokens. The rule sees no weights:
  what it is to do wrong it knows by the count, 2, 1 or 0 instead of 3.
  """

  def propose(weights, state, context, noise, target_cache):
    params, bug = weights.draft
    weights = weights._replace(draft=params)
    draft, state, cache = INNER.propose(
      weights, state, context, noise, target_cache
    )
    here_B = (jnp.arange(B) == ROW) & (context.lengths_B >= 8)
    on = lambda name: here_B & (bug == NAMES.index(name))
    first_1K = jnp.arange(GAMMA)[None] == 1
    ids_V = jnp.arange(V)[None, None]
    tokens_BK, q_BKV, count_B, _ = draft
    for name, token in (('id V', V), ('id -1', -1)):
      tokens_BK = jnp.where(on(name)[:, None] & first_1K, token, tokens_BK)
    at_BKV = lambda name: (on(name)[:, None] & first_1K)[..., None]
    q_BKV = jnp.where(at_BKV('q NaN') & (ids_V == 2), jnp.nan, q_BKV)
    q_BKV = jnp.where(at_BKV('q sum'), 2 * q_BKV, q_BKV)
    other_BKV = (ids_V == (tokens_BK[..., None] + 1) % V).astype(q_BKV.dtype)
    q_BKV = jnp.where(at_BKV('q token'), other_BKV, q_BKV)
    count_B = jnp.where(on('count'), GAMMA + 1, count_B)
    for name, count in zip(NAMES[-3:], (2, 1, 0), strict=True):
      count_B = jnp.where(on(name), count, count_B)
    # Neither reaches the output.
    index_B1 = jnp.where(on('index'), V, 0)[:, None]
    read_B = jnp.take_along_axis(q_BKV[:, 0], index_B1, 1)[:, 0]
    log_B = jnp.log(jnp.where(on('NaN'), -1.0, 1.0))
    count_B = jnp.where((read_B > 2) | (log_B > 2), 0, count_B)
    return types.Draft(tokens_BK, q_BKV, count_B), state, cache

  def init(weights, context, features):
    return INNER.init(weights._replace(draft=weights.draft[0]), context, None)

  def verify(noise, draft, p_BNV):
    accepted_B, weights_BV = reject.verify(noise, draft, p_BNV)
    count_B, id_1V = draft.count_B, jnp.arange(V)[None]
    accepted_B = jnp.where(count_B == 2, 3, accepted_B)
    accepted_B = jnp.where(count_B == 1, 0, accepted_B)
    negative_BV = (count_B[:, None] == 1) & (id_1V == 0)
    log_B = jnp.log(jnp.where(count_B == 0, -1.0, 1.0))
    accepted_B = jnp.where(log_B > 2, 0, accepted_B)
    return types.Verdict(accepted_B, jnp.where(negative_BV, -1, weights_BV))

  drafter = INNER._replace(name='saboteur', init=init, propose=propose)
  return drafter, types.Rule('saboteur', verify)


SABOTEUR = saboteur()


def sabotaged(bug):
  draft = fakes.table(1, V), np.int32(bug)
  return types.Weights(fakes.table(0, V), draft)


@pytest.fixture(scope='module')
def starts():
  """The length of ROW at the start of every window, nothing planted."""
  run, req = watch.programs(TABLE, *SABOTEUR, OPTIONS), request()
  _, (state, info) = run.checked_start(sabotaged(-1), req)
  seen = []
  while np.asarray(state.live_B).any():
    seen.append(int(state.lengths_B[ROW]))
    _, (state, info, _) = run.checked_step(sabotaged(-1), req, state, info)
  return seen


def test_an_idle_saboteur_passes():
  debug.check_values(TABLE, *SABOTEUR, sabotaged(-1), request(), OPTIONS)


@pytest.mark.parametrize('bug', BUGS)
def test_a_planted_value_is_named(bug, starts):
  offset, message = BUGS[bug]
  window = next(w for w, n in enumerate(starts) if n >= 8)
  with jax.debug_nans(False), pytest.raises(debug.BadValue) as caught:
    weights = sabotaged(NAMES.index(bug))
    debug.check_values(TABLE, *SABOTEUR, weights, request(), OPTIONS)
  found = caught.value
  where = ROW, window, starts[window] + offset
  assert (found.row, found.window, found.slot) == where
  assert message in str(found)
  assert str(found).startswith(f'row {ROW} (request 41), window {window}, ')


def test_a_bad_index_of_the_prefill_is_named():
  """And one in a model: it looks up a token that it does not have."""

  def apply(params, tokens_BT, slots_BT, *args, **taps):
    T = tokens_BT.shape[1]
    high_BT = jnp.where((tokens_BT == 7) & (T > GAMMA + 1), V, tokens_BT)
    jnp.take_along_axis(jnp.zeros((len(high_BT), V)), high_BT, 1)
    return TABLE.apply(params, tokens_BT, slots_BT, *args, **taps)

  req = request()
  req.tokens_BL[:] = 1
  req.tokens_BL[ROW, 0] = 7
  with pytest.raises(debug.BadValue, match='index 13') as caught:
    debug.check_values(
      TABLE._replace(apply=apply),
      decode.PLAIN,
      reject.RULE,
      types.Weights(fakes.table(0, V)),
      req,
      OPTIONS,
    )
  assert (caught.value.row, caught.value.window) == (ROW, watch.PREFILL)


def test_a_draft_of_the_wrong_shape_is_refused():
  def propose(*args):
    draft, state, cache = INNER.propose(*args)
    return draft._replace(q_BKV=draft.q_BKV[..., :1]), state, cache

  drafter = INNER._replace(name='narrow', propose=propose)
  weights = types.Weights(fakes.table(0, V), fakes.table(1, V))
  with pytest.raises(
    ValueError, match=r"'narrow': q_BKV has shape \(3, 3, 1\)"
  ):
    debug.check_values(TABLE, drafter, reject.RULE, weights, request(), OPTIONS)


# --- how users reach them ----------------------------------------------------


def test_generate_takes_both_checks_and_gives_the_same_tokens(monkeypatch):
  target = specdec_jax.load('random:tiny')
  prompts = [[5, 6, 5, 6], [1]]
  kwargs = dict(draft='lookup', gamma=2, max_new_tokens=6)
  called = []
  for name in ('check_cache', 'check_values'):
    call = lambda *parts, name=name: called.append((name, *parts))
    monkeypatch.setattr(debug, name, call)
  plain = specdec_jax.generate(target, prompts, **kwargs)
  assert not called
  out = specdec_jax.generate(
    target, prompts, check_cache=True, check_values=True, **kwargs
  )
  assert [x.tokens for x in out] == [x.tokens for x in plain]
  for name, got in zip(('check_values', 'check_cache'), called, strict=True):
    assert got[0] == name and got[2].name == 'lookup'
    assert got[5].tokens_BL.shape[0] == 2


def test_generate_is_silent_on_a_draft_of_the_targets_own_layers():
  """The check itself this time; early exit shares the target's cache."""
  target = specdec_jax.load('random:tiny')
  options = dict(draft='early_exit', draft_options={'exit': 1}, gamma=2)
  (plain,) = specdec_jax.generate(target, [[5, 6, 5, 6]], max_new_tokens=5)
  (out,) = specdec_jax.generate(
    target,
    [[5, 6, 5, 6]],
    max_new_tokens=5,
    check_cache=True,
    **options,
  )
  assert out.tokens == plain.tokens
