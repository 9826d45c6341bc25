"""A drafter made for one target, and the setting that several drafters have.

A row of build.DRAFTERS is a module (or anything else) with

  Settings: a frozen dataclass of fields.setting, each with a default
  for_target(target, settings, *, gamma, chunk) -> Method or types.Drafter
  recipe(world, gamma) -> (drafter, weights.draft), for the certificate: the
    drafter on the tiny models of a certify.base.World; optional
  SECTION: the name of its section in a config, if it is not the row's name

where target is an io.load.LanguageModel and chunk the number of prompt tokens
that one prefill pass reads.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from specdec_jax import fields, types


class Method(NamedTuple):
  """A drafter with all that it reads.

  drafter: its functions.
  params: what they read as weights.draft.
  q: its distribution as a model that reads params, for alpha; None if it has
    none (q is certain) or none that the benchmark can read.
  work(params, state, passes) -> (multiplications, bytes read) of one window's
    drafting, from its params, its state and its passes a window; None where
    the benchmark can tell.
  draft: the io.load.LanguageModel that drafts, if one does.
  """

  drafter: types.Drafter
  params: Any = ()
  q: types.Model | None = None
  work: Callable[[Any, Any, float], tuple[int, int]] | None = None
  draft: Any = None


@dataclasses.dataclass(frozen=True)
class Stopping(fields.Checked):
  """Settings of a drafter that may end a window before gamma."""

  min_confidence: float = fields.setting(
    0.0,
    low=0,
    below=1,
    help='end a window where the likeliest token has less; 0: never',
  )
