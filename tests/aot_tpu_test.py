"""The speculative generate, compiled for TPUs that are not there."""

import os
import pathlib
import re
import sys
import time

import jax
import numpy as np
import pytest

from specdec_jax import decode, requests, sharding, types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.models import config, lm
from specdec_jax.verify import reject
from tests import hlo

pytestmark = pytest.mark.aot_tpu

ROWS, LENGTH, GAMMA = 8, 1024, 4


def mesh_of(topology_name: str, devices: int):
  library = pathlib.Path(sys.prefix) / 'libtpu' / 'libtpu' / 'libtpu.so'
  if not library.exists():
    pytest.skip(f'no {library}: bash scripts/test.sh installs it')
  os.environ.setdefault('TPU_LIBRARY_PATH', str(library))
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  # Another process compiling at the same time is no reason to fail.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='tpu', topology_name=topology_name
  )
  return sharding.make_mesh(1, devices, topology.devices)


def lower(mesh, target_size: str, draft_size: str, *, scan_layers: bool = True):
  """Lowers generate from abstract shapes: bf16, tensor-parallel."""

  def side(size, **kwargs):
    c = config.sized(size, dtype='bfloat16', scan_layers=scan_layers)
    layout = sharding.lay_out(mesh, c)
    params = lm.nest(
      {
        name: jax.ShapeDtypeStruct(
          s.shape, s.dtype, sharding=layout.parameter(name, len(s.shape))
        )
        for name, s in lm.shapes(c).items()
      }
    )
    return lm.make(c, constrain=layout.constrain, **kwargs), params, layout

  target, target_params, layout = side(target_size)
  draft, draft_params, _ = side(draft_size, vocab=target.vocab)
  drafter = lm_drafter.make(draft, gamma=GAMMA)
  item = requests.Item([1, 2, 3], 0)
  if target.encode is not None:
    item = requests.Item([0], 0, source=[1] * 512)
  request = requests.make(
    [item] * ROWS,
    ids=1000,
    context=8192,
    max_new_tokens=100,
    length=LENGTH,
    gamma=GAMMA,
  )
  request = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      np.shape(x),
      np.asarray(x).dtype,
      sharding=layout.sharding('batch', *[None] * (np.ndim(x) - 1)),
    ),
    request,
  )
  programs = decode.programs(
    target, drafter, reject.RULE, decode.Options(widths=())
  )
  weights = types.Weights(target_params, draft_params)
  return programs.generate.lower(weights, request)


SLOW = pytest.mark.slow


@pytest.mark.more
@pytest.mark.parametrize(
  'topology, devices, target, draft',
  [
    pytest.param('v5e:2x4', 8, 'smollm2_1_7b', 'smollm2_135m', marks=SLOW),
    ('v5e:2x4', 8, 'llama3_8b', 'llama3_1b'),
    pytest.param('v5p:2x2x1', 4, 't5_xxl', 't5_small', marks=SLOW),
  ],
)
def test_generate_compiles(topology, devices, target, draft, record_property):
  lowered = lower(mesh_of(topology, devices), target, draft)
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
  for name in (target, draft):
    c = config.sized(name)
    whole = c.heads % devices or c.kv_heads % devices
    heads = c.kv_heads if whole else c.kv_heads // devices
    caches.append(c.depth * ROWS * LENGTH * heads * c.head_dim)
  scattered = 0
  for opcode, shape, line in hlo.instructions(text):
    scattered += opcode == 'scatter' and hlo.size(shape) in caches
    if opcode in ('copy', 'copy-start', 'transpose'):
      assert hlo.size(shape) not in caches, f'a whole cache is copied: {line}'
    if opcode.startswith(('all-gather', 'all-to-all')):
      assert hlo.size(shape) < 2**20, f'weights are gathered: {line}'
    assert opcode not in ('infeed', 'outfeed', 'send', 'recv'), line
    assert not re.search('callback|host_compute', line), line
  # The caches are there, and written in place: the check above saw them.
  assert scattered >= 4
  # Encoders run before the loop of the windows.
  encoded = lambda x: [
    line
    for opcode, _, line in hlo.instructions(x)
    if opcode == 'convolution' and '/encode/' in line
  ]
  assert bool(encoded(text)) == target.startswith('t5')
  windows = [x for x in hlo.loops(text) if '/verify/' in x]
  assert windows and not any(map(encoded, windows))
