"""docs/your_own_model.md runs as printed, and what it warns of is found."""

import pathlib
import re
import sys
import types as python_types

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import debug, decode, requests, types
from specdec_jax.certify import base, certificate, load
from specdec_jax.drafters import lookup
from specdec_jax.verify import reject

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / 'docs/your_own_model.md').read_text()
DECODER, ADAPTER, CHECKS = re.findall(r'```python\n(.*?)```', TEXT, re.S)
OVERWRITE = "memory.at[layer, {}, slots, row].set({}, mode='drop')"


def names(*blocks):
  out = {}
  code = compile('\n'.join(blocks), 'docs/your_own_model.md', 'exec')
  with jax.debug_nans(False):
    exec(code, out)
  return out


@pytest.fixture(autouse=True)
def as_a_user_has_it():
  """The tests' own switch is strict."""
  with jax.numpy_rank_promotion('allow'):
    yield


@pytest.fixture
def mine():
  """A module `mine` of the given code; it is gone after the test."""

  def module(*blocks):
    sys.modules['mine'] = python_types.ModuleType('mine')
    vars(sys.modules['mine']).update(names(*blocks))

  yield module
  sys.modules.pop('mine', None)


def edited(block, *changes):
  for old, new in changes:
    assert old in block, old
    block = block.replace(old, new)
  return block


def wrongly_written(how):
  """The decoder with another way to write its memory."""
  changes = [
    (OVERWRITE.format(i, name), how.format(i=i, name=name))
    for i, name in enumerate(('key', 'value'))
  ]
  return edited(DECODER, *changes)


@pytest.mark.more
def test_the_page_runs_as_printed(mine, capsys):
  mine(DECODER, ADAPTER)
  names(CHECKS)
  printed = capsys.readouterr().out
  assert printed.count('texts equal') == 3 and 'lm: 100% accepted' in printed


# --- what the page warns of ---------------------------------------------------

ADDS = 'memory.at[layer, {i}, slots, row].add({name})'
CLAMPS = (
  'memory.at[layer, {i}, jnp.minimum(slots, memory.shape[2] - 1), row]'
  '.set({name})'
)
ONE_INDEX = (
  'memory.at[layer, {i}].set(jax.lax.dynamic_update_slice_in_dim('
  'memory[layer, {i}], jnp.swapaxes({name}, 0, 1), slots[0, 0], 0))'
)
# A window begins at 1 again, whatever came before it.
OWN_PLACES = ('positions_BT + 1', 'positions_BT - positions_BT[:, :1] + 1')
# The slot after a token holds a draft that was rejected, or the next one.
OWN_MASK = (
  'jnp.where(mask_BTS, 0.0, -1e30)',
  'jnp.where(jnp.arange(mask_BTS.shape[2])[None, None]'
  ' < jnp.sum(mask_BTS, -1, keepdims=True) + 1, 0.0, -1e30)',
)


def stale(*blocks):
  """What debug.check_cache says of a decoder while lookup drafts for it."""
  found = names(*blocks)
  model, params = found['make'](vocab=13, dtype='float32', seed=1)
  # One row has an end to its prompt that the other has not.
  prompts = [[1, 2, 1, 2], [4, 5, 6, 7, 8, 4]]
  request = requests.make(requests.items(prompts, new=12), gamma=3)
  weights = types.Weights(params)
  options = decode.Options(chunk=8, widths=())
  with pytest.raises(debug.Finding) as error, jax.debug_nans(False):
    loop = decode.Loop(model, lookup.make(gamma=3), reject.RULE, options)
    debug.check_cache(loop, weights, request)
  return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
  'decoder, adapter',
  [
    (wrongly_written(ADDS), ADAPTER),
    (wrongly_written(ONE_INDEX), ADAPTER),
    (DECODER, edited(ADAPTER, OWN_PLACES)),
    (DECODER, edited(ADAPTER, OWN_MASK)),
  ],
)
def test_check_cache_finds(decoder, adapter):
  said = stale(decoder, adapter)
  assert "the target's cache is stale" in said
  if '.add(' in decoder:  # the page shows this one
    assert said.split('; it holds')[0] in ' '.join(TEXT.split())


