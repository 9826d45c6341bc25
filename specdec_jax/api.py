"""The Python API: prompts in, text out.

import specdec_jax
target = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-1.7B-Instruct')
draft = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-135M-Instruct')
out = specdec_jax.generate(target, ['Hello!'], draft=draft, gamma=4)
print(out[0].text, out[0].metrics['block_efficiency'])
"""

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from specdec_jax import (
  build,
  debug,
  decode,
  fields,
  hosts,
  metrics,
  requests,
  types,
)
from specdec_jax import record as record_lib
from specdec_jax.drafters import table

Settings = requests.Settings

# Sample j of prompt i is request number i + j * _PROMPTS, below 2**32.
_PROMPTS, _SAMPLES = 1 << 20, 1 << 12


@dataclasses.dataclass(frozen=True)
class Call(fields.Checked):
  """What generate and stream take beside models, prompts and Settings."""

  n: int = fields.setting(
    1, low=1, high=_SAMPLES, help='for more samples, use other seeds'
  )
  batch_size: int = fields.setting(8, low=1)
  chat: bool = fields.setting(False)
  check_cache: bool = fields.setting(False)
  proposals: bool = fields.setting(True)
  request: int = fields.setting(0, low=0, below=2**32)


class NonFiniteLogits(ValueError):
  """The target's logits were NaN or infinite: no token can follow."""


@dataclasses.dataclass(frozen=True)
class Completion:
  """One answer.

  text, tokens: without the prompt. A stop string is not in the text.
  finish_reason: 'stop' (end of sequence, stop id or stop string), 'length', or
    'non-finite' (run only: the logits after these tokens were not finite).
  origins: who made each token, a name of types.ORIGINS.
  metrics: metrics.summary of the request as it was decoded: what a stop
    string cuts off is counted; and the costs that `adaptive` chose by.
  logprobs: of each token, with logprobs=True.
  record: every window, with record=True.
  """

  text: str
  tokens: list[int]
  finish_reason: str
  origins: list[str]
  metrics: dict[str, Any]
  logprobs: list[float] | None = None
  record: record_lib.Record | None = dataclasses.field(
    default=None, repr=False, compare=False
  )


@dataclasses.dataclass(frozen=True)
class Piece:
  """The tokens that one window emitted; text may lag behind them."""

  text: str
  tokens: list[int]
  origins: list[str]


def generate(
  target: build.LanguageModel,
  prompts: str | Sequence[str] | Sequence[Sequence[int]],
  *,
  draft: Any = None,
  rule: str | types.Rule = 'reject',
  gamma: int | None = None,
  draft_options: dict[str, Any] | None = None,
  n: int = 1,
  chat: bool = False,
  batch_size: int = 8,
  check_cache: bool = False,
  proposals: bool = True,
  **options,
) -> list[Completion]:
  """Completes every prompt, n times; exactly as the target alone would.

  Args:
    target: the model whose distribution the output follows.
    prompts: texts, or lists of token ids; sources, if target has an encoder.
    draft: None (plain decoding), a loaded model, a drafter's name or Settings,
      a types.Drafter or Method, or the path of your own, 'file.py:make'
      (docs/your_own_drafter.md).
    rule: a name of RULES ('lenient:0.5' is lossy), a types.Rule, or its path.
    gamma: tokens drafted before each pass of the target (None: 4, or what your
      own drafter was made for).
    draft_options: settings of a drafter that draft names, by name.
    n: samples of each prompt, which follow each other.
    chat: put each text through the model's chat template as a user's turn.
    batch_size: requests decoded together; changes no request's tokens.
    check_cache: decode once before with debug.check_cache: slow.
    proposals: with check_cache, also compare what the drafter proposes with
      what a fresh one would; False for a drafter that learns as it decodes.
    **options: the fields of Settings.

  Raises:
    ValueError: a bad setting, prompt, name or draft. Nothing has run then.
    NonFiniteLogits: the target's logits were not finite.
    debug.Finding: what check_cache found, by row, window and slot.
  """
  wanted = _settings(options, generate)
  call = Call(n, batch_size, chat, check_cache, proposals)
  _check(target, draft, call)
  items = _items(target, prompts, call)
  engine = _engine(target, draft, rule, gamma, draft_options, wanted)
  rows = requests.rows_on(target.layout, min(call.batch_size, len(items)))
  batches = [
    request_of(engine, items[i : i + rows], wanted, rows=rows)
    for i in range(0, len(items), rows)
  ]
  out, checks = [], dict(check_cache=check_cache, proposals=proposals)
  for batch in batches:
    done = run(engine, batch, wanted, **checks)
    for number, x in zip(batch.request_B, done, strict=False):
      if x.finish_reason == 'non-finite':
        raise _non_finite(engine, number, len(x.tokens))
    out += done
  return out


