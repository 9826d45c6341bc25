"""Computes how long passes take on a chip, at least, from arithmetic alone.

A pass reads its weights and caches once and does its products; the slower of
the two bounds it from below, and what the chips send each other comes on top.
Activations, logits, sampling and collectives' latency are left out.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import sharding
from specdec_jax.costs import cost
from specdec_jax.io.quantised import rounded
from specdec_jax.models import config as model_config
from specdec_jax.models import lm, work

# The drafts of a window that predictions try.
GAMMAS = range(1, 17)
# The nodes of a window that is a tree, and how many levels they may have.
NODES, LEVELS = (2, 4, 8, 16, 32), range(1, 9)


class Chip(NamedTuple):
  """A chip, by its maker's page (docs/tpu_report.md has the addresses)."""

  memory: float  # bytes
  bandwidth: float  # bytes a second that it reads of them
  peak: float  # dense bfloat16 operations a second
  # Bytes a second that it sends, on all links together; half of what pages call
  # bidirectional bandwidth.
  links: float
  devices: int = 1  # what a program sees of it, each with an equal part
  shapes: tuple[str, ...] = ()  # topologies of up to 64 chips
  kinds: tuple[str, ...] = ()  # as jax calls a device

  @property
  def device(self) -> 'Chip':
    """Returns the part that is one device."""
    memory, bandwidth, peak, links = (x / self.devices for x in self[:4])
    return Chip(memory, bandwidth, peak, links, 1, *self[5:])


_FLAT = '1x1', '2x2', '2x4', '4x4', '4x8', '8x8'
_CUBES = '2x2x1', '2x2x2', '2x2x4', '2x4x4', '4x4x4'
# Read on 2026-11-23.
TPUS = {
  'v5e': Chip(16e9, 819e9, 197e12, 200e9, 1, _FLAT,
              ('TPU v5 lite', 'TPU v5e')),
  'v5p': Chip(95 * 2**30, 2765e9, 459e12, 600e9, 1, _CUBES,
              ('TPU v5', 'TPU v5p')),
  'v6e': Chip(32e9, 1638e9, 918e12, 400e9, 1, _FLAT,
              ('TPU v6 lite', 'TPU v6e')),
  'tpu7x': Chip(192 * 2**30, 7380e9, 2307e12, 600e9, 2, _CUBES, ('TPU7x',)),
}  # fmt: skip
_HOST = '1', '2', '4', '8'
# Of SXM modules and NVLink; the RTX 4090's links are PCIe 4.0 x16. Sheets
# give peaks with sparsity too, twice these.
GPUS = {
  'h100': Chip(80e9, 3350e9, 989e12, 450e9, 1, _HOST,
               ('NVIDIA H100 80GB HBM3',)),
  'h200': Chip(141e9, 4800e9, 989e12, 450e9, 1, _HOST, ('NVIDIA H200',)),
  'a100': Chip(80e9, 2039e9, 312e12, 300e9, 1, _HOST,
               ('NVIDIA A100-SXM4-80GB',)),
  'rtx4090': Chip(24e9, 1008e9, 165.2e12, 32e9, 1, _HOST,
                  ('NVIDIA GeForce RTX 4090',)),
}  # fmt: skip
CHIPS = TPUS | GPUS


def called(kind: str) -> str:
  """Returns the name in CHIPS for what jax calls a device, or ''."""
  return next((name for name, x in CHIPS.items() if kind in x.kinds), '')


def topology(name: str) -> tuple[Chip, int]:
  """Returns (one device, their number) for a topology such as 'v5e:2x4'; raises
  ValueError for an unknown one."""
  kind, _, shape = name.partition(':')
  if kind not in CHIPS or shape not in CHIPS[kind].shapes:
    known = '; '.join(f'{k}:{", ".join(c.shapes)}' for k, c in CHIPS.items())
    raise ValueError(f'topology={name!r}: allowed are {known}')
  chip = CHIPS[kind]
  return chip.device, chip.devices * math.prod(map(int, shape.split('x')))


class Share(NamedTuple):
  """A model's share on one device, in bytes, and its work in a pass."""

  weights: float  # held
  read: float  # of them, by every pass
  products: float  # operations a token, in products with weights
  scores: float  # operations a token and slot of attention
  slot: float  # of keys and values, a row and slot
  source_scores: float  # the same for tokens of an encoder's source
  source_slot: float
  summed: float  # a token, of the sums over devices (all-reduces)
  split: int  # devices that the model is split over
  whole: tuple[str, ...]  # axes that it does not divide: every device has all


