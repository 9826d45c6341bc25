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

import numpy as np

from specdec_jax import (
  build,
  completion,
  debug,
  decode,
  fields,
  hosts,
  metrics,
  pool,
  requests,
  types,
)
from specdec_jax.drafters import table
from specdec_jax.verify import chain

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
      They are sources, if target has an encoder. One may stand alone.
    draft: None (plain decoding), a loaded model, a drafter's name or Settings,
      a types.Drafter or Method, or the path of your own, 'file.py:make'
      (docs/your_own_drafter.md).
    rule: a name in RULES ('lenient:0.5' is lossy), a types.Rule, or its path.
    gamma: tokens drafted before each target pass (None: 4, or what your own
      drafter was made for).
    draft_options: settings, by name, of a drafter that draft names.
    **options: the fields of completion.Settings; those in completion.EACH may
      be lists, a value a prompt, which for stop and stop_ids is a list.

  Raises:
    ValueError: a bad setting, prompt, name or draft. Nothing has run then.
    NonFiniteLogits: the target's logits were not finite.
  """
  how = dict(draft=draft, rule=rule, gamma=gamma, draft_options=draft_options)
  engine, asked, rows = _job(target, _listed(prompts), 0, **how, **options)
  out = {}
  for i, x in answers(engine, asked, rows=rows):
    if x.finish_reason == 'non-finite':
      said = asked[i].item.number, len(x.tokens), target.label
      raise requests.NonFiniteLogits(*said)
    out[i] = x
  return [out[i] for i in range(len(out))]


def stream(
  target: build.LanguageModel, prompt: Any, *, request: int = 0, **options
) -> Iterator[completion.Piece]:
  """Yields generate's tokens for one prompt, a Piece for each window.

  Text waits while a later token may still change it (half a character, the
  beginning of a stop string); the last piece has all.

  Args:
    target, **options: as in generate, but n and record.
    prompt: a text, token ids, or a conversation.
    request: keys the randomness; generate numbers its prompts from 0.

  Raises:
    ValueError, NonFiniteLogits: as generate.
  """
  if options.get('n', 1) != 1 or options.get('record'):
    raise ValueError('n, record: a stream is one, of no record; use generate')
  if not requests.is_id(request) or not 0 <= request < 2**32:
    raise ValueError(
      f'request={fields.short(request)}: must be a whole number, at least 0 '
      'and less than 2**32'
    )
  engine, asked, _ = _job(target, [prompt], int(request), **options)
  ((_, batch),) = _batches(engine, asked, 1)
  return _pieces(engine, batch, asked[0].settings.stop)


def check_cache(
  target: build.LanguageModel,
  prompts: Any,
  *,
  proposals: bool = True,
  **options,
) -> None:
  """Decodes as generate would, slowly, and checks every cache on the way.

  proposals: also compare what the drafter proposes with what a fresh one would;
    False for a drafter that learns as it decodes.

  Raises:
    debug.Finding: what is wrong first, by row, window and slot.
    ValueError: as generate.
  """
  engine, asked, rows = _job(target, _listed(prompts), 0, **options)
  for _, batch in _batches(engine, asked, rows):
    debug.check_cache(engine.loop, engine.weights, batch, proposals=proposals)


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
):
  """Checks a call; makes engine, requests numbered from `first`, and rows."""
  if not 1 <= len(prompts) <= _PROMPTS:
    raise ValueError(f'{len(prompts)} prompts: give 1 to {_PROMPTS}')
  each = completion.each(options, len(prompts))
  if not isinstance(target, build.LanguageModel):
    raise ValueError(
      f'target={fields.short(target)}: must be a loaded model, as in '
      "specdec_jax.load('hf:org/name')"
    )
  kept = max(each[0].logprobs, each[0].record)
  if kept > target.ids:
    raise ValueError(f'logprobs={kept}: the vocabulary has {target.ids} tokens')
  items = items_of(target, prompts, each[0], first)
  each = [x for x in each for _ in range(x.n)]
  asked = [ask(target, *pair) for pair in zip(items, each, strict=True)]
  engine = build.engine(
    target,
    table.with_options(draft, draft_options),
    rule=rule,
    gamma=gamma,
    options=build.default_options(logprobs=kept),
  )
  if any(x.prediction for x in each):
    build.check_prediction(engine)
  return engine, asked, min(each[0].batch_size, len(items))


def _listed(prompts: Any) -> list[Any]:
  """Lists several prompts, or one alone."""
  found = None if isinstance(prompts, Set) else requests.listed(prompts)
  if found is None:
    return [prompts]
  ids = found and all(map(requests.is_id, found))
  return [found] if ids or requests.is_chat(found) else found


def items_of(
  target: build.LanguageModel,
  prompts: Sequence[Any],
  settings: completion.Settings,
  first: int = 0,
) -> list[requests.Item]:
  """Makes every sample, in generate's order; ValueError: no chat template."""
  # Without a template a chat would be in words of ours.
  chat = settings.chat or any(map(requests.is_chat, prompts))
  if chat and target.tokenizer.chat_template is None:
    raise ValueError(
      f'{target.label} has no chat template: leave chat=True out, or messages, '
      'and give the text as the model was trained to read it'
    )
  found = [requests.item(target, x, 0, chat=settings.chat) for x in prompts]
  return [
    item._replace(number=first + i + j * _PROMPTS)
    for i, item in enumerate(found)
    for j in range(settings.n)
  ]


