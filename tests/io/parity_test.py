"""Logits equal those of transformers: the only test that a transposed square
matrix, a wrong rotation or a misplaced bias cannot pass."""

import dataclasses
import importlib.util
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.io import hf, names
from specdec_jax.models import lm

GOLDEN = pathlib.Path(__file__).parent / 'golden'
FAMILIES = ('llama', 'qwen2', 'qwen3')


def our_logits(folder, tokens, scan_layers=False):
  opened = hf.open_folder(folder, str(folder))
  config = opened.config
  if scan_layers:
    config = dataclasses.replace(config, scan_layers=True)
  params = names.read(opened.reader, config)
  model = lm.make(config)
  B, T = tokens.shape
  slots_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
  mask_BTS = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool))[None], (B, T, T))
  hidden_BTD, _, _ = model.apply(
    params,
    jnp.asarray(tokens),
    slots_BT,
    slots_BT,
    mask_BTS,
    model.init_cache(B, T),
  )
  return np.asarray(model.head(params, hidden_BTD))


@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_the_golden_ones(family, scan_layers):
  golden = np.load(GOLDEN / family / 'logits.npz')
  ours = our_logits(GOLDEN / family, golden['tokens'], scan_layers)
  np.testing.assert_allclose(ours, golden['logits'], atol=1e-4, rtol=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_those_of_torch(family, tmp_path):
  pytest.importorskip('torch', reason='needs torch (extra parity)')
  pytest.importorskip(
    'transformers', reason='needs transformers (extra parity)'
  )
  spec = importlib.util.spec_from_file_location('golden', GOLDEN / 'make.py')
  assert spec and spec.loader
  make = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(make)
  model, tokens, logits = make.build(family, seed=1)
  model.save_pretrained(tmp_path)
  ours = our_logits(tmp_path, tokens)
  np.testing.assert_allclose(ours, logits, atol=1e-4, rtol=1e-4)
