"""Certificate records (subject, promise, figure) and small models."""

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
# The drafter whose windows are trees.
TREE = 'tree'


class World(NamedTuple):
  """A target and a draft model of `vocab` ids; config: None for a user's."""

  target: types.Model
  draft: types.Model
  weights: types.Weights
  vocab: int
  config: model_config.LMConfig | None = None

  def with_draft(self, pair: 'Pair') -> types.Weights:
    return types.Weights(self.weights.target, pair.weights)


class Pair(NamedTuple):
  """A rule, a drafter and the weights.draft that it reads."""

  rule: types.Rule
  drafter: types.Drafter
  weights: Any = ()

  def __str__(self) -> str:
    rule, drafter, _ = self
    return f'{rule.name} with {drafter.name}, gamma {drafter.gamma}'


# (world, gamma) -> the drafter and the weights.draft it reads.
Recipe = Callable[[World, int], tuple[types.Drafter, Any]]


class Subject(NamedTuple):
  """The rules (lossless), drafters (by name) and models to certify.

  seed: for all randomness; the date in the full tier.
  supplied: the user's own parts among 'rule', 'drafter' and 'model'; promises
    about other parts are skipped.
  model: (vocab, dtype) -> a target and a draft of the user's model, with random
    weights; None for this library's. model_path: package.module:name.
  encoder: the models have encoders, and every prompt a source.
  """

  rules: Sequence[types.Rule]
  drafters: Mapping[str, Recipe]
  seed: int = 0
  supplied: tuple[str, ...] = ()
  model: Callable[[int, str], World] | None = None
  model_path: str = ''
  encoder: bool = False

  def pairs(self) -> list[tuple[types.Rule, str]]:
    """Pairs the first rule with every drafter, other rules with the first one.

    Those that take trees meet the tree drafter too. A rule reads only tokens,
    their distributions, count and parents: it need not run with every drafter.
    """
    (first, *rules), names = self.rules, list(self.drafters)
    found = [(first, x) for x in names]
    found += [(x, names[0]) for x in rules if x in self.apart()]
    return found + [(x, TREE) for x in rules if x.trees and TREE in names[1:]]

  def apart(self) -> list[types.Rule]:
    """Drops rules that equal another of them on chains."""
    names = [rule.name for rule in self.rules]
    return [rule for rule in self.rules if rule.on_chains not in names]

  def pair(
    self, world: World, gamma: int, rule: types.Rule | None = None, name=''
  ) -> Pair:
    """Makes a Pair for the models; defaults to the first rule and drafter."""
    recipe = self.drafters[name or next(iter(self.drafters))]
    return Pair(rule or self.rules[0], *recipe(world, gamma))

  def tables(self, vocab: int) -> World:
    return tables(vocab, encoder=self.encoder)

  def transformers(self, vocab: int, *, dtype: str = '', **sizes) -> World:
    """Makes two tiny models: this library's with `sizes`, or the user's."""
    dtype = dtype or str(jnp.result_type(float))
    if self.model is not None:
      return self.model(vocab, dtype)
    return transformers(vocab, dtype=dtype, encoder=self.encoder, **sizes)


class Broken(Exception):
  """A promise failed; the message is the first failing case, a small one."""


@contextlib.contextmanager
def naming(what: Any) -> Iterator[None]:
  """Prefixes a Broken's message with `what`."""
  try:
    yield
  except Broken as error:
    raise Broken(f'{what}: {error}') from None


class NotChecked(Exception):
  """The promise does not apply to the subject; the message gives the reason."""


class Figure(NamedTuple):
  """A check's result in words: reached, its limit, and how much was tried."""

  reached: str
  bound: str
  size: str


class Promise(NamedTuple):
  """A statement about the library, and its check.

  check: (subject, amount) -> Figure; raises Broken or NotChecked.
  quick, full: amounts of the two tiers, in the promise's unit.
  seconds: quick tier on two cores, for each pair of rule and drafter.
  about: the parts that it judges.
  """

  name: str
  text: str
  check: Callable[[Subject, int], Figure]
  quick: int
  full: int
  seconds: float = 0.0
  about: tuple[str, ...] = ('rule', 'drafter', 'model')


def bound() -> float:
  """Returns the entry of BOUNDS for floats as they are now."""
  return BOUNDS[jnp.result_type(float) == jnp.float64]


def none_of(
  n: int, failure: str, distinct: int, kind: str, size: str, more: str = ''
) -> Figure:
  """Reports no failure in n comparisons, with the 95 % bound on its rate.

  distinct: comparisons that differ in more than the program that ran them; the
    bound counts only these.
  """
  rate = f'95 %: under {3 / distinct:.1e} of them'
  reached = f'0 of {n:,} {failure}, at {distinct:,} distinct {kind} ({rate})'
  return Figure(reached + more, '0', size)


def show(p_V) -> str:
  return np.array2string(np.asarray(p_V), precision=6, separator=', ')


# --- models -------------------------------------------------------------------


