"""What a promise is, and what it is checked on."""

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
  """A target and another model of its vocabulary to draft with."""

  target: types.Model
  draft: types.Model
  weights: types.Weights  # of both
  vocab: int


# (world, gamma) -> the drafter and the weights.draft it reads.
Recipe = Callable[[World, int], tuple[types.Drafter, Any]]


class OwnModel(NamedTuple):
  """A user's model. world(vocab, dtype): two of them, with random weights."""

  path: str
  world: Callable[[int, str], World]


class Subject(NamedTuple):
  """What is certified.

  seed: of all randomness, the date in the full tier. own: what of it a user
  brought, 'rule', 'drafter' or 'model'. model: the user's, in place of ours.
  """

  rules: Mapping[str, types.Rule]
  drafters: Mapping[str, Recipe]
  seed: int = 0
  own: tuple[str, ...] = ()
  model: OwnModel | None = None

  def lossless(self) -> list[types.Rule]:
    return [rule for rule in self.rules.values() if rule.lossless]

  def one_drafter(self) -> 'Subject':
    """The same with the first drafter only."""
    name = next(iter(self.drafters))
    return self._replace(drafters={name: self.drafters[name]})

  def pairs(self) -> list[tuple[types.Rule, str]]:
    """Each drafter under the first rule, each rule with the first drafter."""
    first, *rules = self.lossless()
    names = list(self.drafters)
    return [(first, x) for x in names] + [(x, names[0]) for x in rules]

  def judges_acceptance(self) -> bool:
    """A rule or drafter of one's own may accept less: that is only reported."""
    return not {'rule', 'drafter'} & set(self.own)

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
  """check(subject, amount) -> Figure, or raises Broken.

  quick, full: the amounts of the two tiers, in the promise's own unit. of: what
  of a user's own it judges: 'rule', 'drafter', both or neither.
  """

  name: str
  text: str
  check: Callable[[Subject, int], Figure]
  quick: int
  full: int
  of: tuple[str, ...]


def wide() -> bool:
  """Whether floats are float64 here."""
  return jnp.result_type(float) == jnp.float64


def none_of(n: int, what: str) -> str:
  """No failure among n, with the bound on the rate that it shows."""
  return f'0 of {n:,} {what} (95 %: under {3 / n:.1e})'


def tables(vocab: int) -> World:
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


# Prompts are short: a long chunk would only be padding.
OPTIONS = decode.Options(chunk=8)


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
  """The same drafter, proposing 0 to gamma tokens by a rule of the row's own.

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
