r"""Answers a file of prompts, line by line; a rerun resumes where it stopped.

python scripts/generate.py --config=configs/smollm2.py \
  --prompts=IN.jsonl --output=OUT.jsonl [--html=PAGE.html]

Uses the config's first method at its first gamma, bench.batch_size, and the
chat template unless bench.chat is False, as it should be for a base model.
docs/options.md documents the lines of IN, specdec_jax/serve/batch.py those of
OUT. PAGE shows the answers of this run.
"""

import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
from absl import flags

from specdec_jax import (
  build,
  completion,
  hosts,
  html,
  program,
  requests,
  settings,
)
from specdec_jax.bench import prompts
from specdec_jax.serve import batch as batch_lib

_CONFIG = program.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'JSONL file of prompts')
_OUTPUT = flags.DEFINE_string('output', '', 'JSONL file of answers')
_HTML = flags.DEFINE_string(
  'html', '', 'also a page of the answers, coloured by origin; slower'
)


def read():
  """The output's path, and the prompts."""
  if jax.process_count() > 1 and _HTML.value:
    raise ValueError('html: is for one process; start one')
  output = batch_lib.check_output(_OUTPUT.value, _PROMPTS.value)
  return output, prompts.read(_PROMPTS.value, completion.EACH)


def run() -> bool:
  s = settings.settings(config := batch_lib.one_method(_CONFIG.value))
  output, chosen = hosts.from_first(read)
  if _HTML.value:
    program.open_workdir(str(pathlib.Path(_HTML.value).parent))
  e = settings.load(s)
  wanted = completion.Settings(
    **vars(s.sampling),
    max_new_tokens=s.decode.max_new_tokens or None,
    record=bool(_HTML.value),
  )
  engine = settings.first(e)
  rows = requests.rows_on(e.target.layout, min(s.bench.batch_size, len(chosen)))
  if any(x.own.get('prediction') for x in chosen):
    build.check_prediction(engine)
  task = batch_lib.Run(
    prompts=chosen,
    engine=engine,
    chat=s.bench.chat,
    wanted=wanted,
    rows=rows,
    config=batch_lib.digest(config, engine),
  )
  batch_lib.check(task, _PROMPTS.value)
  old = hosts.from_first(lambda: batch_lib.begun(output, task))
  done = batch_lib.write(output, task, old)
  if shown := {title: x for title, x in done.items() if x.record}:
    html(shown, _HTML.value, command=shlex.join(['python', *sys.argv]))
  batch_lib.report(task, done)
  return True


if __name__ == '__main__':
  program.launch(run, hosts=True)