class Asked(NamedTuple):
  """A request: a prompt, with what its settings ask of its row, and these."""

  item: requests.Item
  settings: completion.Settings


def ask(
  target: build.LanguageModel,
  item: requests.Item,
  settings: completion.Settings,
  context: int | None = None,
) -> Asked:
  """Makes a request, its prediction as ids, that fits context or the target's.

  Raises ValueError if it does not fit, and for an unknown stop id.
  """
  if settings.prediction:
    guess = target.tokenizer.encode(settings.prediction)
    item = item._replace(prediction=guess)
  item = item._replace(
    new=requests.check(item, target, settings.max_new_tokens, context),
    sampling=settings,
    stop_ids=settings.all_stop_ids(target),
  )
  return Asked(item, settings)


def answers(
  engine: build.Engine, asked: Sequence[Asked], *, rows: int
) -> Iterator[tuple[int, completion.Completion]]:
  """Completes requests; yields which, and its Completion, as each ends.

  A row whose logits were not finite ends there, as 'non-finite'. More requests
  than rows share a pool, whose rows are as long as the longest needs.

  engine: with the log-probabilities that are wanted.
  asked: requests with one `record`; with it they are decoded in batches.
  rows: decoded together; on a mesh rounded up.
  """
  if asked[0].settings.record or len(asked) <= rows:
    found = _in_batches(engine, asked, rows)
  else:
    found = _in_a_pool(engine, asked, rows)
  for i, *ended in found:
    yield i, completion_of(engine, asked[i].settings, *ended)


def _in_a_pool(engine, asked, rows: int) -> Iterator[tuple[Any, ...]]:
  """Yields (index, Ended)."""
  items = [x.item for x in asked]
  need = max(len(x.tokens) + x.new for x in items)
  held = pool.Pool.of(
    engine,
    rows=rows,
    length=requests.bucket(need + engine.drafter.gamma),
    sources=max(len(x.source) + len(x.prediction) for x in items),
    stops=max(len(x.stop_ids) for x in items),
  )
  return held.answers(collections.deque(enumerate(items)))


def _in_batches(engine, asked, rows: int) -> Iterator[tuple[Any, ...]]:
  """Yields (index, Ended, Reader of its windows if they are recorded)."""
  for first, request in _batches(engine, asked, rows):
    some = asked[first : first + len(request.limit_B)]
    readers: list[Any] = [None] * len(some)
    if some[0].settings.record:
      tokenizer = engine.target.tokenizer
      readers = [completion.Reader(tokenizer, x.settings.stop) for x in some]
      windows = _windows(engine, request, readers, with_q=True)
      ((_, out),) = collections.deque(windows, 1)
    else:
      out = engine.programs.generate(engine.weights, request)
    request, out = hosts.fetch((request, out))
    for row, reader in enumerate(readers):
      yield first + row, requests.ended(request, out, row), reader