# The page itself runs lm and lookup.
def test_ngram_fits_a_padded_vocabulary(mine):
  mine(DECODER, ADAPTER)
  subject = load.subject('', '', 'mine:make', seed=0)
  world = subject.transformers(5)
  drafter, draft = load.RECIPES['ngram'](world, 2)
  request = base.make_request(world, [[1, 2]], 4, length=8, gamma=2)
  out = jax.eval_shape(
    decode.programs(world.target, drafter, reject.RULE, base.OPTIONS).generate,
    types.Weights(world.weights.target, draft),
    request,
  )
  assert out.tokens_BL.shape == (1, 8)


# --- certify --model ----------------------------------------------------------


def test_the_model_takes_the_place_of_ours(mine):
  mine(DECODER, ADAPTER)
  subject = load.subject('', '', 'mine:make', seed=0)
  assert subject.supplied == ('model',)
  assert {'lm', 'lookup'} <= set(subject.drafters)
  world = subject.transformers(5, width=8)
  assert world.vocab == 5 and world.target.vocab == 8
  assert world.target.init_cache(3, 9).shape == (3, 2, 2, 9, 2, 8)
  # Programs are compiled once for a model.
  assert world.target is subject.transformers(5).target
  with jax.enable_x64(True):
    leaves = jax.tree.leaves(subject.transformers(5).weights)
  assert {x.dtype for x in leaves} == {jnp.dtype('float64')}
  chosen = [p.name for p in certificate.choose([], subject.supplied)]
  assert chosen == [
    'null-check',
    'joint-distribution-transformer',
    'greedy-identity',
    'audited-identity',
    'invariance',
    'pool',
  ]


def test_a_make_that_ignores_dtype_is_no_model_of_it(mine):
  """What runs in float32 would be certified in bfloat16."""
  ignored = 'dtype=jnp.dtype(dtype)', 'dtype=jnp.float32'
  mine(edited(DECODER + ADAPTER, ignored))
  subject = load.subject('', '', 'mine:make', seed=0)
  assert subject.transformers(5, dtype='float32')
  wrong = 'model=mine:make: dtype=bfloat16 made weights of float32'
  with pytest.raises(base.Broken, match=wrong):
    subject.transformers(5, dtype='bfloat16')


MISFITS = {
  'its logits are not finite': (
    'draw = lambda x: (x.ndim == 1)', 'draw = lambda x: np.nan'
  ),
  'slot 16 of 16 was written': (
    OVERWRITE.format(0, 'key'), CLAMPS.format(i=0, name='key')
  ),
  'head gives ids from vocab=5 on a chance': (
    '.at[..., ids:].set(-jnp.inf)', ''
  ),
  'vocab=5 made a model of 4 ids': (
    'decoder.words, decoder.longest', '4, 256'
  ),
  'its context is 64; want 128 or more': (
    'longest: int = 256', 'longest: int = 64'
  ),
  'want (types.Model, params)': ('return model, params', 'return model'),
  'head made float32 of (2, 8); want (2, 3, 8) in float32 or wider': (
    'return hidden_BTD, ', 'return hidden_BTD[:, -1], '
  ),
  'called, it raised': ("method='score'", "method='scores'"),
  'want make(vocab=..., dtype=..., seed=...) -> (types.Model, params)': (
    'dtype: str, seed: int', 'seed: int'
  ),
}  # fmt: skip


@pytest.mark.parametrize('message', MISFITS)
def test_a_model_that_does_not_fit_is_one_sentence(message, mine):
  mine(edited(DECODER + ADAPTER, MISFITS[message]))
  with pytest.raises(ValueError) as error, jax.debug_nans(False):
    load.model('mine:make')
  text = str(error.value)
  assert text.startswith('model=mine:make: ') and message in text


@pytest.mark.slow
@pytest.mark.parametrize(
  'decoder, held', [(DECODER, True), (wrongly_written(ADDS), False)]
)
def test_the_joint_law_tells_a_right_model_from_a_wrong_one(
  decoder, held, mine
):
  mine(decoder, ADAPTER)
  subject = load.subject('', '', 'mine:make', seed=0)
  subject = subject._replace(rules=[reject.RULE])
  (promise,) = certificate.choose(
    ['joint-distribution-transformer'], subject.supplied
  )
  with jax.debug_nans(False):
    row = certificate.check(promise._replace(quick=2**13), subject, full=False)
  assert row.passed is held, row
