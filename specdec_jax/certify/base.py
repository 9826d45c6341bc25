"""The subject of a certificate, what a promise is, and small models to run."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, requests, types
from specdec_jax.certify import table_model
from specdec_jax.models import config as model_config
from specdec_jax.models import lm


class World(NamedTuple):
  """A target, a model of the same vocabulary to draft with, weights of both."""

  target: types.Model
  draft: types.Model
  weights: types.Weights
  vocab: int


# (world, gamma) -> the drafter and the weights.draft it reads.
Recipe = Callable[[World, int], tuple[types.Drafter, Any]]


class UserModel(NamedTuple):
  """A user's model. world(vocab, dtype): two of them, with random weights."""

  path: str
  world: Callable[[int, str], World]


class Subject(NamedTuple):
  """The rules, drafters and models that are certified.

  rules, drafters: by name. seed: of all randomness; the date in the full tier.
  brought: parts that the user brought, of 'rule', 'drafter' and 'model'. model:
  the user's; None for this library's.
  """

  rules: Mapping[str, types.Rule]
  drafters: Mapping[str, Recipe]
  seed: int = 0
  brought: tuple[str, ...] = ()
  model: UserModel | None = None

  def lossless(self) -> list[types.Rule]:
    return [rule for rule in self.rules.values() if rule.lossless]

  def pairs(self) -> list[tuple[types.Rule, str]]:
    """Each drafter under the first rule, each rule with the first drafter.

    A rule sees nothing of a drafter but its tokens, their distributions and
    their count, so not every rule must meet every drafter.
    """
    first, *rules = self.lossless()
    names = list(self.drafters)
    return [(first, x) for x in names] + [(x, names[0]) for x in rules]

  def judges_acceptance(self) -> bool:
    """A user's rule or drafter may accept less than ours: slow, not wrong."""
    return not {'rule', 'drafter'} & set(self.brought)

  def transformers(
    self, vocab: int, *, dtype: str | None = None, **sizes
  ) -> World:
    """Two tiny decoders: ours in these sizes, or the user's in its own."""
    dtype = dtype or ('float64' if wide() else 'float32')
    if self.model is not None:
      return self.model.world(vocab, dtype)
    return transformers(vocab, dtype=dtype, **sizes)


class Broken(Exception):
  """A promise failed; the text is a small case that shows it."""


class NotChecked(Exception):
  """There was nothing that the promise could be checked on; says why."""


class Figure(NamedTuple):
  """What a check reached. size: how much was tried, in words."""

  reached: str
  bound: str
  size: str


class Promise(NamedTuple):
  """check(subject, amount) -> Figure, or raises Broken or NotChecked.

  quick, full: the amounts of the two tiers, in the promise's own unit.
  about: parts that it judges, of 'rule', 'drafter' and 'model'.
  seconds: of the quick tier on two cores, for each pair of rule and drafter.
  """

  name: str
  text: str
  check: Callable[[Subject, int], Figure]
  quick: int
  full: int
  about: tuple[str, ...]
  seconds: float


def wide() -> bool:
  """Whether floats are float64 here."""
  return jnp.result_type(float) == jnp.float64


def none_of(n: int, failure: str, distinct: int, kind: str) -> str:
  """No failure in n comparisons, and the bound on its rate at 95 %.

  distinct: how many of the n differ in more than the program that ran them. A
  repeated one says nothing new about the rate.
  """
  return (
    f'0 of {n:,} {failure}, at {distinct:,} distinct {kind} '
    f'(95 %: under {3 / distinct:.1e} of them)'
  )


def show(p_V) -> str:
  return np.array2string(np.asarray(p_V), precision=6, separator=', ')


def tables(vocab: int) -> World:
  """Two table models, whose distributions are known exactly."""
  model = table_model.make(vocab)
  target, draft = (table_model.table(i, vocab) for i in (0, 1))
  return World(model, model, types.Weights(target, draft), vocab)


