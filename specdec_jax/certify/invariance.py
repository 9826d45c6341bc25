"""Promises about requests: independence of others, and exact counts."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from specdec_jax import (
  decode,
  metrics,
  pool,
  requests,
  sampling,
  sharding,
  types,
)
from specdec_jax.certify import base

NEW, GAMMA, VOCAB = 16, 5, 16
QUICK = 36  # requests
# Sizes that eight devices divide, and a scale at which texts differ.
SIZES: dict[str, Any] = dict(
  width=16, heads=8, kv_heads=8, head_dim=4, mlp=32, depth=1, scale=1.5
)


def invariance(subject: base.Subject, amount: int) -> base.Figure:
  """Compares a request's tokens across batches, orders and devices.

  Every rule with the first drafter; coupled text is plain decoding's, too.
  """
  tried, devices = 0, '1 device'
  prompts = base.ragged_prompts(amount, VOCAB, subject.seed, base.LONGEST)
  cases = list(enumerate(prompts, subject.seed))
  with jax.enable_x64(True):
    world = subject.transformers(VOCAB, **SIZES)
    for i, rule in enumerate(subject.apart()):
      pair = subject.pair(world, GAMMA, rule)
      what, run = str(pair), functools.partial(_texts, world, pair)
      wanted = run(cases)
      # Buffers are the loop's and the drafter's: one rule shows them.
      alone = i == 0 or amount > QUICK
      tried += _arrangements(run, cases, wanted, what, alone)
      if rule.coupled:
        plain = _texts(world, base.PLAIN, cases)
        tried += base.same_texts(wanted, plain, f'{what}: not plain decoding')
      # A user's model is not split: its axes are unknown.
      if i == 0 and subject.model is None and len(jax.devices()) >= 8:
        mesh, devices = sharding.make_mesh(4, 2), '1 and 8 devices'
        place = functools.partial(requests.place, layout=sharding.Layout(mesh))
        split = subject.transformers(VOCAB, mesh=mesh, **SIZES)
        own = subject.pair(split, GAMMA)
        got = _texts(split, own, cases, place=place)
        tried += base.same_texts(got, wanted, f'{what}, on 4 x 2 devices')
  names = ', '.join(f'{x.name} {pair.drafter.name}' for x in subject.apart())
  alone = 'each' if amount > QUICK else subject.rules[0].name
  size = f'{names}: batch 8, order, prefix; {alone} alone, padded; on {devices}'
  return base.none_of(tried, 'texts differ', amount, 'requests', size)


def _texts(
  world: base.World,
  pair: base.Pair,
  cases,
  *,
  rows: int = 8,
  pad: int = 0,
  new: int = NEW,
  place=lambda request: request,
) -> list[list[int]]:
  """Decodes requests in batches and returns their texts.

  cases: each request's (number, prompt); the number is its seed too. pad: room
  in the buffers beyond what is needed. place: puts a batch on the devices.
  """
  out, gamma = [], pair.drafter.gamma
  for start in range(0, len(cases), rows):
    numbers, prompts = zip(*cases[start : start + rows], strict=True)
    request = base.make_request(
      world,
      prompts,
      new,
      length=requests.bucket(base.LONGEST + NEW + gamma) + pad,
      sources=16 + pad,
      rows=rows,
      gamma=gamma,
      # One request in three is greedy, to mix both kinds in a batch.
      temperature=[0.9 * (n % 3 > 0) for n in numbers],
      top_p=[0.9 if n % 2 else 1.0 for n in numbers],
      drafts=[n % 5 if n % 4 == 1 else gamma for n in numbers],
      seed=numbers,
      request=numbers,
    )
    output = base.run(world, pair, place(request))
    out += base.texts(output)[: len(prompts)]
  return out


def _arrangements(run, cases, wanted, what: str, alone: bool) -> int:
  """Compares texts reordered, cut and, if alone, each in a longer buffer."""
  order = np.random.default_rng(0).permutation(len(cases))
  mixed = run([cases[i] for i in order])
  back = [mixed[i] for i in np.argsort(order)]
  cut = [x[: len(p) + 5] for x, (_, p) in zip(wanted, cases, strict=True)]
  tried = base.same_texts(back, wanted, f'{what}, another order')
  tried += base.same_texts(run(cases, new=5), cut, f'{what}, max_new_tokens 5')
  if alone:
    by_itself = run(cases, rows=1, pad=32)
    tried += base.same_texts(by_itself, wanted, f'{what}, batch 1, padded')
  return tried


# --- rows that are refilled ---------------------------------------------------

ROWS = 4  # of a pool
FEW = 2  # of a window, where no more have requests
WIDE = 9  # of a pool that reads two prompts together
QUICK_POOL = 20  # requests
# Drafters whose drafts leave keys of their own there, until they are verified.
IN_THE_TARGETS_CACHE = 'early_exit', 'self'
NARROW = dataclasses.replace(base.OPTIONS, widths=())  # one body to compile


def pooled(subject: base.Subject, amount: int) -> base.Figure:
  """Compares a request's tokens across a pool's rows and times.

  They do not depend on the neighbours, of which some are cancelled, nor on
  which prompts are read together, nor on how many rows are decoded, nor on what
  a row has that a prompt begins with. Windows are capped, see base.ragged, so
  rows have read more and less. Every drafter and every rule, on tables and some
  of them on transformers, in full all on both.
  """
  found, full, names = np.zeros(2, int), amount > QUICK_POOL, []
  with jax.enable_x64(True):
    worlds = {'transformer': subject.transformers(VOCAB, **SIZES)}
    if subject.model is None:
      worlds['tables'] = subject.tables(VOCAB)
    for i, (rule, name) in enumerate(subject.pairs()):
      # Transformers are slow to compile.
      big = i == 0 or name in IN_THE_TARGETS_CACHE
      for kind in worlds if full else [[*worlds][0 if big else -1]]:
        pair = subject.pair(worlds[kind], GAMMA, rule, name)
        names.append(f'{rule.name} {pair.drafter.name} ({kind})')
        pair = pair._replace(drafter=base.ragged(pair.drafter))
        with base.naming(f'{pair}, {kind}, in a pool'):
          # A batch is a program more: one pair shows that texts are the same.
          case = worlds[kind], pair, amount, subject.seed
          found += _same_in_a_pool(*case, batch=full or i == 0)
  tried, cached = found.tolist()
  size = (
    f'{WIDE} rows, two read at a time; {ROWS} rows, {FEW} where that will do, '
    f'refilled and cancelled in mid-flight, {cached:,} tokens of prompts not '
    f'read again: {", ".join(names)}'
  )
  return base.none_of(tried, 'texts differ', amount, 'requests', size)


def _same_in_a_pool(
  world, pair: base.Pair, amount: int, seed: int, *, batch: bool
) -> tuple[int, int]:
  """Compares texts with those of requests alone in the pool.

  Every fourth prompt goes on after the answer before. Returns how many texts
  were compared, and the prompts' tokens that a row had already.

  batch: compare with one batch of all, too.
  """
  prompts = base.ragged_prompts(amount, VOCAB, seed, base.LONGEST)
  items = [
    item._replace(
      new=1 + 5 * i % NEW,
      sampling=sampling.Sampling(
        temperature=0.9 * (i % 3 > 0),
        top_p=0.9 if i % 2 else 1.0,
        seed=seed + i,
      ),
      stop_ids=[i % VOCAB] * (i % 2),
      drafts=i % 3 if i % 5 == 4 else pair.drafter.gamma,
    )
    for i, item in enumerate(
      base.items(world, prompts, range(seed, seed + amount))
    )
  ]
  loop = decode.Loop(world.target, pair.drafter, pair.rule, NARROW)
  weights, gamma = world.with_draft(pair), pair.drafter.gamma
  length = 2 * (base.LONGEST + NEW) + gamma
  sizes: dict[str, Any] = dict(length=length, sources=16, stops=1)
  held, alone, tried = pool.Pool(loop, weights, rows=WIDE, **sizes), [], 0
  for i in range(amount):
    if i % 4 == 3:
      items[i] = items[i]._replace(tokens=(*alone[i - 1], *items[i].tokens))
    ((_, one),) = held.answers(collections.deque([(i, items[i])]))
    base.check_finite(one.info)
    alone.append(one.tokens)
  order = np.random.default_rng(seed).permutation(amount).tolist()
  waiting = collections.deque((i, items[i]) for i in order)
  found = dict(held.answers(waiting))
  got = [found[i].tokens for i in range(amount)]
  tried += base.same_texts(got, alone, 'two read together: not as alone')
  if batch:
    request = requests.make(items, gamma=gamma, **sizes)
    out = decode.programs(*loop[:4]).generate(weights, request)
    tried += base.same_texts(alone, base.texts(out), 'not as in a batch')
  sizes |= dict(rows=(FEW, ROWS), prefix_caching=True)
  held = pool.Pool(loop, weights, **sizes)
  found = _in_flight(held, items, np.random.default_rng(seed))
  got = [found[i].tokens for i in range(amount)]
  tried += base.same_texts(got, alone, 'not as alone')
  if world.target.encode is None and not held.cached_tokens:
    raise base.Broken('no prompt went on in a row that had its beginning')
  return tried, held.cached_tokens


def _in_flight(held: pool.Pool, items, rng) -> dict[int, requests.Ended]:
  """Answers requests in any order; rows wait, begin again, or go on at once."""
  first = [i for i in range(len(items)) if i % 4 != 3]
  waiting = collections.deque(rng.permutation(first).tolist())
  running, found = set(), {}
  while waiting or held.busy:
    while waiting and held.free and rng.random() < 0.8:
      running.add(i := waiting.popleft())
      held.begin([i], [items[i]], int(rng.integers(3)))
    ended = held.advance(int(rng.integers(1, 4)))
    done = [i for i in ended if rng.random() < 0.8]
    found |= zip(done, held.take(done), strict=True)
    waiting.extendleft(i + 1 for i in done if i + 1 in range(3, len(items), 4))
    running -= {*ended}
    if running and rng.random() < 0.2:
      held.cancel([i := running.pop()])
      waiting.append(i)
  return found


# --- accounting ---------------------------------------------------------------

GAMMAS = (3, 8, 4)  # in turns


def accounting(subject: base.Subject, amount: int) -> base.Figure:
  """Checks that all counters agree on the number of emitted tokens."""
  rows, vocab, done = 500, 5, 0
  world = subject.tables(vocab)
  each = -(-amount // len(subject.pairs()) // rows) * rows
  for i, (rule, name) in enumerate(subject.pairs()):
    pair = subject.pair(world, GAMMAS[i % len(GAMMAS)], rule, name)
    gamma = pair.drafter.gamma
    for start in range(0, each, rows):
      numbers = np.arange(rows) + start
      request = base.make_request(
        world,
        base.ragged_prompts(rows, vocab, subject.seed + start, base.LONGEST),
        1 + numbers % 17,
        length=base.LONGEST + 18 + gamma,
        gamma=gamma,
        temperature=0.9,
        seed=subject.seed,
        request=numbers,
        stop_ids=[vocab - 1],
      )
      with base.naming(f'{rule.name} with {pair.drafter.name}'):
        _check_counts(base.run(world, pair, request), request)
      done += rows
  size = f'gamma {min(GAMMAS)} to {max(GAMMAS)}, EOS and limits inside windows'
  return base.none_of(done, 'requests miscounted', each, 'requests', size)


def _check_counts(out: decode.Output, request: decode.Request) -> None:
  """Compares the counts of every request of a batch."""
  info = out.info
  emitted_B = out.lengths_B - request.lengths_B
  origins = lambda *which: np.isin(info.origin_BL, which).sum(1)
  offsets = np.arange(info.hist_BN.shape[1])
  others_B = origins(types.RECOVERED, types.BONUS, types.PLAIN)
  drafted_B = origins(types.DRAFTED)
  equal = {
    'origins': (drafted_B + others_B, emitted_B),
    'windows': ((info.window_BL >= 0).sum(1), emitted_B),
    'accepted': (info.accepted_BK.sum(1), drafted_B),
    'histogram': ((info.hist_BN * offsets).sum(1), drafted_B),
    'target calls': (info.hist_BN.sum(1), info.calls_B),
    'ends': (_ends_well(out, request), True),
  }
  for name, (one_B, two_B) in equal.items():
    wrong_B = one_B != two_B
    if wrong_B.any():
      b = int(wrong_B.argmax())
      raise base.Broken(
        f'the {name} of request {b} do not add up: prompt of '
        f'{request.lengths_B[b]}, limit {request.limit_B[b]}, tokens '
        f'{out.tokens_BL[b, : out.lengths_B[b]].tolist()}'
      )
  total = metrics.summary(info).emitted_tokens
  if total != emitted_B.sum():
    raise base.Broken(f'metrics count {total} of {emitted_B.sum()}')


def _ends_well(out: decode.Output, request: decode.Request) -> np.ndarray:
  """Tells whether texts end at their first stop id or, without one, limit."""
  at_1L = np.arange(out.tokens_BL.shape[1])[None]
  start_B1, end_B1 = request.lengths_B[:, None], out.lengths_B[:, None]
  stops_BL = (out.tokens_BL == request.stop_BX[:, :1]) & (at_1L >= start_B1)
  early_B = (stops_BL & (at_1L < end_B1 - 1)).any(1)
  stopped_B = (stops_BL & (at_1L == end_B1 - 1)).any(1)
  return ~early_B & (stopped_B | (out.lengths_B == request.limit_B))
