"""DFlash: blocks are those of speculators; drafts are a block's."""

import functools
import json
import pathlib
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build, forward
from specdec_jax.drafters import dflash
from specdec_jax.io.published import dflash_folder
from specdec_jax.models import eagle, lm
from tests import fakes
from tests.drafters import medusa_test, windows
from tests.drafters.medusa_test import GAMMA, IDS, L
from tests.io import published_test, tiny

GOLDEN = pathlib.Path(__file__).parents[1] / 'io/golden/dflash'
LOGITS = dict(np.load(GOLDEN / 'logits.npz'))
GIVEN = {x: LOGITS.pop(x) for x in ('tokens', 'features', 'embed', 'head')}
SIZE, MASK = 4, 261  # an id that is no token
# A random draft agrees in nothing.
UNMEASURED = functools.partial(dflash.Settings, check='off')


@functools.partial(jax.jit, static_argnums=(0, 1))
def after(blocks, model, params, tokens_L, features_LE, n):
  """Logits [size, V] of a block that begins with the last of n tokens, from
  scratch; the features are those of the tokens."""
  length, n_1 = len(tokens_L), jnp.full(1, n)
  slots = length + blocks.size
  read = functools.partial(forward.read, params=params, slots=slots)
  _, _, cache = read(
    eagle.reader(blocks.config, model, features_LE[None]),
    tokens_BT=tokens_L[None],
    start_B=jnp.zeros(1, int),
    cache=eagle.init_cache(blocks.config, 1, slots),
    keep_BT=jnp.arange(length)[None] < n - 1,
  )
  masks = jnp.full(blocks.size - 1, blocks.mask)
  hidden_BTH, _, _ = read(
    eagle.reader(blocks.config, model),
    tokens_BT=jnp.append(tokens_L[n - 1], masks)[None],
    start_B=n_1 - 1,
    cache=cache,
  )
  return eagle.logits(blocks.config, model, params, hidden_BTH).whole()[0]


def golden_target(**changes):
  """What a golden draft was made for, as far as that is read."""
  sizes = dict(depth=4, width=16, vocab=40, tied=False) | changes
  norm = dict(scale=np.linspace(1, 2, 16))  # which is not applied
  return python_types.SimpleNamespace(
    label='a target',
    config=fakes.tiny(**sizes),
    ids=40,
    layout=None,
    params=dict(embed=GIVEN['embed'], head=GIVEN['head'].T, norm=norm),
  )


@pytest.mark.parametrize('name', LOGITS)
def test_blocks_are_those_of_speculators(x64, name):
  """Begun at every token, with any number of tokens before it."""
  given = golden_target()
  blocks, params = dflash_folder.fit(GOLDEN / name, given)
  anchored = name == 'anchor'
  assert blocks[1:] == (37, 4, 0 if anchored else 1)
  assert blocks.config.taps == (0, 2)
  params = jax.tree.map(jnp.asarray, params)
  given_ = (GIVEN['tokens'], GIVEN['features'].astype(float))
  for n, want in enumerate(LOGITS[name], 1):
    ours = after(blocks, lm.make(given.config), params, *given_, n)
    ours = ours[..., params['ids']] if anchored else ours
    np.testing.assert_allclose(ours, want, rtol=0, atol=2e-5)


@pytest.mark.parity
def test_speculators_still_writes_the_golden_files(tmp_path):
  for name, found in published_test.maker(GOLDEN).make(tmp_path).items():
    np.testing.assert_allclose(found, LOGITS[name], rtol=0, atol=1e-5)


# --- drafts in a text ---------------------------------------------------------


def arrays():
  """Of a draft of two layers, as its authors name them."""
  c = tiny.config('qwen3', vocab=264)
  found = {n.removeprefix('model.'): x for n, x in tiny.arrays(c, 1).items()}
  del found['embed_tokens.weight'], found['lm_head.weight']
  draw, D = np.random.default_rng(2).normal, c.width
  more = {
    'fc.weight': draw(size=(D, 2 * D)),
    'hidden_norm.weight': draw(size=D),
  }
  return found | more


