"""A run of scripts/generate.py with an engine that is a function."""

import dataclasses
import json
import types

import pytest

from configs import pair
from specdec_jax import settings
from specdec_jax.analysis import answers, output_file
from specdec_jax.bench import metrics, prompts
from specdec_jax.io import tokenizer
from specdec_jax.models import config as model_config

ROWS = (
  {'prompt': 'Hello'},
  {'turns': ['one', 'two', 'three'], 'id': 'a/b'},
  {'tokens': [5, 6, 7], 'id': 12},
  {'prompt': 'more'},
  {'turns': ['first', 'second']},
)
TEMPLATE = (
  '{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>'
)
# Two windows of gamma 2, one all accepted and one all rejected.
COUNTS = {
  'emitted_tokens': 4,
  'target_calls': 2,
  'accepted_histogram': [1, 0, 1],
  'uncut_histogram': [1, 0, 1],
  'proposed_per_position': [2, 2],
  'tried_per_position': [2, 1],
  'accepted_per_position': [1, 1],
}
SUMMARY = metrics.total([metrics.total([])._replace(**COUNTS)])._asdict()


def target(*, template=None, context=128, digest='d0'):
  inner = tokenizer.from_bytes(512, 'bytes')
  return types.SimpleNamespace(
    source='fake:model',
    digest=digest,
    ids=258,
    draft_ids=(),
    config=dataclasses.replace(model_config.sized('tiny'), context=context),
    tokenizer=dataclasses.replace(inner, chat_template=template),
  )


def ask(jobs):
  """Each answer is a function of its job alone, and ends with eos."""
  out = []
  for tokens, number, *_ in jobs:
    new = [97 + (sum(tokens) + number + i) % 26 for i in range(3)]
    text = bytes(new).decode()
    out.append(answers.Answer(text, [*new, 256], 'stop', SUMMARY))
  return out


class World:
  """One run's inputs, in a folder; fields may be changed between runs."""

  def __init__(self, folder, rows=ROWS):
    self.input = folder / 'in.jsonl'
    self.input.write_text('\n'.join(map(json.dumps, rows)))
    self.output = folder / 'out.jsonl'
    self.settings = answers.one_arm(settings.settings(pair.get_config('tiny')))
    self.target, self.ask, self.rows = target(), ask, 2
    self.jobs = []

  def run(self, **options):
    found = prompts.read(self.input)
    output_file.check_output(str(self.output), str(self.input))
    task = answers.Task(
      str(self.input), found, self.target, self._ask, True, 8, self.rows
    )
    meta = output_file.describe(self.settings, found, target=self.target)
    return answers.write(self.output, meta, task, **options)

  def _ask(self, jobs):
    assert 1 <= len(jobs) <= self.rows
    self.jobs.append(jobs)
    return self.ask(jobs)

  def files(self):
    return {p.name: p.read_bytes() for p in self.output.parent.iterdir()}

  def refused(self, **options):
    """The message of a run that must change no file and decode nothing."""
    before, asked = self.files(), len(self.jobs)
    with pytest.raises(ValueError) as error:
      self.run(**options)
    assert self.files() == before and len(self.jobs) == asked
    return str(error.value)


def set_settings(world, section, **changes):
  part = dataclasses.replace(getattr(world.settings, section), **changes)
  world.settings = dataclasses.replace(world.settings, **{section: part})
