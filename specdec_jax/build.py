"""From names and settings to things that run.

Every name -> function table lives here. A new rule is a file and a row of
RULES; a new drafter is a file, a row of DRAFTERS and, for the certificate, one
of certify/recipes.py. A section of its name in the config is optional.
"""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from specdec_jax import decode, sharding, types
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.drafters import early_exit, lookup, ngram
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.io import eagles, ngrams
from specdec_jax.io import load as load_lib
from specdec_jax.io import tokenizer as tokenizer_lib
from specdec_jax.verify import block, coupled, lenient, reject

# Rules by name; a function makes the rule of a number, as in 'lenient:0.5'.
RULES: dict[str, types.Rule | Callable[[float], types.Rule]] = {
  'reject': reject.RULE,
  'block': block.RULE,
  'coupled': coupled.RULE,
  'lenient': lenient.make,
}

LanguageModel = load_lib.LanguageModel
load = load_lib.load


class Made(NamedTuple):
  """A named drafter, what it reads as weights.draft, and its q as a model.

  model: for alpha, with weights.draft as parameters; None if it has no q.
  work(params, state, passes) -> (multiplications, bytes read) of a window's
  drafting, from weights.draft, the drafter's state and its passes in a window;
  None where the benchmark can tell.
  """

  drafter: types.Drafter
  params: Any = ()
  model: types.Model | None = None
  work: Callable[[Any, Any, float], tuple[int, int]] | None = None


def _lm(
  draft: LanguageModel,
  chunk: int,
  target: LanguageModel,
  *,
  gamma: int,
  min_confidence: float = 0.0,
) -> Made:
  tokenizer_lib.check_same(target.tokenizer, draft.tokenizer)
  q = draft_model(target, draft)
  drafter = _made(
    lm_drafter.make, q, gamma=gamma, min_confidence=min_confidence, chunk=chunk
  )
  return Made(drafter, draft.as_draft[1], q)


def _lookup(
  target: LanguageModel, *, gamma: int, min_match: int = 2, max_match: int = 4
) -> Made:
  return Made(
    _made(lookup.make, gamma=gamma, min_match=min_match, max_match=max_match)
  )


def _ngram(
  target: LanguageModel,
  *,
  gamma: int,
  path: str | os.PathLike,
  min_confidence: float = 0.0,
) -> Made:
  everywhere = target.layout and target.layout.sharding()
  order, counts = ngrams.read(path, target.tokenizer, everywhere)
  model = ngram.model(target_model(target).vocab, order=order, ids=target.ids)
  drafter = _made(ngram.make, model, gamma=gamma, min_confidence=min_confidence)
  return Made(drafter, counts, model)


def _early_exit(target: LanguageModel, *, gamma: int, exit: int) -> Made:
  depth = target.config.depth
  if not 1 <= exit < depth:
    raise ValueError(
      f'exit={exit}: {target.label} has {depth} layers; allowed are 1 to '
      f'{depth - 1}'
    )
  model = target_model(target)
  drafter = _made(early_exit.make, model, gamma=gamma, exit=exit)
  return Made(drafter, target.params, _made(early_exit.view, model, exit=exit))


def _eagle(
  target: LanguageModel,
  *,
  gamma: int,
  path: str | os.PathLike,
  min_confidence: float = 0.0,
) -> Made:
  whole = None
  if target.layout is not None:
    whole = sharding.lay_out(target.layout.mesh, target.config, replicated=True)
  file = eagles.find(path)
  key = file, file.exists() and file.stat().st_mtime_ns
  if key not in target.drafts:
    target.drafts[key] = eagles.fit(
      eagles.read(path),
      path,
      target.config,
      target.params,
      target.tokenizer,
      whole and whole.sharding(),
    )
  config, params = target.drafts[key]
  model = target_model(target)
  drafter = _made(
    eagle_drafter.make,
    config,
    model,
    gamma=gamma,
    min_confidence=min_confidence,
    constrain=whole and whole.constrain,
  )
  view = eagle_drafter.view(config, model)
  return Made(drafter, params, view, eagle_drafter.work)


