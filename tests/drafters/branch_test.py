"""Trees of drafts through the production loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, sampling, types
from specdec_jax.certify import base
from specdec_jax.drafters import (
  adaptive,
  branch,
  eagle,
  hybrid,
  lm,
  lookup,
  medusa,
  ngram,
)
from specdec_jax.verify import block, coupled, reject, traversal
from tests import fakes
from tests.drafters import features_test

L, B = features_test.L, features_test.B
NEW, V = features_test.NEW, features_test.V
# The right path is 1, 3, 4: nothing of it lies where a chain has it.
PARENTS = np.array([-1, -1, 1, 1, 3])


def propose(weights, state, context, noise, target_cache):
  """A tree of the script's next three tokens, among wrong ones."""
  script_BL, right_BL = weights.draft
  at_B3 = context.lengths_B[:, None] + jnp.arange(3)[None]
  at_B3 = jnp.minimum(at_B3, L - 1)
  next_B3 = jnp.take_along_axis(script_BL, at_B3, 1)
  other_B3 = (next_B3 + 1) % V
  tokens_BK = jnp.stack(
    [other_B3[:, 0], next_B3[:, 0], other_B3[:, 1], *next_B3.T[1:]], 1
  )
  parents_BK = jnp.tile(jnp.asarray(PARENTS, jnp.int32), (B, 1))
  count_B = jnp.take_along_axis(right_BL, at_B3[:, :1], 1)[:, 0]
  return (
    types.Draft(tokens_BK, None, count_B, parents_BK=parents_BK),
    state,
    target_cache,
  )


TREE = features_test.LISTENER._replace(
  name='tree', gamma=len(PARENTS), propose=propose, tree=(2, 2, 1)
)


LOGPROBS = decode.Options(logprobs=2)
MODEL, TABLE = fakes.table_model(V), fakes.table(0, V)
PLAIN = decode.programs(MODEL, decode.PLAIN, coupled.RULE, LOGPROBS)
BRANCHED = decode.programs(MODEL, TREE, coupled.RULE, LOGPROBS)


def said(out):
  """What is known of every emitted token, by logits: three columns."""
  index = np.arange(out.tokens_BL.shape[1])
  emitted_BL = np.asarray(out.info.window_BL) >= 0
  assert index.size == emitted_BL.shape[1]
  info = out.info
  columns = info.logprob_BL, info.top_BLX[1], info.entropy_BL
  return [np.asarray(x)[emitted_BL] for x in columns]


@pytest.mark.parametrize(
  'temperature, wide', [(0.0, False), (1.0, False), (1.0, True)]
)
def test_a_path_is_committed_with_its_slots_and_features(temperature, wide):
  """A table's probabilities hash all slots, so one left behind changes texts.

  coupled: the text is plain decoding's at any temperature.
  """
  with jax.enable_x64(wide):
    _committed(temperature)


def _committed(temperature):
  rng = np.random.default_rng(1)
  prompts = fakes.prompts(B, vocab=V, longest=9, seed=3)
  request = fakes.request(
    prompts,
    [NEW - 1, 3, 9, NEW, NEW],
    vocab=V,
    length=L,
    stop_ids=[4],
    temperature=temperature,
  )
  right = PLAIN.generate(types.Weights(TABLE), request)
  # The script goes on past the limits, so that they cut drafts.
  longer = request._replace(limit_B=request.limit_B + 3)
  text = np.asarray(PLAIN.generate(types.Weights(TABLE), longer).tokens_BL)
  script = np.where(rng.random((B, L)) < 0.15, 0, text).astype(np.int32)
  count = np.where(rng.random((B, L)) < 0.3, 2, 5).astype(np.int32)
  weights = types.Weights(TABLE, (script, count))
  out, state = fakes.run_steps(BRANCHED, weights, request)
  assert fakes.texts(out) == fakes.texts(right)
  for one, two in zip(*map(said, (out, right)), strict=True):
    np.testing.assert_allclose(one, two, rtol=1e-4)
  features_test.check_heard(out, state)
  accepted_BK = np.asarray(out.info.accepted_BK)
  assert accepted_BK.sum(0)[2] > 2
  # Nodes 1 and 3 are the second of their levels, and 4 comes after them.
  places_BKK = np.asarray(out.info.places_BKK)
  np.testing.assert_array_equal(places_BKK[..., 1], accepted_BK)
  assert places_BKK.sum() == accepted_BK.sum()


