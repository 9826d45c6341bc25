"""Logits equal those of transformers: the only test that a transposed square
matrix, a wrong rotation or a misplaced bias cannot pass."""

import dataclasses
import functools
import json
import runpy

import numpy as np
import pytest
import safetensors.numpy
from gguf import RopeScalingType

from specdec_jax import types
from specdec_jax.io import hf
from specdec_jax.io.config_json import families
from specdec_jax.io.gguf import architectures
from specdec_jax.models import config
from tests.io import tiny

FAMILIES = ('llama', 'qwen2', 'qwen3', 'gpt2', 'gemma2', 'gemma3')
FAMILIES += ('phi3', 'olmo2', 't5', 't5_gated')
VARIANT_LOGITS = 'variants/logits.npz'
VARIANTS = json.loads((tiny.GOLDEN / 'variants/settings.json').read_text())


def our_logits(folder, golden, scan_layers=False):
  c, reader, _ = hf.open_folder(folder, str(folder))
  c = c.running(scan_layers=scan_layers)
  source = None
  if 'source' in golden:
    source = types.Source(golden['source'], golden['lengths'])
  params = tiny.params(reader, c)
  return np.asarray(tiny.logits(c, params, golden['tokens'], source))


@pytest.mark.more
@pytest.mark.parametrize(
  'family, scan_layers',
  [*((x, False) for x in FAMILIES), ('gemma3', True), ('t5', True)],
)
def test_logits_equal_the_golden_ones(family, scan_layers):
  golden = np.load(tiny.GOLDEN / family / 'logits.npz')
  ours = our_logits(tiny.GOLDEN / family, golden, scan_layers)
  np.testing.assert_allclose(ours, golden['logits'], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('name', VARIANTS)
def test_other_settings_give_the_golden_logits(name, x64):
  """Of the same weights, as transformers reads the changed config.json."""
  del x64
  base, changes = VARIANTS[name]
  folder, golden = tiny.GOLDEN / base, np.load(tiny.GOLDEN / VARIANT_LOGITS)
  _, reader, _ = hf.open_folder(folder, base)
  raw = json.loads((folder / 'config.json').read_text()) | changes
  c, naming = families.from_json(raw, folder)
  c, reader = c.running(dtype='float64'), reader._replace(naming=naming)
  # Operation by operation: most are compiled once for all variants.
  params = tiny.params(reader, c)
  ours = tiny.eager_logits(c, params, golden['tokens'])[0]
  np.testing.assert_allclose(ours, golden[name], rtol=0, atol=5e-6)


def gemma2_fields(c, w):
  w.add_sliding_window(c.windows[0])
  w.add_attn_logit_softcapping(c.attn_softcap)
  w.add_final_logit_softcapping(c.logit_softcap)


def gemma3_fields(c, w):
  w.add_sliding_window(c.windows[0])
  w.add_sliding_window_pattern(2)
  w.add_rope_scaling_type(RopeScalingType.LINEAR)
  w.add_rope_scaling_factor(c.rope_scaling.factor)


@pytest.mark.parametrize(
  'family, fields', [('gemma2', gemma2_fields), ('gemma3', gemma3_fields)]
)
def test_a_gguf_file_gives_the_golden_logits(family, fields, tmp_path):
  """What the file does not say, such as the query scale, is taken as meant."""
  folder = tiny.GOLDEN / family
  c, _, _ = hf.open_folder(folder, family)
  stored = safetensors.numpy.load_file(folder / hf.SINGLE)
  weights = {name: x.astype(np.float32) for name, x in stored.items()}
  extra = [functools.partial(fields, c)]
  path = tiny.write_gguf(tmp_path / 'a', c, family, weights, extra=extra)
  have, reader, _ = architectures.open_file(path, family)
  golden = np.load(folder / 'logits.npz')
  if family == 'gemma2':
    # Tells 12 from head_dim; files say neither: see io.gguf.architectures.
    assert have.query_scale == 8**-0.5
    have = dataclasses.replace(have, query_scale=12**-0.5)
  same = {**vars(have), 'norm_eps': c.norm_eps}
  assert config.LMConfig(**same) == c
  ours = tiny.logits(have, tiny.params(reader, have), golden['tokens'])
  np.testing.assert_allclose(ours, golden['logits'], atol=1e-4, rtol=1e-4)


@pytest.mark.parity
@pytest.mark.parametrize('family', FAMILIES)
def test_logits_equal_those_of_torch(family, tmp_path):
  pytest.importorskip('torch', reason='needs torch (extra parity)')
  pytest.importorskip(
    'transformers', reason='needs transformers (extra parity)'
  )
  make = runpy.run_path(str(tiny.GOLDEN / 'make.py'))
  model, golden = make['build'](family, seed=1)
  model.save_pretrained(tmp_path)
  ours = our_logits(tmp_path, golden)
  np.testing.assert_allclose(ours, golden['logits'], atol=1e-4, rtol=1e-4)