# Drafters that need no other model: name -> function(target, gamma=..., and its
# settings by name; what they are annotated as is checked, see _KINDS).
DRAFTERS = {
  'lookup': _lookup,
  'ngram': _ngram,
  'early_exit': _early_exit,
  'eagle': _eagle,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Engine:
  """A target with a drafter and a rule, ready to decode.

  draft: the draft's own checkpoint. q: the draft as a model, which reads
  weights.draft; for alpha. work: what drafting costs (Made). None where there
  is none.
  """

  target: LanguageModel
  draft: LanguageModel | None
  q: types.Model | None
  drafter: types.Drafter
  rule: types.Rule
  weights: types.Weights
  programs: decode.Programs
  options: decode.Options
  work: Callable[[Any, Any, float], tuple[int, int]] | None = None


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
    rule: a name (see rule_of) or a types.Rule of your own.
    gamma: tokens drafted in a window; 0 is plain decoding.
    options: static choices of the loop.
    **settings: of the drafter (lookup: min_match, max_match; ngram: path,
      min_confidence; early_exit: exit; eagle: path, min_confidence; a model:
      min_confidence).

  Raises:
    ValueError: an unknown name or setting, a value that is not allowed, or a
      draft with another tokenizer.
  """
  options = options or default_options()
  rule = rule_of(rule)
  if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 0:
    raise ValueError(
      f'gamma={gamma!r}: must be an integer, 0 (plain decoding) or more'
    )
  make = _maker(draft, options)
  _check_settings(draft, make, settings)
  made = Made(decode.PLAIN)
  if gamma:
    made = make(target, gamma=gamma, **settings)
  return Engine(
    target,
    draft if gamma and isinstance(draft, LanguageModel) else None,
    made.model,
    made.drafter,
    rule,
    types.Weights(target.params, made.params),
    decode.programs(target_model(target), made.drafter, rule, options),
    options,
    made.work,
  )


def _maker(draft: Any, options: decode.Options) -> Callable[..., Made]:
  """What makes a drafter of `draft`, as a row of DRAFTERS does."""
  if draft is None:
    return lambda target, *, gamma: Made(decode.PLAIN)
  if isinstance(draft, types.Drafter):
    return lambda target, *, gamma: Made(draft)
  if isinstance(draft, LanguageModel):
    return functools.partial(_lm, draft, options.chunk)
  if isinstance(draft, str) and draft in DRAFTERS:
    return DRAFTERS[draft]
  raise ValueError(
    f'draft={draft!r}: allowed are {", ".join(map(repr, sorted(DRAFTERS)))}, a '
    'loaded model, a types.Drafter, or None'
  )


# What a setting must be, by how it is annotated.
_KINDS = {
  int: ('a whole number', int),
  float: ('a number', int | float),
  str | os.PathLike: ('a path', str | os.PathLike),
}


def _check_settings(draft: Any, make: Callable[..., Made], settings) -> None:
  """Raises ValueError for settings that make(target, gamma=...) has not."""
  shown = f'draft={draft!r}'
  if isinstance(draft, LanguageModel):
    shown = f'draft {draft.label}'
  elif isinstance(draft, types.Drafter):
    shown = f'drafter {draft.name}'
  _, *own = inspect.signature(make).parameters.values()
  rest = any(x.kind is x.VAR_KEYWORD for x in own)
  known = {
    x.name: x for x in own if x.name != 'gamma' and x.kind is not x.VAR_KEYWORD
  }
  allowed = f'allowed are {", ".join(known)}' if known else 'none are allowed'
  for name, value in settings.items():
    if name not in known and not rest:
      raise ValueError(
        f'{shown}: {name}={value!r} is no setting of it; {allowed}'
      )
    annotation = known[name].annotation if name in known else None
    what, kind = _KINDS.get(annotation, ('', object))
    if not isinstance(value, kind) or (what and isinstance(value, bool)):
      raise ValueError(f'{shown}: {name}={value!r}: must be {what}')
  for name, x in known.items():
    if x.default is x.empty and name not in settings:
      what, _ = _KINDS.get(x.annotation, ('of any kind', object))
      raise ValueError(f'{shown}: needs the setting {name}, {what}')


def rule_of(rule: str | types.Rule) -> types.Rule:
  """The rule of a name in RULES; 'lenient:0.5' is lenient with lenience 0.5.

  Raises:
    ValueError: an unknown name, or a number that it does not allow.
  """
  if isinstance(rule, types.Rule):
    return rule
  name, _, number = str(rule).partition(':')
  if name not in RULES:
    names = (
      x if isinstance(r, types.Rule) else f'{x}:NUMBER'
      for x, r in sorted(RULES.items())
    )
    raise ValueError(
      f'rule={rule!r}: allowed are {", ".join(names)}, or a types.Rule'
    )
  return rule_with(RULES[name], number, rule)


def rule_with(
  found: types.Rule | Callable[[float], types.Rule], number: str, shown: str
) -> types.Rule:
  """A rule, or what its factory makes of a number.

  Args:
    found: a rule, or a function of a number that makes one.
    number: '' where none was given.
    shown: what the user wrote, for the error.

  Raises:
    ValueError: a number too many, none, or one that the factory refuses.
  """
  if isinstance(found, types.Rule):
    if number:
      raise ValueError(f'rule={shown!r}: {found.name} takes no number')
    return found
  try:
    return found(float(number))
  except ValueError as error:
    why = error if number else 'needs a number, as in lenient:0.5'
    raise ValueError(f'rule={shown!r}: {why}') from error


def lossless_rules() -> dict[str, types.Rule]:
  """The rules of RULES that need no number and keep the target's output."""
  rules = {n: x for n, x in RULES.items() if isinstance(x, types.Rule)}
  return {name: rule for name, rule in rules.items() if rule.lossless}


def target_model(target: LanguageModel) -> types.Model:
  return target.model


def draft_model(target: LanguageModel, draft: LanguageModel) -> types.Model:
  """The draft with the target's ids and logits of the target's width."""
  return draft.draft_model(target)


def default_options(**changes) -> decode.Options:
  # On an accelerator a wide verify costs what a narrow one does, and a second
  # body in the program only costs compile time.
  cpu = jax.default_backend() == 'cpu'
  return dataclasses.replace(decode.Options(narrow=cpu), **changes)


@functools.cache
def _made(make, *models, **settings):
  """make(*models, **settings), once: an equal one would compile again."""
  return make(*models, **settings)
