"""The measured memory bandwidth, which bounds the speed of decoding.

One autoregressive step reads every weight once, so weight bytes over bandwidth
bound its time from below. Bandwidth is measured, not taken from a data sheet.
"""

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import hosts, machine
from specdec_jax.kernels import calls, pages

# K of x_1K @ w_KN; N fills the bytes. Some shapes stream slower than others.
_ROWS = (1536, 4096, 8192)
# Far beyond any last-level cache, some of which hold more than 100 MB.
_BYTES = {'cpu': 2**28, 'other': 2**30}


class Ceiling(NamedTuple):
  """Memory bandwidth, and the speed that it allows.

  gb_s: by dtype, see bandwidth; before anything else ran.
  devices: devices that read at once.
  tok_s: upper bound on plain decoding, from the bytes that it reads at the
    sustained bandwidth; once the judged prompts have run, at `between`.
  between: GB/s of the fastest read between two judged prompts, the median.
  """

  gb_s: dict[str, dict[str, float]]
  devices: int
  tok_s: float
  between: float | None = None

  def beside(self, dtype: str, gb_s: Sequence[float]) -> 'Ceiling':
    """The ceiling by reads of this dtype made while the prompts were run."""
    between = statistics.median(gb_s)
    tok_s = self.tok_s * between / self.gb_s[dtype]['sustained']
    return self._replace(tok_s=tok_s, between=between)


def reads(
  dtype: str, *, packed: bool = False, small: bool = False
) -> dict[str, machine.Read]:
  """Programs that read 256 MB on CPU, else 1 GB: x_1K @ w_KN, and a sum.

  packed: also by the CPU kernels, which read faster than XLA.
  small: arrays that fit into a cache, for a smoke test; no bound.
  """
  kind = 'cpu' if jax.default_backend() == 'cpu' else 'other'
  size = (2**20 if small else _BYTES[kind]) // jnp.dtype(dtype).itemsize
  filled = lambda *shape: pages.enlarge(machine.filled(shape, dtype))
  out = {}
  for K in _ROWS[:1] if small else _ROWS:
    N = size // K // 128 * 128
    x_1K, w_KN = jnp.ones((1, K), dtype), filled(K, N)
    out[f'matvec {K}x{N}'] = functools.partial(
      machine.read, machine.matvec, x_1K, w_KN
    )
  if packed:
    x_1K = jnp.ones((1, _ROWS[0]))
    panels = filled(size // x_1K.size // calls.WIDE, x_1K.size, calls.WIDE)
    out['kernel'] = functools.partial(machine.read, _kernel, x_1K, panels)
  out['sum'] = functools.partial(machine.read, _sum, filled(size))
  return out


def bandwidth(programs: Mapping[str, machine.Read]) -> dict[str, float]:
  """Gigabytes a second of one device, by program, and the most of them.

  Returns GB/s of each: medians over calls; with their largest as 'sustained'
  and the best single call as 'best'.
  """
  found = {name: machine.repeated(read) for name, read in programs.items()}
  sustained = {name: statistics.median(x) for name, x in found.items()}
  best = max(map(max, found.values()))
  return sustained | {'sustained': max(sustained.values()), 'best': best}


def kept(programs: Mapping[str, machine.Read], found: Mapping[str, float]):
  """The reads to repeat later: all on CPU, else the fastest, for their memory.

  found: of bandwidth.
  """
  fastest = max(programs, key=found.__getitem__)
  cpu = jax.default_backend() == 'cpu'
  return [x for name, x in programs.items() if cpu or name == fastest]


def reading(blocks: Iterable, reads: Sequence[machine.Read], gb_s: list[float]):
  """The blocks; before each the GB/s of the fastest read joins the list.

  The memory of a shared machine is not as fast a minute later.
  """
  fastest = lambda: max(read() for read in reads)
  for block in blocks:
    gb_s.append(hosts.from_first(fastest))
    yield block


@jax.jit
def _kernel(x_1K, panels):
  return calls.linear(x_1K, panels, len(panels) * calls.WIDE)


@jax.jit
def _sum(x):
  return jnp.sum(x, dtype=jnp.promote_types(x.dtype, jnp.float32))