def stream(
  target: build.LanguageModel,
  prompt: str | Sequence[int],
  *,
  draft: Any = None,
  rule: str | types.Rule = 'reject',
  gamma: int | None = None,
  draft_options: dict[str, Any] | None = None,
  chat: bool = False,
  request: int = 0,
  **options,
) -> Iterator[Piece]:
  """The same tokens as generate for one prompt, a window at a time.

  Args:
    target, draft, rule, gamma, draft_options, chat, options: as in generate;
      logprobs and record are refused.
    prompt: a text, or token ids.
    request: the number that keys the randomness; generate numbers its prompts
      from 0.

  Yields:
    A Piece for each window. Text waits while a later token may still change it
    (half a character, the beginning of a stop string); the last piece has all.

  Raises:
    ValueError, NonFiniteLogits: as generate.
  """
  wanted = _settings(options, stream)
  for name in ('logprobs', 'record'):
    if getattr(wanted, name):
      raise ValueError(f'{name}=True: a stream has none; use generate')
  call = Call(chat=chat, request=request)
  _check(target, draft, call)
  items = [requests.item(target, prompt, call.request, chat=chat)]
  engine = _engine(target, draft, rule, gamma, draft_options, wanted)
  rows = requests.rows_on(target.layout, 1)
  return _pieces(engine, request_of(engine, items, wanted, rows=rows), wanted)


def _pieces(engine, request, wanted: Settings) -> Iterator[Piece]:
  weights, reader = engine.weights, engine.target.tokenizer.stream(wanted.stop)
  at = int(request.lengths_B[0])
  request = requests.place(request, engine.target.layout)
  state, info = engine.programs.start(weights, request)
  live, sent = True, 0
  while live:
    state, info = engine.programs.step(weights, request, state, info)
    live, end = bool(state.live_B[0]), int(state.lengths_B[0])
    shown = reader.ready
    tokens = np.asarray(state.tokens_BL)[0, at:end].tolist()
    tokens = _until_stop(reader, tokens)
    live &= not reader.stopped
    made_by = np.asarray(info.origin_BL)[0, at : at + len(tokens)]
    # What a later token could change waits.
    text = reader.text[shown : reader.ready if live else None]
    yield Piece(text, tokens, [types.ORIGINS[o] for o in made_by])
    at, sent = at + len(tokens), sent + len(tokens)
  if info.broken_B[0] and not reader.stopped:
    raise _non_finite(engine, request.request_B[0], sent)


def _settings(options: dict[str, Any], function) -> Settings:
  """requests.settings of the options of generate or stream."""
  _, _, *named, _ = inspect.signature(function).parameters
  loads = inspect.signature(build.load).parameters
  for name in {*options} - {*named}:
    if name in loads:
      raise ValueError(f'{name}: give it to specdec_jax.load')
    rows = table.DRAFTERS.items()
    owners = [x for x, row in rows if hasattr(row.Settings, name)]
    if owners:
      raise ValueError(
        f'{name} is a setting of the drafter {" or ".join(owners)}: give '
        f'draft_options=dict({name}=...)'
      )
  return requests.settings(options, named)


def _items(target, prompts, call: Call) -> list[requests.Item]:
  """Every sample of every prompt, in generate's order."""
  lone = str | bytes | bytearray | Mapping | Set
  if isinstance(prompts, lone) or not isinstance(prompts, Iterable):
    prompts = [prompts]
  found = [requests.item(target, x, 0, chat=call.chat) for x in prompts]
  if not 1 <= len(found) <= _PROMPTS:
    raise ValueError(f'{len(found)} prompts: give 1 to {_PROMPTS}')
  return [
    item._replace(number=i + j * _PROMPTS)
    for i, item in enumerate(found)
    for j in range(call.n)
  ]