def tables(vocab: int, *, encoder: bool = False) -> World:
  """Makes two table models, whose distributions are known exactly."""
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
  """Makes two tiny random transformers (T5s of two shapes, with encoders).

  scale: factor on the weights; at 1 texts would loop. changes: to the sizes.
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
  """Adds a little noise to weights: a draft with high acceptance."""
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
  """Takes some rows of every leaf."""
  return jax.tree.map(lambda x: x[index], tree)


def run(world: World, pair: Pair, request: decode.Request) -> decode.Output:
  """Decodes a batch with the production programs; its output is on the host."""
  programs = decode.programs(world.target, pair.drafter, pair.rule, OPTIONS)
  out = jax.device_get(programs.generate(world.with_draft(pair), request))
  check_finite(out.info)
  return out


def check_finite(info: types.Info) -> None:
  """Raises Broken if a row ended without its text: all such texts are alike."""
  if np.any(info.broken_B):
    raise Broken("the target's logits are not finite")


def plain(world: World, request: decode.Request) -> list[list[int]]:
  """Decodes plainly and returns the texts."""
  return texts(run(world, PLAIN, request))


def make_request(
  world: World, prompts, new, *, request=None, **settings
) -> decode.Request:
  """Makes a batch of prompts, with sources if the models have encoders.

  new, settings: as request_of takes them. request: each prompt's number.
  """
  return request_of(items(world, prompts, request), new, **settings)


def request_of(
  items: Sequence[requests.Item],
  new,
  *,
  stop_ids=(),
  drafts=requests.ANY,
  **settings,
) -> decode.Request:
  """Makes a batch of items.

  new, drafts and the fields of sampling.Sampling: one value, or one an item.
  Other settings are the shape that requests.make takes.
  """
  names = [x.name for x in dataclasses.fields(sampling.Sampling)]
  names = [x for x in names if x in settings]
  sampled = functools.cache(
    lambda *values: sampling.Sampling(**dict(zip(names, values, strict=True)))
  )
  spread = lambda x: np.broadcast_to(np.asarray(x), (len(items),)).tolist()
  given = new, drafts, *map(settings.pop, names)
  rows = zip(items, *map(spread, given), strict=True)
  each = [
    x._replace(new=n, sampling=sampled(*how), stop_ids=stop_ids, drafts=d)
    for x, n, d, *how in rows
  ]
  return requests.make(each, **settings)


def items(world: World, prompts, numbers=None) -> list[requests.Item]:
  """Makes items of prompts, with sources if the models have encoders."""
  found = requests.items(prompts, numbers)
  return [x._replace(source=source_of(world, x.tokens)) for x in found]


def source_of(world: World, prompt: Sequence[int]) -> list[int]:
  """Draws a prompt's source, 1 to 11 tokens; [] without an encoder."""
  if world.target.encode is None:
    return []
  rng = np.random.default_rng([0, *prompt])
  return rng.integers(0, world.vocab, rng.integers(1, 12)).tolist()


def target_table(world: World, prompt: Sequence[int], **settings) -> np.ndarray:
  """Computes a table's p after a prompt and its source, in float64."""
  p_RVV = table_model.warped(world.weights.target, **settings)
  return table_model.given(p_RVV, source_of(world, prompt))


def joint(world: World, prompt: Sequence[int], n: int, text=(), **settings):
  """Computes exact joint p of n tokens after the prompt, or a text: [V] * n."""
  p_RVV = target_table(world, prompt, **settings)
  return table_model.joint_distribution(p_RVV, text or prompt, n)


# Tokens of a prompt that prefill reads in three chunks of OPTIONS.
LONGEST = 20


def ragged_prompts(rows: int, vocab: int, seed: int, longest: int = 6):
  """Draws `rows` prompts of 1 to `longest` tokens."""
  rng = np.random.default_rng([seed, rows, longest])
  return [
    rng.integers(0, vocab, 1 + (3 * b + 1) % longest).tolist()
    for b in range(rows)
  ]


@functools.cache
def ragged(drafter: types.Drafter) -> types.Drafter:
  """Caps a drafter at 0 to gamma tokens, as the committed ones say.

  It is told the cap, as by a request or a drafter around it. From 10 tokens on
  six windows in a row may draft nothing: their tokens are read later.
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
  """Lists every row's committed tokens, prompt included."""
  tokens_BL, lengths_B = map(np.asarray, (output.tokens_BL, output.lengths_B))
  return [row[:n].tolist() for row, n in zip(tokens_BL, lengths_B, strict=True)]


def same_texts(got, wanted, what: str) -> int:
  """Counts the texts; raises Broken for the first that differs."""
  for b, (one, two) in enumerate(zip(got, wanted, strict=True)):
    if one != two:
      at = next(i for i in range(len(one) + 1) if one[: i + 1] != two[: i + 1])
      raise Broken(
        f'{what}: request {b} begins {one[: at + 1]} instead of '
        f'{two[: at + 1]} (token {at})'
      )
  return len(wanted)
