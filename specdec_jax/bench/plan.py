"""Plans a benchmark's methods and prompts, and batches the requests."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import build, decode, requests, sampling
from specdec_jax import settings as settings_lib
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.bench import records
from specdec_jax.models import work


class Arm(NamedTuple):
  """A method (a drafter) at one gamma: a row of the tables.

  name: 'lookup g=4'; the first arm of a run is 'autoregressive'.
  drafter: the method's name, without gamma.
  gamma: draft tokens a window, 0 for plain decoding.
  engine: the method's at its largest gamma.
  """

  name: str
  drafter: str
  gamma: int
  engine: build.Engine


class Plan(NamedTuple):
  """The prompts and sizes of a run.

  test, calibration: disjoint prompts; calibration predicts the test's figures.
  buffer: token slots of a row: the longest prompt and its answer fit.
  sampling, bench: sections of the config.
  batch_sizes: rows of pools, run after the main table; may be empty.
  sources: room for a source's ids; 0 without an encoder.
  """

  test: tuple[requests.Item, ...]
  calibration: tuple[requests.Item, ...]
  max_new_tokens: int
  buffer: int
  sampling: sampling.Sampling
  bench: settings_lib.Bench
  batch_sizes: tuple[int, ...] = ()
  sources: int = 0

  @property
  def batches(self) -> int:
    """Counts batches of test prompts."""
    return -(-len(self.test) // self.bench.batch_size)


class Group(NamedTuple):
  """Prompts that decode together, and their request on the device."""

  items: tuple[requests.Item, ...]
  full: decode.Request


def arms(e: settings_lib.Setup, measure: bool = True) -> list[Arm]:
  """Makes plain decoding, then every method at every gamma of the config; trees
  and adaptive windows at their largest alone. measure: as in build.engine;
  benchmark.run measures."""
  d = e.settings.decode
  plain = settings_lib.engine(e, d.methods[0] if d.methods else 'lookup', 0)
  out = [Arm('autoregressive', 'autoregressive', 0, plain)]
  gammas = sorted(set(d.gammas) - {0})
  for method in dict.fromkeys(d.methods) if gammas else ():
    # One program: the smaller gammas are caps, which are data. An adaptive
    # drafter takes as few as pay.
    engine = settings_lib.engine(e, method, gammas[-1], measure=measure)
    one = engine.drafter.tree or engine.costs is not None
    own = [engine.drafter.gamma] if one else gammas
    out += [Arm(f'{method} g={x}', method, x, engine) for x in own]
  return out


def make(
  e: settings_lib.Setup,
  chosen: Sequence[prompts_lib.Prompt],
  sizes: Sequence[int] = (),
) -> Plan:
  """Plans a config on these prompts, each once; checks all.

  Raises:
    ValueError: max_new_tokens is 0; a prompt, named by its id, is empty, too
      long or has unknown ids.
  """
  s, layout = e.settings, e.target.layout
  if not s.decode.max_new_tokens:
    raise ValueError('decode.max_new_tokens=0: here it must be at least 1')
  if s.bench.prompts_per_category:
    chosen = prompts_lib.first_of_each(chosen, s.bench.prompts_per_category)
  found = {}  # a copy of a prompt tells nothing that the prompt does not
  for item in (_item(e, prompt) for prompt in chosen):
    found.setdefault((tuple(item.tokens), tuple(item.source)), item)
  test, calibration = map(tuple, prompts_lib.halves([*found.values()]))
  longest = max(len(item.tokens) for item in test + calibration)
  most = max((0, *s.decode.gammas))
  trees = [settings_lib.gamma_of(s, x, most) for x in s.decode.methods]
  longest += s.decode.max_new_tokens + max([most, *trees])
  return Plan(
    test=test,
    calibration=calibration,
    max_new_tokens=s.decode.max_new_tokens,
    buffer=requests.bucket(longest),
    sampling=s.sampling,
    bench=s.bench,
    # A mesh's data axis divides the rows of a pool.
    batch_sizes=tuple(sorted({requests.rows_on(layout, x) for x in sizes})),
    sources=max(len(item.source) for item in test + calibration),
  )


def batch_sizes(texts: Sequence[str]) -> tuple[int, ...]:
  """Reads the flag --batch_sizes; raises ValueError unless all are above 0."""
  if not all(x.isdecimal() and int(x) for x in texts):
    raise ValueError(
      f'batch_sizes={",".join(texts)}: want whole numbers, as in 1,4,16'
    )
  return tuple(sorted({int(text) for text in texts}))


def _item(e: settings_lib.Setup, prompt: prompts_lib.Prompt) -> requests.Item:
  """Encodes a prompt's first turn."""
  bench, number = e.settings.bench, prompts_lib.request_number(prompt.id)
  given, most = prompt.given, bench.prompt_tokens
  try:
    item = requests.item(e.target, given, number, chat=bench.chat, most=most)
    requests.check(item, e.target, e.settings.decode.max_new_tokens)
  except ValueError as error:
    raise ValueError(f'prompt {prompt.id!r}: {error}') from error
  return item._replace(id=prompt.id, category=prompt.category or '')


