"""The Python API: prompts in, text out.

import specdec_jax
target = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-1.7B-Instruct')
draft = specdec_jax.load('hf:HuggingFaceTB/SmolLM2-135M-Instruct')
out = specdec_jax.generate(target, ['Hello!'], draft=draft, gamma=4)
print(out[0].text, out[0].metrics['block_efficiency'])
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import build, debug, requests, types
from specdec_jax.analysis import record as record_lib
from specdec_jax.bench import metrics

# Settings of other systems that would change p; ignoring one would be silent.
REFUSED = (
  'frequency_penalty',
  'presence_penalty',
  'repetition_penalty',
  'no_repeat_ngram_size',
  'min_p',
  'typical_p',
  'logit_bias',
  'bad_words',
)

# Sample j of a prompt is request number prompt + j * this.
_SAMPLES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Settings:
  """How to sample and when to stop; checked before anything is traced.

  max_new_tokens: tokens after the prompt. temperature 0 is greedy; top_k 0 and
  top_p 1 are off. seed: the same seed and request give the same tokens, in any
  batch. stop: strings that end the text (not part of it). stop_ids: token ids
  that do; the model's own end-of-sequence ids if None. logprobs: return each
  token's log-probability under the target at temperature 1. record: decode from
  Python, which is slower, and return what record_page shows.
  """

  max_new_tokens: int = 128
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] | None = None
  logprobs: bool = False
  record: bool = False

  def __post_init__(self):
    for name in ('max_new_tokens', 'top_k', 'seed'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f'{name}={value!r}: must be an integer')
    for name in ('temperature', 'top_p'):
      value = getattr(self, name)
      if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{name}={value!r}: must be a number')
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'seed={self.seed}: must be in 0 to 2**32 - 1')
    if self.max_new_tokens < 1:
      raise ValueError(
        f'max_new_tokens={self.max_new_tokens}: must be at least 1'
      )


@dataclasses.dataclass(frozen=True)
class Completion:
  """One answer. origins: who made each token (types.ORIGINS).

  finish_reason: 'stop' (end of sequence, stop id or stop string) or 'length'.
  metrics: eval/metrics.summary of this request as it was decoded: what a stop
  string cuts off the text is counted. record: every window, with record=True.
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


def settings(options: dict[str, Any]) -> Settings:
  """Settings from keyword arguments; refuses what it does not know, by name.

  Raises:
    ValueError: a name of REFUSED, or one that is no setting.
  """
  allowed = {field.name for field in dataclasses.fields(Settings)}
  for name in options:
    if name in REFUSED:
      raise ValueError(
        f'{name} is not supported: it changes the target law, and ignoring it '
        f'would be silent. Remove it; supported are {sorted(allowed)}'
      )
    if name not in allowed:
      raise ValueError(
        f'unknown setting {name!r}: allowed are {sorted(allowed)}'
      )
  options = dict(options)
  for name in ('stop', 'stop_ids'):
    value = options.get(name)
    if isinstance(value, str | int):
      value = (value,)
    if value is not None:
      options[name] = tuple(value)
  if '' in options.get('stop', ()):
    raise ValueError("stop='': a stop string must not be empty")
  return Settings(**options)


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
  check_values: bool = False,
  **options,
) -> list[Completion]:
  """Completes every prompt, n times; losslessly under every lossless rule.

  Args:
    target: the model whose law the output follows.
    prompts: texts, or lists of token ids.
    draft: None (plain decoding), a loaded model, 'lookup', 'ngram',
      'early_exit', 'eagle', or a types.Drafter.
    rule: 'reject', 'block', 'coupled', 'lenient:0.5' (lossy), or a types.Rule.
    gamma: tokens drafted before each pass of the target; 4, or what a drafter
      of your own was made for, if None.
    draft_options: settings of a drafter (lookup: min_match, max_match; ngram:
      path; early_exit: exit; eagle: path; ngram, eagle and a model:
      min_confidence).
    n: samples per prompt; sample j of prompt i is entry i * n + j.
    chat: put each text through the model's chat template as a user's turn.
    batch_size: requests decoded together; changes no request's tokens.
    check_cache: first decode each batch recomputing the caches at every window
      (debug.check_cache), which is slow. Changes no token.
    check_values: likewise, looking for bad indices, NaNs and broken contracts
      (debug.check_values).
    **options: the fields of Settings.

  Raises:
    ValueError: a setting out of range, an unknown name, an empty or too long
      prompt, a draft with another tokenizer. Nothing has run then.
    debug.Finding: what a check found, by row, window and slot.
  """
  wanted = settings(options)
  if n < 1 or batch_size < 1:
    raise ValueError(f'n={n}, batch_size={batch_size}: both must be at least 1')
  if isinstance(prompts, str):
    prompts = [prompts]
  engine = build.engine(
    target,
    draft,
    rule=rule,
    gamma=gamma,
    options=build.default_options(logprobs=wanted.logprobs),
    **(draft_options or {}),
  )
  encoded = [requests.encode(target.tokenizer, x, chat=chat) for x in prompts]
  jobs = [
    requests.Item(tokens, i + j * _SAMPLES)
    for i, tokens in enumerate(encoded)
    for j in range(n)
  ]
  rows = requests.rows_on(target.layout, min(batch_size, max(len(jobs), 1)))
  requests_ = [
    request_of(engine, jobs[i : i + rows], wanted, rows=rows)
    for i in range(0, max(len(jobs), 1), rows)
  ]
  checks = dict(check_cache=check_cache, check_values=check_values)
  done = [x for r in requests_ for x in run(engine, r, wanted, **checks)]
  return done[: len(jobs)]