@functools.cache
def share(c: model_config.LMConfig, split: int = 1, kind: str = '') -> Share:
  """Computes a model's Share on one of `split` devices, by sharding's tables.
  kind: how its matrices are stored, of weights.INTEGERS; '': its dtype."""
  mesh: Any = jax.sharding.AbstractMesh((1, split), ('data', 'model'))
  layout = sharding.lay_out(mesh, c)
  size = jnp.dtype(c.activations).itemsize
  weights = read = products = 0
  at = lambda name, s: layout.parameter(name, len(s.shape))
  for name, s in rounded.shapes(lm.shapes(c), kind).items():
    own = lambda x, at: jax.ShapeDtypeStruct(at.shard_shape(x.shape), x.dtype)
    held = jax.tree.map(own, s, rounded.shardings(at(name, s), s))
    weights += work.tree_bytes(held)
    if not lm.every_pass(name):
      continue
    read += work.tree_bytes(held)
    if name.endswith(('kernel', 'head')):
      products += 2 * jax.tree.leaves(held)[0].size
  part = lambda axis: 1 if axis in layout.whole else split
  heads, kv_heads = c.heads // part('heads'), c.kv_heads // part('heads')
  # After attention, after each MLP, and of the embedding's rows.
  cross = c.encoder is not None
  sums = c.depth * (1 + cross) * (part('heads') > 1)
  sums += c.depth * (part('mlp') > 1) + (part('vocab') > 1)
  scores = 4 * c.depth * heads * c.head_dim
  return Share(
    weights,
    read,
    products,
    scores,
    2 * c.depth * kv_heads * c.head_dim * size,
    scores * cross,
    2 * c.depth * heads * c.head_dim * size * cross,
    sums * c.width * size,
    split,
    tuple(sorted(layout.whole)),
  )


class Pass(NamedTuple):
  """One pass on one device: bytes read, operations, bytes sent; seconds."""

  bytes: float
  operations: float
  sent: float
  seconds: float


def forward(
  device: Chip, s: Share, *, rows: int, tokens: int, slots: int, source: int = 0
) -> Pass:
  """Computes a device's pass over `tokens` tokens in each of `rows` rows, which
  reads all slots of the cache. source: tokens of a source."""
  cache = rows * (slots * s.slot + source * s.source_slot)
  scores = slots * s.scores + source * s.source_scores
  work = rows * tokens * (s.products + scores)
  # A ring sends each byte that is summed twice, but for a device's own part.
  sent = rows * tokens * s.summed * 2 * (s.split - 1) / s.split
  read = s.read + cache
  least = max(read / device.bandwidth, work / device.peak)
  return Pass(read, work, sent, least + sent / device.links)


class Prediction(NamedTuple):
  """A roofline estimate; times in plain steps. Gamma 0: none is above 1."""

  step: float  # seconds of a plain step
  c: float  # of a draft step, in which a tree drafts a level
  v: dict[int, float]  # of a target pass, by its width
  best: dict[float, tuple[int, float]]  # alpha: (gamma, improvement)
  trees: dict[float, tuple[float, int, int]]  # (improvement, nodes, levels)


def predict(
  device: Chip,
  target: Share,
  draft: Share,
  alphas: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9),
  **sizes,
) -> Prediction:
  """Predicts the improvement that speculation brings, by roofline; sizes: rows,
  slots and source, as for `forward`."""
  passes = {
    n: forward(device, target, tokens=n, **sizes).seconds
    for n in (1, *(g + 1 for g in (*GAMMAS, *NODES)))
  }
  step = passes[1]
  c = forward(device, draft, tokens=1, **sizes).seconds / step
  v = {n: x / step for n, x in passes.items()}
  best, trees = {}, {}
  for alpha in alphas:
    gains = {g: cost.improvement(alpha, g, c, v[g + 1]) for g in GAMMAS}
    best[alpha] = cost.best(gains), max(gains.values())
    trees[alpha] = max(
      (cost.tree_tokens(alpha, n, d) / (d * c + v[n + 1]), n, d)
      for n in NODES
      for d in LEVELS
    )
  return Prediction(step, c, v, best, trees)


class Room(NamedTuple):
  """The caches that fit into a device beside the weights."""

  fits: bool  # the batch and buffer asked for
  slots: int  # of the longest buffer at this batch
  rows: int  # of the largest batch at this buffer


def room(
  device: Chip,
  shares: tuple[Share, ...],
  *,
  rows: int,
  slots: int,
  source: int = 0,
  temporaries: float = 0,
) -> Room:
  """Computes one device's Room, beside bytes of temporaries, which are taken to
  grow with rows but not with buffers."""
  free = device.memory - sum(s.weights for s in shares)
  slot = sum(s.slot for s in shares)
  fixed = source * sum(s.source_slot for s in shares)
  row = slots * slot + fixed + temporaries / rows
  longest = ((free - temporaries) / rows - fixed) / slot
  return Room(
    rows * row <= free, max(0, int(longest)), max(0, int(free // row))
  )