def _check(target, draft, call: Call) -> None:
  """build.check; and without a template a chat would be in words of ours."""
  build.check(target, draft)
  if call.chat and target.tokenizer.chat_template is None:
    raise ValueError(
      f'chat=True: {target.label} has no chat template; leave chat out, and '
      'give the text as the model was trained to read it'
    )


def _engine(target, draft, rule, gamma, draft_options, wanted):
  """build.engine with what generate and stream were given."""
  return build.engine(
    target,
    table.with_options(draft, draft_options),
    rule=rule,
    gamma=gamma,
    options=build.default_options(logprobs=wanted.logprobs),
  )


def request_of(
  engine: build.Engine,
  items: Sequence[requests.Item],
  wanted: Settings,
  **shape,
):
  """The items as one batch; shape: rows, length."""
  target = engine.target
  return requests.make(
    items,
    ids=target.ids,
    context=target.context,
    max_new_tokens=wanted.max_new_tokens,
    gamma=engine.drafter.gamma,
    temperature=wanted.temperature,
    top_k=wanted.top_k,
    top_p=wanted.top_p,
    seed=wanted.seed,
    stop_ids=wanted.all_stop_ids(target.tokenizer, target.ids),
    **shape,
  )


def run(
  engine: build.Engine,
  request: decode.Request,
  wanted: Settings,
  *,
  check_cache: bool = False,
  proposals: bool = True,
) -> list[Completion]:
  """Decodes a batch; a Completion for every row that started.

  A row whose logits were not finite ends there, as 'non-finite'.

  Args:
    engine: a target with a drafter and a rule.
    request: the batch, from request_of.
    wanted: the settings that request was made with; stop strings, logprobs
      and record are applied here.
    check_cache, proposals: as in generate.
  """
  placed = requests.place(request, engine.target.layout)
  if check_cache:
    parts = engine.drafter, engine.rule, engine.weights, placed, engine.options
    debug.check_cache(engine.target.model, *parts, proposals=proposals)
  if wanted.record:
    out, windows = record_lib.run(engine, placed)
    setting = record_lib.setting(engine, wanted)
    records = record_lib.describe(engine, placed, out, windows, setting)
  else:
    out = hosts.fetch(engine.programs.generate(engine.weights, placed))
    records = [None] * len(out.lengths_B)
  started = np.flatnonzero(request.limit_B > request.lengths_B)
  return [
    _completion(engine, request, wanted, out, int(row), records[row])
    for row in started
  ]


def _completion(engine, request, wanted: Settings, out, row: int, record):
  tokenizer = engine.target.tokenizer
  start, end = int(request.lengths_B[row]), int(out.lengths_B[row])
  tokens = out.tokens_BL[row, start:end].tolist()
  reason = 'length'
  if end < request.limit_B[row] or tokens[-1] in request.stop_BX[row]:
    reason = 'stop'
  if out.info.broken_B[row]:
    reason = 'non-finite'
  text = tokenizer.decode(tokens)
  if wanted.stop:
    reader = tokenizer.stream(wanted.stop)
    tokens, text = _until_stop(reader, tokens), reader.text
    reason = 'stop' if reader.stopped else reason
  kept = slice(start, start + len(tokens))
  counts = metrics.rows(out.info, slice(row, row + 1))
  logprobs = out.info.logprob_BL
  return Completion(
    text=text,
    tokens=tokens,
    finish_reason=reason,
    origins=[types.ORIGINS[o] for o in out.info.origin_BL[row, kept]],
    metrics=metrics.summary(counts)._asdict() | {'costs': engine.costs},
    logprobs=None if logprobs is None else logprobs[row, kept].tolist(),
    record=record,
  )


def _non_finite(engine, number, count: int) -> NonFiniteLogits:
  return NonFiniteLogits(
    f'request {number}: the logits of {engine.target.label} are not finite '
    f'after {count} new tokens; try dtype float32'
  )


def _until_stop(reader, tokens: list[int]) -> list[int]:
  """Reads tokens up to the one that completes a stop string; those it read."""
  for n, token in enumerate(tokens, 1):
    reader.push(token)
    if reader.stopped:
      return tokens[:n]
  return tokens
