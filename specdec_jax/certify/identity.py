"""Promises about tokens: what speculation says is what plain decoding says."""

import collections
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax import decode, forward, types
from specdec_jax.bench import audit
from specdec_jax.certify import base
from specdec_jax.drafters import scripted

# In the quick tier a script alone drafts 3: five drafters with five gammas are
# more programs than it has time for.
GAMMAS = (1, 2, 4, 8)
EVERY_GAMMA = (1, 2, 3, 4, 8)
QUICK = 20_000
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
  left, out = set().union(*map(pairs_of, combos)), []
  while left:
    best = max(combos, key=lambda combo: len(pairs_of(combo) & left))
    out.append(best)
    left -= pairs_of(best)
  return out


def greedy_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Greedy text in float64 and on tables, whatever drafts it."""
  tokens, kinds = 0, collections.Counter()
  with jax.enable_x64(True):
    worlds = dict(transformer=subject.transformers(13), table=base.tables(13))
    trained = {name: _trained(world) for name, world in worlds.items()}
    made = {
      x: _drafts(subject, worlds[x.world], x, trained[x.world])
      for x in programs(subject, GAMMAS if amount <= QUICK else EVERY_GAMMA)
    }
    for turn in itertools.count():
      plain = {
        name: _plain(world, subject.seed, turn)
        for name, world in worlds.items()
      }
      for program, (drafter, drafts) in made.items():
        world, rule = worlds[program.world], subject.rules[program.rule]
        request, text = plain[program.world]
        request, text = _first(request, program.batch), text[: program.batch]
        drafts = drafts or _scripts(world, program, text, turn)
        for kind, other in drafts.items():
          out = base.run(world, drafter, rule, other, request)
          _same(base.texts(out), text, f'{program}, {kind} draft', request)
          tokens += NEW * program.batch
          kinds[kind] += 1
      if tokens >= amount:
        break
  return base.Figure(
    base.none_of(tokens, 'tokens differ'),
    '0',
    f'{len(made)} programs; drafts {", ".join(kinds)}',
  )


def programs(subject: base.Subject, gammas=GAMMAS) -> list[Program]:
  """A pairwise cover, and a script under every rule.

  Transformers, slow to compile, once for each rule and each drafter.
  """
  rules = tuple(rule.name for rule in subject.lossless())
  drafters = tuple(subject.drafters)
  covered = cover([rules, drafters, gammas, BATCHES])
  shapes = itertools.cycle([(8, 8), (3, 3), (2, 32)])
  scripts: list[tuple] = [(x, SCRIPTED, *next(shapes)) for x in rules]
  big: list[tuple] = [scripts[0]]
  for rule, drafter in subject.pairs():
    pair = rule.name, drafter
    # Of the programs of this pair the one that adds most.
    new = lambda x: sum(x[i] not in {b[i] for b in big} for i in (2, 3))
    big.append(max((x for x in covered if x[:2] == pair), key=new))
  return [
    Program(*x, world='transformer' if x in big else 'table')
    for x in sorted([*covered, *scripts], key=lambda x: x not in big)
  ]


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


def _drafts(
  subject, world, program: Program, trained
) -> tuple[types.Drafter, dict[str, Any]]:
  """A program's drafter, and the weights.draft of every kind of draft.

  Made once: an equal drafter would compile again. A script has no weights yet.
  """
  if program.drafter == SCRIPTED:
    return scripted.make(gamma=program.gamma), {}
  drafter, other = subject.drafters[program.drafter](world, program.gamma)
  if other is not world.weights.draft:
    return drafter, {program.drafter: other}
  target = world.weights.target
  return drafter, dict(random=other, identical=target, trained=trained)


def _scripts(world, program: Program, text, turn: int) -> dict[str, Any]:
  """Drafts that are wrong everywhere, or here and there."""
  right = np.zeros((program.batch, LENGTH), np.int32)
  for row, tokens in zip(right, text, strict=True):
    row[: len(tokens)] = tokens
  counts = np.full_like(right, program.gamma)
  rng = np.random.default_rng([turn, program.gamma])
  noisy = np.where(rng.random(right.shape) < 0.3, 1, right)
  some = rng.integers(0, 9, right.shape).astype(np.int32)
  return {
    'adversarial': ((right + 1) % world.vocab, counts),
    'partly right': (noisy.astype(np.int32), some),
  }


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
    hidden, _, _ = forward.read(
      model, params, tokens_BL, start_B, model.init_cache(32, 16), slots=16
    )
    return model.head(params, hidden)

  p = jax.nn.softmax(logits(world.target, world.weights.target))

  def loss(params):
    log_q = jax.nn.log_softmax(logits(world.draft, params))
    # Ids that are padding have p = 0 and log q = -inf.
    return -jnp.mean(jnp.sum(p * jnp.where(p > 0, log_q, 0), -1))

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
  gamma, rates, total = 4, [], 0
  first, *others = subject.drafters
  for dtype in ('float32', 'bfloat16'):
    world = subject.transformers(
      512, scale=1.5, width=64, heads=4, kv_heads=2, mlp=128, dtype=dtype
    )
    weights = types.Weights(world.weights.target, _blurred(world))
    world = world._replace(weights=weights)
    rules = subject.lossless()
    arms = [(rules[0], first, 0.0, amount)]
    arms += [(rule, first, 0.8, amount) for rule in rules if rule.coupled]
    if dtype == 'float32':
      arms += [(rule, first, 0.0, amount // 4) for rule in rules[1:]]
      arms += [(rules[0], name, 0.0, amount // 4) for name in others]
    for rule, name, temperature, each in arms:
      recipe = subject.drafters[name]
      arm = Arm(world, rule, *recipe(world, gamma), temperature, dtype)
      tokens, ties = _audited(subject.seed, arm, each)
      warm = f' T={temperature}' if temperature else ''
      rates.append(
        f'{dtype} {rule.name} {name}{warm} {1000 * ties / tokens:.2g}'
      )
      total += tokens
  return base.Figure(
    f'{base.none_of(total, "tokens")} unexplained; ties in 1,000 tokens: '
    + ', '.join(rates),
    '0',
    f'{amount:,} tokens each, a quarter with other rules and drafters; batch 1',
  )


class Arm(NamedTuple):
  """What is audited against plain decoding."""

  world: base.World
  rule: types.Rule
  drafter: types.Drafter
  draft_weights: Any
  temperature: float
  dtype: str


def _audited(seed: int, arm: Arm, amount: int) -> tuple[int, int]:
  """(tokens compared, ties), one request after the other."""
  tokens, ties, turn = 0, 0, 0
  while tokens < amount:
    (prompt,) = base.ragged_prompts(1, 512, 1000 * seed + turn)
    prompt = (prompt * 3)[: 1 + turn % 6]
    settings: dict[str, Any] = dict(temperature=arm.temperature, seed=seed)
    request = base.make_request(
      arm.world, [prompt], NEW, length=LENGTH, request=[turn], **settings
    )
    (plain,), (mine,) = (
      base.texts(base.run(arm.world, drafter, rule, weights, request))
      for drafter, rule, weights in (
        (decode.PLAIN, _ANY_RULE, ()),
        (arm.drafter, arm.rule, arm.draft_weights),
      )
    )
    start = len(prompt)
    case = audit.Case(
      prompt, plain[start:], mine[start:], request=turn, **settings
    )
    found = audit.audit(
      arm.world.target,
      arm.world.weights.target,
      case,
      gamma=arm.drafter.gamma,
      chunk=base.OPTIONS.chunk,
      length=LENGTH,
      relative_limit=audit.NOISE_LIMIT if arm.dtype == 'float32' else None,
    )
    if found.verdict == 'BUG':
      raise base.Broken(
        f'{arm.dtype}, {arm.rule.name}, {arm.drafter.name}, prompt {prompt}: '
        f'{found}'
      )
    # Nothing is compared after a first divergence.
    tokens += NEW if found.position is None else found.position + 1
    ties += found.verdict == 'tie'
    turn += 1
  return tokens, ties


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
  gammas, tried, kept = range(1, 9), 0, 0
  with jax.enable_x64(True):
    worlds = [base.tables(13), subject.transformers(13)]
    worlds = [w._replace(weights=_twice(w.weights.target)) for w in worlds]
    for name, recipe in subject.drafters.items():
      for gamma in gammas:
        # Transformers, slow to compile, at three of them.
        world = worlds[gamma in (1, 4, 8)]
        drafter, other = recipe(world, gamma)
        if other is not world.weights.draft:
          break  # it has no model
        start = tried
        for turn in itertools.count():
          tried_K, kept_K = _accepted(subject, world, drafter, turn)
          tried, kept = tried + int(tried_K.sum()), kept + int(kept_K.sum())
          if (tried_K != kept_K).any() and subject.judges_acceptance():
            raise base.Broken(
              f"{name}, gamma {gamma}: of the target's own drafts refused at "
              f'each offset: {(tried_K - kept_K).tolist()}'
            )
          if tried - start >= amount / len(gammas) or not tried_K.any():
            break
  if not tried:
    raise base.NotChecked('no drafter here has a model')
  # A lossless rule or drafter of one's own need not accept everything.
  return base.Figure(
    f'{tried - kept} of {tried:,} refused',
    '0' if subject.judges_acceptance() else 'reported only',
    'float64, gamma 1 to 8, T=0 and 0.8',
  )


def _twice(params) -> types.Weights:
  return types.Weights(params, params)


def _accepted(subject, world, drafter, turn: int, rows: int = 64):
  """Drafts tried and accepted at each offset, greedy and sampled."""
  infos = []
  for temperature in (0.0, 0.8):
    request = base.make_request(
      world,
      base.ragged_prompts(rows, world.vocab, 1000 * subject.seed + turn),
      72,
      length=96,
      temperature=temperature,
      top_p=0.9,
      seed=subject.seed,
      request=np.arange(rows) + rows * turn,
    )
    rule = subject.lossless()[0]
    out = base.run(world, drafter, rule, world.weights.draft, request)
    infos.append(out.info)
  total = lambda name: np.sum([getattr(x, name) for x in infos], axis=(0, 1))
  return total('tried_BK'), total('accepted_BK')