@pytest.mark.parametrize('broken', ['refused', 'accepted'])
def test_only_nodes_of_the_path_can_end_a_row(broken):
  """By logits that are no numbers, after a token of the second level."""
  request = fakes.request([[1, 2, 3]] * B, 4, vocab=V, length=L)
  right = PLAIN.generate(types.Weights(TABLE), request)
  text = np.asarray(right.tokens_BL)
  # Of the first window the right second token, and the wrong one beside it.
  bad = (int(text[0, 4]) + (broken == 'refused')) % V
  assert broken == 'accepted' or bad not in text[0, 2:6]
  params = TABLE.copy()
  params[:, bad] = np.nan
  script = types.Weights(params, (text, np.full((B, L), 5, np.int32)))
  with jax.debug_nans(False):
    out, _ = fakes.run_steps(BRANCHED, script, request)
  assert np.asarray(out.info.broken_B).all() == (broken == 'accepted')
  if broken == 'refused':
    assert fakes.texts(out) == fakes.texts(right)


WORLD = base.tables(6)
MORE, SLOW = pytest.mark.more, pytest.mark.slow


def eagle_tree(levels: str, world=WORLD):
  config, params = eagle.random_layer(world)
  sizes = dict(gamma=3, **branch.settings_of(levels))
  return eagle.make(config, world.target, **sizes), params


def medusa_tree(levels: str, world=WORLD):
  sizes = branch.settings_of(levels)
  model, params = medusa.random_heads(world, len(sizes['levels']))
  return medusa.make(model, gamma=3, **sizes), params


def lm_tree(levels: str, world=WORLD):
  levels = branch.levels_of(levels)
  return lm.make(world.draft, gamma=3, levels=levels), world.weights.draft


def ngram_tree(levels: str, world=WORLD):
  _, counts = ngram.recipe(world, 3)
  model = ngram.model(world.target.vocab, ids=world.vocab)
  return ngram.make(model, gamma=3, levels=branch.levels_of(levels)), counts


def hybrid_tree(levels: str, world=WORLD):
  tree, params = lm_tree(levels, world)
  first = lookup.make(gamma=tree.gamma, min_match=1)
  return hybrid.make(first, tree), ((), params)


def adaptive_tree(levels: str, world=WORLD, make=lm_tree):
  tree, params = make(levels, world)
  count = np.arange(tree.gamma + 1.0)
  costs = adaptive.Costs(1 + 0.02 * count, 0.02 * count)
  first = lookup.make(gamma=tree.gamma, min_match=1)
  made = hybrid.make(adaptive.make(first), adaptive.make(tree))
  own = adaptive.Params((), costs), adaptive.Params(params, costs)
  return made, own


def adaptive_best(levels: str, world=WORLD):
  return adaptive_tree(levels, world, eagle_tree)


def run(drafter, params, rule, world=WORLD, new=30, **settings):
  request = base.make_request(
    world, base.ragged_prompts(6, world.vocab, 0, 9), new, gamma=12, **settings
  )
  out = base.run(world, base.Pair(rule, drafter, params), request)
  return out, base.plain(world, request)


@pytest.mark.parametrize(
  'make, rule, of_trees',
  [
    pytest.param(lm_tree, reject.RULE, reject.RULE, marks=MORE),
    pytest.param(ngram_tree, reject.RULE, reject.RULE, marks=MORE),
    pytest.param(eagle_tree, block.RULE, traversal.RULE, marks=SLOW),
  ],
)
def test_a_tree_of_one_child_a_node_draws_the_tokens_of_a_chain(
  make, rule, of_trees
):
  chain, params = make('')
  tree, _ = make('1,1,1')
  settings = dict(temperature=[1.0, 0.7, 1.3, 0.0, 1.0, 1.0], top_k=3)
  (one, _), (two, _) = (
    run(x, params, y, **settings) for x, y in ((chain, rule), (tree, of_trees))
  )
  assert base.texts(one) == base.texts(two)
  for name in ('hist_BN', 'proposed_BK', 'tried_BK', 'accepted_BK'):
    np.testing.assert_array_equal(
      getattr(one.info, name), getattr(two.info, name), name
    )


