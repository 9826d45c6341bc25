"""Medusa's heads: each predicts the token it is trained for; how they are read.

The reading to compare with is of NumPy and of the files' own arrays.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from specdec_jax import build, forward, types
from specdec_jax.drafters import medusa
from tests import fakes
from tests.drafters import windows
from tests.io import tiny, torch_file

B, L, GAMMA, COUNT = 5, 32, 3, 4
TEMPERATURES = [0.7, 1, 1, 1, 0.0]
CONFIG = tiny.config(vocab=264)
MODEL = tiny.arrays(CONFIG)
IDS = 260  # of the byte tokenizer; the others are padding
# Random heads agree in nothing.
UNMEASURED = functools.partial(medusa.Settings, check='off')


def arrays(own=True, layers=1):
  """Those of heads as Medusa names them."""
  rng, c = np.random.default_rng(1), CONFIG
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32) / 3
  out = {}
  for i in range(COUNT):
    for j in range(layers):
      out[f'{i}.{j}.linear.weight'] = draw(c.width, c.width)
      out[f'{i}.{j}.linear.bias'] = draw(c.width)
    if own:
      out[f'{i}.{layers}.weight'] = draw(c.vocab, c.width)
  return out


def save(folder, layout='safetensors', own=None):
  """(folder of the target, source of the heads) in one of three layouts."""
  own = own or arrays()
  if layout == 'inside':
    inside = {f'medusa_head.{name}': x for name, x in own.items()}
    tiny.write_folder(folder, CONFIG, weights=MODEL | inside, shards=2)
    return folder, folder
  tiny.write_folder(folder, CONFIG, weights=MODEL)
  beside = folder / 'heads'
  beside.mkdir(exist_ok=True)
  # As published: it says 2 where there are more.
  (beside / 'config.json').write_text(json.dumps({'medusa_num_heads': 2}))
  if layout == 'pt':
    torch_file.save(beside / 'medusa_lm_head.pt', own)
  else:
    path = beside / 'medusa_lm_head.safetensors'
    safetensors.numpy.save_file(own, path)
  return folder, beside


def law(arrays, number, states_TD):
  """What a head says after each state: [T, V]."""
  x, layer = states_TD, 0
  while f'{number}.{layer}.linear.weight' in arrays:
    y = x @ arrays[f'{number}.{layer}.linear.weight'].T
    y = y + arrays[f'{number}.{layer}.linear.bias']
    x, layer = x + y / (1 + np.exp(-y)), layer + 1
  head = arrays.get(f'{number}.{layer}.weight', MODEL['lm_head.weight'])
  logits = (x @ head.T)[:, :IDS]
  p = np.exp(logits - logits.max(-1, keepdims=True))
  return np.pad(p / p.sum(-1, keepdims=True), ((0, 0), (0, CONFIG.vocab - IDS)))


def states(target, text):
  """The target's states after its final norm: [T, D]."""
  x_1TD = forward.hidden(target.model, target.params, jnp.asarray([text]))
  x = np.asarray(x_1TD[0])
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps)
  return x * MODEL['model.norm.weight']


asked = functools.partial(
  windows.asked, [24, 9, 20, 20, 16], TEMPERATURES, vocab=IDS, length=L
)


def proposals(target, drafter, params):
  """(texts, live windows) as tests.drafters.windows has them."""
  weights = types.Weights(target.params, params)
  out, seen = windows.proposals(target.model, drafter, weights, asked())
  return fakes.texts(out), seen


@pytest.mark.parametrize(
  'layout, own, layers',
  [
    pytest.param('pt', True, 1, marks=pytest.mark.more),
    ('safetensors', False, 2),
    pytest.param('inside', True, 1, marks=pytest.mark.more),
  ],
)
def test_a_head_drafts_the_token_that_it_predicts(
  x64, tmp_path, layout, own, layers
):
  """Head i, of the state of token t, drafts token t + 2 + i."""
  made_of = arrays(own, layers)
  folder, source = save(tmp_path / 'm', layout, made_of)
  target = build.load(str(folder), dtype='float64')
  made = build.engine(target, UNMEASURED(source), gamma=GAMMA)
  texts, seen = proposals(target, made.drafter, made.weights.draft)
  plain = build.engine(target, rule='coupled')
  assert texts == fakes.texts(plain.programs.generate(plain.weights, asked()))
  known = []
  for text in texts:
    states_TD = states(target, text)
    laws = [law(made_of, i, states_TD) for i in range(GAMMA)]
    T = range(len(text))
    known.append({(t + 2 + i, i): laws[i][t] for i in range(GAMMA) for t in T})
  assert {count for *_, count in seen} == {0, GAMMA}
  for b, n, _, q_KV, count in seen:
    assert count == (0 if n == 1 else GAMMA)
    for k in range(count):
      q_V = known[b][n + k, k]
      q_V = windows.warmed(q_V, TEMPERATURES[b])
      np.testing.assert_allclose(q_KV[k], q_V, rtol=0, atol=1e-9)


def test_files_that_are_no_heads_are_refused(tmp_path):
  folder, source = save(tmp_path / 'm', 'pt')
  target = tiny.read(folder)
  make = lambda source: build.engine(target, UNMEASURED(source), gamma=1)
  path = source / 'medusa_lm_head.pt'
  assert make(path).drafter is make(source).drafter  # the file alone, too
  with pytest.raises(ValueError, match='/absent: no such file; give a folder'):
    make('/absent')
  with pytest.raises(ValueError, match='no place for .lm_head.weight, mo'):
    make(folder)
  torch_file.zipped(path, b'cposix\nsystem\n')
  with pytest.raises(ValueError, match='GLOBAL posix system, which makes no a'):
    make(source)