def transformers(vocab: int, scale: float = 3, **changes) -> World:
  """Two random tiny transformers whose texts do not repeat for ever."""
  sizes = dict(
    depth=2,
    width=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp=24,
    context=512,
    dtype='float64' if wide() else 'float32',
  )
  config = model_config.sized('tiny', **sizes | changes, vocab=vocab)
  model = lm.make(config)
  target, draft = (
    jax.tree.map(lambda x: (scale * x).astype(x.dtype), lm.init(config, i))
    for i in (0, 1)
  )
  return World(model, model, types.Weights(target, draft), vocab)


def blurred(params: Any) -> Any:
  """The weights with a little noise on each: a draft that is good."""
  rng = np.random.default_rng(3)
  return jax.tree.map(
    lambda x: (
      x + (0.05 * np.std(x.astype(np.float32)) * rng.normal(size=x.shape))
    ).astype(x.dtype),
    jax.device_get(params),
  )


# Plain decoding asks its rule for nothing but p itself.
PLAIN_RULE = types.Rule(
  'plain',
  lambda noise, draft, p_BNV: types.Verdict(
    jnp.zeros_like(draft.count_B), p_BNV[:, 0]
  ),
)
# Prompts are short: a long chunk would only be padding.
OPTIONS = decode.Options(chunk=8)


def run(
  world: World,
  drafter: types.Drafter,
  rule: types.Rule,
  draft_weights: Any,
  request: decode.Request,
) -> decode.Output:
  """One production generate; the output on the host."""
  programs = decode.programs(world.target, drafter, rule, OPTIONS)
  weights = types.Weights(world.weights.target, draft_weights)
  return jax.device_get(programs.generate(weights, request))


def plain(world: World, request: decode.Request) -> list[list[int]]:
  """Texts of plain decoding."""
  return texts(run(world, decode.PLAIN, PLAIN_RULE, (), request))


def make_request(
  world: World, prompts, new, *, length: int, request=None, **settings
):
  return requests.make(
    requests.items(prompts, request),
    ids=world.vocab,
    context=10**6,
    max_new_tokens=new,
    length=length,
    **settings,
  )


def ragged_prompts(rows: int, vocab: int, seed: int, longest: int = 6):
  """Random prompts of 1 to `longest` tokens."""
  rng = np.random.default_rng([seed, rows, longest])
  return [
    rng.integers(0, vocab, 1 + (3 * b + 1) % longest).tolist()
    for b in range(rows)
  ]


@functools.cache
def ragged(drafter: types.Drafter) -> types.Drafter:
  """The same drafter, proposing 0 to gamma tokens.

  The count depends on committed tokens only, as the contract asks.
  """

  def propose(weights, state, context, noise, target_cache):
    draft, state, cache = drafter.propose(
      weights, state, context, noise, target_cache
    )
    last_B = jnp.take_along_axis(
      context.tokens_BL, context.lengths_B[:, None] - 1, 1
    )[:, 0]
    count_B = (5 * context.lengths_B + last_B) % (drafter.gamma + 1)
    count_B = jnp.minimum(count_B, draft.count_B)
    return draft._replace(count_B=count_B), state, cache

  return drafter._replace(name=f'ragged {drafter.name}', propose=propose)


def texts(output: decode.Output) -> list[list[int]]:
  """Every row's committed tokens, prompt included."""
  tokens_BL, lengths_B = map(np.asarray, (output.tokens_BL, output.lengths_B))
  return [row[:n].tolist() for row, n in zip(tokens_BL, lengths_B, strict=True)]


def same_texts(got, wanted, what: str) -> int:
  """How many texts were compared.

  Raises:
    Broken: the first text that differs.
  """
  compared = list(zip(got, wanted, strict=True))
  for b, (one, two) in enumerate(compared):
    if one != two:
      at = next(
        (i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
        min(len(one), len(two)),
      )
      raise Broken(
        f'{what}: request {b} begins {one[: at + 1]} instead of '
        f'{two[: at + 1]} (token {at})'
      )
  return len(compared)