# --- batches -----------------------------------------------------------------


def groups(
  arms: Sequence[Arm], plan: Plan, items: Sequence[requests.Item]
) -> list[Group]:
  """Deals the prompts to batches of plan.bench.batch_size.

  Fills the last batch with copies of its own prompts: every row is live, and no
  two batches share a prompt, as they are an interval's sample. One buffer
  length for all gives one executable.
  """
  rows = plan.bench.batch_size
  full = filled(items, rows)
  return [
    _group(arms, plan, full[i : i + rows], plan.max_new_tokens)
    for i in range(0, len(full), rows)
  ]


def capped(arm: Arm, request: decode.Request) -> decode.Request:
  """Limits the request's windows to the arm's gamma."""
  return request._replace(gamma_B=jnp.minimum(request.gamma_B, arm.gamma))


def shortened(request: decode.Request, tokens: int) -> decode.Request:
  """Limits the request's answers to so many tokens."""
  end_B = jnp.minimum(request.limit_B, request.lengths_B + tokens)
  return request._replace(limit_B=end_B)


def filled(items: Sequence[requests.Item], rows: int) -> list[requests.Item]:
  """Fills the last batch with copies of its prompts; by its own request number
  each draws different noise."""
  full = len(items) // rows * rows
  last = items[full:]
  turns = [divmod(i, len(last)) for i in range(rows if last else 0)]
  # Any odd step will do; a copy may share its number with another prompt.
  return list(items[:full]) + [
    last[i]._replace(number=(last[i].number + turn * 1_000_003) % 2**31)
    for turn, i in turns
  ]


def _group(arms, plan: Plan, items, new: int) -> Group:
  target = arms[0].engine.target
  asked = dict(sampling=plan.sampling, stop_ids=target.tokenizer.eos_ids)
  made = requests.make(
    [item._replace(new=new, **asked) for item in items],
    gamma=max(arm.gamma for arm in arms),
    length=plan.buffer,
    sources=plan.sources or None,
  )
  full = requests.place(made, target.layout)
  return Group(tuple(items), full if target.layout else jax.device_put(full))


def middle(arms: Sequence[Arm], plan: Plan, most: int) -> Group:
  """Repeats a prompt of middle length in every row, for `most` windows."""
  length = lambda item: len(item.tokens) + len(item.source)
  items = sorted(plan.calibration + plan.test, key=length)
  item, rows = items[len(items) // 2], plan.bench.batch_size
  gamma = max(arm.gamma for arm in arms)
  end = min(plan.buffer - gamma, arms[0].engine.target.context)
  room = max(min(most, end - len(item.tokens)), 1)
  return _group(arms, plan, [item] * rows, room)


def answers(
  groups: Sequence[Group], outputs: Sequence[decode.Output]
) -> records.Answers:
  """Cuts every prompt's answer out of the outputs."""
  out = {}
  for g, (group, output) in enumerate(zip(groups, outputs, strict=True)):
    for row, item in enumerate(group.items):
      end = output.lengths_B[row]
      tokens = output.tokens_BL[row, len(item.tokens) : end].tolist()
      broken = bool(output.info.broken_B[row])
      out[g, row] = records.Answer(item, tokens, broken)
  return out


def cut(plan: Plan, batches: int, repeats: int) -> Plan:
  """Keeps so many batches of test prompts, and so many repeats."""
  bench = dataclasses.replace(plan.bench, repeats=repeats)
  test = plan.test[: batches * bench.batch_size]
  return plan._replace(test=test, bench=bench)


# --- for the record ----------------------------------------------------------


def setting(arms: Sequence[Arm], plan: Plan) -> records.Setting:
  target, rule = arms[0].engine.target, arms[0].engine.rule
  drafts = (a.engine.draft.label for a in arms if a.engine.draft)
  tested = {item.category for item in plan.test}
  known = dict.fromkeys(item.category for item in plan.calibration)
  return records.Setting(
    target=target.label,
    draft=next(drafts, None),
    dtype=target.dtype,
    rule=rule.name,
    lossless=rule.lossless,
    weights={'target': work.tree_bytes(target.params)}
    | {arm.drafter: _own_bytes(arm.engine) for arm in arms[1:]},
    sampling=dataclasses.asdict(plan.sampling),
    batch_size=plan.bench.batch_size,
    max_new_tokens=plan.max_new_tokens,
    buffer=plan.buffer,
    repeats=plan.bench.repeats,
    judged_prompts=len(plan.test),
    other_prompts=len(plan.calibration),
    not_judged=tuple(x for x in known if x not in tested),
    codes=target.codes,
    categories=len(tested - {''}),
  )


def _own_bytes(engine: build.Engine) -> int:
  """Counts bytes that the drafter's weights add to the target's."""
  # A head reduced to some ids is held beside the full one.
  whole = engine.draft.params if engine.draft else ()
  # Before costs are known, only the parts of adaptive have weights.
  held = engine.weights.draft, whole, [x.params for x in engine.parts]
  return work.tree_bytes(work.own_leaves(held, engine.target.params))
