r"""Compares every text with plain decoding's and explains each difference.

python scripts/audit.py --config=configs/pair.py \
  --config.target.source=SOURCE --config.draft.source=SOURCE

Exit status 1 if a difference is a BUG or a request failed. Untimed; takes the
configs, --prompts and --workdir of bench.py.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from specdec_jax import build, hosts, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import identity, prompts
from specdec_jax.bench import plan as plan_lib

_CONFIG = program.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string(
  'prompts', '', 'JSONL file, in place of bench.prompts'
)
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder for the results')


def run() -> bool:
  """True if every difference is a tie and every request ended well."""
  settings = settings_lib.settings(_CONFIG.value)
  identity.check_promise(build.rule_of(settings.decode.rule), settings.sampling)
  folder = hosts.from_first(lambda: program.open_workdir(_WORKDIR.value))
  asked = _PROMPTS.value or settings.bench.prompts
  chosen = hosts.from_first(lambda: prompts.chosen(asked))
  loaded = settings_lib.load(settings)
  plan = plan_lib.make(loaded, chosen)
  arms = plan_lib.arms(loaded)
  return identity.run(arms, plan, _CONFIG.value.to_dict(), folder)


if __name__ == '__main__':
  program.launch(run, hosts=True)
