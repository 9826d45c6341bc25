"""The speculative generate, compiled for TPUs that are not there."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from specdec_jax import build, sharding
from specdec_jax.chips import aot, hlo, roofline, train_step
from specdec_jax.drafters import dflash, lookup, method
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io.quantised import rounded
from specdec_jax.models import config, eagle, lm, weights
from tests import loops

pytestmark = [pytest.mark.aot_tpu, pytest.mark.usefixtures('optimised')]

ROWS, LENGTH, GAMMA = 8, 1024, 4
SCAN = config.Execution(scan_layers=True)


def mesh_of(topology: str):
  try:
    return sharding.make_mesh(1, len(found := aot.devices(topology)), found)
  except ValueError as error:
    pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
  'topology, devices, target, draft, levels',
  [
    ('v5e:2x4', 8, 'smollm2_1_7b', 'smollm2_135m', ()),
    ('v5e:2x4', 8, 'llama3_8b', 'llama3_1b', ()),
    ('v5e:2x4', 8, 'llama3_8b', 'llama3_1b', (10, 10, 8, 4)),
    ('v5p:2x2x1', 4, 'llama3_8b', 'llama3_1b', (10, 10, 8, 4)),
    ('v5p:2x2x1', 4, 't5_xxl', 't5_small', ()),
  ],
)
def test_generate_compiles(topology, devices, target, draft, levels):
  mesh = mesh_of(topology)
  assert mesh.shape['model'] == devices
  pair = [config.sized(x, dtype='bfloat16', run=SCAN) for x in (target, draft)]
  sizes = ROWS, LENGTH, sum(levels) or GAMMA
  setting = aot.Setting(topology, 1, devices, *pair, *sizes)
  text = compiled(aot.lower(mesh, setting, levels=levels))
  caches = []
  for c in pair:
    whole = c.heads % devices or c.kv_heads % devices
    heads = c.kv_heads if whole else c.kv_heads // devices
    caches.append(c.depth * ROWS * LENGTH * heads * c.head_dim)
  assert not hlo.warnings(text, caches, LENGTH)
  # They are there, and written in place: the check above saw them.
  assert scattered(text, caches) >= 4
  # Encoders run before the loop of the windows.
  encoded = lambda x: [
    line
    for opcode, _, line in hlo.instructions(x)
    if opcode == 'convolution' and '/encode/' in line
  ]
  assert bool(encoded(text)) == target.startswith('t5')
  windows = [x for x in loops.bodies(text) if '/verify/' in x]
  assert windows and not any(map(encoded, windows))


def compiled(lowered) -> str:
  start = time.perf_counter()
  text = lowered.compile().as_text()
  print(f'compiled in {time.perf_counter() - start:.1f} s')
  return text


def scattered(text: str, caches) -> int:
  """Writes into arrays of a cache's size."""
  found = hlo.instructions(text)
  return sum(x == 'scatter' and hlo.size(s) in caches for x, s, _ in found)


# Ids of Qwen3 that are tokens; the next one stands for masks.
TOKENS, TAPS = 151669, (1, 9, 17, 25, 33)
# As eagle_folder and dflash_folder read deepseek-ai/{eagle3_qwen3_8b_ttt7,
# dflash_qwen3_8b_block7}.
DRAFTS = {
  'eagle3': (1, dict(reads='beside', last_norm='head')),
  'dflash': (5, dict(reads='context', last_norm='fed')),
}


def published(mesh, setting, name) -> method.Method:
  """One with an embedding and a head of its own, whole on every device."""
  c, (depth, own) = setting.target, DRAFTS[name]
  block = dataclasses.replace(
    c, depth=depth, run=config.Execution(scan_layers=True, fused=True)
  )
  shared = dict(tap_width=c.width, tap_norm='none', reads_first=False)
  draft: Any = eagle.EagleConfig(block, TAPS, **shared, **own)
  module = eagle_drafter
  target, target_params, _ = aot.side(mesh, c, '')
  whole = sharding.lay_out(mesh, c, tensor_parallel=1)
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
  params = {
    'layer': lm.nest(eagle.shapes(draft)),
    'head': shape(c.width, TOKENS),
    'embed': shape(c.vocab, c.width),
    'ids': jax.ShapeDtypeStruct((TOKENS,), jnp.int32),
  }
  params = jax.tree.map(lambda x: aot.placed(x, whole.sharding()), params)
  if name == 'dflash':
    draft = eagle.Blocks(draft, mask=TOKENS, size=setting.gamma, first=0)
    module = dflash
  drafter = module.make(
    draft, target, gamma=setting.gamma, constrain=whole.constrain
  )
  return method.Method(drafter, params | {'target': target_params})


