"""check_cache: silent on what is right, exact about what is planted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import debug, decode, program, types
from specdec_jax.certify import base
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import lookup
from specdec_jax.kernels import library
from specdec_jax.models import convert, lm
from specdec_jax.verify import coupled, reject
from tests import fakes

V, L, NEW, GAMMA, B = 13, 32, 12, 3, 3
TABLE = fakes.table_model(V)
INNER = lm_drafter.make(TABLE, gamma=GAMMA)
LOOKUP = lookup.make(gamma=GAMMA)
ROW = 1  # where things are planted
# One body and no second: checks compile faster.
OPTIONS = decode.Options(widths=())


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


CASES = {
  # name: (drafter of a model, rule)
  'table': (lambda model: fakes.ragged(INNER), reject.RULE),
  'layers': (lambda model: lm_drafter.make(model, gamma=GAMMA), coupled.RULE),
  'scan': (lambda model: lookup.make(gamma=GAMMA, min_match=1), reject.RULE),
  'packed': (lambda model: lm_drafter.make(model, gamma=GAMMA), reject.RULE),
}


@pytest.mark.more
@pytest.mark.parametrize(
  'kind',
  ['table', pytest.param('layers', marks=pytest.mark.slow), 'scan', 'packed'],
)
def test_a_lost_slot_is_named_and_nothing_else(kind):
  with jax.enable_x64(kind == 'layers'):
    if kind == 'table':
      model, params = TABLE, (fakes.table(0, V), fakes.table(1, V))
    else:
      dtype = 'float64' if kind == 'layers' else 'float32'
      config = fakes.tiny(dtype=dtype).running(scan_layers=kind == 'scan')
      params = lm.init(config, 0), lm.init(config, 1)
      if kind == 'packed':
        if why := library.load(program.cache_folder()):
          pytest.skip(why)
        packed = [convert.pack(*convert.fuse(config, x)) for x in params]
        (config, *_), params = zip(*packed, strict=True)
      model = lm.make(config)
    make, rule = CASES[kind]
    drafter = make(model)
    loop = decode.Loop(forgetful(model), drafter, rule, OPTIONS)
    req, slot = request(), 9
    debug.check_cache(loop, weights_of(*params), req)
    weights = weights_of(*params, slot)
    with pytest.raises(debug.Finding) as caught:
      debug.check_cache(loop, weights, req)
    programs = decode.programs(*loop[:4])
    out, state = fakes.run_steps(programs, weights, req)
  # A slot counts once the token after it is there.
  window = int(out.info.window_BL[ROW, slot + 1])
  found = caught.value
  assert (found.row, found.window, found.slot) == (ROW, window, slot)
  token = int(state.tokens_BL[ROW, slot])
  assert f'(request 41), window {window}, slot {slot}: ' in str(found)
  assert f'stale for token {token}' in str(found)


@pytest.mark.more
def test_a_drafter_that_reads_too_little_is_named():
  """The cache hole: a fresh state has read all, a window reads one token."""
  hole = TABLE._replace(apply=reads_one)
  drafter = lm_drafter.make(hole, gamma=GAMMA)

  def init(weights, context, features):
    longer = context._replace(lengths_B=context.lengths_B + 1)
    return drafter.init(weights, longer, features)

  params = fakes.table(0, V)  # the same twice: everything is accepted
  weights = types.Weights(params, params)
  loop = decode.Loop(TABLE, drafter._replace(init=init), reject.RULE, OPTIONS)
  req = request(temperature=0.8)
  with pytest.raises(debug.Finding) as caught:
    debug.check_cache(loop, weights, req)
  found = caught.value
  n = int(req.lengths_B[ROW]) + GAMMA + 1
  assert (found.row, found.window, found.slot) == (ROW, 1, n)
  assert f'first differs in slot {n - 2}' in str(found)
  assert 'proposals=False' in str(found)
  debug.check_cache(loop, weights, req, proposals=False)


def reads_one(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, **_):
  """TABLE.apply that loses the first of two tokens in ROW."""
  if tokens_BT.shape[1] == 2:
    rows_B1 = jnp.arange(B)[:, None]
    lost_BT = (rows_B1 == ROW) & (jnp.arange(2)[None] == 0)
    slots_BT = jnp.where(lost_BT, L, slots_BT)
  return TABLE.apply(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache)


@pytest.mark.more
def test_one_bit_of_what_an_encoder_left_is_named():
  """In the cache of the target or of the draft, when its window is read."""
  world = base.transformers(V, encoder=True, depth=1)
  prompts = fakes.prompts(B, vocab=V, seed=5)
  req = base.make_request(
    world, prompts, NEW, gamma=GAMMA, length=L, temperature=0.8
  )

  def writing(model, width):
    def apply(params, tokens_BT, *args, **more):
      hidden, taps, cache = model.apply(params, tokens_BT, *args, **more)
      if tokens_BT.shape[1] == width:
        k_BHIC = cache.store[-1].k_BGSC
        bit = jnp.nextafter(k_BHIC[ROW, 1, 0, 2], jnp.inf)
        last = cache.store[-1]._replace(k_BGSC=k_BHIC.at[ROW, 1, 0, 2].set(bit))
        cache = cache._replace(store=(*cache.store[:-1], last))
      return hidden, taps, cache

    return model._replace(apply=apply)

  for target, draft in (
    (world.target, world.draft),
    (writing(world.target, GAMMA + 1), world.draft),
    (world.target, writing(world.draft, 2)),
  ):
    drafter = lm_drafter.make(draft, gamma=GAMMA)
    args = (
      decode.Loop(target, drafter, reject.RULE, OPTIONS),
      world.weights,
      req,
    )
    if (target, draft) == (world.target, world.draft):
      debug.check_cache(*args)
      continue
    with pytest.raises(debug.Finding, match='what the encoder') as caught:
      debug.check_cache(*args)
    found = caught.value
    assert (found.row, found.window, found.slot) == (ROW, 0, 0)


def refused(message, params, model=TABLE, drafter=LOOKUP):
  loop = decode.Loop(model, drafter, reject.RULE, OPTIONS)
  weights = types.Weights(params, fakes.table(1, V))
  with pytest.raises(ValueError, match=message), jax.debug_nans(False):
    debug.check_cache(loop, weights, request())


def test_a_draft_of_the_wrong_shape_is_refused():
  def propose(*args):
    draft, state, cache = INNER.propose(*args)
    return draft._replace(q_BKV=draft.q_BKV[..., :1]), state, cache

  narrow = INNER._replace(name='narrow', propose=propose)
  words = r"'narrow': q_BKV has shape \(3, 3, 1\)"
  refused(words, fakes.table(0, V), drafter=narrow)


def test_a_cache_without_slots_is_refused():
  """Nothing of it would be compared."""
  bigram = TABLE._replace(
    init_cache=lambda rows, slots: jnp.zeros((rows, 1)),
    apply=lambda params, tokens_BT, *args, **_: (tokens_BT, (), args[-1]),
    head=lambda params, hidden: params[hidden],
  )
  refused('no leaf of the cache grows', jnp.zeros((V, V)), bigram)


def test_nan_ends_a_check_as_it_ends_a_text():
  nan = np.full_like(fakes.table(0, V), np.nan)
  refused('request 40: .* not finite after 0 new tokens', nan)


@pytest.mark.slow
def test_the_api_checks_what_it_would_generate():
  """With the target's own first layers, which share its cache."""
  target = specdec_jax.load('random:tiny')
  options = dict(draft='early_exit', draft_options={'exit': 1}, gamma=2)
  specdec_jax.check_cache(target, [[5, 6, 5, 6]], max_new_tokens=5, **options)
