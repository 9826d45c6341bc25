"""Promises about tokens: what speculation says is what plain decoding says."""

import collections
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax import decode, types, windows
from specdec_jax.drafters import scripted
from specdec_jax.eval import audit
from specdec_jax.eval.promises import base

GAMMAS = (1, 2, 3, 4, 8)
BATCHES = (1, 3, 8, 32)
NEW = 40
# Longest prompt, new tokens, and a window of the largest gamma.
LENGTH = 6 + NEW + max(GAMMAS) + 2
SCRIPTED = 'scripted'


class Program(NamedTuple):
  """One level of every factor: what is compiled together."""

  rule: str
  drafter: str
  gamma: int
  batch: int
  world: str


def cover(factors: list[tuple]) -> list[tuple]:
  """Few combinations in which every pair of levels meets (greedy choice)."""
  combos = list(itertools.product(*factors))
  pairs_of = lambda combo: set(itertools.combinations(enumerate(combo), 2))
  left = set().union(*map(pairs_of, combos))
  out = []
  while left:
    best = max(combos, key=lambda combo: len(pairs_of(combo) & left))
    out.append(best)
    left -= pairs_of(best)
  return out


def greedy_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Greedy text in float64 and on tables, whatever drafts it."""
  programs = _programs(subject)
  tokens, kinds = 0, collections.Counter()
  with jax.enable_x64(True):
    worlds = dict(transformer=base.transformers(13), table=base.tables(13))
    trained = {name: _trained(world) for name, world in worlds.items()}
    for turn in itertools.count():
      plain = {
        name: _plain(world, subject.seed, turn)
        for name, world in worlds.items()
      }
      for program in programs:
        world = worlds[program.world]
        request, text = plain[program.world]
        request, text = _first(request, program.batch), text[: program.batch]
        for kind, drafter, other in _drafts(
          subject, world, program, text, trained[program.world], turn
        ):
          rule = subject.rules[program.rule]
          out = base.run(world, drafter, rule, other, request)
          _same(base.texts(out), text, f'{program}, {kind} draft', request)
          tokens += NEW * program.batch
          kinds[kind] += 1
      if tokens >= amount:
        break
  return base.Figure(
    f'0 of {tokens:,} tokens differ (95 %: under {3 / tokens:.1e})',
    '0',
    f'{len(programs)} programs; drafts {", ".join(kinds)}',
  )


def _programs(subject: base.Subject) -> list[Program]:
  """A pairwise cover; transformers, slow to compile, in a few that have all."""
  combos = cover(
    [
      tuple(rule.name for rule in subject.lossless()),
      (*subject.drafters, SCRIPTED),
      GAMMAS,
      BATCHES,
    ]
  )
  left, out = {x for combo in combos for x in enumerate(combo)}, []
  for combo in combos:
    mine = set(enumerate(combo))
    # Worth it if it brings two levels that no transformer had.
    new = len(mine & left) >= 2 or combo is combos[-1]
    left -= mine if new else set()
    out.append(Program(*combo, world='transformer' if new else 'table'))
  return out


def _plain(world: base.World, seed: int, turn: int, rows: int = max(BATCHES)):
  prompts = base.ragged_prompts(rows, world.vocab, 1000 * seed + turn)
  request = base.make_request(world, prompts, NEW, length=LENGTH)
  out = base.run(world, decode.PLAIN, _ANY_RULE, (), request)
  return request, base.texts(out)


# Plain decoding never asks its rule anything but for p itself.
_ANY_RULE = types.Rule(
  'plain',
  lambda noise, draft, p_BNV: types.Verdict(
    jnp.zeros_like(draft.count_B), p_BNV[:, 0]
  ),
)


def _first(request: decode.Request, rows: int) -> decode.Request:
  return jax.tree.map(lambda x: x[:rows], request)


def _drafts(subject, world, program, text, trained, turn):
  """(kind, drafter, weights.draft) of everything a program can draft with."""
  if program.drafter == SCRIPTED:
    drafter = scripted.make(gamma=program.gamma)
    right = np.zeros((program.batch, LENGTH), np.int32)
    for row, tokens in zip(right, text, strict=True):
      row[: len(tokens)] = tokens
    counts = np.full_like(right, program.gamma)
    rng = np.random.default_rng([turn, program.gamma])
    noisy = np.where(rng.random(right.shape) < 0.3, 1, right)
    some = rng.integers(0, 9, right.shape).astype(np.int32)
    yield 'adversarial', drafter, ((right + 1) % world.vocab, counts)
    yield 'partly right', drafter, (noisy.astype(np.int32), some)
    return
  recipe = subject.drafters[program.drafter]
  drafter, other = recipe(world, program.gamma)
  if other is not world.weights.draft:
    yield program.drafter, drafter, other
    return
  yield 'random', drafter, other
  yield 'identical', drafter, world.weights.target
  yield 'trained', drafter, trained


def _same(got, wanted, what: str, request) -> None:
  for b, (one, two) in enumerate(zip(got, wanted, strict=True)):
    if one != two:
      at = next(
        (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
        min(len(one), len(two)),
      )
      raise base.Broken(
        f'{what}: row {b}, prompt {two[: request.lengths_B[b]]}, token {at}: '
        f'{one[at : at + 1]} instead of {two[at : at + 1]}'
      )


def _trained(world: base.World):
  """The draft, fitted for a moment to the target's laws on random text."""
  rng = np.random.default_rng(5)
  tokens_BL = jnp.asarray(rng.integers(0, world.vocab, (32, 16)), jnp.int32)
  start_B = jnp.zeros(32, jnp.int32)

  def logits(model, params):
    hidden, _, _ = windows.read(
      model, params, tokens_BL, start_B, model.init_cache(32, 16), slots=16
    )
    return model.head(params, hidden)

  p = jax.nn.softmax(logits(world.target, world.weights.target))

  def loss(params):
    return -jnp.mean(
      jnp.sum(p * jax.nn.log_softmax(logits(world.draft, params)), -1)
    )

  optimiser = optax.adam(3e-2)

  @jax.jit
  def fit(params):
    def one(carry, _):
      params, state = carry
      value, slope = jax.value_and_grad(loss)(params)
      change, state = optimiser.update(slope, state, params)
      return (optax.apply_updates(params, change), state), value

    carry = (params, optimiser.init(params))
    (params, _), values = jax.lax.scan(one, carry, length=150)
    return params, values

  params, values = fit(jax.tree.map(jnp.asarray, world.weights.draft))
  if not values[-1] < values[0]:
    raise base.Broken('the draft could not be trained: nothing was certified')
  return jax.device_get(params)