def _batches(engine, asked, rows: int):
  """Yields (index of its first request, decode.Request) by batch."""
  layout, gamma = engine.target.layout, engine.drafter.gamma
  rows = requests.rows_on(layout, rows)
  for i in range(0, len(asked), rows):
    items = [x.item for x in asked[i : i + rows]]
    request = requests.make(items, gamma=gamma, rows=rows)
    yield i, requests.place(request, layout)


def completion_of(
  engine: build.Engine,
  settings: completion.Settings,
  ended: requests.Ended,
  reader: completion.Reader | None = None,
) -> completion.Completion:
  """Makes the answer; reads its text here if no reader has read its windows."""
  tokenizer, start, record = engine.target.tokenizer, ended.start, None
  if reader is None:
    reader = completion.Reader(tokenizer, settings.stop)
    new = slice(start, len(ended.tokens))
    own = requests.cut(ended.info.of_tokens, 0, new)
    reader.piece(ended.tokens[new], *own, last=True)
  elif settings.record:
    prompt = tokenizer.decode(ended.tokens[:start], special=True)
    setting = _setting(engine, settings)
    record = completion.Record(prompt, reader.pieces, setting)
  return completion.Completion(
    **reader.whole(),
    finish_reason='stop' if reader.stopped else ended.reason,
    metrics=metrics.summary(ended.info)._asdict() | {'costs': engine.costs},
    record=record,
  )


def _setting(engine: build.Engine, wanted: completion.Settings):
  """Names models and settings, for display."""
  name = lambda model: model and f'{model.label}, {model.dtype}'
  own = ('temperature', 'top_k', 'top_p', 'seed', 'max_new_tokens')
  return dict(
    target=name(engine.target),
    draft=name(engine.draft),
    drafter=engine.drafter.name,
    gamma=engine.drafter.gamma,
    rule=engine.rule.name + ' (LOSSY)' * (not engine.rule.lossless),
    **{key: getattr(wanted, key) for key in own},
  )


def _pieces(engine, request, stop) -> Iterator[completion.Piece]:
  """Yields the pieces from a batch of one."""
  reader, window = completion.Reader(engine.target.tokenizer, stop), None
  for window in _windows(engine, request, [reader]):
    yield from window[0].values()
    if reader.stopped:
      return
  out = window and window[1]
  if out and out.info.broken_B[0]:
    count = int(out.lengths_B[0]) - int(request.lengths_B[0])
    said = request.request_B[0], count, engine.target.label
    raise requests.NonFiniteLogits(*said)


def _windows(engine, request, readers, *, with_q: bool = False):
  """Decodes from Python; yields a window's pieces by row, and Output so far.

  First without pieces, before a window. with_q: pieces have q, but in trees.
  """
  programs, pieces = engine.programs, {}
  if with_q:
    loop = engine.loop._replace(drafter=debug.watched(engine.drafter))
    programs = decode.programs(*loop[:4])
  state, info = programs.start(engine.weights, request)
  while True:
    yield pieces, decode.Output(state.tokens_BL, state.lengths_B, info)
    # Copies: the next step is donated these arrays.
    at_B, live_B = np.array(state.lengths_B), np.array(state.live_B)
    if not live_B.any():
      return
    state, info = programs.step(engine.weights, request, state, info)
    q_BK, pieces = None, {}
    if with_q:
      inner, draft, _ = state.drafter
      state = state._replace(drafter=inner)
      if draft.q_BKV is not None and draft.parents_BK is None:
        q_BK = np.asarray(chain.pick(draft.q_BKV, draft.tokens_BK))
    for row in np.flatnonzero(live_B).tolist():
      if readers[row].stopped:
        continue
      new = slice(at_B[row], int(state.lengths_B[row]))
      pieces[row] = readers[row].piece(
        np.asarray(state.tokens_BL)[row, new],
        *requests.cut(info.of_tokens, row, new),
        info.refused_BK[row],
        None if q_BK is None else q_BK[row],
        last=not state.live_B[row],
      )


completion.show(generate, stream, check_cache)
