"""Logits equal those of transformers: the only test that a transposed square
matrix, a wrong rotation or a misplaced bias cannot pass."""

import dataclasses
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from gguf import RopeScalingType

from specdec_jax import forward as forward_lib
from specdec_jax.io import gguf, hf, names
from specdec_jax.models import config, lm

GOLDEN = pathlib.Path(__file__).parent / 'golden'
FAMILIES = ('llama', 'qwen2', 'qwen3', 'gpt2', 'gemma2', 'gemma3')


def our_logits(folder, tokens, scan_layers=False):
  opened = hf.open_folder(folder, str(folder))
  c = dataclasses.replace(opened.config, scan_layers=scan_layers)
  params = names.read(opened.reader, c)
  return np.asarray(forward(lm.make(c), params, jnp.asarray(tokens)))


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens_BT):
  """Logits of one causal pass."""
  B, T = tokens_BT.shape
  hidden_BTD, _, _ = forward_lib.read(
    model,
    params,
    tokens_BT,
    jnp.zeros((B,), jnp.int32),
    model.init_cache(B, T),
    slots=T,
  )
  return model.head(params, hidden_BTD)


@pytest.mark.more
@pytest.mark.parametrize('scan_layers', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_the_golden_ones(family, scan_layers):
  golden = np.load(GOLDEN / family / 'logits.npz')
  ours = our_logits(GOLDEN / family, golden['tokens'], scan_layers)
  np.testing.assert_allclose(ours, golden['logits'], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('family', ['gemma2', 'gemma3'])
def test_a_gguf_file_gives_the_golden_logits(tiny, family, tmp_path):
  """What the file does not say, such as the query scale, is taken as meant."""
  folder = GOLDEN / family
  c = hf.open_folder(folder, family).config
  stored = safetensors.numpy.load_file(folder / 'model.safetensors')
  path = tiny.write_gguf(
    tmp_path / 'm.gguf',
    c,
    family,
    {name: x.astype(np.float32) for name, x in stored.items()},
    extra=[functools.partial(GEMMA_FIELDS[family], c)],
  )
  have, reader, _ = gguf.open_file(path, family)
  golden = np.load(folder / 'logits.npz')
  if family == 'gemma2':
    # Tells 12 from head_dim; files say neither: see io.gguf.
    assert have.query_scale == 8**-0.5
    have = dataclasses.replace(have, query_scale=12**-0.5)
  same = {**vars(have), 'norm_eps': c.norm_eps}
  assert config.LMConfig(**same) == c
  params = names.read(reader, have)
  ours = forward(lm.make(have), params, jnp.asarray(golden['tokens']))
  np.testing.assert_allclose(ours, golden['logits'], atol=1e-4, rtol=1e-4)


def gemma2_fields(c, w):
  w.add_sliding_window(c.windows[0])
  w.add_attn_logit_softcapping(c.attn_softcap)
  w.add_final_logit_softcapping(c.logit_softcap)


def gemma3_fields(c, w):
  w.add_sliding_window(c.windows[0])
  w.add_sliding_window_pattern(2)
  w.add_rope_scaling_type(RopeScalingType.LINEAR)
  w.add_rope_scaling_factor(c.rope_scaling.factor)


GEMMA_FIELDS = dict(gemma2=gemma2_fields, gemma3=gemma3_fields)


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