MIXED = [0.0, 0.7, 1.3, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
  'make, levels, rule, temperature',
  [
    (eagle_tree, '3,2', coupled.RULE, MIXED),
    pytest.param(medusa_tree, '3,2', coupled.RULE, MIXED, marks=MORE),
    (lm_tree, '3,2,2', coupled.RULE, MIXED),
    pytest.param(ngram_tree, '3,2', coupled.RULE, MIXED, marks=MORE),
    pytest.param(hybrid_tree, '3,2', coupled.RULE, MIXED, marks=MORE),
    pytest.param(adaptive_tree, '3,2', coupled.RULE, MIXED, marks=MORE),
    (eagle_tree, 'best:5', coupled.RULE, MIXED),
    pytest.param(medusa_tree, 'best:5', coupled.RULE, MIXED, marks=MORE),
    pytest.param(adaptive_best, 'best:5', coupled.RULE, MIXED, marks=MORE),
    pytest.param(eagle_tree, 'best:7', traversal.RULE, 0.0, marks=MORE),
    pytest.param(eagle_tree, '4,4,2,2', reject.RULE, 0.0, marks=MORE),
    pytest.param(medusa_tree, '4,4,2', reject.RULE, 0.0, marks=SLOW),
    pytest.param(eagle_tree, '4,4,2,2', coupled.RULE, 1.0, marks=SLOW),
  ],
)
def test_texts_of_a_tree_are_plain_decodings(
  make, levels, rule, temperature, x64
):
  world = base.tables(6)
  drafter, params = make(levels, world)
  out, plain = run(drafter, params, rule, world, temperature=temperature)
  assert base.texts(out) == plain
  assert np.asarray(out.info.accepted_BK).sum() > 9


def test_a_rule_that_takes_chains_is_not_given_a_tree():
  request = fakes.request([[1, 2]] * B, 3, vocab=V, length=L)
  programs = decode.programs(MODEL, TREE, block.RULE)
  script = np.zeros((B, L), np.int32)
  with pytest.raises(ValueError, match='rule block takes chains'):
    programs.generate(types.Weights(TABLE, (script, script)), request)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_draft_has_read_the_path_when_it_drafts_again(temperature):
  """The target drafts for itself: it accepts all, if nothing was left behind.

  The first child of every node is the token that the target draws; of a tree
  of two children a node it lies where no chain has it.
  """
  tree = lm.make(WORLD.target, gamma=5, levels=(2, 2, 1))
  out, plain = run(
    tree, WORLD.weights.target, coupled.RULE, temperature=temperature
  )
  assert base.texts(out) == plain
  tried, accepted = (np.asarray(x) for x in out.info[2:4])
  np.testing.assert_array_equal(tried.sum(0)[:3], accepted.sum(0)[:3])
  assert accepted.sum(0)[2] > 9


def test_a_window_of_lookup_beside_a_tree_is_one_path():
  parents_BK = jnp.array([[-1, -1, 0], [-1, -1, 1]])
  none_BK = jnp.zeros((2, 3), bool)
  tree = types.Draft(
    parents_BK, None, None, parents_BK=parents_BK, proposed_BK=none_BK
  )
  found = hybrid._joined(tree, jnp.array([True, False]))
  assert found['parents_BK'].tolist() == [[-1, 0, 1], [-1, -1, 1]]
  assert found['proposed_BK'].tolist() == [[True] * 3, [False] * 3]


