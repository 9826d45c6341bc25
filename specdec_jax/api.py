"""The Python API: prompts in, text out.

import specdec_jax
target = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-1.7B-Instruct')
draft = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-135M-Instruct')
out = specdec_jax.generate(target, ['Hello!'], draft=draft, gamma=4)
print(out[0].text, out[0].metrics['block_efficiency'])
"""

import collections
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax import (
  build,
  completion,
  debug,
  fields,
  hosts,
  metrics,
  pool,
  requests,
  sampling,
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
    **options: the fields of Settings; those of completion.EACH may be lists,
      with a value for each prompt, which for stop and stop_ids is a list.

  Raises:
    ValueError: a bad setting, prompt, name or draft. Nothing has run then.
    NonFiniteLogits: the target's logits were not finite.
  """
  how = dict(draft=draft, rule=rule, gamma=gamma, draft_options=draft_options)
  job = _job(target, _listed(prompts), 0, **how, **options)
  out = {}
  rows = min(job.each[0].batch_size, len(job.items))
  for i, x in _answered(job, rows):
    if x.finish_reason == 'non-finite':
      raise _non_finite(job.engine, job.items[i].number, len(x.tokens))
    out[i] = x
  return [out[i] for i in range(len(out))]


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
    target, draft, rule, gamma, draft_options, options: as in generate; n and
      record are refused.
    prompt: a text, token ids, or a conversation.
    request: the number that keys the randomness; generate numbers its prompts
      from 0.

  Yields:
    A Piece for each window. Text waits while a later token may still change it
    (half a character, the beginning of a stop string); the last piece has all.

  Raises:
    ValueError, NonFiniteLogits: as generate.
  """
  for name, default in dict(n=1, record=False).items():
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
  ((_, batch),) = _batches(job.engine, job.items, job.asked, 1)
  return _pieces(job.engine, batch, job.each[0])


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
  engine, items, each, wanted = _job(target, _listed(prompts), 0, **asked)
  rows = min(each[0].batch_size, len(items))
  for _, batch in _batches(engine, items, wanted, rows):
    placed = requests.place(batch, target.layout)
    debug.check_cache(engine.loop, engine.weights, placed, proposals=proposals)


class _Job(NamedTuple):
  """What is decoded: requests, the settings of each, what they ask for."""

  engine: build.Engine
  items: Sequence[requests.Item]
  each: Sequence[completion.Settings]
  asked: Sequence[requests.Wanted]


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
  if not 1 <= len(prompts) <= _PROMPTS:
    raise ValueError(f'{len(prompts)} prompts: give 1 to {_PROMPTS}')
  each = completion.each(options, len(prompts))
  if not isinstance(target, build.LanguageModel):
    raise ValueError(
      f'target={fields.short(target)}: must be a loaded model, as in '
      "specdec_jax.load('hf:org/name')"
    )
  wanted = each[0]
  if wanted.logprobs > target.ids:
    raise ValueError(
      f'logprobs={wanted.logprobs}: the vocabulary has {target.ids} tokens'
    )
  items = items_of(target, prompts, each, first)
  each = [x for x in each for _ in range(x.n)]
  asked = _asked(target, items, each)
  engine = build.engine(
    target,
    table.with_options(draft, draft_options),
    rule=rule,
    gamma=gamma,
    options=build.default_options(logprobs=max(wanted.logprobs, wanted.record)),
  )
  if any(x.prediction for x in each):
    build.check_prediction(engine)
  return _Job(engine, items, each, asked)


def _listed(prompts: Any) -> list[Any]:
  """Several prompts, or one of them alone."""
  found = None if isinstance(prompts, Set) else requests.listed(prompts)
  if found is None:
    return [prompts]
  return [found] if requests.is_chat(found) else found


def items_of(
  target: build.LanguageModel,
  prompts: Sequence[Any],
  each: Sequence[completion.Settings],
  first: int = 0,
) -> list[requests.Item]:
  """Every sample of every prompt, in generate's order.

  each: the settings of each prompt, which differ in EACH alone.

  Raises:
    ValueError: a chat, for a target without a template; see requests.item.
  """
  wanted, encode = each[0], target.tokenizer.encode
  # Without a template a chat would be in words of ours.
  chat = wanted.chat or any(map(requests.is_chat, prompts))
  if chat and target.tokenizer.chat_template is None:
    raise ValueError(
      f'{target.label} has no chat template: leave chat=True out, or messages, '
      'and give the text as the model was trained to read it'
    )
  found = [requests.item(target, x, 0, chat=wanted.chat) for x in prompts]
  guesses = [encode(x.prediction) if x.prediction else () for x in each]
  return [
    item._replace(number=first + i + j * _PROMPTS, prediction=guess)
    for i, (item, guess) in enumerate(zip(found, guesses, strict=True))
    for j in range(wanted.n)
  ]


def wanted_of(
  target: build.LanguageModel, item: requests.Item, wanted: completion.Settings
) -> requests.Wanted:
  """What is asked of one request.

  Raises:
    ValueError: it does not fit; a value past float32; an unknown stop id.
  """
  new = requests.check(item, target, wanted.max_new_tokens)
  sampled = wanted.temperature, wanted.top_k, wanted.top_p
  sampling.settings(1, *sampled)
  return requests.Wanted(
    new, *sampled, wanted.seed, wanted.all_stop_ids(target)
  )


def answers(
  engine: build.Engine,
  items: Sequence[requests.Item],
  each: Sequence[completion.Settings],
  *,
  rows: int,
) -> Iterator[tuple[int, completion.Completion]]:
  """Completes requests; yields which, and its Completion, as each ends.

  A row whose logits were not finite ends there, as 'non-finite'. More requests
  than rows share a pool, whose rows are as long as the longest needs.

  Args:
    engine: with the log-probabilities that are wanted.
    items, each: the requests and their settings, which have one `record`; with
      it they are decoded a batch at a time.
    rows: decoded together; on a mesh rounded up.
  """
  asked = _asked(engine.target, items, each)
  return _answered(_Job(engine, items, each, asked), rows)


def _answered(
  job: _Job, rows: int
) -> Iterator[tuple[int, completion.Completion]]:
  engine, items, each, asked = job
  if each[0].record or len(items) <= rows:
    found = _in_batches(engine, items, asked, rows, record=each[0].record)
  else:
    found = _in_a_pool(engine, items, asked, rows)
  return ((i, completion_of(engine, each[i], *ended)) for i, *ended in found)


def _asked(target, items, each) -> list[requests.Wanted]:
  return [wanted_of(target, *pair) for pair in zip(items, each, strict=True)]


def _in_a_pool(engine, items, asked, rows: int) -> Iterator[tuple[Any, ...]]:
  """Yields (index, Ended)."""
  pairs = list(zip(items, asked, strict=True))
  need = max(len(x.tokens) + wanted.new for x, wanted in pairs)
  held = pool.Pool.of(
    engine,
    rows=rows,
    length=requests.bucket(need + engine.drafter.gamma),
    sources=max(len(x.source) + len(x.prediction) for x in items),
    stops=max(len(wanted.stop_ids) for wanted in asked),
  )
  waiting = ((i, *pair) for i, pair in enumerate(pairs))
  return held.answers(collections.deque(waiting))


def _in_batches(
  engine, items, asked, rows: int, *, record: bool
) -> Iterator[tuple[Any, ...]]:
  """Yields (index, Ended, windows if they are recorded, or None)."""
  for first, request in _batches(engine, items, asked, rows):
    placed, windows = requests.place(request, engine.target.layout), None
    if record:
      out, windows = record_lib.run(engine, placed)
    else:
      out = hosts.fetch(engine.programs.generate(engine.weights, placed))
    for row in range(min(len(items) - first, len(request.limit_B))):
      ended = requests.ended(request, out, row)
      yield first + row, ended, windows and windows[row]


def _batches(engine, items, asked, rows: int):
  """Yields (index of its first item, decode.Request), a batch at a time."""
  rows = requests.rows_on(engine.target.layout, rows)
  for i in range(0, len(items), rows):
    some, wanted = (x[i : i + rows] for x in (items, asked))
    each, gamma = requests.together(wanted), engine.drafter.gamma
    yield i, requests.make(some, each, gamma=gamma, rows=rows)


def completion_of(
  engine: build.Engine,
  wanted: completion.Settings,
  ended: requests.Ended,
  windows: list[record_lib.Window] | None = None,
) -> completion.Completion:
  """The answer to a request: stop strings and logprobs are applied here."""
  tokenizer, info, start = engine.target.tokenizer, ended.info, ended.start
  new = slice(start, len(ended.tokens))
  reader = completion.Reader(tokenizer, wanted.stop)
  piece = reader.piece(ended.tokens[new], *_recorded(info, new), last=True)
  record = None
  if windows is not None:
    setting = record_lib.setting(engine, wanted)
    prompt = ended.tokens[:start]
    record = record_lib.Record(prompt, windows, tokenizer, setting)
  return completion.Completion(
    text=piece.text,
    tokens=piece.tokens,
    finish_reason='stop' if reader.stopped else ended.reason,
    origins=piece.origins,
    metrics=metrics.summary(info)._asdict() | {'costs': engine.costs},
    logprobs=piece.logprobs,
    top_logprobs=piece.top_logprobs,
    entropies=piece.entropies,
    record=record,
    texts=piece.texts,
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
    told, refused_K = _recorded(info, slice(at, end)), info.refused_BK[0]
    yield reader.piece(tokens, *told, refused_K=refused_K, last=not live)
    at = end
  if info.broken_B[0] and not reader.stopped:
    raise _non_finite(engine, request.request_B[0], at - begin)


def _non_finite(engine, number, count: int) -> requests.NonFiniteLogits:
  return requests.NonFiniteLogits(
    f'request {number}: the logits of {engine.target.label} are not finite '
    f'after {count} new tokens; try dtype float32'
  )


def _recorded(info: types.Info, new: slice) -> tuple[Any, ...]:
  """What Reader.piece is told of new tokens of row 0."""
  # Copies: the next step is donated these arrays.
  cut = lambda x_BL: np.array(np.asarray(x_BL)[0, new])
  return jax.tree.map(cut, info.of_tokens)
