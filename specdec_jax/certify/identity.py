"""Promises that speculation emits the tokens of plain decoding."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import program as program_lib
from specdec_jax import sampling, types
from specdec_jax.bench import audit, records
from specdec_jax.certify import base
from specdec_jax.costs import scripted
from specdec_jax.kernels import library, quantised
from specdec_jax.models import convert, lm, weights

GAMMAS = (1, 2, 3, 4, 8)
BATCHES = (8, 3, 32, 1)
NEW = 40
# Buffer: longest prompt, new tokens, and a window of the largest gamma.
LENGTH = base.LONGEST + NEW + max(GAMMAS) + 2
SCRIPTED, SCRIPTS = 'scripted', ('adversarial', 'partly right')
QUICK = 10_000


class Program(NamedTuple):
  """A rule and a drafter, and the shapes to compile them for."""

  rule: types.Rule
  drafter: str
  gamma: int
  batch: int
  world: str


def programs(subject: base.Subject, *, full: bool) -> list[Program]:
  """Lists every rule with every drafter, and with scripted drafts.

  Gammas and batch sizes alternate; the full tier has every gamma. Transformers,
  slow to compile, run only subject.pairs(); table models run the others.
  """
  shapes = itertools.cycle(zip(GAMMAS * 4, BATCHES * 5, strict=True))
  out = []
  for rule in subject.rules:
    for name in [*subject.drafters, SCRIPTED]:
      if not (rule.trees if name == base.TREE else rule in subject.apart()):
        continue
      big = (rule, name) in subject.pairs()
      world = 'transformer' if big else 'table'
      for _ in GAMMAS if full else [0]:
        out.append(Program(rule, name, *next(shapes), world))
  return out


def greedy_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Compares greedy text, in float64 and on tables, with plain decoding's.

  Where the draft is the target itself, all drafts must be accepted, greedy and
  sampled; a user's rule or drafter may accept fewer.
  """
  own = np.zeros(2, np.int64)  # the target's own drafts: tried, accepted
  with jax.enable_x64(True):
    transformers, tables = subject.transformers(13), subject.tables(13)
    worlds = dict(transformer=transformers, table=tables)
    made: list[tuple[Program, types.Drafter, str, Any]] = [
      (program, *draft)
      for program in programs(subject, full=amount > QUICK)
      for draft in _drafts(subject, worlds[program.world], program)
    ]
    each = NEW * sum(program.batch for program, *_ in made)
    turns = range(-(-amount // each))
    plain = {}
    for (name, world), turn in itertools.product(worlds.items(), turns):
      request = _request(world, subject, turn, max(BATCHES))
      plain[name, turn] = request, base.plain(world, request)
    # A program's turns together: of so many programs few stay compiled.
    for (program, drafter, kind, other), turn in itertools.product(made, turns):
      world, (request, text) = worlds[program.world], plain[program.world, turn]
      request = base.take(request, slice(program.batch))
      text = text[: program.batch]
      if program.drafter == SCRIPTED:
        other = _script(world, program.gamma, text, turn, kind)
      pair = base.Pair(program.rule, drafter, other)
      what = f'{pair}, batch {program.batch}, {program.world}'
      got = base.texts(base.run(world, pair, request))
      base.same_texts(got, text, f'{what}, {kind} draft')
      if kind == 'identical':
        own += _accepted(subject, world, pair, request, what)
  kinds = dict.fromkeys(kind for *_, kind, _ in made)
  accepted = f"; {own[1]:,} of the target's own {own[0]:,} drafts accepted"
  return base.none_of(
    each * len(turns),
    'tokens differ',
    _positions((x.world, x.batch) for x, *_ in made) * len(turns),
    'positions',
    f'{len({x[:2] for x in made})} programs; drafts {", ".join(kinds)}',
    accepted if own[0] else '',
  )


def _positions(runs) -> int:
  """Counts the tokens that any (world, batch) of a turn compared."""
  widest: dict[str, int] = {}
  for world, batch in runs:
    widest[world] = max(batch, widest.get(world, 0))
  return NEW * sum(widest.values())


def _request(world: base.World, subject: base.Subject, turn: int, rows: int):
  """Makes a batch of random prompts, others in every turn."""
  seed = 1000 * subject.seed + turn
  prompts = base.ragged_prompts(rows, world.vocab, seed, base.LONGEST)
  return base.make_request(world, prompts, NEW, length=LENGTH)


def _drafts(
  subject: base.Subject, world: base.World, program: Program
) -> list[tuple[types.Drafter, str, Any]]:
  """Lists a program's drafts: (drafter, kind of draft, weights.draft).

  Built once: an equal drafter would compile again. Scripts get weights later.
  """
  if program.drafter == SCRIPTED:
    drafter = scripted.make(gamma=program.gamma)
    return [(drafter, kind, ()) for kind in SCRIPTS]
  recipe = subject.drafters[program.drafter]
  drafter, other = recipe(world, program.gamma)
  if other is not world.weights.draft:
    return [(drafter, program.drafter, other)]
  # The draft may be of another shape than the target.
  same, _ = recipe(world._replace(draft=world.target), program.gamma)
  target = world.weights.target
  good = (same, 'identical', target), (same, 'good', base.blurred(target))
  return [(drafter, 'random', other), *good]


def _script(world, gamma: int, text, turn: int, kind: str):
  """Scripts drafts that are wrong everywhere, or at random offsets."""
  right = np.zeros((len(text), LENGTH), np.int32)
  for row, tokens in zip(right, text, strict=True):
    row[: len(tokens)] = tokens
  if kind == 'adversarial':
    return (right + 1) % world.vocab, np.full_like(right, gamma)
  rng = np.random.default_rng([turn, gamma])
  noisy = np.where(rng.random(right.shape) < 0.3, 1, right)
  some = rng.integers(0, 9, right.shape)
  return noisy.astype(np.int32), some.astype(np.int32)


def _accepted(subject, world, pair: base.Pair, request, what: str):
  """Counts [tried, accepted] where target and draft are the same model.

  A user's rule or drafter may reject some: that is slow, not wrong.
  """
  out = np.zeros(2, np.int64)
  for temperature in (0.0, 0.8):
    warm = np.full_like(request.sampling.top_p_B, temperature)
    top_p = np.full_like(warm, 0.9)
    sampling = request.sampling._replace(temperature_B=warm, top_p_B=top_p)
    info = base.run(world, pair, request._replace(sampling=sampling)).info
    tried_K, accepted_K = info.tried_BK.sum(0), info.accepted_BK.sum(0)
    out += [tried_K.sum(), accepted_K.sum()]
    judged = not {'rule', 'drafter'} & set(subject.supplied)
    if judged and (tried_K != accepted_K).any():
      raise base.Broken(
        f"{what}, T={temperature}: the target's own drafts are refused, at "
        f'each offset {(tried_K - accepted_K).tolist()}'
      )
  return out


# --- float32 and bfloat16 -----------------------------------------------------


def audited_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Audits greedy and coupled text, float32 and bfloat16: only ties differ."""
  compared, rates = 0, []
  for dtype in ('float32', 'bfloat16'):
    for arm, tokens, ties in audited(subject, dtype, amount):
      compared += tokens
      rates.append(f'{arm} {1000 * ties / tokens:.2g}')
  return base.none_of(
    compared,
    'tokens unexplained',
    compared,
    'positions',
    f'{amount:,} tokens each, batch 1, gamma 4',
    f'; ties in 1,000 tokens: {", ".join(rates)}',
  )


def audited(subject: base.Subject, dtype: str, amount: int):
  """Audits greedy and coupled text: yields (arm, tokens compared, ties)."""
  world = subject.transformers(
    512, scale=1.5, width=64, heads=4, kv_heads=2, mlp=128, dtype=dtype
  )
  target = world.weights.target
  near = types.Weights(target, base.blurred(target))
  world = world._replace(draft=world.target, weights=near)
  name = next(iter(subject.drafters))
  arms = [(x, 0.8) for x in subject.rules if x.coupled]
  for rule, temperature in [(subject.rules[0], 0.0), *arms]:
    pair = subject.pair(world, 4, rule)
    arm = f'{dtype} {rule.name} {name} T={temperature:g}'
    draws: dict[str, Any] = dict(temperature=temperature, seed=subject.seed)
    sampled = sampling.Sampling(**draws)
    ran = sampled, pair.drafter.gamma, base.OPTIONS.chunk, LENGTH
    tokens, ties = 0, 0
    for turn in itertools.count():
      seed = 1000 * subject.seed + turn
      (prompt,) = base.ragged_prompts(1, world.vocab, seed)
      prompt = (prompt * 3)[: 1 + turn % 6]
      (item,) = base.items(world, [prompt], [turn])
      request = base.request_of([item], NEW, length=LENGTH, **draws)
      both = base.plain(world, request)
      both += base.texts(base.run(world, pair, request))
      both = [records.Answer(item, x[len(prompt) :]) for x in both]
      found = audit.compare(world.target, target, [both], audit.Passes(*ran))
      if found.bugs:
        raise base.Broken(f'{arm}, prompt {prompt}: {found.findings[0]}')
      tokens, ties = tokens + found.tokens, ties + found.ties
      if tokens >= amount:
        break
    yield arm, tokens, ties


# --- on the CPU kernels -------------------------------------------------------


KERNEL_GAMMAS, KERNEL_BATCHES = (4, 1, 8, 2), (1, 3, 8)
# Of each way to store scales one kind: the others take a minute to compile.
FEW_KINDS = ('Q4_1', 'Q6_K', 'U8_128')


def kernel_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Compares greedy text on CPU kernels with plain decoding's; no tie parts."""
  if subject.model is not None:
    raise base.NotChecked('a model of your own does not run on them')
  if jax.default_backend() != 'cpu':
    raise base.NotChecked(f'they are for CPU, not {jax.default_backend()}')
  kinds = [*quantised.KINDS] if amount > QUICK else FEW_KINDS
  for one in (library.ROWS, *map(library.quantised, kinds)):
    if why := library.load(program_lib.cache_folder(), one):
      raise base.NotChecked(why)
  worlds = {x: _packed_world(x, subject) for x in ('float32', 'bfloat16')}
  worlds[convert.STORED] = _stored_world(kinds, subject)
  names = list(subject.drafters)
  shapes = itertools.cycle(
    zip(KERNEL_GAMMAS * 3, KERNEL_BATCHES * 4, strict=True)
  )
  made = []
  for dtype, world in worlds.items():
    for name in names if dtype == 'float32' else names[:1]:
      gamma, batch = next(shapes)
      # A rule does not see the models: the first one will do.
      made.append((dtype, subject.pair(world, gamma, name=name), batch))
  rows = max(KERNEL_BATCHES)
  each = NEW * sum(batch for *_, batch in made)  # tokens of a turn
  turns = -(-amount // each)
  for turn in range(turns):
    plain = {}
    for dtype, world in worlds.items():
      request = _request(world, subject, turn, rows)
      alone = (base.take(request, [b]) for b in range(rows))
      plain[dtype] = request, [base.plain(world, x)[0] for x in alone]
    for dtype, pair, batch in made:
      request, text = plain[dtype]
      run = base.run(worlds[dtype], pair, base.take(request, slice(batch)))
      what = f'{dtype} {pair}, batch {batch}'
      base.same_texts(base.texts(run), text[:batch], what)
  return base.none_of(
    each * turns,
    'tokens differ',
    _positions((dtype, batch) for dtype, _, batch in made) * turns,
    'positions',
    f'{len(made)} programs, float32, bfloat16 and stored weights (of '
    f'{len(kinds)} kinds), batch 1, 3 and 8',
  )


def _packed_world(dtype: str, subject: base.Subject, **changes) -> base.World:
  """Makes a target and a draft of two packed layers."""
  sizes = dict(width=48, heads=4, kv_heads=2, head_dim=8, mlp=80) | changes
  world = subject.transformers(512, scale=1.5, dtype=dtype, **sizes)
  config, params = world.config, world.weights.target
  assert config is not None
  (config, target), (_, draft) = (
    convert.pack(*convert.fuse(config, x))
    for x in (params, base.blurred(params))
  )
  model = lm.make(config)
  return base.World(model, model, types.Weights(target, draft), 512, config)


def _stored_world(kinds: Sequence[str], subject: base.Subject) -> base.World:
  """Stores matrices in all kinds in turn; the draft is near, in float32."""
  sizes = dict(width=256, head_dim=64, mlp=256, depth=-(-len(kinds) // 4))
  world = _packed_world('float32', subject, **sizes)
  rng, turn = np.random.default_rng(0), itertools.cycle(kinds)
  target = jax.tree.map(
    lambda x: _random(x, next(turn), rng) if weights.is_stored(x) else x,
    world.weights.target,
    is_leaf=weights.is_stored,
  )
  assert world.config is not None
  config, numbers = convert.plain(world.config, target)
  blurred = base.blurred(lm.nest(numbers))
  _, draft = convert.pack(*convert.fuse(config, blurred))
  return world._replace(weights=types.Weights(target, draft))


def _random(matrix: Any, kind: str, rng) -> weights.Quantised:
  """Draws codes and scales, sized as the matrix is, for 8- or 16-bit rows."""
  k, (K, N) = quantised.KINDS[kind], matrix.shape
  rows, wide = (N // quantised.WIDE, K // k.depth), quantised.WIDE
  panels = rng.integers(0, 256, (*rows, wide * k.size), np.uint8)
  size = 2.0 ** -(k.bits + (6 if k.scales == quantised.SUPER else 0))
  for (dtype, n), start in zip(k.fields, k.offsets, strict=True):
    if dtype.kind == 'f':
      floats = rng.normal(0, 0.1 * size, (*rows, wide)).astype(dtype)
      panels[..., start : start + n * wide] = floats.view(np.uint8)
  bits = int(rng.choice(quantised.BITS))
  return weights.Quantised(jnp.asarray(panels), kind, N, matrix.parts, bits)
