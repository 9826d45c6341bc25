"""Describes what a drafter's module has, and holds what several share.

An entry of drafters.table.DRAFTERS is a module (or any object) with

  Settings: a frozen dataclass of fields.setting, each with a default
  for_target(target, settings, *, gamma, chunk) -> Method or types.Drafter
  recipe(world, gamma) -> (drafter, weights.draft), for the certificate: the
    drafter on a certify.base.World's tiny models; optional
  SECTION: the name of its section in a config, if not its name in DRAFTERS
  WRAPS: a number for a drafter around another one, its setting `drafter`, whose
    number is less; for_target then also takes `inner`, that one's Method

where target is an io.load.LanguageModel and chunk the number of prompt tokens
that one prefill pass reads.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from specdec_jax import fields, sharding, types
from specdec_jax.drafters import branch, readings
from specdec_jax.io import files, load, sources
from specdec_jax.io import tokenizer as tokenizer_lib


class Method(NamedTuple):
  """A drafter for one target, with its parameters.

  drafter: its pure functions. params: its parameters, weights.draft.
  q: measures alpha: has these params and the distribution of a window's first
    draft; a model, or another drafter; None: the drafter itself.
  draft: the io.load.LanguageModel that drafts, None if there is none.
  parts: the methods in a drafter around others.
  costs: drafters.adaptive's: measured costs, {} if they have yet to be
    measured; params are made from them.
  """

  drafter: types.Drafter
  params: Any = ()
  q: types.Model | types.Drafter | None = None
  draft: Any = None
  parts: tuple['Method', ...] = ()
  costs: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published(fields.Checked):
  """Settings of a drafter whose drafts others publish."""

  check: str = fields.setting(
    'auto',
    allowed=('auto', 'off'),
    help='auto: find by measurement how a published draft is to be read',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branching(fields.Checked):
  """Settings of one that may draft a tree."""

  tree: str = fields.setting(
    '',
    help="nodes of each level, as in '4,4,2,2', gamma in all, or 'best:8', the "
    "8 likeliest nodes; '': a chain",
  )

  def __post_init__(self):
    super().__post_init__()
    branch.levels_of(self.tree)
    if branch.best_of(self.tree) and not isinstance(self, Published):
      raise ValueError(
        f"tree={self.tree}: the likeliest nodes are eagle's and medusa's; give "
        "the nodes of each level, as in '2,2'"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping(Branching):
  """Settings of one that may end a chain before gamma."""

  min_confidence: float = fields.setting(
    0.0,
    low=0,
    below=1,
    help='end a window where the likeliest token has less; 0: never',
  )

  def __post_init__(self):
    super().__post_init__()
    if self.tree and self.min_confidence:
      raise ValueError('tree: takes no min_confidence; leave one of them out')


# --- drafts that others publish -----------------------------------------------


def published(
  form: readings.Form, target: load.LanguageModel, settings: Any
) -> tuple[Any, Any]:
  """Reads a draft once, as it agrees best: (settings, weights.draft)."""
  source, found = settings.source, None
  if settings.check == 'auto':
    found = readings.find(form, target, source)
  reading = readings.judge(f'{form.name} {source}', target, found)
  return target.once(
    (form.name, reading, *files.stamp(form.paths(source))),
    lambda: form.fit(source, target, reading),
  )


def whole(target: Any) -> sharding.Layout | None:
  """Lays out a draft whole on every device in a target's mesh."""
  return target.layout and sharding.lay_out(
    target.layout.mesh, target.config, tensor_parallel=1
  )


# --- a draft model beside its target ------------------------------------------


def check_pair(target: Any, draft: Any) -> None:
  """Raises ValueError for other tokenizers, or if only one has an encoder.
  Takes load.LanguageModel, or sources.Source, which is not read yet."""
  has = lambda model: 'has no encoder' if model.start is None else 'has one'
  if has(target) != has(draft):
    raise ValueError(
      f'target {target.label} {has(target)} and draft {draft.label} '
      f'{has(draft)}; an encoder: both need one, or neither'
    )
  tokenizer_lib.check_same(target.tokenizer, draft.tokenizer)


def opened(target: load.LanguageModel, source: str) -> sources.Source:
  """Returns a source that is open: as settings.load opened it, else now."""
  return target.drafts.get(('opened', source)) or sources.open_source(source)


def load_beside(
  target: load.LanguageModel, source: Any, dtype: str, tensor_parallel: int = 0
) -> load.LanguageModel:
  """Loads a draft that runs as its target does: on its mesh, by its kernels."""
  own = target.lm_config
  return load.load(
    source,
    dtype=dtype,
    mesh=target.layout and target.layout.mesh,
    tensor_parallel=tensor_parallel,
    scan_layers=own and own.run.scan_layers,
    kernels='auto' if own is None or own.run.packed else 'xla',
  )


@functools.lru_cache(maxsize=64)  # an equal drafter would compile again
def keeping_features(drafter: types.Drafter) -> types.Drafter:
  """Wraps the drafter; its state is then (its own, features_BLE). So a prompt
  that begins with a row's tokens can be drafted for without reading them again.
  features_BLE has all tokens but the row's last, and garbage from there on."""

  def init(weights, context, features_BLE):
    return drafter.init(weights, context, features_BLE), features_BLE

  def propose(weights, state, context, noise, target_cache):
    own, features_BLE = state
    draft, own, cache = drafter.propose(
      weights, own, context, noise, target_cache
    )
    return draft, (own, features_BLE), cache

  def commit(state, context, outcome, features_BNE):
    own, features_BLE = state
    own = drafter.commit(own, context, outcome, features_BNE)
    # The window read the token that was the last before it, and drafts.
    B, N, _ = features_BNE.shape
    first_B = context.lengths_B - outcome.emitted_B - 1
    at_BN = first_B[:, None] + jnp.arange(N)[None]
    new_BNE = features_BNE.astype(features_BLE.dtype)
    kept_BLE = features_BLE.at[jnp.arange(B)[:, None], at_BN].set(
      new_BNE, mode='drop'
    )
    return own, kept_BLE

  return drafter._replace(init=init, propose=propose, commit=commit)
