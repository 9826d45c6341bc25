"""Answers a file of prompts, one JSON line each; a rerun skips what it has.

A line, written as its answer ends, has the prompt's `id`; a completion's
`text`, `tokens`, `finish_reason` and `metrics`, in lists with one a turn where
the prompt has "turns"; and `run`, a digest of prompt, config and weights.
"""

import copy
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import (
  Collection,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

from specdec_jax import (
  api,
  build,
  completion,
  hosts,
  metrics,
  printing,
  requests,
)
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.io import files
from specdec_jax.models import convert, work

# Prompts of a row that are answered together: they share a length, and every
# first turn is answered before a second.
_TOGETHER = 32
# Sections of the config that change no answer, except for bench.chat.
_NO_EFFECT = ('mesh', 'bench')


class Run(NamedTuple):
  """Prompts, in their file's order, and how to answer them.

  chat: put texts through the chat template.
  wanted: settings for each prompt, except its own.
  rows: prompts decoded together.
  config: see digest().
  """

  prompts: Sequence[prompts_lib.Prompt]
  engine: build.Engine
  chat: bool
  wanted: completion.Settings
  rows: int
  config: str


def one_method(config):
  """Copies a ConfigDict with its first method at its first gamma; plain
  decoding where there is no method, or gamma 0."""
  config = copy.deepcopy(config)
  d = config.decode
  d.methods, d.gammas = tuple(d.methods)[:1], tuple(d.gammas)[:1]
  if not d.methods or d.gammas in ((), (0,)):
    d.methods, d.gammas = (), (0,)
  return config


def digest(config, engine: build.Engine) -> str:
  """Hashes a ConfigDict and the weights of target and drafter."""
  parts = {k: v for k, v in config.to_dict().items() if k not in _NO_EFFECT}
  models = [x for x in (engine.target, engine.draft) if x]
  weights = [[model.digest, model.draft_ids] for model in models]
  # Heads and counts are in no model. What adaptive has of its own, beside its
  # parts, are seconds, which differ from run to run.
  held = [x.params for x in engine.parts] or engine.weights.draft
  if own := work.own_leaves(held, [model.params for model in models]):
    weights.append([convert.digest(hosts.fetch(own))])
  return _sha256([parts, config.bench.chat, weights])


def check(run: Run, source: str) -> None:
  """Raises ValueError for the first prompt that cannot be answered."""
  target = run.engine.target
  for prompt in run.prompts:
    try:
      if prompt.turns[1:] and (not run.chat or target.start is not None):
        raise ValueError('later turns need bench.chat=True and no encoder')
      api.ask(target, _item(run, prompt, ()), _wanted(run, prompt))
    except ValueError as error:
      raise ValueError(f'{source}: prompt {prompt.id!r}: {error}') from error


def check_output(path: str, source: str) -> pathlib.Path:
  """Returns --output as a path; raises ValueError before any work."""
  if not path or not source:
    raise ValueError('want --prompts=IN.jsonl and --output=OUT.jsonl')
  out = pathlib.Path(path)
  if out.is_dir() or not os.access(out.parent, os.W_OK):
    raise ValueError(f'output {path}: cannot be written: name another')
  if out.exists() and out.samefile(source):
    raise ValueError(f'output {path} is the prompts: name another file')
  return out


def begun(path: pathlib.Path, run: Run) -> set[str]:
  """Returns the ids answered so far; then cuts off a torn last line. Raises
  ValueError for a line with another prompt, config or weights, and leaves the
  file as it is."""
  advice = f'name another --output, or delete {path.name} to start again'
  why = f'{path}: its last line is no answer: {advice}'
  lines = files.Lines(path, why, '{"id":"')
  digests = {prompt.id: _prompt_digest(run, prompt) for prompt in run.prompts}
  ids = set()
  for where, row in lines.read():
    id = str(row.get('id'))
    if id not in digests or row.get('run') != digests[id]:
      raise ValueError(
        f'{where}: was answered with another prompt, config or weights: give '
        f'those it was begun with, {advice}'
      )
    ids.add(id)
  if path.exists():
    lines.open().close()
  return ids


def write(
  path: pathlib.Path, run: Run, old: Collection[str]
) -> dict[str, completion.Completion]:
  """Appends answers to the prompts not in `old`, each as soon as it has ended;
  returns the new answers, by title."""
  left = [prompt for prompt in run.prompts if prompt.id not in old]
  size, done, title = _TOGETHER * run.rows, {}, f'{len(left)} answers'
  parts = (left[i : i + size] for i in range(0, len(left), size))
  found = (pair for part in parts for pair in _answers(run, part))
  name = path if hosts.is_first() else os.devnull
  with files.naming(name), open(name, 'a', encoding='utf-8') as file:
    for prompt, answers in printing.track(found, title, len(left)):
      file.write(_line(run, prompt, answers))
      file.flush()
      for turn, x in enumerate(answers, 1):
        done[f'{prompt.id}, turn {turn}' if turn > 1 else prompt.id] = x
  return done


def report(run: Run, done: Mapping[str, completion.Completion]) -> None:
  """Prints what was answered, and a line of JSON."""
  rule = run.engine.rule
  print(f'{len(run.prompts)} prompts are answered, {len(done)} now')
  if not rule.lossless:
    print(
      f'The rule {rule.name} is LOSSY: these answers do not follow the '
      "target's distribution; scripts/bench.py measures by how much."
    )
  add = lambda name: sum(x.metrics[name] for x in done.values() if x.metrics)
  tokens, calls = add('emitted_tokens'), add('target_calls')
  bad = sum(x.finish_reason == 'non-finite' for x in done.values())
  counts = dict(prompts=len(run.prompts), answers=len(done), non_finite=bad)
  counts |= dict(tokens=tokens, target_calls=calls)
  rate = dict(block_efficiency=metrics.ratio(tokens, calls))
  summary = counts | rate | dict(lossless=rule.lossless)
  made = f'{tokens} tokens in {calls} passes of the target'
  printing.result(summary, f'{made}; {bad} answers are not finite')


# --- one conversation --------------------------------------------------------


def request_number(id: str, turn: int) -> int:
  """Returns the number that keys a turn's randomness, in [0, 2**32).

  First turn: prompts.request_number(id), below 2**31. Later turns: 2**31 plus
  the number of the text 'id<newline>turn', so they collide with no first turn.
  """
  if turn == 0:
    return prompts_lib.request_number(id)
  return 2**31 + prompts_lib.request_number(f'{id}\n{turn}')


def _wanted(run: Run, prompt: prompts_lib.Prompt) -> completion.Settings:
  """Returns the settings for each turn of a prompt."""
  return dataclasses.replace(run.wanted, **prompt.own)


def _item(run: Run, prompt, answers: Sequence[Any]) -> requests.Item:
  """Makes turn len(answers) of a prompt, after the turns and answers before."""
  given = prompt.given
  if answers:
    given = [{'role': 'user', 'content': prompt.turns[0]}]
    for x, turn in zip(answers, prompt.turns[1:], strict=False):
      given.append({'role': 'assistant', 'content': x.text})
      given.append({'role': 'user', 'content': turn})
  number = request_number(prompt.id, len(answers))
  return requests.item(run.engine.target, given, number, chat=run.chat)


def _answers(
  run: Run, some: Sequence[prompts_lib.Prompt]
) -> Iterator[tuple[prompts_lib.Prompt, list[completion.Completion]]]:
  """Yields prompts with the answers to all their turns, as they end.

  A turn is empty, without metrics, if one before had logits not finite
  ('non-finite'), or if the turns before left no room ('context').
  """
  answers = [[] for _ in some]
  for turn in range(max(len(x.turns) or 1 for x in some)):
    asked = [i for i, x in enumerate(some) if turn < (len(x.turns) or 1)]
    for i, answer in _turn(run, some, asked, answers):
      answers[i].append(answer)
      if turn + 1 == (len(some[i].turns) or 1):
        yield some[i], answers[i]


def _turn(run: Run, some, asked: Sequence[int], answers):
  """Yields prompts' indices with the answers to their next turns."""
  given, fitting = [], []
  for i in asked:
    item, wanted = _item(run, some[i], answers[i]), _wanted(run, some[i])
    need = len(item.tokens) + (wanted.max_new_tokens or 1)
    why = 'context' if need > run.engine.target.context else ''
    if answers[i] and answers[i][-1].finish_reason == 'non-finite':
      why = 'non-finite'
    if why:
      yield i, completion.Completion('', [], [], finish_reason=why, metrics={})
      continue
    given.append(i)
    fitting.append(api.ask(run.engine.target, item, wanted))
  if fitting:
    for n, answer in api.answers(run.engine, fitting, rows=run.rows):
      yield given[n], answer


def _line(run: Run, prompt: prompts_lib.Prompt, answers: Sequence[Any]) -> str:
  names = 'text', 'tokens', 'finish_reason', 'metrics'
  columns = {name: [getattr(x, name) for x in answers] for name in names}
  if not prompt.listed:
    columns = {name: values[0] for name, values in columns.items()}
  row = {'id': prompt.id} | columns | {'run': _prompt_digest(run, prompt)}
  return json.dumps(row, separators=(',', ':')) + '\n'


def _prompt_digest(run: Run, prompt: prompts_lib.Prompt) -> str:
  parts = [run.config, prompt.given, prompt.turns, prompt.listed]
  if prompt.own:  # without, as before a line could have some
    parts.append(prompt.own)
  return _sha256(parts)


def _sha256(content: Any) -> str:
  text = json.dumps(content, sort_keys=True, default=list)
  return hashlib.sha256(text.encode()).hexdigest()[:16]
