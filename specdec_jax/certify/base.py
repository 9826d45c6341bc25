"""Records of a certificate (subject, promise, figure) and small models."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specdec_jax import decode, requests, sampling, sharding, types
from specdec_jax.certify import table_model
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

# Largest allowed error of a probability, by whether floats are float64.
BOUNDS = {False: 1e-6, True: 1e-12}
_ANY = requests.Wanted(1).drafts  # as many as a window has
# The drafter whose windows are trees.
TREE = 'tree'


class World(NamedTuple):
  """A target and a draft model of `vocab` ids, with the weights of both.

  config: sizes of the target; None for a user's model.
  """

  target: types.Model
  draft: types.Model
  weights: types.Weights
  vocab: int
  config: model_config.LMConfig | None = None

  def with_draft(self, pair: 'Pair') -> types.Weights:
    return types.Weights(self.weights.target, pair.weights)


class Pair(NamedTuple):
  """A rule and a drafter, with the weights.draft that the drafter reads."""

  rule: types.Rule
  drafter: types.Drafter
  weights: Any = ()

  def __str__(self) -> str:
    rule, drafter, _ = self
    return f'{rule.name} with {drafter.name}, gamma {drafter.gamma}'


# (world, gamma) -> the drafter and the weights.draft it reads.
Recipe = Callable[[World, int], tuple[types.Drafter, Any]]


class Subject(NamedTuple):
  """The rules, drafters and models that are certified.

  rules: lossless ones.
  drafters: by name.
  seed: of all randomness; the date in the full tier.
  supplied: parts given by the user, of 'rule', 'drafter' and 'model'; promises
    about other parts are skipped.
  model: (vocab, dtype) -> a target and a draft of the user's model, with random
    weights; None for this library's.
  model_path: of the user's model, package.module:name.
  encoder: the models have encoders, and every prompt has a source.
  """

  rules: Sequence[types.Rule]
  drafters: Mapping[str, Recipe]
  seed: int = 0
  supplied: tuple[str, ...] = ()
  model: Callable[[int, str], World] | None = None
  model_path: str = ''
  encoder: bool = False

  def pairs(self) -> list[tuple[types.Rule, str]]:
    """Each drafter under the first rule, each rule with the first drafter, and
    with trees.

    A rule reads only tokens, their distributions, their count and whose
    children they are, so not every rule must run with every drafter.
    """
    (first, *rules), names = self.rules, list(self.drafters)
    found = [(first, x) for x in names]
    found += [(x, names[0]) for x in rules if x in self.apart()]
    return found + [(x, TREE) for x in rules if x.trees and TREE in names[1:]]

  def apart(self) -> list[types.Rule]:
    """The rules but for those that are another one of them on chains."""
    names = [rule.name for rule in self.rules]
    return [rule for rule in self.rules if rule.on_chains not in names]

  def pair(
    self, world: World, gamma: int, rule: types.Rule | None = None, name=''
  ) -> Pair:
    """A rule with a drafter for the models; the first of each if not given."""
    recipe = self.drafters[name or next(iter(self.drafters))]
    return Pair(rule or self.rules[0], *recipe(world, gamma))

  def tables(self, vocab: int) -> World:
    return tables(vocab, encoder=self.encoder)

  def transformers(self, vocab: int, *, dtype: str = '', **sizes) -> World:
    """Two tiny models: this library's with `sizes`, or the user's."""
    dtype = dtype or str(jnp.result_type(float))
    if self.model is not None:
      return self.model(vocab, dtype)
    return transformers(vocab, dtype=dtype, encoder=self.encoder, **sizes)


class Broken(Exception):
  """A promise failed; the message is a small failing case.

  Whatever checks one raises it, for the first that it finds.
  """


@contextlib.contextmanager
def naming(what: Any) -> Iterator[None]:
  """Prefixes the message of a Broken with `what`."""
  try:
    yield
  except Broken as error:
    raise Broken(f'{what}: {error}') from None


class NotChecked(Exception):
  """The promise does not apply to the subject; the message gives the reason."""


class Figure(NamedTuple):
  """The result of a check, in words.

  reached: the measured figure.
  bound: its limit.
  size: how much was tried.
  """

  reached: str
  bound: str
  size: str


class Promise(NamedTuple):
  """A statement about the library, and how it is checked.

  name, text: for the reader.
  check: (subject, amount) -> Figure; raises Broken or NotChecked.
  quick, full: amounts of the two tiers, in the promise's unit.
  seconds: quick tier on two cores, for each pair of rule and drafter.
  about: parts that it judges.
  """

  name: str
  text: str
  check: Callable[[Subject, int], Figure]
  quick: int
  full: int
  seconds: float = 0.0
  about: tuple[str, ...] = ('rule', 'drafter', 'model')


def bound() -> float:
  """Of BOUNDS, for floats as they are now."""
  return BOUNDS[jnp.result_type(float) == jnp.float64]


def none_of(
  n: int, failure: str, distinct: int, kind: str, size: str, more: str = ''
) -> Figure:
  """The Figure of no failure in n comparisons, with the 95 % bound on its rate.

  distinct: comparisons that differ in more than the program that ran them; only
  these count for the bound.
  """
  rate = f'95 %: under {3 / distinct:.1e} of them'
  reached = f'0 of {n:,} {failure}, at {distinct:,} distinct {kind} ({rate})'
  return Figure(reached + more, '0', size)


def show(p_V) -> str:
  return np.array2string(np.asarray(p_V), precision=6, separator=', ')


# --- models -------------------------------------------------------------------


def tables(vocab: int, *, encoder: bool = False) -> World:
  """Two table models, whose distributions are known exactly."""
  model = table_model.make(vocab, encoder=encoder)
  target, draft = (table_model.table(i, vocab) for i in (0, 1))
  sizes = dict(width=4, heads=1, kv_heads=1, head_dim=4, mlp=4, vocab=vocab)
  sizes |= dict(depth=table_model.DEPTH, context=table_model.CONTEXT)
  config = model_config.sized(
    'tiny', dtype=str(jnp.result_type(float)), **sizes
  )
  return World(model, model, types.Weights(target, draft), vocab, config)


def transformers(
  vocab: int,
  scale: float = 3,
  *,
  encoder: bool = False,
  mesh: Mesh | None = None,
  **changes,
) -> World:
  """Two tiny random transformers; T5s of two shapes if they have encoders.

  scale: factor of the weights; at 1 texts would loop. changes: of the sizes.
  """
  sizes: dict[str, Any] = dict(width=16, heads=2, kv_heads=1, head_dim=8)
  sizes |= (
    dict(mlp=24, dtype=str(jnp.result_type(float)), vocab=vocab) | changes
  )
  name, other = 'tiny', {}
  if encoder:
    name, sizes['kv_heads'] = 't5_tiny', sizes['heads']
    other = dict(depth=1, width=sizes['width'] // 2)
  configs = [model_config.sized(name, **sizes | x) for x in ({}, other)]
  models, weights = [], []
  for seed, config in enumerate(configs):
    layout = mesh and sharding.lay_out(mesh, config)
    params = lm.init(config, seed, layout and layout.put)
    params = jax.tree.map(lambda x: (scale * x).astype(x.dtype), params)
    models.append(lm.make(config, constrain=layout and layout.constrain))
    weights.append(params)
  (target, draft), both = models, types.Weights(*weights)
  return World(target, draft, both, vocab, configs[0])


def blurred(params: Any) -> Any:
  """The weights with a little noise added: a draft of high acceptance."""
  rng = np.random.default_rng(3)
  noise = lambda x: 0.05 * x.astype(np.float32).std() * rng.normal(size=x.shape)
  return jax.tree.map(
    lambda x: (x + noise(x)).astype(x.dtype), jax.device_get(params)
  )


# --- texts --------------------------------------------------------------------

# Plain decoding needs a rule only for the next token, drawn from p.
PLAIN_RULE = types.Rule(
  'plain',
  lambda noise, draft, p_BNV: types.Verdict(
    jnp.zeros_like(draft.count_B), p_BNV[:, 0]
  ),
)
PLAIN = Pair(PLAIN_RULE, decode.PLAIN)
# Prompts are short; a longer chunk would be padding.
OPTIONS = decode.Options(chunk=8)


def take(tree: Any, index: Any) -> Any:
  """Some rows of every leaf."""
  return jax.tree.map(lambda x: x[index], tree)


def run(world: World, pair: Pair, request: decode.Request) -> decode.Output:
  """Decodes a batch with the production programs; the output on the host."""
  programs = decode.programs(world.target, pair.drafter, pair.rule, OPTIONS)
  out = jax.device_get(programs.generate(world.with_draft(pair), request))
  check_finite(out.info)
  return out


def check_finite(info: types.Info) -> None:
  """Raises Broken if a row ended without its text: all such texts are alike."""
  if np.any(info.broken_B):
    raise Broken("the target's logits are not finite")


def plain(world: World, request: decode.Request) -> list[list[int]]:
  """Texts of plain decoding."""
  return texts(run(world, PLAIN, request))


def make_request(
  world: World, prompts, new, *, request=None, **settings
) -> decode.Request:
  """A batch of prompts, each with a source if the models have encoders.

  Args:
    new: tokens to emit, at most.
    request: number of each prompt.
    **settings: as of `wanted`, and the shape that requests.make takes.
  """
  each, shape = wanted(len(prompts), new, **settings)
  return requests.make(items(world, prompts, request), each, **shape)


def wanted(
  count: int, new, *, stop_ids=(), drafts=_ANY, **settings
) -> tuple[list[requests.Wanted], dict[str, Any]]:
  """Makes the Wanted of `count` prompts; also returns the settings left over.

  new, drafts and the fields of sampling.Sampling: one value, or one a prompt.
  """
  names = [x.name for x in dataclasses.fields(sampling.Sampling)]
  names = [x for x in names if x in settings]
  sampled = functools.cache(
    lambda *values: sampling.Sampling(**dict(zip(names, values, strict=True)))
  )
  spread = lambda x: np.broadcast_to(np.asarray(x), (count,)).tolist()
  given = new, drafts, *map(settings.pop, names)
  rows = zip(*map(spread, given), strict=True)
  each = [requests.Wanted(n, sampled(*x), stop_ids, d) for n, d, *x in rows]
  return each, settings


def items(world: World, prompts, numbers=None) -> list[requests.Item]:
  """Prompts as items, each with a source if the models have encoders."""
  found = requests.items(prompts, numbers)
  return [x._replace(source=source_of(world, x.tokens)) for x in found]


def source_of(world: World, prompt: Sequence[int]) -> list[int]:
  """The source of a prompt, 1 to 11 tokens; [] without an encoder."""
  if world.target.encode is None:
    return []
  rng = np.random.default_rng([0, *prompt])
  return rng.integers(0, world.vocab, rng.integers(1, 12)).tolist()


def target_table(world: World, prompt: Sequence[int], **settings) -> np.ndarray:
  """A table model's probabilities after a prompt and its source, float64."""
  p_RVV = table_model.warped(world.weights.target, **settings)
  return table_model.given(p_RVV, source_of(world, prompt))


