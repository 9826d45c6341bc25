"""Answers a file of prompts, line by line; a rerun resumes where it stopped.

python scripts/generate.py --config=configs/smollm2.py \
  --prompts=IN.jsonl --output=OUT.jsonl [--html=PAGE.html]

Uses the config's first method at its first gamma, bench.batch_size, and the
chat template unless bench.chat is False. bench/prompts.py documents the lines
of IN, specdec_jax/batch.py those of OUT. PAGE shows the answers of this run.
"""

import dataclasses
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
from absl import flags  # noqa: E402

from specdec_jax import (  # noqa: E402
  api,
  build,
  hosts,  # noqa: E402
  html,
  program,
  requests,
  settings,  # noqa: E402
)
from specdec_jax import batch as batch_lib  # noqa: E402
from specdec_jax.bench import prompts  # noqa: E402

_CONFIG = program.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'JSONL file of prompts')
_OUTPUT = flags.DEFINE_string('output', '', 'JSONL file of answers')
_HTML = flags.DEFINE_string('html', '', 'page of who made each token: slower')
_CACHE = flags.DEFINE_bool('check_cache', False, 'recompute every cache: slow')


def read():
  """The output's path, the prompts, and costs: a rerun goes on as begun."""
  if jax.process_count() > 1 and (_HTML.value or _CACHE.value):
    raise ValueError('html, check_cache: are for one process; start one')
  output = batch_lib.check_output(_OUTPUT.value, _PROMPTS.value)
  return output, prompts.read(_PROMPTS.value), batch_lib.costs(output)


def run() -> bool:
  """True if every prompt has its answer."""
  s = settings.settings(config := batch_lib.one_method(_CONFIG.value))
  output, chosen, costs = hosts.from_first(read)
  if _HTML.value:
    program.open_workdir(str(pathlib.Path(_HTML.value).parent))
  e = settings.load(s)
  target, max_new, chat = e.target, s.decode.max_new_tokens, s.bench.chat
  sampling = dataclasses.asdict(s.sampling)
  wanted = api.Settings(max_new, **sampling, record=bool(_HTML.value))
  rows = requests.rows_on(target.layout, min(s.bench.batch_size, len(chosen)))
  engine = settings.first(e, measure=not costs)

  def ask(items):
    batch = api.request_of(engine, items, wanted, rows=rows)
    return api.run(engine, batch, wanted, check_cache=_CACHE.value)

  digest = batch_lib.digest(config, [m for m in (target, engine.draft) if m])
  task = batch_lib.Run(chosen, target, ask, chat, max_new, rows, digest)
  batch_lib.check_prompts(task, _PROMPTS.value)
  old = hosts.from_first(lambda: batch_lib.begun(output, task))
  if costs and engine.costs is not None:
    engine = build.with_costs(engine, costs)
  done, recorded = batch_lib.write(output, task, old)
  if recorded and hosts.is_first():
    html(recorded, _HTML.value, command=shlex.join(['python', *sys.argv]))
  return batch_lib.report(done, engine.rule)


if __name__ == '__main__':
  program.launch(run, hosts=True)
