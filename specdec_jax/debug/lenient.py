"""Functions whose deliberate accesses out of bounds checkify does not see."""

import pathlib
from collections.abc import Callable

import jax
import jax.extend.core as jex
from jax.interpreters import mlir

_MODE = jax.lax.GatherScatterMode
_JAX = str(pathlib.Path(jax.__file__).parent)

# checkify takes every index out of bounds for an error, whatever the mode. This
# primitive stands for those that are meant; it looks inside none.
_meant_p = jex.Primitive('meant')
_bound = lambda *args, of, **params: of.bind(*args, **params)
_meant_p.def_impl(_bound)
_meant_p.def_effectful_abstract_eval(
  lambda *avals, of, **params: of.abstract_eval(*avals, **params)
)
mlir.register_lowering(_meant_p, mlir.lower_fun(_bound, multiple_results=False))


def wrap(f: Callable) -> Callable:
  """f, with scatters and clipped gathers out of checkify's sight."""

  def wrapped(*args):
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    out = jex.jaxpr_as_fun(_rewritten(closed))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), out)

  return wrapped


def _rewritten(x, caller=None):
  """A jaxpr (or a parameter that may hold some) with the meant ones marked.

  caller: the source of the equation that calls it. JAX's own jitted functions
  do not know theirs, so their equations take it.
  """
  # From jax 0.11 on a jaxpr is its own closed one.
  if isinstance(x, jex.ClosedJaxpr) and x.jaxpr is not x:
    return x.replace(jaxpr=_rewritten(x.jaxpr, caller))
  if type(x) is tuple:
    return tuple(_rewritten(one, caller) for one in x)
  if not isinstance(x, jex.Jaxpr):
    return x

  def one(eqn):
    source = eqn.source_info
    if caller is not None and not _placed(source):
      source = caller
    name, mode = eqn.primitive.name, eqn.params.get('mode')
    clips = mode == _MODE.CLIP
    drops = name.startswith('scatter') and mode == _MODE.FILL_OR_DROP
    # Of an empty gather checkify would report the first index.
    empty = name == 'gather' and 0 in eqn.invars[1].aval.shape
    if clips or drops or empty:
      params = dict(eqn.params, of=eqn.primitive)
      return eqn.replace(primitive=_meant_p, params=params)
    items = eqn.params.items()
    params = {key: _rewritten(value, source) for key, value in items}
    return eqn.replace(params=params, source_info=source)

  return x.replace(eqns=[one(eqn) for eqn in x.eqns])


def _placed(source) -> bool:
  """Whether a source names a line outside of JAX."""
  lines = str(source.traceback).splitlines()
  return any(not line.startswith(_JAX) for line in lines)
