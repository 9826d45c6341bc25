"""Makes engines from a target, a draft and a rule; the table of rules.

To add a rule, write a file and add a row to RULES; a user's own needs no row.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from specdec_jax import decode, fields, types
from specdec_jax.costs import calibration
from specdec_jax.drafters import adaptive, method, table
from specdec_jax.io import load as load_lib
from specdec_jax.io import own
from specdec_jax.verify import (
  block,
  coupled,
  lenient,
  reject,
  traversal,
  typical,
)

# Rules by name; a function makes a rule from a number, as in 'lenient:0.5'.
RULES: dict[str, types.Rule | Callable[[float], types.Rule]] = {
  'reject': reject.RULE,
  'block': block.RULE,
  'coupled': coupled.RULE,
  'traversal': traversal.RULE,
  'lenient': lenient.make,
  'typical': typical.make,
}

LanguageModel = load_lib.LanguageModel
load = load_lib.load


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
  """A target with a drafter and a rule, ready to decode.

  draft, q, parts, costs: as in drafters.method.Method; None for plain decoding.
    Until there are costs (with_costs), an adaptive drafter has no weights.
  """

  target: LanguageModel
  draft: LanguageModel | None
  q: types.Model | types.Drafter | None
  drafter: types.Drafter
  rule: types.Rule
  weights: types.Weights
  programs: decode.Programs
  options: decode.Options
  parts: tuple[method.Method, ...] = ()
  costs: Mapping[str, Any] | None = None

  @property
  def loop(self) -> decode.Loop:
    parts = self.drafter, self.rule, self.options
    return decode.Loop(self.target.model, *parts)

  def __repr__(self) -> str:
    parts = self.target, self.drafter.name, self.drafter.gamma, self.rule.name
    return f'Engine{parts}'


def engine(
  target: LanguageModel,
  draft: Any = None,
  *,
  rule: str | types.Rule = 'reject',
  gamma: int | None = None,
  options: decode.Options | None = None,
  measure: bool = True,
) -> Engine:
  """Combines a target, whose distribution is kept, with a draft and a rule.

  draft: one in drafters.table.DRAFTS; None is plain decoding.
  gamma: tokens drafted in a window; 0 is plain decoding; None is the gamma of a
    Method or types.Drafter, 4 for any other draft.
  measure: time the costs of an adaptive drafter for which none are given.

  Raises ValueError for an unknown name or path, an empty setting, or a draft
  with another tokenizer.
  """
  options = options or default_options()
  rule, draft = rule_of(rule), table.draft_of(draft)
  if gamma is None:
    made = isinstance(draft, method.Method)
    gamma = draft.drafter.gamma if made else table.gamma_of(draft, 4)
  gamma = fields.plain(gamma)
  if type(gamma) is not int or not 0 <= gamma < target.context:
    raise ValueError(
      f'gamma={fields.short(gamma)}: must be a whole number, 0 (plain '
      f'decoding) or more, and less than the context of {target.context}'
    )
  made = method.Method(decode.PLAIN)
  if gamma and draft is not None:
    made = table.method_of(target, draft, gamma=gamma, chunk=options.chunk)
    check_tree(target.label, target.model, made.drafter, rule)
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
  if made.costs:
    return with_costs(built, made.costs)
  return measured(built) if measure else built


def check_tree(
  label: str, target: types.Model, drafter: types.Drafter, rule: types.Rule
):
  """Raises ValueError for a tree where only chains can be verified."""
  if drafter.tree and not rule.trees:
    can = [name for name, x in lossless_rules().items() if x.trees]
    raise ValueError(
      f'rule={rule.name}: it takes chains, and {drafter.name} drafts a tree; '
      f'give {" or ".join(can)}, or leave the tree out'
    )
  if drafter.tree and target.compact is None:
    raise ValueError(
      f'{drafter.name} drafts a tree, and {label} has no `compact` '
      '(types.Model); leave the tree out'
    )


def check_prediction(engine: Engine) -> None:
  """Raises ValueError if nothing would search a prediction."""
  if engine.target.start is not None:
    why = f'{engine.target.label} has an encoder, and its source is searched'
  elif searches(engine):
    return
  else:
    why = f'{engine.drafter.name} searches none; lookup and hybrid do'
  raise ValueError(f'prediction: {why}; leave it out')


def searches(engine: Engine) -> bool:
  """Tells whether lookup is part of the drafter."""
  made = engine.drafter, *(x.drafter for x in engine.parts)
  return 'lookup' in [x.name for x in made]


def measured(engine: Engine, rows: int = 1, *few: int) -> Engine:
  """Adds costs, if the engine needs some: timed at rows and at each few."""
  if engine.costs != {}:
    return engine
  costs: dict[str, Any] = {**calibration.measure(engine, rows)}
  if few:
    costs['few'] = {str(x): calibration.measure(engine, x) for x in few}
  return with_costs(engine, costs)


def with_costs(engine: Engine, costs: Mapping[str, Any]) -> Engine:
  """Gives an adaptive drafter its costs; other costs compile nothing again.

  costs: as for adaptive.params. With Engine.costs a rerun chooses the same.
  """
  params = adaptive.params(engine.parts, costs)
  weights = engine.weights._replace(draft=params)
  return dataclasses.replace(engine, weights=weights, costs=costs)


def rule_of(rule: str | types.Rule) -> types.Rule:
  """Finds a rule by its name or path; NUMBER is for what makes a rule.

  rule: a types.Rule; a name in RULES, or 'lenient:NUMBER'; or the path
    'package.module:name[:NUMBER]', also 'file.py:name[:NUMBER]', of a
    types.Rule, of verify(noise, draft, p_BNV), or of a function that makes one.

  Raises ValueError: none of these, or a number that is missing or not allowed.
  """
  return rule if isinstance(rule, types.Rule) else _rule(str(rule))


@functools.cache  # an equal rule would be compiled again
def _rule(text: str) -> types.Rule:
  name, _, number = text.partition(':')
  found: Any = RULES.get(name)
  why = f'needs a number, as in {name}:0.5'
  if not (ours := found is not None):
    if not (path := table.PATH.fullmatch(text)):
      plain = [x for x, r in RULES.items() if isinstance(r, types.Rule)]
      forms = sorted(x if x in plain else f'{x}:NUMBER' for x in RULES)
      names = fields.choices(name, forms)
      raise ValueError(f"rule={text}: {names}, 'file.py:name', or a types.Rule")
    found, number = own.named('rule', path[1]), path[2]
    name = path[1].rpartition(':')[2]
    why = (
      f'{own.signature(found)}; want verify(noise, draft, p_BNV) -> Verdict, a '
      'types.Rule or a function that makes one'
    )
  if not number and isinstance(found, types.Rule):
    return found
  if not number and own.binds(found, 'noise', 'draft', 'p_BNV'):
    return types.Rule(name, found)
  numbers, made = [number] if number else [], None
  if isinstance(found, types.Rule):
    why = f'{name} takes no number'
  elif own.binds(found, *numbers):
    try:
      made = found(*map(float, numbers))
    except Exception as error:  # a user's function may raise anything
      why = str(error) if ours else f'it raised {fields.first_line(error)}'
  if isinstance(made, types.Rule):
    return made
  raise ValueError(f'rule={text}: {why}')


def lossless_rules() -> dict[str, types.Rule]:
  """Finds the lossless RULES that take no number, by name."""
  rules = {n: x for n, x in RULES.items() if isinstance(x, types.Rule)}
  return {name: rule for name, rule in rules.items() if rule.lossless}


def default_options(**changes) -> decode.Options:
  # On an accelerator a wide verification costs no more than a narrow one, and a
  # second branch in the program only adds compile time. A GPU's prefill is
  # bound by memory below some 256 tokens (experiments/gpu).
  backend = jax.default_backend()
  widths = (0, 1, 2, 4, 8) if backend == 'cpu' else ()
  options = decode.Options(256 if backend == 'gpu' else 64, widths)
  return dataclasses.replace(options, **changes)
