"""Jits one optimiser step; its state is sharded and donated."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from specdec_jax import fields, hosts, sharding, types
from specdec_jax import settings as settings_lib
from specdec_jax.train import data

Array = jax.Array
# loss(params, frozen, batch, key) -> (scalar, {name: scalar or vector}), all
# means over the tokens where batch['counted'], a boolean [B, T], is true.
Loss = Callable[[Any, Any, dict[str, Array], Array], tuple[Array, dict]]


@dataclasses.dataclass(frozen=True)
class Mesh(settings_lib.Mesh):
  """Devices along each axis, and where what is trained is stored."""

  # No device has all of what is trained, nor of its moments.
  fsdp: bool = fields.setting()

  def over(self, rows: Mapping[str, int]) -> jax.sharding.Mesh | None:
    """Makes the mesh that splits batches of these rows; see data.check_rows."""
    mesh = sharding.mesh_of(self.data, self.model, min(rows.values()))
    if self.fsdp and mesh is None:
      raise ValueError(
        'mesh.fsdp=True: the mesh is 1 x 1; give more devices, or fsdp=False'
      )
    data.check_rows(rows, mesh.shape['data'] if mesh else 1)
    return mesh


@dataclasses.dataclass(frozen=True)
class Optimiser(fields.Checked):
  """AdamW or Muon with warm-up, cosine decay and clipping by global norm."""

  learning_rate: float = fields.setting(above=0, help='the peak')
  warmup: int = fields.setting(low=0, help='steps, rising from 0')
  final: float = fields.setting(low=0, help='the last rate, over the peak')
  weight_decay: float = fields.setting(low=0)
  clip: float = fields.setting(above=0, help='the largest gradient norm')
  b1: float = fields.setting(low=0, below=1)
  b2: float = fields.setting(low=0, below=1)
  # Peak rate of the layers' matrices; 0: AdamW (Jordan et al. 2024,
  # https://kellerjordan.github.io/posts/muon).
  muon: float = fields.setting(low=0)
  accumulate: int = fields.setting(low=1, help='parts that a batch is read in')


class State(NamedTuple):
  """The training state; float32, whatever the dtype of the forward pass."""

  step: Array  # steps done
  params: types.Params
  moments: Any  # the optimiser's


def schedule(o: Optimiser, steps: int, peak: float) -> optax.Schedule:
  """Makes the learning rate by step: linear warm-up to peak, then a cosine."""
  rise, begin = min(o.warmup, steps - 1), 0.0 if o.warmup else peak
  end = o.final * peak
  return optax.warmup_cosine_decay_schedule(begin, peak, rise, steps, end)


def transform(o: Optimiser, steps: int) -> optax.GradientTransformation:
  """Makes the optax transformation; scales and biases do not decay."""
  adam = optax.adamw(
    schedule(o, steps, o.learning_rate),
    b1=o.b1,
    b2=o.b2,
    weight_decay=o.weight_decay,
    mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
  )
  if o.muon:
    # Muon gets no parameter that stacks several matrices.
    one = lambda x: optax.contrib.MuonDimensionNumbers()
    muon = optax.contrib.muon(
      schedule(o, steps, o.muon),
      weight_decay=o.weight_decay,
      muon_weight_dimension_numbers=lambda params: jax.tree.map(one, params),
    )
    adam = optax.partition({True: muon, False: adam}, _by_muon)
  return optax.chain(optax.clip_by_global_norm(o.clip), adam)


def _by_muon(params: types.Params):
  """Marks layers' matrices, but not embedding, head and positions."""
  tables = ('embed', 'head', 'positions', 'relative')
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.ndim == 2 and str(path[-1].key) not in tables, params
  )


def start(o: Optimiser, steps: int, params: types.Params) -> State:
  """Makes the first state; moments are sharded as their parameters. Arrays are
  committed to their devices, as a restored state's are: a resumed run compiles
  the same program."""
  state = State(jnp.int32(0), params, transform(o, steps).init(params))
  first = jax.tree.leaves(params)[0].sharding
  if not isinstance(first, jax.NamedSharding):
    return jax.device_put(state, first)
  whole = jax.NamedSharding(first.mesh, jax.sharding.PartitionSpec())

  def put(x):
    # The optimiser's step counts have no parameter, so no mesh: replicate them.
    laid = isinstance(x.sharding, jax.NamedSharding)
    return hosts.put(x, x.sharding if laid else whole)

  return jax.tree.map(put, state)


def make(o: Optimiser, steps: int, loss: Loss, seed: int, start: State):
  """Jits the step: (state, frozen, batch) -> (state, figures).

  The state is donated. Figures are 'loss', 'gradient_norm' before clipping,
  'parameter_norm' after the step, 'learning_rate' and the loss's own. Each
  step's key comes from the seed and the step's number.

  steps: in the whole run. start: a state with the returned one's sharding.
  """
  update = transform(o, steps)
  rate = schedule(o, steps, o.learning_rate)
  grad = jax.value_and_grad(loss, has_aux=True)
  if o.accumulate > 1:
    grad = functools.partial(_in_parts, grad, o.accumulate)

  def step(state: State, frozen, batch):
    key = jax.random.fold_in(jax.random.key(seed), state.step)
    (value, figures), gradient = grad(state.params, frozen, batch, key)
    change, moments = update.update(gradient, state.moments, state.params)
    params = optax.apply_updates(state.params, change)
    figures = figures | {
      'loss': value,
      'gradient_norm': optax.tree.norm(gradient),
      'parameter_norm': optax.tree.norm(params),
      'learning_rate': jnp.asarray(rate(state.step), jnp.float32),
    }
    return State(state.step + 1, params, moments), figures

  where = jax.tree.map(lambda x: x.sharding, start)
  return jax.jit(step, donate_argnums=0, out_shardings=(where, None))


def _in_parts(grad, parts: int, params, frozen, batch, key):
  """Accumulates loss and gradient over parts of a batch, each weighted by its
  counted tokens: every split gives the same mean."""
  rows = batch['counted'].shape[0]
  assert rows % parts == 0, (rows, parts)
  # Every parts-th row, so that each part has rows of every device.
  split = jax.tree.map(
    lambda x: jnp.swapaxes(x.reshape(rows // parts, parts, *x.shape[1:]), 0, 1),
    batch,
  )
  whole = jnp.maximum(jnp.sum(batch['counted']), 1)

  def body(total, part):
    i, some = part
    share = jnp.sum(some['counted']) / whole
    found = grad(params, frozen, some, jax.random.fold_in(key, i))
    return jax.tree.map(lambda a, b: a + b * share, total, found), None

  one = jax.tree.map(lambda x: x[0], split)
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    jax.eval_shape(grad, params, frozen, one, key),
  )
  return jax.lax.scan(body, zeros, (jnp.arange(parts), split))[0]
