"""The speculative generate, compiled for TPUs that are not there."""

import dataclasses
import time

import pytest

from specdec_jax import build, sharding
from specdec_jax.chips import aot, hlo, train_step
from specdec_jax.drafters import lookup
from specdec_jax.models import config

pytestmark = pytest.mark.aot_tpu

ROWS, LENGTH, GAMMA = 8, 1024, 4
SCAN = config.Execution(scan_layers=True)


def mesh_of(topology: str):
  try:
    return sharding.make_mesh(1, len(found := aot.devices(topology)), found)
  except ValueError as error:
    pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
  'topology, devices, target, draft',
  [
    ('v5e:2x4', 8, 'smollm2_1_7b', 'smollm2_135m'),
    ('v5e:2x4', 8, 'llama3_8b', 'llama3_1b'),
    ('v5p:2x2x1', 4, 't5_xxl', 't5_small'),
  ],
)
def test_generate_compiles(topology, devices, target, draft, record_property):
  mesh = mesh_of(topology)
  assert mesh.shape['model'] == devices
  sized = lambda name: config.sized(name, dtype='bfloat16', run=SCAN)
  pair = sized(target), sized(draft)
  lowered = aot.lower(
    mesh, aot.Setting(topology, 1, devices, *pair, ROWS, LENGTH, GAMMA)
  )
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  record_property('compile_seconds', seconds)
  memory = compiled.memory_analysis()
  print(
    f'{target} + {draft}, {topology}, tensor-parallel: compiled in '
    f'{seconds:.1f} s; temporaries {memory.temp_size_in_bytes / 1e6:.0f} MB, '
    f'arguments {memory.argument_size_in_bytes / 1e6:.0f} MB a device'
  )
  text = compiled.as_text()
  caches = []
  for c in pair:
    whole = c.heads % devices or c.kv_heads % devices
    heads = c.kv_heads if whole else c.kv_heads // devices
    caches.append(c.depth * ROWS * LENGTH * heads * c.head_dim)
  assert not hlo.warnings(text, caches, LENGTH)
  # The caches are there, and written in place: the check above saw them.
  found = list(hlo.instructions(text))
  scattered = [
    x for x in found if x[0] == 'scatter' and hlo.size(x[1]) in caches
  ]
  assert len(scattered) >= 4
  # Encoders run before the loop of the windows.
  encoded = lambda x: [
    line
    for opcode, _, line in hlo.instructions(x)
    if opcode == 'convolution' and '/encode/' in line
  ]
  assert bool(encoded(text)) == target.startswith('t5')
  windows = [x for x in hlo.loops(text) if '/verify/' in x]
  assert windows and not any(map(encoded, windows))


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
    lookup.make(gamma=GAMMA) if drafts == 'lookup' else None,
    build.rule_of(rule),
  )
  cache = 2 * rows * LENGTH * few.kv_heads // mesh.size * few.head_dim
  found = aot.compiled(lowered, mesh.size, (cache,), LENGTH)
  assert not found.refused and not found.warnings
  step = train_step.make(setting, 128)
  assert step.fits and not step.program.refused and not step.program.warnings
  print(f'{topology}: {found.seconds:.1f} s and {step.program.seconds:.1f} s')
