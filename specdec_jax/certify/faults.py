"""Known faults, which certify.py --inject-fault plants so that it must fail."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import decode, pool, sampling, types
from specdec_jax.certify import base, load
from specdec_jax.verify import chain, reject


class Fault(NamedTuple):
  """A fault, and where it is planted: in one of the last five.

  text: what is wrong.
  promise: the name of one that sees it.
  verify: in the rule; gets the right one, and its arguments.
  draft: (draft, context, noise) -> Draft, of what the drafter proposed.
  drafts: noise -> the noise that the drafter gets.
  model: in the draft model's apply, as verify.
  loop: (module, name of a function, the wrong one, as verify).
  """

  text: str
  promise: str
  verify: Callable[..., types.Verdict] | None = None
  draft: Callable[..., types.Draft] | None = None
  drafts: Callable[..., types.Noise] | None = None
  model: Callable[..., Any] | None = None
  loop: tuple[Any, str, Callable[..., Any]] | None = None


# --- in the rule --------------------------------------------------------------


def _wrong_residual(right, noise, draft, p_BNV):
  verdict = right(noise, draft, p_BNV)
  return verdict._replace(weights_BV=chain.row(p_BNV, verdict.accepted_B))


def _one_more(right, noise, draft, p_BNV):
  verdict = right(noise, draft, p_BNV)
  more_B = jnp.minimum(verdict.accepted_B + 1, draft.count_B)
  return verdict._replace(accepted_B=more_B)


def _bonus_row(right, noise, draft, p_BNV):
  verdict = right(noise, draft, p_BNV)
  all_B = (verdict.accepted_B == draft.count_B) & (draft.count_B > 0)
  before_BV = chain.row(p_BNV, jnp.maximum(verdict.accepted_B - 1, 0))
  weights_BV = jnp.where(all_B[:, None], before_BV, verdict.weights_BV)
  return verdict._replace(weights_BV=weights_BV)


# --- in the drafter -----------------------------------------------------------


def _stale_q(draft, context, noise):
  return draft._replace(q_BKV=jnp.roll(draft.q_BKV, 1, 1))


def flat(draft, wrong_BKV):
  """The draft with a flat q where it is to be wrong."""
  q_BKV = jnp.where(wrong_BKV, 1 / draft.q_BKV.shape[-1], draft.q_BKV)
  return draft._replace(q_BKV=q_BKV)


def _flat_q(draft, context, noise):
  return flat(draft, (jnp.arange(draft.q_BKV.shape[1]) >= 3)[None, :, None])


def _late_q(draft, context, noise):
  return flat(draft, (context.lengths_B >= 16)[:, None, None])


def _cut(draft, context, noise):
  likely_BK = chain.pick(draft.q_BKV, draft.tokens_BK) >= 0.3
  count_B = jnp.minimum(draft.count_B, chain.prefix(likely_BK))
  return draft._replace(count_B=count_B)


def _neighbour(draft, context, noise):
  count_B = 1 + jnp.roll(context.lengths_B, 1) % draft.tokens_BK.shape[1]
  return draft._replace(count_B=jnp.minimum(draft.count_B, count_B))


def _reused_noise(noise):
  next_of = lambda offset, q_BV: noise.next(
    jnp.full(len(q_BV), offset, jnp.int32), q_BV
  )
  return types.Noise(None, next_of, noise.next)


def _hole(right, params, tokens_BT, slots_BT, *rest, **named):
  # A window begins with the last two tokens: see drafters.lm.
  if tokens_BT.shape[1] == 2:
    slots_BT = slots_BT.at[:, 0].set(jnp.iinfo(jnp.int32).max)
  return right(params, tokens_BT, slots_BT, *rest, **named)


# --- in the loop --------------------------------------------------------------


def _one_key(right, seed_B, request_B, index_B):
  return right(seed_B, request_B, jnp.zeros_like(index_B))


def _past_stops(right, loop, request, *rest):
  none_BX = jnp.full_like(request.stop_BX, -1)
  return right(loop, request._replace(stop_BX=none_BX), *rest)


def _kept_stops(right, held, began, where_B):
  request, *rest = right(held, began, where_B)
  return request._replace(stop_BX=held[0].stop_BX), *rest


FAULTS: dict[str, Fault] = {
  'wrong-residual': Fault(
    'after a rejection the next token is drawn from p, not from max(p - q, 0)',
    'window-distribution', verify=_wrong_residual),
  'one-more': Fault(
    'the rule accepts one draft more than pass its tests',
    'window-distribution', verify=_one_more),
  'bonus-row': Fault(
    'after full acceptance the next token is drawn from the row before',
    'window-distribution', verify=_bonus_row),
  'stale-q': Fault(
    'the drafter reports the q of the step before',
    'windows-enumerated', draft=_stale_q),
  'flat-q': Fault(
    'the drafter reports a flat q from the fourth draft on',
    'long-rows', draft=_flat_q),
  'late-q': Fault(
    'the drafter reports a flat q once a row has 16 tokens',
    'long-rows', draft=_late_q),
  'cut': Fault(
    'a window ends before the first draft that was unlikely',
    'windows-enumerated', draft=_cut),
  'neighbour': Fault(
    'how many drafts are proposed depends on another row of the batch',
    'invariance', draft=_neighbour),
  'reused-noise': Fault(
    'drafts are drawn with the noise of the token that is emitted',
    'windows-enumerated', drafts=_reused_noise),
  'cache-hole': Fault(
    'the draft does not read the token before the last',
    'greedy-identity', model=_hole),
  'one-key': Fault(
    'every emitted token of a request is drawn with the same noise',
    'joint-distribution-tables', loop=(sampling, 'next_keys', _one_key)),
  'past-stops': Fault(
    'a text goes on after its stop id',
    'accounting', loop=(decode, '_commit', _past_stops)),
  'kept-stops': Fault(
    'a row that is refilled ends at the stop ids of the request before',
    'pool', loop=(pool, '_put', _kept_stops)),
}  # fmt: skip


@contextlib.contextmanager
def subject(name: str, *paths: str, seed: int = 0) -> Iterator[base.Subject]:
  """load.subject of the paths; or `reject` with `lm`, with a fault by its name.

  The loop has the fault while this is entered.

  Raises:
    ValueError: no such fault, and the message lists them; a fault and a path;
      see load.subject.
  """
  if not name:
    yield load.subject(*paths, seed=seed)
    return
  if name not in FAULTS:
    every = '; '.join(f'{x} ({fault.text})' for x, fault in FAULTS.items())
    raise ValueError(f'inject-fault={name!r}: the faults are {every}')
  if any(paths):
    raise ValueError(
      f'inject-fault={name}: it is planted in reject with lm; give no other '
      'rule, drafter or model'
    )
  fault = FAULTS[name]
  wrong = lambda part: part._replace(name=f'{part.name} ({name})')
  rule, recipe = reject.RULE, load.RECIPES['lm']
  if fault.verify:
    verify = functools.partial(fault.verify, rule.verify)
    rule = wrong(rule)._replace(verify=verify, certain=False)
  if fault.draft or fault.drafts or fault.model:
    recipe = _recipe(fault, recipe, wrong)
  with _patched(*fault.loop) if fault.loop else contextlib.nullcontext():
    yield base.Subject((rule,), {'lm': recipe}, seed)


@contextlib.contextmanager
def _patched(module, name: str, wrong):
  """Replaces a function that is looked up while programs are traced."""
  right = getattr(module, name)
  jax.clear_caches()
  setattr(module, name, functools.partial(wrong, right))
  try:
    yield
  finally:
    setattr(module, name, right)
    jax.clear_caches()


def _recipe(fault: Fault, recipe: base.Recipe, wrong) -> base.Recipe:
  """The recipe of drafters with the fault."""

  @functools.cache  # an equal drafter would compile again
  def change(drafter: types.Drafter) -> types.Drafter:
    def propose(weights, state, context, noise, target_cache):
      own = fault.drafts(noise) if fault.drafts else noise
      draft, *rest = drafter.propose(weights, state, context, own, target_cache)
      if fault.draft and draft.q_BKV is not None:
        draft = fault.draft(draft, context, noise)
      return draft, *rest

    return wrong(drafter)._replace(propose=propose)

  def planted(world: base.World, gamma: int):
    if fault.model:
      world = world._replace(draft=_misread(fault.model, world.draft))
    drafter, weights = recipe(world, gamma)
    return change(drafter), weights

  return planted


@functools.cache
def _misread(wrong, model: types.Model) -> types.Model:
  return model._replace(apply=functools.partial(wrong, model.apply))
