"""Compiles programs for TPUs that are not there, from shapes alone."""

import importlib.util
import os
import sys
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import jax

from specdec_jax import decode, requests, sharding, types
from specdec_jax.chips import hlo, roofline
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import method
from specdec_jax.io.quantised import rounded
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.verify import reject

# Tokens of the source that an encoder reads.
SOURCE = 512


def library() -> str:
  """Returns the TPU compiler's path; raises ValueError if there is none."""
  spec = importlib.util.find_spec('libtpu')
  # scripts/test.sh keeps it off the path, where jax would look for a TPU.
  folders = [f'{sys.prefix}/libtpu/libtpu']
  folders += spec.submodule_search_locations or () if spec else ()
  given = os.environ.get('TPU_LIBRARY_PATH', '')
  for place in (given, *(f'{x}/libtpu.so' for x in folders)):
    if os.path.exists(place):
      return place
  raise ValueError(
    "the TPU compiler libtpu is missing: pip install 'jax[tpu]', or "
    'bash scripts/test.sh --all, which keeps it in .venv/libtpu'
  )


class Setting(NamedTuple):
  """A pair of models, and the devices to look at."""

  topology: str  # as in 'v5e:2x4' or 'h100:8'
  data: int  # of the mesh; 1 x 1 is one 'model' axis of all devices
  model: int
  target: model_config.LMConfig  # in bfloat16, as the draft
  draft: model_config.LMConfig
  rows: int  # of the batch
  slots: int  # of its buffers
  gamma: int  # drafts of a window
  tensor_parallel: int = 0  # devices that share a draft (sharding.lay_out)
  names: tuple[str, str] = ('target', 'draft')
  weights: tuple[str, str] = ('', '')  # of weights.INTEGERS; '': bfloat16
  train: int = 0  # tokens of a row in the draft's train step; 0: no such step


def knows(topology: str) -> bool:
  """Tells whether the compiler knows the chips: TPUs."""
  return topology.partition(':')[0] in roofline.TPUS


def devices(topology: str) -> list[Any]:
  """Returns a topology's devices, to compile for; see library."""
  os.environ['TPU_LIBRARY_PATH'] = library()
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  # Another process compiling at the same time is no reason to fail.
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  from jax.experimental import topologies

  one = dict(chips_per_host_bounds=(1, 1, 1))  # a host has more by default
  more: dict[str, Any] = one if topology.endswith(':1x1') else {}
  return topologies.get_topology_desc(
    platform='tpu', topology_name=topology, **more
  ).devices


def lower(
  mesh: jax.sharding.Mesh,
  s: Setting,
  made: method.Method | None = None,
  rule: types.Rule = reject.RULE,
  levels: tuple[int, ...] = (),
):
  """Lowers generate, greedy or sampled, for a mesh's devices.

  made: with its parameters' shapes; None is the setting's draft model.
  levels: of the tree that this model drafts; () is a chain of s.gamma.
  """
  p, target_params, layout = side(mesh, s.target, s.weights[0])
  if made is None:
    q, draft_params, _ = side(
      mesh, s.draft, s.weights[1], s.tensor_parallel, vocab=p.vocab
    )
    made = method.Method(
      lm_drafter.make(q, gamma=s.gamma, levels=levels), draft_params
    )
  item = requests.Item([1, 2, 3], 0, new=1)
  if p.encode is not None:
    item = requests.Item([0], 0, source=[1] * SOURCE, new=1)
  request = requests.make(
    [item] * s.rows,
    gamma=made.drafter.gamma,
    length=s.slots,
    mixed=True,
  )
  rows = lambda x: layout.sharding('batch', *[None] * (x.ndim - 1))
  request = jax.tree.map(lambda x: placed(x, rows(x)), request)
  # As on a TPU: see build.default_options.
  options = decode.Options(widths=())
  programs = decode.programs(p, made.drafter, rule, options)
  weights = types.Weights(target_params, made.params)
  return programs.generate.lower(weights, request)


def placed(x: Any, at: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  """Returns an array's shape, placed on devices."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)


def side(
  mesh, c: model_config.LMConfig, kind: str, tensor_parallel: int = 0, **more
):
  """Returns (model, its parameters' shapes, layout)."""
  layout = sharding.lay_out(mesh, c, tensor_parallel=tensor_parallel)
  at = lambda name, s: layout.parameter(name, len(s.shape))
  params = {
    name: jax.tree.map(placed, s, rounded.shardings(at(name, s), s))
    for name, s in rounded.shapes(lm.shapes(c), kind).items()
  }
  return lm.make(c, constrain=layout.constrain, **more), lm.nest(params), layout


class Compiled(NamedTuple):
  """A program as the compiler describes it; bytes on one device; the compiler's
  own counts take every loop's body once."""

  seconds: float  # to compile
  arguments: float = 0
  temporaries: float = 0  # with caches
  warnings: tuple[str, ...] = ()  # of hlo, as collectives
  collectives: dict[str, hlo.Collective] = {}
  operations: float | None = None  # None where the compiler counts none
  bytes: float | None = None
  refused: str = ''  # why it could not be compiled


def compiled(
  lowered,
  devices: int,
  caches: Collection[int],
  slots: int,
  gathers: Collection[int] = (),
) -> Compiled:
  """Compiles what `lower` returns; other arguments as in hlo."""
  start = time.perf_counter()
  try:
    done = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    why = str(error).splitlines()[0]
    return Compiled(time.perf_counter() - start, refused=why)
  seconds = time.perf_counter() - start
  memory, counts = done.memory_analysis(), done.cost_analysis() or {}
  text = done.as_text()
  return Compiled(
    seconds,
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    tuple(hlo.warnings(text, caches, slots, gathers)),
    hlo.collectives(text, devices),
    counts.get('flops'),
    counts.get('bytes accessed'),
  )
