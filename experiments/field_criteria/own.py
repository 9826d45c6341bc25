"""The certificate's promises, short: what fails fails in it too.

Amounts are small and every promise that can runs on the programs that the other
criteria have compiled. In order of cost; the first that fails decides.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from scipy import stats

from experiments.field_criteria import samples
from specdec_jax import build
from specdec_jax.eval import certificate, pairs, table_model
from specdec_jax.eval.promises import base, rows

ALPHA = 1e-9


def chance(counts_V, law) -> float:
  """p-value of Pearson's test; cells expecting under 10 are pooled."""
  seen, law = np.ravel(counts_V), np.ravel(law)
  expected = law * seen.sum()
  if seen[expected == 0].any():
    return 0.0
  small = expected < 10
  pool = lambda x: np.append(x[~small], x[small].sum())
  seen, expected = pool(seen), pool(expected)
  if expected[-1] < 10:
    seen[-2:] = seen[-2:].sum(), 0
    expected[-2:] = expected[-2:].sum(), 0
    seen, expected = seen[:-1], expected[:-1]
  score = ((seen - expected) ** 2 / expected).sum()
  return float(stats.chi2.sf(score, len(seen) - 1))


def follows(counts_V, law) -> bool:
  """The certificate's test of counts."""
  return chance(counts_V, law) > ALPHA


def _promise(name: str, subject: base.Subject, amount: int) -> None:
  named = {promise.name: promise for promise in certificate.PROMISES}
  named[name].check(subject, amount)


def check(tell: Callable[[str], None]) -> str:
  """'' if every promise holds, else which one fails; tells where it is."""
  for promise in (
    greedy_identity,
    self_draft,
    accounting,
    invariance,
    joint_law,
    kernel_law,
    window_law,
    coupled_identity,
    coupled_texts,
  ):
    tell(promise.__name__)
    try:
      with jax.enable_x64(False):
        promise()
    except Exception as error:
      return f'{promise.__name__}: {error or type(error).__name__}'[:200]
  return ''


def greedy_identity() -> None:
  plain = samples.greedy_texts('none')
  for draft in ('random', 'same'):
    _equal(samples.greedy_texts(draft), plain, f'{draft} draft')


def _equal(got, wanted, what: str) -> None:
  if got != wanted:
    raise base.Broken(f'{what}: the texts differ')


def self_draft() -> None:
  for temperature in (0.0, 0.8):
    info = samples.transformer_run('same', temperature).info
    if (info.tried_BK != info.accepted_BK).any():
      raise base.Broken('drafts of the target itself are refused')


_SUBJECT = base.Subject(build.RULES, build.RECIPES)
_REJECT = _SUBJECT._replace(rules={'reject': build.RULES['reject']})


def _table() -> base.World:
  return samples.world_of(
    [table_model.table(i, samples.V, hashes=samples.HASHES) for i in (0, 1)]
  )


def _mixed(world: base.World, order, new=8):
  """Requests of every kind, in an order: seeds, lengths and settings theirs."""
  prompts = base.ragged_prompts(samples.ROWS, samples.V, 0, longest=5)
  return samples.request_of(
    world,
    np.minimum(1 + order % 8, new),
    [prompts[i] for i in order],
    temperature=[0.9 * (i % 3 > 0) for i in order],
    top_p=[0.9 if i % 2 else 1.0 for i in order],
    seed=[int(i) for i in order],
    request=list(order),
  )


def accounting() -> None:
  world = _table()
  order = np.arange(samples.ROWS)
  request = _mixed(world, order)
  request = request._replace(stop_BX=np.full_like(request.stop_BX, 4))
  # Calls it private, but it is the certificate's own check.
  rows._check_counts(samples.run(world, request), request)


def invariance() -> None:
  world = _table()
  straight = np.arange(samples.ROWS)
  wanted = base.texts(samples.run(world, _mixed(world, straight)))
  order = np.random.default_rng(0).permutation(samples.ROWS)
  mixed = base.texts(samples.run(world, _mixed(world, order)))
  _equal([mixed[i] for i in np.argsort(order)], wanted, 'another order')
  short = base.texts(samples.run(world, _mixed(world, straight, new=3)))
  cut = [x[: len(y)] for x, y in zip(wanted, short, strict=True)]
  _equal(short, cut, 'fewer new tokens')


def joint_law() -> None:
  """Five tokens, two windows and more: production keys, production loop."""
  world, new, amount = _table(), 5, 2**17
  target = np.asarray(world.weights.target)
  warm: dict[str, Any] = dict(temperature=0.9, top_p=0.95)
  # At temperature 1 the law is a softmax; else the code's own (as in certify).
  plain: dict[str, Any] = dict(temperature=1.0)
  for settings, law in (
    (plain, samples.softmax(target.astype(np.float64))),
    (warm, table_model.warped(target, **warm)),
  ):
    said = samples.tokens(world, amount, new, **settings)
    wanted = table_model.joint_law(pairs.normal(law), [1], new)
    flat = np.ravel_multi_index(said.T, wanted.shape)
    seen = np.bincount(flat, minlength=wanted.size).reshape(wanted.shape)
    for m in range(1, new + 1):
      rest = tuple(range(m, new))
      if not chance(seen.sum(rest), wanted.sum(rest)) > ALPHA / (2 * new):
        raise base.Broken(f'first {m} tokens, {settings}')


def kernel_law() -> None:
  _promise('kernel-law', _SUBJECT, 2**19)


def window_law() -> None:
  _promise('window-law', _REJECT, 100)


def coupled_identity() -> None:
  _promise('coupled-identity', _SUBJECT, 60)


def coupled_texts() -> None:
  """A coupled rule says what it says when nothing is proposed."""
  world = _table()
  request = samples.request_of(world, 8, temperature=0.8)
  request = request._replace(
    request_B=np.arange(samples.ROWS, dtype=request.request_B.dtype)
  )
  got = base.texts(samples.run(world, request, 'coupled'))
  # The same noise, another draft: the texts may not depend on it.
  other = world._replace(
    weights=world.weights._replace(draft=world.weights.target)
  )
  _equal(base.texts(samples.run(other, request, 'coupled')), got, 'coupled')
