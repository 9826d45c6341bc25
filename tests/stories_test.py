"""A published checkpoint reproduces its authors' published greedy text.

stories260K (github.com/karpathy/llama2.c); its file formats are read here only.
"""

import dataclasses
import pathlib
import struct

import numpy as np
import pytest

from specdec_jax import decode, requests, types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import lookup
from specdec_jax.models import config, lm
from specdec_jax.verify import reject

FOLDER = pathlib.Path(__file__).parents[2] / 'shared/weights/stories260K'

pytestmark = pytest.mark.skipif(
  not FOLDER.exists(), reason=f'no {FOLDER}: the stories260K checkpoint'
)


def read_model(path):
  """A llama2.c v0 file: seven int32, then float32 arrays in a fixed order."""
  blob = path.read_bytes()
  D, F, depth, H, G, V, context = struct.unpack('7i', blob[:28])
  c = config.LMConfig(
    depth=depth,
    width=D,
    heads=H,
    kv_heads=G,
    head_dim=D // H,
    mlp=F,
    vocab=V,
    context=context,
    rope_pairs='interleaved',
  )
  data, at = np.frombuffer(blob, np.float32, offset=28), 0

  def take(*shape):
    nonlocal at
    at += int(np.prod(shape))
    return data[at - int(np.prod(shape)) : at].reshape(shape)

  flat = {'head': take(V, D).T}
  C = D // H
  for name, shape in (
    ('attn_norm/scale', (D,)),
    ('attn/q/kernel', (H * C, D)),
    ('attn/k/kernel', (G * C, D)),
    ('attn/v/kernel', (G * C, D)),
    ('attn/o/kernel', (D, H * C)),
    ('mlp_norm/scale', (D,)),
    ('mlp/gate/kernel', (F, D)),
    ('mlp/down/kernel', (D, F)),
    ('mlp/up/kernel', (F, D)),
  ):
    for i, x in enumerate(take(depth, *shape)):
      flat[f'layers/{i}/{name}'] = x.T
  flat['norm/scale'] = take(D)
  return c, lm.nest({name: np.ascontiguousarray(x) for name, x in flat.items()})


def read_pieces(path, V):
  """Token strings: int32 longest, then (float32 score, int32 size, bytes)."""
  blob, at, pieces = path.read_bytes(), 4, []
  for _ in range(V):
    _, size = struct.unpack_from('fi', blob, at)
    pieces.append(blob[at + 8 : at + 8 + size])
    at += 8 + size
  return pieces


@pytest.mark.parametrize('kind', ['autoregressive', 'lookup', 'first_layers'])
def test_reproduces_the_published_greedy_text(kind):
  c, params = read_model(FOLDER / 'stories260K.bin')
  pieces = read_pieces(FOLDER / 'tok512.bin', c.vocab)
  golden = (FOLDER / 'golden_greedy.txt').read_text().strip()
  target, weights = lm.make(c), types.Weights(params)
  drafter = decode.PLAIN
  if kind == 'lookup':
    drafter = lookup.make(gamma=3)
  if kind == 'first_layers':
    short = dataclasses.replace(c, depth=3)
    kept = {str(i): params['layers'][str(i)] for i in range(3)}
    weights = types.Weights(params, params | {'layers': kept})
    drafter = lm_drafter.make(lm.make(short), gamma=3)
  request = requests.make(
    requests.items([[1]]),  # BOS; greedy from nothing
    ids=c.vocab,
    context=c.context,
    max_new_tokens=256,
    gamma=drafter.gamma,
    stop_ids=[1, 2],
  )
  out = decode.programs(target, drafter, reject.RULE).generate(weights, request)
  tokens = np.asarray(out.tokens_BL)[0, 1 : int(out.lengths_B[0])]
  text = b''.join(pieces[t] for t in tokens).decode().strip()
  text = text.replace('<0x0A>', '\n')  # its tokenizer's byte token
  size = min(len(text), len(golden))
  assert size > 500
  assert text[:size] == golden[:size]
  if kind == 'first_layers':
    calls, emitted = int(out.info.calls_B[0]), len(tokens)
    assert emitted / calls > 1.2  # measured alpha of three layers: 0.316