@dataclasses.dataclass(frozen=True)
class Piece:
  """What one window of a stream added; text may lag behind the tokens."""

  text: str
  tokens: list[int]
  origins: list[str]


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

  Arguments and errors as generate; request is the request number that keys the
  randomness (generate numbers its prompts from 0). The last piece carries what
  text was held back: half a character, or what could have begun a stop string.
  """
  wanted = settings(options)
  for name in ('logprobs', 'record'):
    if getattr(wanted, name):
      raise ValueError(f'{name}=True: a stream has none; use generate')
  engine = build.engine(
    target,
    draft,
    rule=rule,
    gamma=gamma,
    options=build.default_options(),
    **(draft_options or {}),
  )
  tokens = requests.encode(target.tokenizer, prompt, chat=chat)
  jobs = [requests.Item(tokens, request)]
  rows = requests.rows_on(target.layout, 1)
  return _pieces(engine, request_of(engine, jobs, wanted, rows=rows), wanted)


def _pieces(engine, request, wanted: Settings) -> Iterator[Piece]:
  tokenizer, weights = engine.target.tokenizer, engine.weights
  start = int(request.lengths_B[0])
  request = requests.place(request, engine.target.layout)
  state, info = engine.programs.start(weights, request)
  live, told, shown = True, 0, 0
  while live:
    state, info = engine.programs.step(weights, request, state, info)
    live, end = bool(state.live_B[0]), int(state.lengths_B[0])
    tokens = np.asarray(state.tokens_BL)[0, start:end].tolist()
    text = tokenizer.decode(tokens)
    cut = _find_stop(text, wanted.stop)
    if cut is not None:
      live, text = False, text[:cut]
      tokens = _until_stop(tokenizer, tokens, wanted.stop)
    made_by = np.asarray(info.origin_BL)[0, start + told : start + len(tokens)]
    # Text never shrinks: what a later token could change waits.
    ready = len(text) - (_held_back(text, wanted.stop) if live else 0)
    ready = max(ready, shown)
    yield Piece(
      text[shown:ready], tokens[told:], [types.ORIGINS[o] for o in made_by]
    )
    told, shown = len(tokens), ready


def request_of(
  engine: build.Engine,
  items: Sequence[requests.Item],
  wanted: Settings,
  **shape,
):
  """The items as one batch; shape: rows, length."""
  stop_ids = wanted.stop_ids
  if stop_ids is None:
    stop_ids = engine.target.tokenizer.eos_ids
  return requests.make(
    items,
    ids=engine.target.ids,
    context=engine.target.context,
    max_new_tokens=wanted.max_new_tokens,
    gamma=engine.drafter.gamma,
    temperature=wanted.temperature,
    top_k=wanted.top_k,
    top_p=wanted.top_p,
    seed=wanted.seed,
    stop_ids=stop_ids,
    **shape,
  )


def run(
  engine: build.Engine,
  request,
  wanted: Settings,
  *,
  check_cache: bool = False,
  check_values: bool = False,
) -> list[Completion]:
  """One executable call; a Completion for every row that started.

  With a check on, it runs before (debug.py) and raises what it finds.
  """
  placed = requests.place(request, engine.target.layout)
  checks = [debug.check_values] * check_values
  for check in checks + [debug.check_cache] * check_cache:
    model = build.target_model(engine.target)
    of = engine.drafter, engine.rule, engine.weights
    check(model, *of, placed, engine.options)
  found = None
  if wanted.record:
    model = build.target_model(engine.target)
    of = model, engine.drafter, engine.rule, engine.options, engine.weights
    out, found = record_lib.run(*of, placed)
  else:
    out = jax.device_get(engine.programs.generate(engine.weights, placed))
  tokenizer = engine.target.tokenizer
  started = np.flatnonzero(request.limit_B > request.lengths_B)
  for row in np.flatnonzero(out.info.broken_B):
    raise FloatingPointError(
      f'request {request.request_B[row]}: the logits of {engine.target.label} '
      f'are not finite after {out.lengths_B[row]} tokens; try dtype float32'
    )
  records = (
    None if found is None else _records(engine, placed, out, found, wanted)
  )
  done = []
  for row in started:
    start, end = int(request.lengths_B[row]), int(out.lengths_B[row])
    tokens = out.tokens_BL[row, start:end].tolist()
    stopped = end < request.limit_B[row] or tokens[-1] in request.stop_BX[row]
    text = tokenizer.decode(tokens)
    cut = _find_stop(text, wanted.stop)
    if cut is not None:
      text, stopped = text[:cut], True
      tokens = _until_stop(tokenizer, tokens, wanted.stop)
    kept = slice(start, start + len(tokens))
    logprobs = out.info.logprob_BL
    done.append(
      Completion(
        text=text,
        tokens=tokens,
        finish_reason='stop' if stopped else 'length',
        origins=[types.ORIGINS[o] for o in out.info.origin_BL[row, kept]],
        metrics=metrics.summary(
          metrics.rows(out.info, slice(row, row + 1))
        )._asdict(),
        logprobs=None if logprobs is None else logprobs[row, kept].tolist(),
        record=None if records is None else records[row],
      )
    )
  return done


def _records(engine, request, output, found, wanted: Settings):
  target, q = engine.target, engine.q
  if engine.drafter.taps:
    q = None  # of a window's first tokens only; the drafter knows all of them
  return record_lib.describe(
    output,
    found,
    request,
    target=(build.target_model(target), target.params),
    draft=q and (q, engine.weights.draft),
    chunk=engine.options.chunk,
    tokenizer=target.tokenizer,
    setting=record_lib.setting(engine, wanted),
  )


def _find_stop(text: str, stop: tuple[str, ...]) -> int | None:
  found = [at for at in (text.find(s) for s in stop) if at >= 0]
  return min(found, default=None)


def _until_stop(tokenizer, tokens: list[int], stop) -> list[int]:
  """The tokens up to the one that completes the first stop string."""
  low, high = 1, len(tokens)
  while low < high:
    middle = (low + high) // 2
    if _find_stop(tokenizer.decode(tokens[:middle]), stop) is None:
      low = middle + 1
    else:
      high = middle
  return tokens[:high]


def _held_back(text: str, stop: tuple[str, ...]) -> int:
  """Characters at the end that more tokens could still change or cut."""
  held = len(text) - len(text.rstrip('\ufffd'))
  for s in stop:
    for size in range(1, len(s)):
      if text.endswith(s[:size]):
        held = max(held, size)
  return held
