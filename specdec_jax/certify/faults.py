"""Known faults, which certify.py --inject-fault plants so that it must fail."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import decode, pool, sampling, types
from specdec_jax.certify import base, load
from specdec_jax.drafters import branch, lm
from specdec_jax.verify import chain, reject


class Fault(NamedTuple):
  """A function that is wrong; text says how, promise names one that sees it.

  where: its owner, and its name there. wrong: gets the right one first.
  """

  text: str
  promise: str
  where: tuple[Any, str]
  wrong: Callable[..., Any]


def _wrong_residual(right, noise, draft, p_BNV):
  verdict = right(noise, draft, p_BNV)
  return verdict._replace(weights_BV=chain.row(p_BNV, verdict.accepted_B))


def _of_draft(change):
  """Makes Fault.wrong for branch.draft. change: (draft, context) -> Draft."""

  def wrong(right, context, *rest, **how):
    draft, cache = right(context, *rest, **how)
    return draft if draft.q_BKV is None else change(draft, context), cache

  return wrong


def stale_q(draft, context):
  return draft._replace(q_BKV=jnp.roll(draft.q_BKV, 1, 1))


def flat_q(draft, context):
  q_BKV, K = draft.q_BKV, draft.q_BKV.shape[1]
  later_1K1 = (jnp.arange(K) >= 3)[None, :, None]
  return draft._replace(q_BKV=jnp.where(later_1K1, 1 / q_BKV.shape[-1], q_BKV))


def cut(draft, context):
  likely_BK = chain.pick(draft.q_BKV, draft.tokens_BK) >= 0.3
  count_B = jnp.minimum(draft.count_B, chain.prefix(likely_BK))
  return draft._replace(count_B=count_B)


def _neighbour(draft, context):
  count_B = 1 + jnp.roll(context.lengths_B, 1) % draft.tokens_BK.shape[1]
  return draft._replace(count_B=jnp.minimum(draft.count_B, count_B))


def _reused_noise(right, noise, *rest):
  next_of = lambda offset, q_BV: noise.next(
    jnp.full(len(q_BV), offset, jnp.int32), q_BV
  )
  return right(types.Noise(None, next_of, noise.next), *rest)


def _hole(right, context, start_B, size):
  tokens_BT, index_BT = right(context, start_B, size)
  # A window begins with the last two tokens.
  if size == 2:
    tokens_BT = jnp.repeat(tokens_BT[:, 1:], 2, 1)
  return tokens_BT, index_BT


def _one_key(right, seed_B, request_B, index_B):
  return right(seed_B, request_B, jnp.zeros_like(index_B))


def _past_stops(right, loop, request, *rest):
  none_BX = jnp.full_like(request.stop_BX, -1)
  return right(loop, request._replace(stop_BX=none_BX), *rest)


def _kept_stops(right, held, began, where_B):
  request, *rest = right(held, began, where_B)
  return request._replace(stop_BX=held[0].stop_BX), *rest


DRAFT = branch, 'draft'
FAULTS: dict[str, Fault] = {
  'wrong-residual': Fault(
    'after a rejection the next token is drawn from p, not from max(p - q, 0)',
    'window-distribution', (reject, 'verify'), _wrong_residual),
  'stale-q': Fault(
    'the drafter reports the q of the step before',
    'windows-enumerated', DRAFT, _of_draft(stale_q)),
  'flat-q': Fault(
    'the drafter reports a flat q from the fourth draft on',
    'long-rows', DRAFT, _of_draft(flat_q)),
  'cut': Fault(
    'a window ends before the first draft that was unlikely',
    'windows-enumerated', DRAFT, _of_draft(cut)),
  'neighbour': Fault(
    'how many drafts are proposed depends on another row of the batch',
    'invariance', DRAFT, _of_draft(_neighbour)),
  'reused-noise': Fault(
    'drafts are drawn with the noise of the token that is emitted',
    'windows-enumerated', (branch, 'draw'), _reused_noise),
  'cache-hole': Fault(
    'the draft does not read the token before the last',
    'greedy-identity', (lm, 'span'), _hole),
  'one-key': Fault(
    'every emitted token of a request is drawn with the same noise',
    'joint-distribution-tables', (sampling, 'next_keys'), _one_key),
  'past-stops': Fault(
    'a text goes on after its stop id',
    'accounting', (decode, '_commit'), _past_stops),
  'kept-stops': Fault(
    'a row that is refilled ends at the stop ids of the request before',
    'pool', (pool, '_put'), _kept_stops),
}  # fmt: skip


@contextlib.contextmanager
def subject(name: str, *paths: str, seed: int = 0) -> Iterator[base.Subject]:
  """Loads a subject, or `reject` with `lm` and this fault, while it is entered.

  Raises ValueError for no such fault (the message lists them), a fault and a
  path, or as load.subject does.
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
  # That of the module now, right or wrong.
  verify = lambda *args: reject.verify(*args)
  rule = reject.RULE._replace(
    name=f'reject ({name})', verify=verify, certain=False
  )
  with _planted(FAULTS[name]):
    yield base.Subject((rule,), {'lm': load.RECIPES['lm']}, seed)


@contextlib.contextmanager
def _planted(fault: Fault) -> Iterator[None]:
  """Replaces a function that is looked up while programs are traced."""
  module, name = fault.where
  right = getattr(module, name)
  jax.clear_caches()
  setattr(module, name, lambda *args, **more: fault.wrong(right, *args, **more))
  try:
    yield
  finally:
    setattr(module, name, right)
    jax.clear_caches()
