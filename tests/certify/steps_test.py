"""Long rows and long windows: what is wrong beyond the third draft is named."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import sampling, types
from specdec_jax.certify import (
  base,
  counted,
  enumerate_window,
  enumerated,
  faults,
  load,
  problems,
  steps,
  table_model,
)
from specdec_jax.drafters import lm
from specdec_jax.verify import reject

# --- drafters that are wrong now and then -------------------------------------


def flat(draft, wrong_BKV):
  """The draft with a flat q where it is to be wrong."""
  q_BKV = jnp.where(wrong_BKV, 1 / draft.q_BKV.shape[-1], draft.q_BKV)
  return draft._replace(q_BKV=q_BKV)


def unnormalised(draft, context):
  return draft._replace(q_BKV=draft.q_BKV * 1.001)


def last_of_eight(draft, context):
  """A buffer of seven rows."""
  return draft._replace(q_BKV=draft.q_BKV.at[:, 7].set(draft.q_BKV[:, 6]))


def cold(draft, context):
  """Settings of some rows are not those of the draft."""
  colder_BKV = draft.q_BKV**2 / jnp.sum(draft.q_BKV**2, -1, keepdims=True)
  some_B11 = (context.sampling.top_k_B > 3)[:, None, None]
  return draft._replace(q_BKV=jnp.where(some_B11, colder_BKV, draft.q_BKV))


def among_greedy(draft, context):
  """Rows that are sampled beside a greedy one."""
  greedy_B = sampling.is_greedy(context.sampling)
  return flat(draft, (jnp.any(greedy_B) & ~greedy_B)[:, None, None])


def beyond_sixty(draft, context):
  return flat(draft, (context.lengths_B > 60)[:, None, None])


def hot(draft, context):
  return flat(draft, (context.sampling.temperature_B > 1.35)[:, None, None])


def nucleus(draft, context):
  return flat(draft, (context.sampling.top_p_B < 0.6)[:, None, None])


def where_capped(change):
  """The change in rows that may draft less than gamma."""

  @functools.wraps(change)
  def change_some(draft, context):
    capped_B = context.gamma_B < draft.tokens_BK.shape[1]
    either = lambda one, two: jnp.where(
      capped_B.reshape(-1, *[1] * (one.ndim - 1)), one, two
    )
    return jax.tree.map(either, change(draft, context), draft)

  change_some.__name__ = f'capped_{change.__name__}'
  return change_some


def some_certain(draft, context):
  """Lawful: rows of odd length report what they drew as certain."""
  odd_B11 = (context.lengths_B % 2 == 1)[:, None, None]
  certain_BKV = jax.nn.one_hot(draft.tokens_BK, draft.q_BKV.shape[-1])
  return draft._replace(q_BKV=jnp.where(odd_B11, certain_BKV, draft.q_BKV))


def right(draft, context):
  return draft


CHANGES = {
  change.__name__: change
  for change in (
    right,
    faults.stale_q,
    faults.flat_q,
    faults.cut,
    unnormalised,
    last_of_eight,
    cold,
    among_greedy,
    beyond_sixty,
    hot,
    nucleus,
    where_capped(faults.stale_q),
    where_capped(faults.cut),
    some_certain,
  )
}


NAMES = [*CHANGES]


@functools.cache
def switching(model, *, gamma):
  """`lm` with one of NAMES, whose index is weights.draft[1]: one program."""
  right = lm.make(model, gamma=gamma)
  inner = lambda weights: weights._replace(draft=weights.draft[0])

  def init(weights, context, features):
    return right.init(inner(weights), context, features)

  def propose(weights, state, context, noise, target_cache):
    draft, *rest = right.propose(
      inner(weights), state, context, noise, target_cache
    )
    wrong = [functools.partial(f, draft, context) for f in CHANGES.values()]
    return jax.lax.switch(weights.draft[1], wrong), *rest

  return right._replace(name='mine', init=init, propose=propose)


def recipe(name):
  def make(world, gamma):
    drafter = switching(world.draft, gamma=gamma)
    return drafter, (world.weights.draft, np.int32(NAMES.index(name)))

  return make


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
  monkeypatch.setattr(steps, 'watched', watched)


watched = functools.cache(steps.watched)


# --- every q and every p of long rows -----------------------------------------


def follow(name):
  subject = base.Subject([reject.RULE], {'x': recipe(name)})
  return steps.long_rows(subject, len(steps.LENGTHS))


@pytest.mark.more
def test_a_right_drafter_reports_what_it_drew_from(monkeypatch):
  met, right = np.zeros((2, 9), int), steps.check_target

  def check_target(tables, state, window):
    greedy_B = np.array([x['temperature'] == 0 for x in steps.SETTINGS])
    met_B = window.draft.count_B, state.live_B.astype(int)
    np.add.at(met, (greedy_B.astype(int), met_B[0]), met_B[1])
    return right(tables, state, window)

  monkeypatch.setattr(steps, 'check_target', check_target)
  figure = follow('right')
  found = re.fullmatch('0 of (.*) q and of (.*) p differ', figure.reached)
  assert found
  q, p = (int(x.replace(',', '')) for x in found.groups())
  # The drafts of each window and the token after them. Half of the windows are
  # whole, the others of every length; what is certain has no q.
  assert p == (met @ np.arange(1, 10)).sum()
  assert 0.6 < q / (met[0] @ np.arange(9)) < 0.9
  assert met[0].min() > 12 and 0.4 < met[0, 8] / met[0].sum() < 0.6
  assert 'rows to 157 tokens' in figure.size


def test_what_is_reported_as_certain_is_lawful():
  q = lambda name: int(follow(name).reached.split()[2].replace(',', ''))
  assert 0.3 < q('some_certain') / q('right') < 0.7


@pytest.mark.parametrize(
  'name, where',
  [
    ('stale_q', 'draft 0'),
    ('flat_q', 'draft 3'),
    ('unnormalised', 'draft 0'),
    ('last_of_eight', 'draft 7'),
    ('cold', 'draft 0'),
    ('among_greedy', 'draft 0'),
    ('beyond_sixty', 'draft 0'),
    ('hot', 'draft 0'),
    ('nucleus', 'draft 0'),
    ('capped_stale_q', 'draft 0'),
  ],
)
def test_a_q_that_was_not_drawn_from_is_named(name, where):
  wrong = rf'reject with mine, gamma 8: after \[.*\] mine drew {where} from'
  with pytest.raises(base.Broken, match=wrong):
    follow(name)


def test_a_q_of_nan_is_named():
  q_BV, one = np.full((1, 3), np.nan), np.ones(1, int)
  text_BL = np.array([[1, 2, 0]])
  state = steps.decode.State(text_BL, one + 1, one > 0, (), ())
  draft = types.Draft(one[None], q_BV[:, None], one)
  window = steps.Window(draft, None, draws={-1: (q_BV, one[:, None])})
  with pytest.raises(base.Broken, match=r'after \[1, 2\] mine .* q \[nan, nan'):
    steps._check_reported('mine', state, window)


def reported(q_BKV, tokens_BK, draws, **more):
  """What _check_reported makes of windows, of which all are live or live_B."""
  tokens_BK, q_BKV = np.array(tokens_BK), np.array(q_BKV, float)
  (B, K), live_B = tokens_BK.shape, more.pop('live_B', [True] * len(q_BKV))
  one_B = np.ones(B, int)
  state = steps.decode.State(one_B[:, None], one_B, np.array(live_B), (), ())
  draft = types.Draft(tokens_BK, q_BKV, K * one_B, **more)
  draws = {i: (np.array(q, float), np.array(x)) for i, (q, x) in draws.items()}
  window = steps.Window(draft, None, draws=draws)
  return steps._check_reported('mine', state, window)


HALF, FIFTH = [0.5, 0.5], [0.2, 0.8]


def test_drafts_made_of_other_draws_are_not_compared():
  """Where any row shows it: one that has ended, or whose draw is impossible."""
  q_BKV, draws = [[FIFTH], [FIFTH]], [HALF, HALF]
  other = lambda **more: reported(
    q_BKV, [[0], [1]], {-1: (draws, [[0], [0]])}, **more
  )
  assert other() == other(live_B=[True, False]) == 0
  draws = [HALF, [0.0, 1.0]]
  assert other() == 0
  # Draws of another number of ids are something else.
  coin = [[0.2, 0.3, 0.5]]
  assert reported([[FIFTH]], [[1]], {-1: (coin, [[1]])}) == 0


def test_p_is_compared_at_every_proposed_offset_of_a_live_row():
  world = base.tables(steps.VOCAB)
  table = table_model.warped(world.weights.target, temperature=1.0)
  text, drafts_K = [1, 2, 0, 3], [4, 1, 2]
  row_V = lambda k: table_model.row_of(table, text + drafts_K[:k])
  p_BNV = np.stack([np.stack([row_V(k) for k in range(4)])] * 2)
  live_B, tokens_BL = np.array([True, False]), np.array([text + [0] * 4] * 2)
  state = steps.decode.State(tokens_BL, np.array([4, 4]), live_B, (), ())
  draft = types.Draft(np.array([drafts_K] * 2), None, np.array([2, 3]))
  compared = lambda p_BNV: steps.check_target(
    [table] * 2, state, steps.Window(draft, p_BNV)
  )
  assert compared(p_BNV) == 3  # two drafts and the token after them
  for b, k, seen in ((0, 0, True), (0, 2, True), (0, 3, False), (1, 0, False)):
    other_BNV = p_BNV.copy()
    other_BNV[b, k, 0] += 1e-9
    if not seen:
      assert compared(other_BNV) == 3
      continue
    case = (
      rf'after \[{", ".join(map(str, text + drafts_K[:k]))}\], of which {k}'
    )
    with pytest.raises(base.Broken, match=case):
      compared(other_BNV)


@pytest.mark.more
def test_rows_of_an_early_exit_are_capped_apart():
  """Its layers run over what the row that may draft most has: p shows it."""
  drafters = {'early_exit': load.RECIPES['early_exit']}
  figure = steps.long_rows(base.Subject([reject.RULE], drafters), 12)
  assert 'early_exit 8' in figure.size


# --- one window of gamma 4 to 8 -----------------------------------------------


def long_window(name, gamma=4):
  world = base.tables(2)
  pair = base.Pair(reject.RULE, *recipe(name)(world, gamma))
  return enumerated.long_window_error(world, pair, dict(temperature=1.0))


@pytest.mark.more
def test_a_long_window_is_enumerated_after_long_rows():
  assert long_window('right') < 1e-6
  # A length that looks at the draft it cuts: q is what was drawn from.
  with pytest.raises(
    base.Broken, match=r'after \[.*\] (emitted|tokens) .* inst'
  ):
    long_window('cut')
  with pytest.raises(base.Broken, match='mine drew draft 3 from'):
    long_window('flat_q')


def uncapped(monkeypatch):
  """Requests and committed tokens cap no window."""
  right = base.make_request
  monkeypatch.setattr(
    base, 'make_request', lambda *x, drafts=0, **more: right(*x, **more)
  )
  monkeypatch.setattr(base, 'ragged', lambda drafter: drafter)


def short_windows(name):
  world = base.tables(3)
  pair = base.Pair(reject.RULE, *recipe(name)(world, 2))
  pair = pair._replace(drafter=base.ragged(pair.drafter))
  return enumerated.windows_error(world, pair, dict(temperature=1.0))


@pytest.mark.more
@pytest.mark.parametrize('windows', [long_window, short_windows])
def test_what_is_wrong_of_capped_windows_alone_is_named(windows, monkeypatch):
  """A length that looks at its drafts: no q shows it."""
  assert follow('capped_cut')
  with pytest.raises(base.Broken, match='after .* (emitted|tokens) .* inst'):
    windows('capped_cut')
  uncapped(monkeypatch)
  assert windows('capped_cut') < 1e-6


@pytest.mark.more
def test_what_is_wrong_of_capped_q_alone_is_named(monkeypatch):
  """In long rows: with caps test_a_q_that_was_not_drawn_from names it."""
  monkeypatch.setattr(steps, '_caps', lambda rng, rows, gamma: [gamma] * rows)
  assert follow('capped_stale_q')


def test_a_path_is_what_was_proposed():
  """Whatever outcome of the draws it came from."""
  p, q = problems.of_all_families(0, each=1, gamma=2, vocab=3)
  target = problems.target_distribution(p)
  count_X = np.resize([2, 1, 2, 0], len(p))
  batch = problems.windows(p, q, 'distinct', count_X=count_X)
  order_XR = np.random.default_rng(0).permuted(
    np.arange(len(batch.chance_B)).reshape(len(p), -1), axis=1
  )
  other = jax.tree.map(lambda x: x[order_XR.ravel()], batch)
  for each in (batch, other):
    found = enumerate_window.ends(reject.RULE, each)
    got = enumerate_window.distribution(found, each, target)
    np.testing.assert_allclose(got, target, atol=1e-6)


def test_every_pair_has_one_long_window():
  pairs = [(reject.RULE, name) for name in [*'abcde', enumerated.SCRIPTED]]
  cells = [x[1:4] for x in enumerated._cells(pairs, 3) if x[5]]
  names, _, gammas = zip(*cells, strict=True)
  assert names == tuple('abcde') and {*gammas} == set(range(4, 9))


def test_every_pair_is_counted_at_a_long_window_too():
  drafters = dict.fromkeys('abcde', load.RECIPES['lm'])
  subject = base.Subject([reject.RULE], drafters)
  for full in (False, True):
    cells = [x for x in counted._cells(subject, full=full) if x[4]]
    met = {x[2] for x in cells}
    assert met == set(range(4, 9)) and len(cells) == 5 * (5 if full else 1)
  chunk = base.OPTIONS.chunk
  edges = [(len(x) - 1) // chunk for x in counted.LONG_PROMPTS]
  assert edges == [1, 2]


def test_the_joint_distribution_is_a_product_of_rows():
  p_RVV = table_model.warped(table_model.table(0, 3), temperature=0.9)
  prompt = [1, 2, 0, 0, 1]
  joint = table_model.joint_distribution(p_RVV, prompt, 4)
  assert joint.shape == (3,) * 4
  for text in ([0, 0, 0, 0], [2, 1, 0, 2], [1, 2, 2, 0]):
    one = 1.0
    for i, token in enumerate(text):
      one *= table_model.row_of(p_RVV, prompt + text[:i])[token]
    assert joint[tuple(text)] == pytest.approx(one, rel=1e-12)
