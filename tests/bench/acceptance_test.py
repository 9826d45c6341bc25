"""What a trace says of lenience, on laws that are known."""

import numpy as np

from specdec_jax import requests, types
from specdec_jax.bench import acceptance
from specdec_jax.certify import table_model

P = np.array([0.4, 0.35, 0.15, 0.1])
LENIENCES = (1.0, 0.9, 0.87, 0.5)


def at_index_2(temperature, q_V):
  """(p, q, kept_X, distance_X) of token 1 after two others."""
  table = lambda law_V: np.tile(np.log(law_V), (1, 4, 1)).astype('f4')
  request = requests.make(
    requests.items([[0, 3]]),
    ids=4,
    context=64,
    max_new_tokens=1,
    temperature=temperature,
    length=8,
  )
  request.tokens_BL[0, 2] = 1
  model = table_model.make(4)
  p, q, *rest = np.asarray(
    acceptance.scores(
      types.Weights(table(P), table(q_V)),
      request,
      target=model,
      draft=model,
      chunk=4,
      leniences=LENIENCES,
    )
  )[0, 2]
  return p, q, rest[: len(LENIENCES)], rest[len(LENIENCES) :]


def test_greedy_lenience_keeps_what_is_nearly_the_best():
  """The draft's argmax is 1, and 0.35 / 0.4 = 0.875."""
  p, q, kept, distance = at_index_2(0.0, np.array([0.1, 0.7, 0.1, 0.1]))
  assert (p, q) == (0, 1)
  assert kept == [0, 0, 1, 1]
  assert distance == [0, 0, 1, 1]


def test_sampled_lenience_keeps_the_ratio_divided_by_it():
  q_V = np.array([0.1, 0.7, 0.1, 0.1])
  p, q, kept, distance = at_index_2(1.0, q_V)
  np.testing.assert_allclose((p, q), (0.35, 0.7), rtol=1e-5)
  wanted = [0.3 + min(0.35 / l, 0.7) for l in LENIENCES]
  np.testing.assert_allclose(kept, wanted, rtol=1e-5)
  # What more is kept of token 1 is less of tokens 0 and 2.
  far = [min(0.35 / l, 0.7) - 0.35 for l in LENIENCES]
  np.testing.assert_allclose(distance, far, atol=1e-6)
