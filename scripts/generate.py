"""Answers a file of prompts, line by line; a rerun goes on where it stopped.

python scripts/generate.py --config=configs/smollm2.py \
  --prompts=IN.jsonl --output=OUT.jsonl [--html=PAGE.html]

Takes the config's first method at its first gamma, bench.batch_size, and the
chat template unless bench.chat is False. Lines: eval/prompts.py, answers.py.
"""

import dataclasses
import pathlib
import shlex
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from specdec_jax import (  # noqa: E402
  api,
  html,
  runtime,
  settings,  # noqa: E402
)
from specdec_jax.analysis import (
  answers,  # noqa: E402
  output_file,  # noqa: E402
)
from specdec_jax.bench import (
  prompts,  # noqa: E402
)

_CONFIG = runtime.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'JSONL file of prompts')
_OUTPUT = flags.DEFINE_string('output', '', 'JSONL file of answers')
_HTML = flags.DEFINE_string('html', '', 'page of who made each token: slower')
_CACHE = flags.DEFINE_bool('check_cache', False, 'recompute every cache: slow')


def run() -> bool:
  """True if every prompt has its answer."""
  s = answers.one_arm(settings.settings(_CONFIG.value))
  output = output_file.check_output(_OUTPUT.value, _PROMPTS.value)
  chosen = prompts.read(_PROMPTS.value)
  # Twice: before the models are loaded, and, with them, in answers.write.
  lines, _ = output_file.begun(output, output_file.describe(s, chosen), chosen)
  output_file.check_page(_HTML.value, output, _PROMPTS.value, lines)
  engine = settings.first(e := settings.load(s))
  b, max_new, seen = s.bench, s.decode.max_new_tokens, {}
  sampling = dataclasses.asdict(s.sampling)
  wanted = api.Settings(max_new, **sampling, record=bool(_HTML.value))
  rows = answers.rows(b.batch_size, len(chosen), s.mesh.data)
  batch = lambda jobs: api.request_of(engine, jobs, wanted, rows=rows)
  ask = lambda jobs: api.run(
    engine, batch(jobs), wanted, check_cache=_CACHE.value
  )
  task = answers.Task(
    _PROMPTS.value, chosen, e.target, ask, b.chat, max_new, rows
  )
  meta = output_file.describe(s, chosen, target=e.target, draft=e.draft)
  with answers.interrupts() as caught:
    done = answers.write(
      output, meta, task, track=runtime.track, stopped=lambda: caught, seen=seen
    )
  if seen:
    html(seen, _HTML.value, command=shlex.join(['python', *sys.argv]))
  print(answers.sentence(done, *caught))
  done['lossless'] = engine.rule.lossless
  if not engine.rule.lossless:
    print(
      f'The rule {engine.rule.name} is LOSSY: these answers do not follow the '
      "target's law; scripts/bench.py measures by how much."
    )
  print(runtime.compact(done))
  return done['lines'] == done['prompts']


if __name__ == '__main__':
  runtime.launch(run)