LAYERS = tiny.settings(tiny.config('qwen3', vocab=264), 'qwen3')
BLOCK = dict(block_size=SIZE, mask_token_id=MASK)
FACTS = {
  'z-lab': LAYERS
  | dict(architectures=['DFlashDraftModel'], block_size=SIZE)
  | dict(dflash_config=dict(mask_token_id=MASK, target_layer_ids=[0, 1])),
  'speculators': BLOCK
  | dict(speculators_model_type='dflash', aux_hidden_state_layer_ids=[1, 2])
  | dict(transformer_layer_config=LAYERS, draft_vocab_size=264),
  'deepspec': LAYERS
  | BLOCK
  | dict(architectures=['Qwen3DSparkModel'], target_layer_ids=[0, 1]),
}


def save(folder, form='z-lab', own=None, **facts):
  """(folder of the target, folder of a draft)."""
  tiny.write_folder(folder, medusa_test.CONFIG, weights=medusa_test.MODEL)
  beside, own = folder / 'draft', own or arrays()
  beside.mkdir(exist_ok=True)
  if form == 'deepspec':  # which saves the target's matrices again
    for name in ('embed_tokens', 'lm_head'):
      own[f'{name}.weight'] = medusa_test.MODEL['lm_head.weight']
  (beside / 'config.json').write_text(json.dumps(FACTS[form] | facts))
  safetensors.numpy.save_file(own, beside / 'model.safetensors')
  return folder, beside


@pytest.mark.parametrize(
  'form', [pytest.param('z-lab', marks=pytest.mark.more), 'deepspec']
)
def test_drafts_are_those_of_a_block(x64, tmp_path, form):
  """All q of all windows."""
  folder, source = save(tmp_path / 'm', form)
  scan = form == 'z-lab'  # as on a TPU
  target = build.load(str(folder), dtype='float64', scan_layers=scan)
  made = build.engine(target, UNMEASURED(source), gamma=GAMMA)
  texts, seen = medusa_test.proposals(target, made.drafter, made.weights.draft)
  plain = build.engine(target, rule='coupled')
  request = medusa_test.asked()
  assert texts == fakes.texts(plain.programs.generate(plain.weights, request))
  blocks, params = dflash_folder.fit(source, target)
  assert blocks.first == (0 if form == 'deepspec' else 1)
  tokens_BL = jnp.asarray(fakes.pad(texts, L))
  given = target.model, target.params, tokens_BL, (0, 1)
  features_BLE = windows.tapped(*given)[1]
  assert {count for *_, count in seen} == {GAMMA}
  for b, n, _, q_KV, _ in seen:
    given = tokens_BL[b], features_BLE[b], n
    law_TV = jax.nn.softmax(after(blocks, target.model, params, *given))
    law_KV = np.asarray(law_TV)[blocks.first :][:GAMMA]
    assert not law_KV[:, IDS:].any()
    law_KV = windows.warmed(law_KV, medusa_test.TEMPERATURES[b])
    np.testing.assert_allclose(q_KV, law_KV, rtol=0, atol=1e-9)


def test_a_draft_of_speculators_is_read_alike(tmp_path):
  made = [save(tmp_path / form, form) for form in ('z-lab', 'speculators')]
  target = tiny.read(made[0][0])
  one, two = (dflash_folder.fit(source, target) for _, source in made)
  assert one[0] == two[0]
  tiny.check_equal(one[1], two[1])
  # Without a size: that of its class.
  path = made[1][1] / 'config.json'
  raw = json.loads(path.read_text())
  del raw['block_size']
  path.write_text(json.dumps(raw))
  blocks, _ = dflash_folder.fit(made[1][1], target)
  assert (blocks.size, one[0].size) == (8, SIZE)
