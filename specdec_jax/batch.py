"""Answers a file of prompts, one JSON line each; a rerun resumes.

Decoding is left to Run.ask.
"""

import copy
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from specdec_jax import hosts, printing, program, requests, types
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.io import files

# Sections of the config that change no answer, except for bench.chat.
_NO_EFFECT = ('mesh', 'bench')


class Answer(NamedTuple):
  """A turn that is not decoded, with fields as in api.Completion.

  finish_reason: 'context' (earlier turns left no room for this one) or
    'non-finite' (the logits of an earlier one were NaN or infinite).
  """

  text: str
  tokens: Sequence[int]
  finish_reason: str
  metrics: dict[str, Any] | None = None
  record: Any = None


class Run(NamedTuple):
  """Prompts and how to answer them.

  prompts: in the order of their file.
  target: the LanguageModel that answers.
  ask: decodes at most `rows` items together and returns their answers.
  chat: apply the chat template to text prompts.
  max_new_tokens: limit of each answer.
  rows: prompts decoded together.
  config: digest of config and weights; see digest().
  """

  prompts: Sequence[prompts_lib.Prompt]
  target: Any
  ask: Callable[[list[requests.Item]], Sequence[Any]]
  chat: bool
  max_new_tokens: int
  rows: int
  config: str


def one_method(config):
  """A copy of a ConfigDict with its first method at its first gamma.

  Without a method, or at gamma 0, it decodes plainly.
  """
  config = copy.deepcopy(config)
  d = config.decode
  d.methods, d.gammas = tuple(d.methods)[:1], tuple(d.gammas)[:1]
  if not d.methods or d.gammas in ((), (0,)):
    d.methods, d.gammas = (), (0,)
  return config


def digest(config, models: Sequence[Any]) -> str:
  """A digest of a ConfigDict and of the models' weights."""
  parts = {k: v for k, v in config.to_dict().items() if k not in _NO_EFFECT}
  weights = [[model.digest, model.draft_ids] for model in models]
  return _sha256([parts, config.bench.chat, weights])


def _sha256(content: Any) -> str:
  text = json.dumps(content, sort_keys=True, default=list)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def costs(path: pathlib.Path) -> dict[str, Any] | None:
  """The costs by which `adaptive` chose in the first answer of an output."""
  try:
    with open(path, encoding='utf-8') as file:
      found = json.loads(file.readline())['metrics']
    return (found if isinstance(found, dict) else found[0])['costs']
  except (LookupError, OSError, TypeError, ValueError):
    return None  # `begun` says what is wrong.


# --- one conversation --------------------------------------------------------


def request_number(id: str, turn: int) -> int:
  """The request number that keys the randomness of a turn, in [0, 2**32).

  First turn: prompts.request_number(id), below 2**31. Later turns: 2**31 plus
  the number of the text 'id<newline>turn', so they collide with no first turn.
  """
  if turn == 0:
    return prompts_lib.request_number(id)
  return 2**31 + prompts_lib.request_number(f'{id}\n{turn}')


def encode(run: Run, prompt, answers: Sequence[Any]) -> list[int]:
  """The input tokens of turn len(answers), earlier turns and answers included.

  With `chat`, the conversation in the chat template, as in the API; else, and
  for an encoder, the tokens so far, a newline and the text of the turn.
  """
  tokenizer = run.target.tokenizer
  if prompt.tokens is not None:
    return list(prompt.tokens)
  first, *later = prompt.turns[: len(answers) + 1]
  if run.chat and run.target.start is None:
    messages = [{'role': 'user', 'content': first}]
    for answer, turn in zip(answers, later, strict=True):
      messages.append({'role': 'assistant', 'content': answer.text})
      messages.append({'role': 'user', 'content': turn})
    return tokenizer.encode_chat(messages)
  tokens = tokenizer.encode(first)
  for answer, turn in zip(answers, later, strict=True):
    tokens += [t for t in answer.tokens if t not in tokenizer.eos_ids]
    # As it goes on behind other text: without bos, or a space that begins it.
    tokens += tokenizer.split_chat(f'a\n{turn}', 1)[1]
  return tokens


def answer(run: Run, batch: Sequence[prompts_lib.Prompt]) -> list[list[Any]]:
  """The answers to every turn of at most `rows` prompts."""
  answers = [[] for _ in batch]
  for turn in range(max(len(prompt.turns) or 1 for prompt in batch)):
    items, asked = [], []
    for prompt, before in zip(batch, answers, strict=True):
      if turn >= (len(prompt.turns) or 1):
        continue
      tokens = encode(run, prompt, before)
      if before and before[-1].finish_reason == 'non-finite':
        before.append(Answer('', (), 'non-finite'))
      elif turn and len(tokens) + run.max_new_tokens > run.target.context:
        before.append(Answer('', (), 'context'))
      else:
        number = request_number(prompt.id, turn)
        items.append(requests.item(run.target, tokens, number, chat=False))
        asked.append(before)
    if items:
      for before, new in zip(asked, run.ask(items), strict=True):
        before.append(new)
  return answers


# --- the file ----------------------------------------------------------------