def test_a_level_that_no_row_wants_is_not_read():
  """A row of gamma 3 in a tree of 3 + 2 nodes reads its last two tokens."""
  read = []

  def apply(params, tokens_BT, *rest, **more):
    jax.debug.callback(lambda: read.append(tokens_BT.shape[1]))
    return WORLD.draft.apply(params, tokens_BT, *rest, **more)

  draft = WORLD.draft._replace(apply=apply)
  tree = lm.make(draft, gamma=5, levels=(3, 2), chunk=8)
  request = base.make_request(WORLD, [[1, 2, 3]], 6, gamma=5)
  for most, wanted in ((3, {2}), (4, {2, 3})):
    read.clear()
    asked = request._replace(gamma_B=jnp.full(1, most))
    base.run(WORLD, base.Pair(reject.RULE, tree, WORLD.weights.draft), asked)
    jax.effects_barrier()
    assert {*read} - {base.OPTIONS.chunk} == wanted


def noisy(rows: int, temperature, at=5, gamma=9, coupled=False):
  """(types.Sampling, types.Noise) of so many requests."""
  settings, keys = sampling.settings(rows, temperature), jnp.arange(rows)
  own = keys.astype(jnp.uint32), keys.astype(jnp.uint32), jnp.full(rows, at)
  how = dict(gamma=gamma, coupled=coupled)
  return settings, sampling.noise(*own, settings, **how)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_the_worthiest_nodes_of_a_level_come_first(temperature):
  """Of six nodes after three, with two alike: elder siblings still do."""
  settings, noise = noisy(9, temperature)
  logits_B1V = jax.random.normal(jax.random.key(0), (9, 1, 7))
  logits_BMV = jax.random.normal(jax.random.key(1), (9, 3, 7))
  logits_BMV = logits_BMV.at[:, :, 3].set(logits_BMV[:, :, 2])
  above = branch.root(9)
  at = dict(first=-1, depth=0, count=3)
  above = branch.grow(noise, settings, above, logits_B1V, **at)
  level = branch.grow(
    noise, settings, above, logits_BMV, first=0, depth=1, count=6
  )
  likely_BMV = np.sort(jax.nn.softmax(logits_BMV))[..., ::-1]
  for row in range(9):
    family, worth = [0, 0, 0], []
    for x, of in enumerate(level.of_BX[row].tolist()):
      worth.append(above.joint_BX[row, of] * likely_BMV[row, of, family[of]])
      family[of] += 1
      # A node's own worth is that of the token that was drawn.
      own = jax.nn.softmax(logits_BMV[row, of])[level.tokens_BX[row, x]]
      joint = float(above.joint_BX[row, of] * own)
      assert float(level.joint_BX[row, x]) == pytest.approx(joint, rel=1e-5)
    assert worth == sorted(worth, reverse=True)
  if not temperature:
    assert (np.diff(level.joint_BX) <= 0).all()


def found_best(count: int, gamma_B, levels=()):
  """(types.Draft, levels read) of a tree whose draft is a table of bigrams."""
  rng, read, rows = np.random.default_rng(0), [], len(gamma_B)
  table_VV = jnp.asarray(3 * rng.normal(size=(7, 7)), jnp.float32)
  settings, noise = noisy(rows, np.linspace(0, 1, rows))
  tokens_B, one_B = jnp.arange(rows) % 7, jnp.ones(rows, jnp.int32)
  text = tokens_B[:, None], one_B, one_B > 0, settings, gamma_B
  one_hot = lambda x: jax.nn.one_hot(x, 7)

  def level(cache, tokens_BX, parents_BXD, start_B, tree, begin):
    jax.debug.callback(lambda: read.append(begin))
    return one_hot(tokens_BX), cache

  draft, _ = branch.draft(
    types.Context(*text),
    noise,
    (),
    lambda cache: (one_hot(tokens_B)[:, None], cache),
    level,
    lambda x_BXD, depth: x_BXD @ table_VV,
    gamma=count,
    levels=levels or branch.levels_of(f'best:{count}'),
    best=count,
  )
  jax.effects_barrier()
  return draft, sorted({*read}), np.asarray(jax.nn.softmax(table_VV, -1))