# --- float32 and bfloat16 -----------------------------------------------------


def audited_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Greedy and coupled text in float32 and bfloat16: ties, and nothing else."""
  gamma, rows, rates = 4, 1, []
  for dtype in ('float32', 'bfloat16'):
    world = base.transformers(
      512, scale=1.5, width=64, heads=4, kv_heads=2, mlp=128, dtype=dtype
    )
    weights = types.Weights(world.weights.target, _blurred(world))
    world = world._replace(weights=weights)
    for rule in subject.lossless():
      for temperature in (0.0, 0.8) if rule.coupled else (0.0,):
        name, recipe = next(iter(subject.drafters.items()))
        drafter, other = recipe(world, gamma)
        tokens, ties = 0, 0
        for turn in itertools.count():
          settings: dict[str, Any] = dict(
            temperature=temperature, seed=subject.seed
          )
          prompts = base.ragged_prompts(rows, 512, 1000 * subject.seed + turn)
          request = base.make_request(
            world, prompts, NEW, length=LENGTH, **settings
          )
          arms = [
            base.texts(base.run(world, d, r, o, request))
            for d, r, o in (
              (decode.PLAIN, _ANY_RULE, ()),
              (drafter, rule, other),
            )
          ]
          for b, (plain, mine) in enumerate(zip(*arms, strict=True)):
            start = int(request.lengths_B[b])
            case = audit.Case(
              plain[:start], plain[start:], mine[start:], request=b, **settings
            )
            ties += _tie(world, case, gamma, rows, dtype, rule.name)
          tokens += NEW * rows
          if tokens >= amount:
            break
        warm = f' T={temperature}' if temperature else ''
        rates.append(f'{dtype} {rule.name}{warm} {1000 * ties / tokens:.2g}')
  return base.Figure(
    '0 unexplained; ties in 1,000 tokens: ' + ', '.join(rates),
    '0',
    f'{tokens:,} tokens each, {name}, gamma {gamma}, batch {rows}',
  )


def _tie(world, case, gamma, rows, dtype, rule: str) -> bool:
  found = audit.audit(
    world.target,
    world.weights.target,
    case,
    gamma=gamma,
    chunk=base.OPTIONS.chunk,
    length=LENGTH,
    rows=rows,
    relative_limit=audit.NOISE_LIMIT if dtype == 'float32' else None,
  )
  if found.verdict == 'BUG':
    raise base.Broken(f'{dtype}, {rule}, prompt {case.prompt}: {found}')
  return found.verdict == 'tie'


def _blurred(world: base.World) -> Any:
  """The target with a little noise on every weight: a draft that is good."""
  rng = np.random.default_rng(3)
  return jax.tree.map(
    lambda x: (
      x + (0.05 * np.std(x.astype(np.float32)) * rng.normal(size=x.shape))
    ).astype(x.dtype),
    jax.device_get(world.weights.target),
  )


# --- draft = target -----------------------------------------------------------


def self_draft(subject: base.Subject, amount: int) -> base.Figure:
  """A draft that is the target has everything accepted, at every offset."""
  gammas, drafts = range(1, 9), 0
  with jax.enable_x64(True):
    worlds = [base.tables(13), base.transformers(13)]
    worlds = [w._replace(weights=_twice(w.weights.target)) for w in worlds]
    for name, recipe in subject.drafters.items():
      for gamma in gammas:
        # Transformers, slow to compile, at three of them.
        world = worlds[gamma in (1, 4, 8)]
        drafter, other = recipe(world, gamma)
        if other is not world.weights.draft:
          break  # it has no model
        done = 0
        while done < amount / len(gammas):
          done += _all_accepted(subject, world, name, drafter, done)
        drafts += done
  if not drafts:
    return base.Figure('nothing to check', '100 %', 'no drafter has a model')
  return base.Figure(
    f'100 % of {drafts:,} accepted', '100 %', 'float64, gamma 1 to 8, T=0, 0.8'
  )


def _twice(params) -> types.Weights:
  return types.Weights(params, params)


def _all_accepted(subject, world, name, drafter, seed: int, rows=64) -> int:
  """How many drafts were tried, greedily and sampled; none may be refused."""
  rule, tried = subject.lossless()[0], 0
  for temperature in (0.0, 0.8):
    request = base.make_request(
      world,
      base.ragged_prompts(rows, world.vocab, subject.seed + seed),
      72,
      length=96,
      temperature=temperature,
      top_p=0.9,
      seed=subject.seed,
      request=np.arange(rows) + seed,
    )
    info = base.run(world, drafter, rule, world.weights.draft, request).info
    lost_K = (info.tried_BK - info.accepted_BK).sum(0)
    if lost_K.any():
      raise base.Broken(
        f'{name}, {rule.name}, gamma {drafter.gamma}, T={temperature}: of the '
        f"target's own drafts refused at each offset: {lost_K.tolist()}"
      )
    tried += int(info.tried_BK.sum())
  return tried
