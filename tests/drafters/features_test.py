"""A drafter hears exactly the features of the tokens that are committed."""

import numpy as np
import pytest

from specdec_jax import decode, forward, types
from specdec_jax.drafters import scripted
from specdec_jax.models import lm
from specdec_jax.verify import reject
from tests import fakes

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

L, B, NEW = 32, 5, 14


def collect(model, params, vocab, taps, chunk, *, stops=()):
  rng = np.random.default_rng(1)
  prompts = fakes.prompts(B, vocab=vocab, longest=9, seed=3)
  request = fakes.request(
    prompts, [NEW, 3, 9, NEW, NEW], vocab=vocab, length=L, stop_ids=stops
  )
  plain = decode.programs(model, decode.PLAIN, reject.RULE)
  text = np.asarray(plain.generate(types.Weights(params), request).tokens_BL)
  script = np.where(rng.random((B, L)) < 0.3, 0, text).astype(np.int32)
  drafter = fakes.listener(scripted.make(gamma=3), taps)
  programs = decode.programs(
    model, drafter, reject.RULE, decode.Options(chunk=chunk)
  )
  count = rng.integers(0, 4, (B, L)).astype(np.int32)
  weights = types.Weights(params, (script, count))
  return fakes.run_steps(programs, weights, request)


@pytest.mark.parametrize('chunk', [64, 4])
def test_features_of_a_table(chunk):
  vocab, taps = 11, (0, 2)
  params = fakes.table(0, vocab)
  out, state = collect(
    fakes.table_model(vocab), params, vocab, taps, chunk, stops=[4]
  )
  _, features_BLE, known_B = state.drafter
  for b, text in enumerate(fakes.texts(out)):
    # The last token has been emitted but not read.
    assert known_B[b] == len(text) - 1
    for i in range(len(text) - 1):
      seen = fakes.prefix_hash(text[: i + 1]), text[i], i
      wanted = [x for layer in taps for x in (*seen, layer)]
      assert features_BLE[b, i].tolist() == wanted, (b, i)
  assert np.asarray(out.info.accepted_BK).sum() > 0


@pytest.mark.more
def test_features_of_a_transformer(x64):
  config = fakes.tiny()
  model, params = lm.make(config), fakes.wild(config, 0)
  out, state = collect(model, params, config.vocab, (1, 0), 4)
  _, features_BLE, known_B = state.drafter
  _, taps, _ = forward.read(
    model,
    params,
    out.tokens_BL,
    np.zeros(B, np.int32),
    model.init_cache(B, L),
    slots=L,
    taps=(1, 0),
  )
  wanted_BLE = np.asarray(forward.concat(taps))
  for b in range(B):
    n = int(known_B[b])
    np.testing.assert_allclose(
      features_BLE[b, :n], wanted_BLE[b, :n], rtol=0, atol=1e-10
    )
