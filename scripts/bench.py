r"""Benchmarks drafters on a target: speed, predicted speed, identity of texts.

python scripts/bench.py --config=configs/pair.py \
  --config.target.source=SOURCE --config.draft.source=SOURCE
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from specdec_jax import hosts, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, budget, prompts
from specdec_jax.bench import plan as plan_lib

_CONFIG = program.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string(
  'prompts', '', 'JSONL file, in place of bench.prompts'
)
_SIZES = flags.DEFINE_list('batch_sizes', [], 'and in pools of so many: 1,4,16')
_MINUTES = flags.DEFINE_float(
  'minutes', 10, 'in all, with loading and compiling; 0: all of the config'
)
_REFERENCE = flags.DEFINE_string(
  'reference',
  '',
  "how far the target is from this: a dtype of its own source ('float32'), or "
  'a source, read as float32; the minutes do not count it',
)
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder for the results')


def run() -> bool:
  """True if every difference from plain decoding is explained."""
  settings = settings_lib.settings(_CONFIG.value)
  folder = hosts.from_first(lambda: program.open_workdir(_WORKDIR.value))
  asked = _PROMPTS.value or settings.bench.prompts
  chosen = hosts.from_first(lambda: prompts.chosen(asked))
  sizes = plan_lib.batch_sizes(_SIZES.value)
  clock = budget.clock(_MINUTES.value)
  loaded = settings_lib.load(settings)
  plan = plan_lib.make(loaded, chosen, sizes)
  arms = plan_lib.arms(loaded, measure=False)
  found, start = None, program.elapsed()
  if _REFERENCE.value:
    found = benchmark.distance(loaded, arms, plan, _REFERENCE.value)
  clock = clock.later(program.elapsed() - start)
  doc = benchmark.run(arms, plan, clock, found)
  return benchmark.finish(doc, _CONFIG.value, folder)


if __name__ == '__main__':
  program.launch(run, hosts=True)