@pytest.mark.slow
@pytest.mark.parametrize('name', DRAFTS)
def test_generate_compiles_with_a_published_draft(name):
  mesh, gamma = mesh_of('v5e:2x4'), 7
  c = config.sized('qwen3_8b', dtype='bfloat16', run=SCAN)
  setting = aot.Setting('v5e:2x4', 1, mesh.size, c, c, ROWS, LENGTH, gamma)
  made = published(mesh, setting, name)
  text = compiled(aot.lower(mesh, setting, made))
  slots = LENGTH + 8 * (name == 'dflash')  # a block may end behind the text
  own = ROWS * slots * c.kv_heads * c.head_dim
  split = c.depth * ROWS * LENGTH * c.kv_heads * c.head_dim // mesh.size
  for cache, length in ((split, LENGTH), (own, slots)):
    assert not hlo.warnings(text, [cache], length)
    assert scattered(text, [cache])


@pytest.mark.slow
@pytest.mark.parametrize(
  'topology, rule, drafts',
  [
    ('v5e:2x4', 'block', 'lm'),
    ('v5p:2x2x1', 'coupled', 'lookup'),
    ('v6e:2x4', 'coupled', 'lm'),
    ('tpu7x:2x2x1', 'block', 'lookup'),
  ],
)
def test_every_chip_takes_rules_drafters_and_the_train_step(
  topology, rule, drafts
):
  mesh, rows = mesh_of(topology), 6  # no weight has a cache's size
  # Layers are scanned: two compile like many.
  full = config.sized('smollm2_1_7b', dtype='bfloat16', run=SCAN)
  few = dataclasses.replace(full, depth=2)
  setting = aot.Setting(
    topology, 2, mesh.size // 2, few, few, ROWS, LENGTH, GAMMA
  )
  lowered = aot.lower(
    mesh,
    setting._replace(rows=rows),
    method.Method(lookup.make(gamma=GAMMA)) if drafts == 'lookup' else None,
    build.rule_of(rule),
  )
  cache = 2 * rows * LENGTH * few.kv_heads // mesh.size * few.head_dim
  found = aot.compiled(lowered, mesh.size, (cache,), LENGTH)
  assert not found.refused and not found.warnings
  device, _ = roofline.topology(topology)
  step = train_step.make(setting._replace(train=128), device)
  assert step['fits'] and not step['program'].warnings
  print(f'{topology}: {found.seconds:.1f} s, {step["program"].seconds:.1f} s')


def written(text: str) -> Iterator[tuple[str, str]]:
  """(opcode, result) of what a program writes: in a fusion only its result."""
  fused = False
  for line in text.splitlines():
    if line.endswith('{'):
      fused = 'fus' in line.split(' ')[0]
    for opcode, shape, _ in () if fused else hlo.instructions(line):
      if opcode not in ('parameter', 'bitcast', 'get-tuple-element', 'while'):
        yield opcode, shape


def floats(text: str, least: int) -> list[tuple[str, str]]:
  """Those that are arrays of so many floats, or more."""
  wide = lambda shape: shape.startswith(('bf16[', 'f32['))
  return [x for x in written(text) if wide(x[1]) and hlo.size(x[1]) >= least]


K, N, LAYERS = 4096, 14336, 4


@pytest.mark.parametrize('rows', [1, 5, 64])
@pytest.mark.parametrize('kind', [*weights.INTEGERS, 'dense'])
def test_a_product_reads_integers_and_writes_no_wider_matrix(kind, rows):
  """Of the layers of a scan, each of which is read once."""
  where = sharding.lay_out(mesh_of('v5e:1x1'), config.sized('tiny')).sharding()
  at = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
  stack = {'mlp/up/kernel': jax.ShapeDtypeStruct((LAYERS, K, N), jnp.int8)}
  placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
  (matrix,) = rounded.shapes(stack, kind.replace('dense', 'int4')).values()
  matrix = jax.tree.map(placed, matrix)

  def layer(x_RK, one):
    if kind == 'dense':
      one = weights.Dense(one.dense().astype(x_RK.dtype))
    return one.linear(x_RK)[:, :K], None

  run = lambda x_RK, matrix: jax.lax.scan(layer, x_RK, matrix)[0]
  compiled = jax.jit(run).lower(at(rows, K), matrix).compile()
  wide = floats(compiled.as_text(), K * N)
  if kind == 'dense':  # what this test is there to see
    assert wide
    return
  assert not wide
  read = compiled.cost_analysis()['bytes accessed']
  codes = K * N * jax.dtypes.itemsize_bits(matrix.codes.dtype) / 8
  scales = 8 * math.prod(matrix.scale.shape[1:])
  assert codes < read < 1.3 * codes + scales + 12 * rows * (K + N)


@pytest.mark.slow
@pytest.mark.parametrize('kinds', [('int8', 'int4'), ('int4', 'int8')])
def test_no_wider_matrix_is_written_where_a_model_is_split(kinds):
  mesh = mesh_of('v5e:2x2')
  full = config.sized('llama3_1b', dtype='bfloat16', run=SCAN)
  few = dataclasses.replace(full, depth=2)
  setting = aot.Setting(
    'v5e:2x2', 1, 4, few, few, 1, LENGTH, GAMMA, weights=kinds
  )
  text = aot.lower(mesh, setting).compile().as_text()
  assert not hlo.warnings(text, (), LENGTH)
  # k and v are small; o is the next.
  assert not floats(text, few.width * few.width // 4)