def check_output(path: str, source: str) -> pathlib.Path:
  """The path of the output; raises ValueError before any work.

  Args:
    path, source: the flags --output and --prompts.
  """
  if not path or not source:
    raise ValueError('want --prompts=IN.jsonl and --output=OUT.jsonl')
  out = pathlib.Path(path)
  if out.is_dir() or not os.access(out.parent, os.W_OK):
    raise ValueError(f'output {path}: cannot be written: name another')
  if out.exists() and out.samefile(source):
    raise ValueError(f'output {path} is the prompts: name another file')
  return out


def check_prompts(run: Run, source: str) -> None:
  """Raises ValueError for the first prompt that cannot be answered."""
  for prompt in run.prompts:
    try:
      requests.check(
        requests.item(run.target, encode(run, prompt, ()), 0, chat=False),
        max_new_tokens=run.max_new_tokens,
        context=run.target.context,
        ids=run.target.ids,
      )
    except ValueError as error:
      raise ValueError(f'{source}: prompt {prompt.id!r}: {error}') from error


def begun(path: pathlib.Path, run: Run) -> set[str]:
  """The ids answered so far; then cuts off an unfinished last line.

  Raises:
    ValueError: a line of another prompt, another config or other weights. The
      file is left as it is.
  """
  if not path.exists():
    return set()
  data = path.read_bytes()
  end = data.rfind(b'\n') + 1
  advice = f'name another --output, or delete {path.name} to start again'
  digests = {prompt.id: _prompt_digest(run, prompt) for prompt in run.prompts}
  ids = set()
  for where, row in files.read_jsonl(path, finished=True):
    id = str(row.get('id'))
    if id not in digests or row.get('run') != digests[id]:
      raise ValueError(
        f'{where}: was answered with another prompt, config or weights: give '
        f'those it was begun with, {advice}'
      )
    ids.add(id)
  unfinished = data[end:]
  if not unfinished.startswith(b'{"id":"'[: len(unfinished)]):
    raise ValueError(f'{path}: its last line is no answer: {advice}')
  os.truncate(path, end)
  return ids


def write(
  path: pathlib.Path, run: Run, old: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Answers the prompts that have no line yet, batch by batch.

  After Ctrl-C or SIGTERM it ends with the current batch.

  Args:
    path: the output; lines are appended.
    run: prompts and settings; call check_prompts first.
    old: the ids answered so far, of begun.

  Returns:
    A summary: prompts, lines (in the file), written, skipped, non_finite,
    tokens, target_calls, block_efficiency, seconds; and the new answers that
    have a record, by title.
  """
  start = time.perf_counter()
  left = [prompt for prompt in run.prompts if prompt.id not in old]
  batches = [left[i : i + run.rows] for i in range(0, len(left), run.rows)]
  written, done, recorded = 0, [], {}
  name = path if hosts.is_first() else os.devnull
  with open(name, 'a', encoding='utf-8') as file, program.interrupts() as stop:
    for batch in printing.track(batches, f'{len(left)} answers'):
      if hosts.anywhere(bool(stop)):
        break
      for prompt, answers in zip(batch, answer(run, batch), strict=True):
        file.write(_line(run, prompt, answers))
        written, done = written + 1, done + answers
        for turn, x in enumerate(answers, 1):
          if x.record is not None:
            title = f'{prompt.id}, turn {turn}' if answers[1:] else prompt.id
            recorded[title] = x
      file.flush()
  add = lambda name: sum(x.metrics[name] for x in done if x.metrics)
  tokens, calls = add('emitted_tokens'), add('target_calls')
  summary = {
    'output': str(path),
    'prompts': len(run.prompts),
    'lines': len(old) + written,
    'written': written,
    'skipped': len(old),
    'non_finite': sum(x.finish_reason == 'non-finite' for x in done),
    'tokens': tokens,
    'target_calls': calls,
    'block_efficiency': tokens / calls if calls else None,
    'seconds': round(time.perf_counter() - start, 3),
  }
  return summary, recorded


def report(summary: dict[str, Any], rule: types.Rule) -> bool:
  """Prints a summary; returns whether every prompt has its answer."""
  lines, prompts = summary['lines'], summary['prompts']
  print(f'{lines} of {prompts} prompts are answered: {summary["output"]}')
  if not rule.lossless:
    print(
      f'The rule {rule.name} is LOSSY: these answers do not follow the '
      "target's distribution; scripts/bench.py measures by how much."
    )
  print(printing.compact(summary | {'lossless': rule.lossless}))
  return lines == prompts


def _line(run: Run, prompt: prompts_lib.Prompt, answers: Sequence[Any]) -> str:
  """A line of output; for {"turns"}, values other than id and run are lists."""
  names = 'text', 'tokens', 'finish_reason', 'metrics'
  columns = {name: [getattr(x, name) for x in answers] for name in names}
  if not prompt.listed:
    columns = {name: values[0] for name, values in columns.items()}
  row = {'id': prompt.id} | columns | {'run': _prompt_digest(run, prompt)}
  return json.dumps(row, separators=(',', ':')) + '\n'


def _prompt_digest(run: Run, prompt: prompts_lib.Prompt) -> str:
  return _sha256([run.config, prompt.turns, prompt.tokens, prompt.listed])
