"""A file of prompts to a file of answers, line by line; a rerun goes on.

Knows no engine: `Task.ask` decodes.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from specdec_jax import requests
from specdec_jax.analysis import output_file
from specdec_jax.bench import metrics
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.io import tokenizer as tokenizer_lib


class Answer(NamedTuple):
  """What ask returns for a job, or anything with these attributes.

  finish_reason: 'stop', 'length', or 'context': the answers before left no room
  in the context for this turn.
  """

  text: str
  tokens: Sequence[int]
  finish_reason: str
  metrics: dict[str, Any] | None


_NO_ROOM = Answer('', (), 'context', None)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
  """Prompts and how to answer them.

  source: the file of the prompts, for messages. target: the model (tokenizer,
  ids, config.context). ask(jobs) -> Answers: decodes at most `rows` pairs
  (tokens, request number) together. chat: put text prompts through the chat
  template, if there is one.
  """

  source: str
  prompts: Sequence[prompts_lib.Prompt]
  target: Any
  ask: Callable[[list[tuple[list[int], int]]], Sequence[Any]]
  chat: bool
  max_new_tokens: int
  rows: int


def one_arm(settings):
  """experiment.Settings of one method: the first one at the first gamma.

  No method, no gamma, or gamma 0 is plain decoding: methods (), gammas (0,).
  """
  d = settings.decode
  methods, gammas = tuple(d.methods)[:1], tuple(d.gammas)[:1]
  if not methods or gammas in ((), (0,)):
    methods, gammas = (), (0,)
  d = dataclasses.replace(d, methods=methods, gammas=gammas)
  return dataclasses.replace(settings, decode=d)


def rows(batch_size: int, prompts: int, data: int = 1) -> int:
  """Rows of every batch: not more than prompts, a multiple of the data axis."""
  return -(-min(batch_size, prompts) // data) * data


# --- before anything is traced or written -----------------------------------


def check_prompts(task: Task) -> None:
  """Raises ValueError for the first prompt that cannot be answered.

  Later turns must fit after answers of max_new_tokens each.
  """
  for index, prompt in enumerate(task.prompts):
    where = f'{task.source}:{index + 1}: prompt {prompt.id!r}'
    try:
      requests.check_prompt(
        encode(task, prompt, ()),
        max_new_tokens=task.max_new_tokens,
        context=task.target.context,
        ids=task.target.ids,
      )
      later = _turns(prompt) - 1
      tokens = len(encode(task, prompt, [_NO_ROOM] * later))
    except ValueError as error:
      raise ValueError(f'{where}: {error}') from error
    need = tokens + (later + 1) * task.max_new_tokens
    if need > task.target.context:
      raise ValueError(
        f'{where}: its {later + 1} turns, with max_new_tokens='
        f'{task.max_new_tokens} for each answer, need {need} tokens and the '
        f'context holds {task.target.context}: lower max_new_tokens or '
        'take turns out'
      )


# --- answering ---------------------------------------------------------------


def request_number(id: str, turn: int) -> int:
  """What keys the randomness of a turn, in [0, 2**32).

  The first turn's is prompts.request_number(id). A later one's is 2**31 and the
  request number of the text 'id<newline>turn': no first turn has such a number.
  """
  if turn == 0:
    return prompts_lib.request_number(id)
  return 2**31 + prompts_lib.request_number(f'{id}\n{turn}')


def encode(task: Task, prompt, said: Sequence[Any]) -> list[int]:
  """The tokens that turn len(said) is answered on; said: the answers before.

  With the chat template the conversation is rendered anew. Raw, a turn is its
  text, after the tokens so far without their end-of-sequence id and a newline.
  """
  if prompt.tokens is not None:
    return list(prompt.tokens)
  tokenizer = task.target.tokenizer
  if task.chat and tokenizer.chat_template is not None:
    messages = [{'role': 'user', 'content': prompt.turns[0]}]
    for answer, turn in zip(said, prompt.turns[1:], strict=False):
      messages.append({'role': 'assistant', 'content': answer.text})
      messages.append({'role': 'user', 'content': turn})
    return tokenizer.encode(tokenizer.chat(messages))
  tokens = tokenizer.encode(prompt.turns[0])
  for answer, turn in zip(said, prompt.turns[1:], strict=False):
    tokens += [t for t in answer.tokens if t not in tokenizer.eos_ids]
    tokens += _continued(tokenizer, f'\n{turn}')
  return tokens


def _continued(tokenizer: tokenizer_lib.Tokenizer, text: str) -> list[int]:
  tokens = tokenizer.encode(text)
  return tokens[1:] if tokenizer.add_bos else tokens


def _turns(prompt) -> int:
  return 1 if prompt.tokens is not None else len(prompt.turns)


def answer(task: Task, batch: Sequence[prompts_lib.Prompt]) -> list[list[Any]]:
  """The answers to every turn of at most `rows` prompts."""
  said = [[] for _ in batch]
  room = task.target.context - task.max_new_tokens
  for turn in range(max(map(_turns, batch))):
    jobs, asked = [], []
    for prompt, before in zip(batch, said, strict=True):
      if turn >= _turns(prompt):
        continue
      tokens = encode(task, prompt, before)
      # check_prompts counts answers in tokens; a template reads their text
      # anew, and broken text can take more.
      if turn and len(tokens) > room:
        before.append(_NO_ROOM)
        continue
      number = request_number(prompt.id, turn)
      jobs.append(requests.Item(tokens, number))
      asked.append(before)
    if jobs:
      for before, new in zip(asked, task.ask(jobs), strict=True):
        before.append(new)
  return said


def line(prompt: prompts_lib.Prompt, said: Sequence[Any]) -> bytes:
  """A line of output; with {"turns"} every value but id is a list, by turn."""
  columns = {
    'text': [x.text for x in said],
    'tokens': [list(x.tokens) for x in said],
    'finish_reason': [x.finish_reason for x in said],
    'metrics': [x.metrics for x in said],
  }
  if not prompt.listed:
    columns = {name: values[0] for name, values in columns.items()}
  row = {'id': prompt.id} | columns
  return (
    json.dumps(row, separators=(',', ':'), allow_nan=False).encode() + b'\n'
  )


def recorded(prompt: prompts_lib.Prompt, said: Sequence[Any]) -> dict[str, Any]:
  """Those of a prompt's answers that have a record, by a title."""
  turn = lambda i: f', turn {i}' if len(said) > 1 else ''
  return {
    prompt.id + turn(i): x
    for i, x in enumerate(said, 1)
    if not isinstance(x, Answer) and x.record is not None
  }


