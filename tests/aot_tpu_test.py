"""The speculative generate, compiled for TPUs that are not there."""

import math
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

pytestmark = pytest.mark.aot_tpu

ROWS, LENGTH, GAMMA = 8, 1024, 4


@pytest.fixture(scope='module')
def mesh():
  library = pathlib.Path(sys.prefix) / 'libtpu' / 'libtpu' / 'libtpu.so'
  if not library.exists():
    pytest.skip(f'no {library}: bash scripts/test.sh installs it')
  os.environ.setdefault('TPU_LIBRARY_PATH', str(library))
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  # Another process compiling at the same time is no reason to fail.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='tpu', topology_name='v5e:2x4'
  )
  return sharding.make_mesh(1, 8, topology.devices)


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
  request = requests.make(
    requests.items([[1, 2, 3]] * ROWS),
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


def instructions(text: str):
  """(opcode, result shape, line) of every HLO instruction."""
  for line in text.splitlines():
    found = re.match(
      r'\s*(?:ROOT )?%?[\w.\-]+ = (\(?[\w\[\],]+)[^ ]* ([\w\-]+)\(', line
    )
    if found:
      yield found[2], found[1], line


def size(shape: str) -> int:
  """Elements of an HLO shape such as bf16[24,8,1024,256]."""
  dims = re.search(r'\[([\d,]*)\]', shape)
  return math.prod(int(d) for d in dims[1].split(',') if d) if dims else 0


@pytest.mark.more
@pytest.mark.parametrize(
  'target,draft',
  [
    pytest.param('smollm2_1_7b', 'smollm2_135m', marks=pytest.mark.slow),
    ('llama3_8b', 'llama3_1b'),
  ],
)
def test_generate_compiles_for_v5e(mesh, target, draft, record_property):
  lowered = lower(mesh, target, draft)
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  record_property('compile_seconds', seconds)
  memory = compiled.memory_analysis()
  print(
    f'{target} + {draft}, v5e:2x4, tensor-parallel over 8: compiled in '
    f'{seconds:.1f} s; temporaries {memory.temp_size_in_bytes / 1e6:.0f} MB, '
    f'arguments {memory.argument_size_in_bytes / 1e6:.0f} MB a device'
  )
  text = compiled.as_text()
  caches = []
  for name in (target, draft):
    c = config.sized(name)
    heads = c.kv_heads if c.heads % 8 or c.kv_heads % 8 else c.kv_heads // 8
    caches.append(c.depth * ROWS * LENGTH * heads * c.head_dim)
  scattered = 0
  for opcode, shape, line in instructions(text):
    scattered += opcode == 'scatter' and size(shape) in caches
    if opcode in ('copy', 'copy-start', 'transpose'):
      assert size(shape) not in caches, f'a whole cache is copied: {line}'
    if opcode.startswith(('all-gather', 'all-to-all')):
      assert size(shape) < 2**20, f'weights are gathered: {line}'
    assert opcode not in ('infeed', 'outfeed', 'send', 'recv'), line
    assert not re.search('callback|host_compute', line), line
  # The caches are there, and written in place: the check above saw them.
  assert scattered >= 4
