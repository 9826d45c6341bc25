"""Answers a file of prompts, line by line; a rerun goes on where it stopped.

python scripts/generate.py --config=configs/smollm2.py \
  --prompts=IN.jsonl --output=OUT.jsonl

Takes the config's first method at its first gamma, bench.batch_size, and the
chat template unless bench.chat is False. Lines: eval/prompts.py, answers.py.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from specdec_jax import api, experiment, runtime  # noqa: E402
from specdec_jax.eval import answers, output_file, prompts, report  # noqa: E402

_CONFIG = config_flags.DEFINE_config_file('config', 'configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'JSONL file of prompts')
_OUTPUT = flags.DEFINE_string('output', '', 'JSONL file of answers')
_CACHE = flags.DEFINE_bool('check_cache', False, 'recompute every cache: slow')
_VALUES = flags.DEFINE_bool('check_values', False, 'look for bad values: slow')


def run() -> bool:
  """True if every prompt has its answer."""
  settings = answers.one_arm(experiment.settings(_CONFIG.value))
  output = output_file.check_output(_OUTPUT.value, _PROMPTS.value)
  chosen = prompts.read(_PROMPTS.value)
  # Twice: before the models are loaded, and, with them, in answers.write.
  output_file.begun(output, output_file.describe(settings, chosen), chosen)
  e = experiment.load(settings)
  method = (*settings.decode.methods, 'lookup')[0]
  engine = experiment.engine(e, method, settings.decode.gammas[0])
  max_new = settings.decode.max_new_tokens
  wanted = api.Settings(max_new, **dataclasses.asdict(settings.sampling))
  b = settings.bench
  rows = answers.rows(b.batch_size, len(chosen), settings.mesh.data)
  checks = dict(check_cache=_CACHE.value, check_values=_VALUES.value)
  ask = lambda jobs: api.run(
    engine, api.request_of(engine, jobs, wanted, rows=rows), wanted, **checks
  )
  task = answers.Task(
    _PROMPTS.value, chosen, e.target, ask, b.chat, max_new, rows
  )
  meta = output_file.describe(settings, chosen, target=e.target, draft=e.draft)
  with answers.interrupts() as caught:
    done = answers.write(
      output, meta, task, track=report.track, stopped=lambda: caught
    )
  print(answers.sentence(done, *caught), report.compact(done), sep='\n')
  return done['lines'] == done['prompts']


if __name__ == '__main__':
  runtime.launch(run)