def write(
  path: pathlib.Path,
  meta: dict[str, Any],
  task: Task,
  *,
  track: Callable[..., Any] = lambda batches, description: batches,
  stopped: Callable[[], Any] = lambda: False,
  seen: dict[str, Any] | None = None,
) -> dict[str, Any]:
  """Answers what has no line yet, batch by batch, and appends it.

  A batch is always the same prompts, so that a run that was stopped inside one
  does it again and gets the same bytes in any precision.

  Args:
    path: the output, from check_output.
    meta: from describe, models included.
    task: the prompts; checked first.
    track: shows progress: (batches, description) -> batches.
    stopped: true to end after the batch at hand.
    seen: receives the answers that have a record, by a title, once written.

  Returns:
    lines (in the file), prompts, written, skipped (there before), tokens and
    the metrics (metrics.total) of the lines written, seconds.

  Raises:
    ValueError: before anything is written, what check_prompts and begun
      refuse, or a file that another run has open; later, a failing disk.
  """
  start = time.perf_counter()
  check_prompts(task)
  total, summaries = len(task.prompts), []
  skipped, _ = output_file.begun(path, meta, task.prompts)
  lines = skipped
  if skipped < total:
    with output_file.opened(path) as file:
      # Again under the lock: another run may just have ended.
      lines = skipped = output_file.begin(path, file, meta, task.prompts)
      first = skipped // task.rows * task.rows
      starts = range(first, total, task.rows)
      for at in track(starts, f'answers {skipped + 1} to {total}'):
        if stopped():
          break
        batch = task.prompts[at : at + task.rows]
        said = answer(task, batch)[lines - at :]
        new = list(zip(batch[lines - at :], said, strict=True))
        output_file.append(path, file, b''.join(line(*pair) for pair in new))
        lines += len(new)
        if seen is not None:
          for pair in new:
            seen |= recorded(*pair)
        summaries += [x.metrics for _, xs in new for x in xs if x.metrics]
  summary = metrics.total([metrics.Summary(**x) for x in summaries])._asdict()
  return {
    'output': str(path),
    'prompts': total,
    'lines': lines,
    'written': lines - skipped,
    'skipped': skipped,
    'tokens': summary['emitted_tokens'],
    'metrics': summary,
    'seconds': round(time.perf_counter() - start, 3),
  }


def sentence(done: dict[str, Any], *caught: str) -> str:
  """What a run did, from write's summary; caught: the signal that ended it."""
  lines, prompts, path = done['lines'], done['prompts'], done['output']
  if lines < prompts:
    why = f'stopped by {caught[0]} ' if caught else 'stopped '
    return f'{why}at line {lines} of {prompts}; run it again to go on: {path}'
  if not done['written']:
    return f'nothing to do: all {prompts} answers are there: {path}'
  return f'wrote {done["written"]} answers, {prompts} are there: {path}'


@contextlib.contextmanager
def interrupts() -> Iterator[list[str]]:
  """A list that receives the first SIGINT or SIGTERM; the next acts as ever."""
  caught: list[str] = []

  def note(number, frame):
    caught.append(signal.Signals(number).name)
    # Not print: a handler may interrupt one.
    os.write(2, b'\nstopping after this batch; once more stops at once\n')
    restore()

  before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  try:
    yield caught
  finally:
    restore()
