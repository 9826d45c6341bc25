"""A drafter hears exactly the features of the tokens that are committed."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, types
from specdec_jax.costs import scripted
from specdec_jax.verify import reject
from tests import fakes

L, B, NEW, V, TAPS = 32, 5, 14, 11, (0, 2)
SCRIPTED = scripted.make(gamma=3)


def init(weights, context, features_BLE):
  return features_BLE, context.lengths_B - 1


def commit(state, context, outcome, features_BNE):
  features_BLE, known_B = state
  index_1N = jnp.arange(features_BNE.shape[1])[None]
  emitted_B1 = outcome.emitted_B[:, None]
  slots_BN = jnp.where(index_1N < emitted_B1, known_B[:, None] + index_1N, L)
  features_BLE = features_BLE.at[jnp.arange(B)[:, None], slots_BN].set(
    features_BNE, mode='drop'
  )
  return features_BLE, known_B + outcome.emitted_B


# features_BLE[:, i] for i < known_B: what init and commit said of token i.
LISTENER = SCRIPTED._replace(
  name='listener', init=init, commit=commit, taps=TAPS
)


def check_heard(out, state):
  """What LISTENER heard of each token, by the table model's own taps."""
  features_BLE, known_B = state.drafter
  for b, text in enumerate(fakes.texts(out)):
    # The last token has been emitted but not read.
    assert known_B[b] == len(text) - 1
    for i in range(len(text) - 1):
      seen = fakes.prefix_hash(text[: i + 1]), text[i], i
      wanted = [x for layer in TAPS for x in (*seen, layer)]
      assert features_BLE[b, i].tolist() == wanted, (b, i)


@pytest.mark.more
@pytest.mark.parametrize('chunk', [64, 4])
def test_features_of_a_table(chunk):
  model, params = fakes.table_model(V), fakes.table(0, V)
  rng = np.random.default_rng(1)
  prompts = fakes.prompts(B, vocab=V, longest=9, seed=3)
  request = fakes.request(
    prompts, [NEW, 3, 9, NEW, NEW], vocab=V, length=L, stop_ids=[4]
  )
  plain = decode.programs(model, decode.PLAIN, reject.RULE)
  text = np.asarray(plain.generate(types.Weights(params), request).tokens_BL)
  script = np.where(rng.random((B, L)) < 0.3, 0, text).astype(np.int32)
  count = rng.integers(0, 4, (B, L)).astype(np.int32)
  programs = decode.programs(
    model, LISTENER, reject.RULE, decode.Options(chunk=chunk)
  )
  weights = types.Weights(params, (script, count))
  out, state = fakes.run_steps(programs, weights, request)
  check_heard(out, state)
  assert np.asarray(out.info.accepted_BK).sum() > 0
