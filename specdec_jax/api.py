"""The Python API: prompts in, text out.

import specdec_jax
target = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-1.7B-Instruct')
draft = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-135M-Instruct')
out = specdec_jax.generate(target, ['Hello!'], draft=draft, gamma=4)
print(out[0].text, out[0].metrics['block_efficiency'])
"""

from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import (
  build,
  completion,
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

# Sample j of prompt i is request number i + j * _PROMPTS, below 2**32.
_PROMPTS = (1 << 32) // completion.SAMPLES


def generate(
  target: build.LanguageModel,
  prompts: Any,
  *,
  draft: Any = None,
  rule: str | types.Rule = 'reject',
  gamma: int | None = None,
  draft_options: dict[str, Any] | None = None,
  **options,
) -> list[completion.Completion]:
  """Completes every prompt, n times; exactly as the target alone would.

  Args:
    target: the model whose distribution the output follows.
    prompts: texts, lists of token ids, or conversations: lists of messages,
      each a dict with 'role' ('system', 'user', 'assistant') and 'content'.
      They are sources, if target has an encoder. A text or a conversation may
      stand alone.
    draft: None (plain decoding), a loaded model, a drafter's name or Settings,
      a types.Drafter or Method, or the path of your own, 'file.py:make'
      (docs/your_own_drafter.md).
    rule: a name of RULES ('lenient:0.5' is lossy), a types.Rule, or its path.
    gamma: tokens drafted before each pass of the target (None: 4, or what your
      own drafter was made for).
    draft_options: settings of a drafter that draft names, by name.
    **options: the fields of Settings.

  Raises:
    ValueError: a bad setting, prompt, name or draft. Nothing has run then.
    NonFiniteLogits: the target's logits were not finite.
  """
  how = dict(draft=draft, rule=rule, gamma=gamma, draft_options=draft_options)
  job = _job(target, _listed(prompts), 0, **how, **options)
  out = []
  for batch in job.batches:
    done = run(job.engine, batch, job.wanted)
    for number, x in zip(batch.request_B, done, strict=False):
      if x.finish_reason == 'non-finite':
        raise _non_finite(job.engine, number, len(x.tokens))
    out += done
  return out


def stream(
  target: build.LanguageModel,
  prompt: Any,
  *,
  draft: Any = None,
  rule: str | types.Rule = 'reject',
  gamma: int | None = None,
  draft_options: dict[str, Any] | None = None,
  request: int = 0,
  **options,
) -> Iterator[completion.Piece]:
  """The same tokens as generate for one prompt, a window at a time.

  Args:
    target, draft, rule, gamma, draft_options, options: as in generate; n,
      logprobs and record are refused.
    prompt: a text, token ids, or a conversation.
    request: the number that keys the randomness; generate numbers its prompts
      from 0.

  Yields:
    A Piece for each window. Text waits while a later token may still change it
    (half a character, the beginning of a stop string); the last piece has all.

  Raises:
    ValueError, NonFiniteLogits: as generate.
  """
  for name, default in dict(n=1, logprobs=0, record=False).items():
    if options.get(name, default) != default:
      raise ValueError(
        f'{name}={options[name]}: a stream has none; use generate'
      )
  if not requests.is_id(request) or not 0 <= request < 2**32:
    raise ValueError(
      f'request={fields.short(request)}: must be a whole number, at least 0 '
      'and less than 2**32'
    )
  how = dict(draft=draft, rule=rule, gamma=gamma, draft_options=draft_options)
  job = _job(target, [prompt], int(request), **how, **options)
  return _pieces(job.engine, job.batches[0], job.wanted)


def check_cache(
  target: build.LanguageModel, prompts: Any, *, proposals: bool = True, **asked
) -> None:
  """Decodes as generate would, slowly, and checks every cache on the way.

  Args:
    target, prompts: as in generate.
    proposals: also compare what the drafter proposes with what a fresh one
      would; False for a drafter that learns as it decodes.
    **asked: draft, rule, gamma, draft_options and options, as in generate.

  Raises:
    debug.Finding: what is wrong first, by row, window and slot.
    ValueError: as generate.
  """
  engine, _, batches = _job(target, _listed(prompts), 0, **asked)
  parts = engine.drafter, engine.rule, engine.options
  loop = decode.Loop(target.model, *parts)
  for batch in batches:
    placed = requests.place(batch, target.layout)
    debug.check_cache(loop, engine.weights, placed, proposals=proposals)


class _Job(NamedTuple):
  engine: build.Engine
  wanted: completion.Settings
  batches: list[decode.Request]


def _job(
  target,
  prompts,
  first,
  /,
  *,
  draft=None,
  rule='reject',
  gamma=None,
  draft_options=None,
  **options,
) -> _Job:
  """What a call of generate decodes; its first prompt has number `first`."""
  wanted = completion.settings(options)
  build.check(target, draft)
  if wanted.logprobs > target.ids:
    raise ValueError(
      f'logprobs={wanted.logprobs}: the vocabulary has {target.ids} tokens'
    )
  items = _items(target, prompts, wanted, first)
  engine = build.engine(
    target,
    table.with_options(draft, draft_options),
    rule=rule,
    gamma=gamma,
    options=build.default_options(logprobs=max(wanted.logprobs, wanted.record)),
  )
  rows = requests.rows_on(target.layout, min(wanted.batch_size, len(items)))
  batches = [
    request_of(engine, items[i : i + rows], wanted, rows=rows)
    for i in range(0, len(items), rows)
  ]
  return _Job(engine, wanted, batches)


def _listed(prompts: Any) -> list[Any]:
  """Several prompts, or one of them alone."""
  found = None if isinstance(prompts, Set) else requests.listed(prompts)
  if found is None:
    return [prompts]
  return [found] if requests.is_chat(found) else found


def _items(target, prompts, wanted, first: int) -> list[requests.Item]:
  """Every sample of every prompt, in generate's order."""
  if not 1 <= len(prompts) <= _PROMPTS:
    raise ValueError(f'{len(prompts)} prompts: give 1 to {_PROMPTS}')
  # Without a template a chat would be in words of ours.
  chat = wanted.chat or any(map(requests.is_chat, prompts))
  if chat and target.tokenizer.chat_template is None:
    raise ValueError(
      f'{target.label} has no chat template: leave chat=True out, or messages, '
      'and give the text as the model was trained to read it'
    )
  found = [requests.item(target, x, 0, chat=wanted.chat) for x in prompts]
  return [
    item._replace(number=first + i + j * _PROMPTS)
    for i, item in enumerate(found)
    for j in range(wanted.n)
  ]


def request_of(
  engine: build.Engine,
  items: Sequence[requests.Item],
  wanted: completion.Settings,
  **shape,
) -> decode.Request:
  """The items as one batch; shape: rows, length."""
  target = engine.target
  new = [requests.check(x, target, wanted.max_new_tokens) for x in items]
  sampled = wanted.temperature, wanted.top_k, wanted.top_p, wanted.seed
  asked = requests.Wanted(new, *sampled, wanted.all_stop_ids(target))
  return requests.make(items, asked, gamma=engine.drafter.gamma, **shape)


def run(
  engine: build.Engine, request: decode.Request, wanted: completion.Settings
) -> list[completion.Completion]:
  """Decodes a batch; a Completion for every row that started.

  A row whose logits were not finite ends there, as 'non-finite'.

  Args:
    request: the batch, from request_of.
    wanted: the settings that request was made with; stop strings, logprobs
      and record are applied here.
  """
  placed = requests.place(request, engine.target.layout)
  if wanted.record:
    out, windows = record_lib.run(engine, placed)
  else:
    out = hosts.fetch(engine.programs.generate(engine.weights, placed))
    windows = None
  started = np.flatnonzero(request.limit_B > request.lengths_B)
  return [
    _completion(engine, request, wanted, out, row, windows)
    for row in map(int, started)
  ]


def _completion(engine, request, wanted, out, row: int, windows):
  tokenizer, info = engine.target.tokenizer, out.info
  start, end = int(request.lengths_B[row]), int(out.lengths_B[row])
  tokens = out.tokens_BL[row, start:end].tolist()
  reason = 'length'
  if end < request.limit_B[row] or tokens[-1] in request.stop_BX[row]:
    reason = 'stop'
  if info.broken_B[row]:
    reason = 'non-finite'
  made_by = _origins(info.origin_BL[row, start:end])
  reader = completion.Reader(tokenizer, wanted.stop)
  piece = reader.piece(tokens, made_by, last=True)
  reason = 'stop' if reader.stopped else reason
  kept = slice(start, start + len(piece.tokens))
  of_row = lambda x_BL: x_BL[row, kept].tolist()
  logprobs = top = None
  if info.logprob_BL is not None:
    logprobs = of_row(info.logprob_BL)
  if info.top_BLX is not None:
    pairs = zip(*map(of_row, info.top_BLX), strict=True)
    top = [list(zip(*x, strict=True)) for x in pairs]
  record = windows and record_lib.Record(
    out.tokens_BL[row, :start].tolist(),
    windows[row],
    tokenizer,
    record_lib.setting(engine, wanted),
  )
  counts = metrics.rows(info, slice(row, row + 1))
  return completion.Completion(
    text=piece.text,
    tokens=piece.tokens,
    finish_reason=reason,
    origins=piece.origins,
    metrics=metrics.summary(counts)._asdict() | {'costs': engine.costs},
    logprobs=logprobs,
    top_logprobs=top,
    record=record,
  )


def _pieces(engine, request, wanted) -> Iterator[completion.Piece]:
  weights = engine.weights
  reader = completion.Reader(engine.target.tokenizer, wanted.stop)
  begin = at = int(request.lengths_B[0])
  request = requests.place(request, engine.target.layout)
  state, info = engine.programs.start(weights, request)
  live = True
  while live and not reader.stopped:
    state, info = engine.programs.step(weights, request, state, info)
    live, end = bool(state.live_B[0]), int(state.lengths_B[0])
    tokens = np.asarray(state.tokens_BL)[0, at:end].tolist()
    made_by = _origins(np.asarray(info.origin_BL)[0, at:end])
    yield reader.piece(tokens, made_by, last=not live)
    at = end
  if info.broken_B[0] and not reader.stopped:
    raise _non_finite(engine, request.request_B[0], at - begin)


def _non_finite(engine, number, count: int) -> completion.NonFiniteLogits:
  return completion.NonFiniteLogits(
    f'request {number}: the logits of {engine.target.label} are not finite '
    f'after {count} new tokens; try dtype float32'
  )


def _origins(origin_L: np.ndarray) -> list[str]:
  return [types.ORIGINS[o] for o in origin_L]