def joint(world: World, prompt: Sequence[int], n: int, text=(), **settings):
  """Exact distribution of n tokens of a table model: [V] * n, float64.

  They come after the prompt or, if given, after a text that begins with it.
  """
  p_RVV = target_table(world, prompt, **settings)
  return table_model.joint_distribution(p_RVV, text or prompt, n)


# Tokens of a prompt that prefill reads in three chunks of OPTIONS.
LONGEST = 20


def ragged_prompts(rows: int, vocab: int, seed: int, longest: int = 6):
  """Random prompts of 1 to `longest` tokens."""
  rng = np.random.default_rng([seed, rows, longest])
  return [
    rng.integers(0, vocab, 1 + (3 * b + 1) % longest).tolist()
    for b in range(rows)
  ]


@functools.cache
def ragged(drafter: types.Drafter) -> types.Drafter:
  """The same drafter, capped at 0 to gamma tokens: as committed ones say.

  It is told the cap, as by a request or a drafter around it. Of texts of 10
  tokens and more six windows in a row may draft nothing: they are read later.
  """

  def propose(weights, state, context, noise, target_cache):
    lengths_B, most = context.lengths_B, drafter.gamma + 1
    last_B1 = lengths_B[:, None] - 1
    last_B = jnp.take_along_axis(context.tokens_BL, last_B1, 1)[:, 0]
    cap_B = jnp.where((lengths_B - 10) % 16 < 6, 0, 5 * lengths_B + last_B)
    cap_B = jnp.minimum(cap_B % most, context.gamma_B)
    given = weights, state, context._replace(gamma_B=cap_B), noise, target_cache
    draft, *rest = drafter.propose(*given)
    return draft._replace(count_B=jnp.minimum(cap_B, draft.count_B)), *rest

  return drafter._replace(name=f'ragged {drafter.name}', propose=propose)


def texts(output: decode.Output) -> list[list[int]]:
  """Every row's committed tokens, prompt included."""
  tokens_BL, lengths_B = map(np.asarray, (output.tokens_BL, output.lengths_B))
  return [row[:n].tolist() for row, n in zip(tokens_BL, lengths_B, strict=True)]


def same_texts(got, wanted, what: str) -> int:
  """How many texts there are; raises Broken for the first that differs."""
  for b, (one, two) in enumerate(zip(got, wanted, strict=True)):
    if one != two:
      at = next(i for i in range(len(one) + 1) if one[: i + 1] != two[: i + 1])
      raise Broken(
        f'{what}: request {b} begins {one[: at + 1]} instead of '
        f'{two[: at + 1]} (token {at})'
      )
  return len(wanted)
