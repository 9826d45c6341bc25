"""The methods and prompts of a benchmark, and batches of requests."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import build, decode, requests
from specdec_jax import settings as settings_lib
from specdec_jax.bench import prompts as prompts_lib

# track(items, description) yields the items and shows a progress bar.
Track = Callable[[Iterable, str], Iterable]


class Arm(NamedTuple):
  """A method under a name.

  name: 'lookup g=4'; the first arm of a run is 'autoregressive'.
  drafter: the method's name, without gamma.
  gamma: draft tokens a window, 0 for plain decoding.
  """

  name: str
  drafter: str
  gamma: int
  engine: build.Engine


class Plan(NamedTuple):
  """The prompts and sizes of a run.

  judged, others: disjoint prompts; the others predict the figures of judged.
  max_new_tokens: limit of each answer.
  sampling, bench: sections of the config.
  batch_sizes: further sizes, run after the main table; may be empty.
  """

  judged: tuple[requests.Item, ...]
  others: tuple[requests.Item, ...]
  max_new_tokens: int
  sampling: settings_lib.Sampling
  bench: settings_lib.Bench
  batch_sizes: tuple[int, ...] = ()


class Group(NamedTuple):
  """Prompts that decode together, and their requests.

  Limits are traced, so one executable serves full, first and none.

  items: the prompts.
  host: the request on the host.
  full: the same on the device.
  first: with room for one token.
  none: with room for none, which is a prefill.
  """

  items: tuple[requests.Item, ...]
  host: decode.Request
  full: decode.Request
  first: decode.Request
  none: decode.Request


def arms(e: settings_lib.Experiment) -> list[Arm]:
  """Plain decoding, then every method at every gamma of the config."""
  d = e.settings.decode
  plain = settings_lib.engine(e, d.methods[0] if d.methods else 'lookup', 0)
  out = [Arm('autoregressive', 'autoregressive', 0, plain)]
  for method in d.methods:
    for gamma in sorted(set(d.gammas) - {0}):
      engine = settings_lib.engine(e, method, gamma)
      out.append(Arm(f'{method} g={gamma}', method, gamma, engine))
  return out


def make(
  e: settings_lib.Experiment,
  chosen: Sequence[prompts_lib.Prompt],
  sizes: Sequence[int] = (),
) -> Plan:
  """The plan of a config on these prompts; every prompt is checked.

  Raises:
    ValueError: a prompt that is empty, too long or has unknown ids, by its id.
  """
  s = e.settings
  if s.bench.prompts_per_category:
    chosen = prompts_lib.first_of_each(chosen, s.bench.prompts_per_category)
  judged, others = prompts_lib.halves(chosen)
  return Plan(
    judged=tuple(_item(e, prompt) for prompt in judged),
    others=tuple(_item(e, prompt) for prompt in others),
    max_new_tokens=s.decode.max_new_tokens,
    sampling=s.sampling,
    bench=s.bench,
    batch_sizes=tuple(sizes),
  )


def batch_sizes(texts: Sequence[str]) -> tuple[int, ...]:
  """The flag --batch_sizes as numbers.

  Raises:
    ValueError: anything but integers of 1 or more.
  """
  for text in texts:
    if not text.isdecimal() or int(text) < 1:
      raise ValueError(
        f'batch_sizes={",".join(texts)}: want whole numbers, as in 1,4,16'
      )
  return tuple(sorted({int(text) for text in texts}))


def _item(
  e: settings_lib.Experiment, prompt: prompts_lib.Prompt
) -> requests.Item:
  """The first turn of a prompt as tokens."""
  s = e.settings
  tokens = prompt.tokens
  try:
    if tokens is None:
      tokens = requests.encode(
        e.target.tokenizer, prompt.turns[0], chat=s.bench.chat
      )
    tokens = tokens[-s.bench.prompt_tokens :]
    requests.check_prompt(
      tokens,
      max_new_tokens=s.decode.max_new_tokens,
      context=e.target.context,
      ids=e.target.ids,
    )
  except ValueError as error:
    raise ValueError(f'prompt {prompt.id!r}: {error}') from error
  return requests.Item(
    tuple(tokens),
    prompts_lib.request_number(prompt.id),
    prompt.id,
    prompt.category or '',
  )


# --- batches -----------------------------------------------------------------


def groups(
  arms: Sequence[Arm],
  plan: Plan,
  items: Sequence[requests.Item],
  rows: int | None = None,
) -> list[Group]:
  """The prompts in batches of `rows`, plan.bench.batch_size by default.

  All batches share one buffer length, so they share one executable.
  """
  rows = rows or plan.bench.batch_size
  # Sorted by category, so that a batch's time belongs to one category.
  by: dict[str, list[requests.Item]] = {}
  for item in items:
    by.setdefault(item.category, []).append(item)
  parts = [x[i : i + rows] for x in by.values() for i in range(0, len(x), rows)]
  return [_group(arms, plan, part, rows, plan.max_new_tokens) for part in parts]


def _group(arms, plan: Plan, items, rows: int, new: int) -> Group:
  target, s = arms[0].engine.target, plan.sampling
  host = requests.make(
    items,
    ids=target.ids,
    context=target.context,
    max_new_tokens=new,
    gamma=max(arm.gamma for arm in arms),
    temperature=s.temperature,
    top_k=s.top_k,
    top_p=s.top_p,
    seed=s.seed,
    stop_ids=target.tokenizer.eos_ids,
    rows=rows,
    length=_length(arms, plan),
  )
  place = lambda limit_B: jax.device_put(
    requests.place(host._replace(limit_B=limit_B), target.layout)
  )
  one_B = np.minimum(host.lengths_B + 1, host.limit_B)
  return Group(
    items=tuple(items),
    host=host,
    full=place(host.limit_B),
    first=place(one_B),
    none=place(host.lengths_B),
  )


def _length(arms: Sequence[Arm], plan: Plan) -> int:
  """Length of the token buffers: the longest prompt and its answer fit."""
  gamma = max(arm.gamma for arm in arms)
  longest = max(len(item.tokens) for item in plan.judged + plan.others)
  return requests.bucket(longest + plan.max_new_tokens + gamma)


def calibration_request(arms: Sequence[Arm], plan: Plan) -> decode.Request:
  """The shortest prompt in every row, with room for the windows to time."""
  item = min(plan.others or plan.judged, key=lambda item: len(item.tokens))
  gamma = max(arm.gamma for arm in arms)
  context = arms[0].engine.target.context
  room = min(_length(arms, plan) - gamma, context) - len(item.tokens)
  rows, new = plan.bench.batch_size, min(plan.bench.windows, room)
  return _group(arms, plan, [item] * rows, rows, new).full


class Answer(NamedTuple):
  """A prompt and the tokens that an arm emitted after it.

  broken: it ended because the target's logits were not finite.
  """

  item: requests.Item
  tokens: list[int]
  broken: bool


def answers(
  groups: Sequence[Group], outputs: Sequence[decode.Output]
) -> list[Answer]:
  """The answer to every prompt, in the groups' order."""
  out = []
  for group, output in zip(groups, outputs, strict=True):
    for row, item in enumerate(group.items):
      start, end = group.host.lengths_B[row], output.lengths_B[row]
      tokens = output.tokens_BL[row, start:end].tolist()
      out.append(Answer(item, tokens, bool(output.info.broken_B[row])))
  return out


