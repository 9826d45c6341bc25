"""Engines from names and settings: the tables of rules and drafters.

To add a rule, write a file and add a row to RULES; to add a drafter, a file and
a row to DRAFTERS (drafters.method describes a row).
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from specdec_jax import decode, fields, types
from specdec_jax.costs import calibration
from specdec_jax.drafters import (
  adaptive,
  eagle,
  early_exit,
  hybrid,
  layers_file,
  lm,
  lookup,
  method,
  ngram,
)
from specdec_jax.io import load as load_lib
from specdec_jax.io import sources
from specdec_jax.verify import block, coupled, lenient, reject

# Rules by name; a function makes a rule from a number, as in 'lenient:0.5'.
RULES: dict[str, types.Rule | Callable[[float], types.Rule]] = {
  'reject': reject.RULE,
  'block': block.RULE,
  'coupled': coupled.RULE,
  'lenient': lenient.make,
}

# Drafters by name; a row is described in drafters.method.
DRAFTERS: dict[str, Any] = {
  'lm': lm,
  'lookup': lookup,
  'ngram': ngram,
  'early_exit': early_exit,
  'eagle': eagle,
  'hybrid': hybrid,
  'adaptive': adaptive,
}

LanguageModel = load_lib.LanguageModel
load = load_lib.load


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
  """A target with a drafter and a rule, ready to decode.

  target: the model whose output distribution is kept.
  draft, q: as in drafters.method.Method; None for plain decoding.
  drafter, rule: the pure functions of the loop.
  weights: parameters of target and drafter.
  programs: the jitted programs of the loop.
  options: static choices of the loop.
  parts, costs: as in drafters.method.Method; until there are costs (see
    with_costs), an adaptive drafter has no weights.
  """

  target: LanguageModel
  draft: LanguageModel | None
  q: types.Model | None
  drafter: types.Drafter
  rule: types.Rule
  weights: types.Weights
  programs: decode.Programs
  options: decode.Options
  parts: tuple[method.Method, ...] = ()
  costs: Mapping[str, Any] | None = None

  def __repr__(self) -> str:
    parts = self.target, self.drafter.name, self.drafter.gamma, self.rule.name
    return f'Engine{parts}'


def check(target: Any, draft: Any) -> None:
  """Raises ValueError for what is nearly a target or a draft."""
  if not isinstance(target, LanguageModel):
    raise ValueError(
      f'target={fields.short(target)}: must be a loaded model, as in '
      "specdec_jax.load('hf:org/name')"
    )
  for name, model in (('target', target), ('draft', draft)):
    why = None
    if isinstance(model, types.Model):
      why = 'has no parameters: give what specdec_jax.wrap makes of it'
    elif isinstance(model, sources.Source):
      why = 'has no weights: give what specdec_jax.load returns'
    elif callable(model):
      why = 'is a function: call it, and give what it makes'
    if why:
      raise ValueError(f'{name}={fields.short(model)} {why}')


def engine(
  target: LanguageModel,
  draft: Any = None,
  *,
  rule: str | types.Rule = 'reject',
  gamma: int | None = None,
  options: decode.Options | None = None,
  measure: bool = True,
  **settings,
) -> Engine:
  """Combines a target, a draft and a rule.

  Args:
    target: the model whose output distribution is kept.
    draft: None (plain decoding), a LanguageModel, a name of DRAFTERS, or a
      types.Drafter of your own.
    rule: a name (see rule_of) or a types.Rule of your own.
    gamma: tokens drafted in a window; 0 is plain decoding; None is the gamma
      of a types.Drafter, 4 for any other draft.
    options: static choices of the loop.
    measure: time the costs of an adaptive drafter for which none are given.
    **settings: fields of the drafter's Settings; for a LanguageModel,
      min_confidence. A drafter around others takes theirs by name, as in
      drafter='eagle', eagle=dict(path='zoo:NAME').

  Raises:
    ValueError: an unknown name or setting, a value that is not allowed, or a
      draft with another tokenizer.
  """
  options = options or default_options()
  rule = rule_of(rule)
  if gamma is None:
    gamma = draft.gamma if isinstance(draft, types.Drafter) else 4
  gamma = fields.plain(gamma)
  if type(gamma) is not int or not 0 <= gamma < target.context:
    raise ValueError(
      f'gamma={fields.short(gamma)}: must be a whole number, 0 (plain '
      f'decoding) or more, and less than the context of {target.context}'
    )
  made = _method(target, draft, settings, gamma, options.chunk)
  built = Engine(
    target,
    made.draft,
    made.q,
    made.drafter,
    rule,
    types.Weights(target.params, made.params),
    decode.programs(target.model, made.drafter, rule, options),
    options,
    made.parts,
    made.costs,
  )
  costs = made.costs
  if costs == {} and measure:
    costs = calibration.measure(built)
  return with_costs(built, costs) if costs else built


def with_costs(engine: Engine, costs: Mapping[str, Any]) -> Engine:
  """An engine with an adaptive drafter, which chooses by these costs.

  Other costs compile nothing again. Engine.costs are those in use: with them a
  rerun chooses the same.

  Args:
    engine: made with draft='adaptive'.
    costs: as drafters.adaptive.params takes them.
  """
  params = adaptive.params(engine.parts, costs)
  weights = engine.weights._replace(draft=params)
  return dataclasses.replace(engine, weights=weights, costs=costs)


def _method(
  target: LanguageModel,
  draft: Any,
  settings: Mapping[str, Any],
  gamma: int,
  chunk: int,
) -> method.Method:
  """The drafter for `engine`; settings are checked even if gamma is 0."""
  plain = method.Method(decode.PLAIN)
  if settings and (draft is None or isinstance(draft, types.Drafter)):
    name = f'drafter {draft.name}' if draft else 'draft=None'
    raise ValueError(f'{name} has no settings; given are {", ".join(settings)}')
  if draft is None:
    return plain
  if isinstance(draft, types.Drafter):
    if gamma and draft.gamma != gamma:
      raise ValueError(
        f'gamma={gamma}: drafter {draft.name} was made for {draft.gamma}; '
        f'give gamma={draft.gamma}, or make another drafter'
      )
    return method.Method(draft) if gamma else plain
  if isinstance(draft, LanguageModel):
    checked = fields.make(method.Stopping, f'draft {draft.label}', settings)
    if not gamma:
      return plain
    return lm.with_draft(draft, target, checked, gamma=gamma, chunk=chunk)
  if isinstance(draft, str) and draft in DRAFTERS:
    return _named(target, draft, settings, gamma, chunk) or plain
  if isinstance(draft, str) and layers_file.is_file(draft):
    raise ValueError(
      f"draft={draft!r} is a draft's file: give draft='lm' with the option "
      f"source={draft!r}, or draft='eagle' with path={draft!r}"
    )
  path = isinstance(draft, str) and set(draft) & set(':/.')
  if path or isinstance(draft, os.PathLike):
    raise ValueError(
      f'draft={draft!r} is not loaded: give specdec_jax.load({draft!r})'
    )
  raise ValueError(
    f'draft={fields.short(draft)}: allowed are '
    f'{", ".join(map(repr, sorted(DRAFTERS)))}, a loaded model, a '
    'types.Drafter, or None'
  )


def _named(
  target: LanguageModel,
  name: str,
  settings: Mapping[str, Any],
  gamma: int,
  chunk: int,
) -> method.Method | None:
  """The method of a row of DRAFTERS, None if gamma is 0."""
  row, others, more = DRAFTERS[name], {}, {}
  if wraps(name):
    others = {x: y for x, y in settings.items() if x in DRAFTERS}
  own = {x: y for x, y in settings.items() if x not in others}
  checked = fields.make(row.Settings, name, own)
  try:
    fields.check_needed(checked)
  except ValueError as error:
    raise ValueError(
      f'{name}.{error}; from Python in draft_options, by name'
    ) from error
  if wraps(name):
    inner = wrapped(name, checked)
    theirs = others.pop(inner, {})
    if not isinstance(theirs, Mapping):
      raise ValueError(
        f'{name}.{inner}={fields.short(theirs)}: must be a dict of its settings'
      )
    given = {**theirs, **others}
    more['inner'] = _named(target, inner, given, gamma, chunk)
  if not gamma:
    return None
  made = row.for_target(target, checked, gamma=gamma, chunk=chunk, **more)
  return method.Method(made) if isinstance(made, types.Drafter) else made


def wraps(name: str) -> bool:
  """Whether a row of DRAFTERS is around another one."""
  return getattr(DRAFTERS[name], 'WRAPS', False)


def wrapped(name: str, settings: Any) -> str:
  """The drafter that a row with these settings is around.

  Raises:
    ValueError: no such drafter.
  """
  inner = settings.drafter
  if inner not in DRAFTERS or inner == name:
    allowed = ', '.join(x for x in DRAFTERS if x != name)
    raise ValueError(f'{name}.drafter={inner!r}: allowed are {allowed}')
  return inner


def rule_of(rule: str | types.Rule) -> types.Rule:
  """A rule by its name in RULES; 'lenient:0.5' is lenient with lenience 0.5.

  Raises:
    ValueError: an unknown name, or a number that is missing or not allowed.
  """
  if isinstance(rule, types.Rule):
    return rule
  name, _, number = str(rule).partition(':')
  if name not in RULES:
    names = (
      x if isinstance(r, types.Rule) else f'{x}:NUMBER'
      for x, r in sorted(RULES.items())
    )
    given = f'rule={fields.short(rule)}'
    raise ValueError(
      f'{given}: allowed are {", ".join(names)}, or a types.Rule'
    )
  found = RULES[name]
  if isinstance(found, types.Rule):
    if number:
      raise ValueError(f'rule={rule!r}: {name} takes no number')
    return found
  try:
    return found(float(number))
  except ValueError as error:
    why = error if number else 'needs a number, as in lenient:0.5'
    raise ValueError(f'rule={rule!r}: {why}') from error


def lossless_rules() -> dict[str, types.Rule]:
  """The lossless rules of RULES that take no number, by name."""
  rules = {n: x for n, x in RULES.items() if isinstance(x, types.Rule)}
  return {name: rule for name, rule in rules.items() if rule.lossless}


def default_options(**changes) -> decode.Options:
  # On an accelerator a wide verification costs no more than a narrow one, and a
  # second branch in the program only adds compile time.
  widths = (0, 1, 2, 4, 8) if jax.default_backend() == 'cpu' else ()
  return dataclasses.replace(decode.Options(widths=widths), **changes)