def paths(draft, row: int) -> list[tuple[int, ...]]:
  """The tokens of the path to each proposed node."""
  out = []
  parents = draft.parents_BK[row].tolist()
  for i, parent in enumerate(parents):
    before = out[parent] if parent >= 0 else ()
    out.append((*before, int(draft.tokens_BK[row, i])))
  return [x for x, ok in zip(out, draft.proposed_BK[row], strict=True) if ok]


def test_the_likeliest_nodes_are_proposed_whatever_the_temperature():
  """All paths of three tokens, sorted by the product of the draft's p.

  A level is read only if a node below it may be among them: one of a row that
  wants one node never is.
  """
  full_B = jnp.full(6, 8)
  draft, read, q_VV = found_best(8, full_B, levels=(7, 49, 343))
  assert draft.q_BKV is None and read == [1, 8]
  for row in range(6):
    worth = {}
    for depth in (1, 2, 3):
      for path in itertools.product(range(7), repeat=depth):
        steps = zip((row, *path), path, strict=False)
        worth[path] = np.prod([q_VV[a, b] for a, b in steps])
    wanted = sorted(worth, key=worth.__getitem__, reverse=True)[:8]
    assert paths(draft, row) == wanted
    found = [worth[x] for x in wanted]
    np.testing.assert_allclose(draft.marks['worth_BK'][row], found, rtol=1e-5)
  _, read, _ = found_best(8, jnp.ones(6, jnp.int32), levels=(7, 49, 343))
  assert read == []
  # Fewer are the first of more.
  few, _, _ = found_best(3, jnp.full(6, 3), levels=(7, 49, 343))
  for row in range(6):
    assert paths(few, row) == paths(draft, row)[:3]


def test_drawn_nodes_are_proposed_however_unlikely():
  draft, read, q_VV = found_best(0, jnp.full(6, 21), levels=(7, 7, 7))
  assert draft.proposed_BK.all() and read == [1, 8]
  texts = [(row, *path) for row in range(6) for path in paths(draft, row)]
  assert min(np.prod(q_VV[x[:-1], x[1:]]) for x in texts) < 1e-4


def test_children_that_no_draw_is_left_for_are_not_proposed():
  """Of a greedy row all are: they are its likeliest."""
  _, noise = noisy(8, 1.0)
  settings = sampling.settings(8, [1.0, 0.0] * 4, top_k=2)
  logits_B1V = jax.random.normal(jax.random.key(0), (8, 1, 7))
  at = dict(first=-1, depth=0, count=3)
  level = branch.grow(noise, settings, branch.root(8), logits_B1V, **at)
  assert level.ok_BX.tolist() == [[True, True, False], [True] * 3] * 4


def test_levels_that_the_likeliest_nodes_are_looked_for_in():
  assert branch.levels_of('best:1') == (2,)
  assert branch.levels_of('best:4') == (3, 2, 2, 1)
  assert branch.levels_of('best:11') == (6, 4, 3, 3, 2)
  assert branch.size_of('best:11') == 11 and branch.size_of('3,2') == 5


def test_coupled_siblings_are_the_best_of_their_positions_race():
  """The first child is the token that plain decoding would draw from q."""
  _, noise = noisy(4, 1.0, gamma=6, coupled=True)
  rng = np.random.default_rng(0)
  q_BMV = jnp.asarray(rng.dirichlet(np.ones(9), (4, 2)), jnp.float32)
  nodes_BM = jnp.tile(jnp.array([2, 3]), (4, 1))
  tokens_BMX, ok_BMX = noise.children(nodes_BM, 1, q_BMV, 3)
  at_B = jnp.full(4, 1)
  for m in range(2):
    drawn_B = noise.next(at_B, q_BMV[:, m])
    np.testing.assert_array_equal(tokens_BMX[:, m, 0], drawn_B)
  for family_X in np.asarray(tokens_BMX).reshape(8, 3):
    assert len(set(family_X)) == 3
  assert ok_BMX.all()
  # Two nodes of one depth run the same race: what is best differs by q alone.
  same_BMV = jnp.stack([q_BMV[:, 0]] * 2, 1)
  one, two = jnp.moveaxis(noise.children(nodes_BM, 1, same_BMV, 3)[0], 1, 0)
  np.testing.assert_array_equal(one, two)