# --- for the record ----------------------------------------------------------


class Setting(NamedTuple):
  """Models, sampling and sizes of a run, as reports print them.

  draft: draft model of the first method that has one.
  buffer: token slots of a row.
  not_judged: categories whose prompts are all among the others.
  """

  target: str
  draft: str | None
  dtype: str
  rule: str
  lossless: bool
  sampling: dict[str, Any]
  batch_size: int
  max_new_tokens: int
  buffer: int
  repeats: int
  judged_prompts: int
  other_prompts: int
  not_judged: tuple[str, ...]


def setting(arms: Sequence[Arm], plan: Plan) -> Setting:
  engine = arms[0].engine
  drafts = (a.engine.draft.label for a in arms if a.engine.draft)
  judged = {item.category for item in plan.judged}
  others = dict.fromkeys(item.category for item in plan.others)
  return Setting(
    target=engine.target.label,
    draft=next(drafts, None),
    dtype=engine.target.dtype,
    rule=engine.rule.name,
    lossless=engine.rule.lossless,
    sampling=dataclasses.asdict(plan.sampling),
    batch_size=plan.bench.batch_size,
    max_new_tokens=plan.max_new_tokens,
    buffer=_length(arms, plan),
    repeats=plan.bench.repeats,
    judged_prompts=len(plan.judged),
    other_prompts=len(plan.others),
    not_judged=tuple(x for x in others if x not in judged),
  )
