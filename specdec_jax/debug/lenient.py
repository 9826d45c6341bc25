"""Functions whose deliberate accesses out of bounds checkify does not see."""

from collections.abc import Callable

import jax
import jax.extend.core as jex
from jax.interpreters import mlir

_MODE = jax.lax.GatherScatterMode

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


def _rewritten(x):
  if isinstance(x, jex.ClosedJaxpr):
    return x.replace(jaxpr=_rewritten(x.jaxpr))
  if type(x) is tuple:
    return tuple(map(_rewritten, x))
  if not isinstance(x, jex.Jaxpr):
    return x

  def one(eqn):
    name, mode = eqn.primitive.name, eqn.params.get('mode')
    clips = mode == _MODE.CLIP
    drops = name.startswith('scatter') and mode == _MODE.FILL_OR_DROP
    # Of an empty gather checkify would report the first index.
    empty = name == 'gather' and 0 in eqn.invars[1].aval.shape
    if clips or drops or empty:
      params = dict(eqn.params, of=eqn.primitive)
      return eqn.replace(primitive=_meant_p, params=params)
    return eqn.replace(
      params={key: _rewritten(value) for key, value in eqn.params.items()}
    )

  return x.replace(eqns=[one(eqn) for eqn in x.eqns])
