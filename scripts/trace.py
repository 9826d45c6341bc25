"""Block efficiency at every gamma under two rules, from one plain run.

python scripts/trace.py record --config=configs/pair.py \
  --config.target.source=SOURCE --config.draft.source=SOURCE --output=T.jsonl
python scripts/trace.py analyse T.jsonl MORE.jsonl   # loads no model

docs/counterfactuals.md explains both. analyse ends with a line of JSON.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from experiments import (
  counterfactual,  # noqa: E402
  trace,  # noqa: E402
)
from specdec_jax import printing, program, settings  # noqa: E402
from specdec_jax.bench import plan, prompts  # noqa: E402

_CONFIG = program.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'in place of bench.prompts')
_OUTPUT = flags.DEFINE_string('output', '', 'the trace that record writes')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'texts of each prompt')
_LIMIT = flags.DEFINE_integer('limit', 16, 'the largest gamma of analyse')


def record() -> None:
  output = trace.check_output(_OUTPUT.value)
  e = settings.load(settings.settings(_CONFIG.value))
  chosen = prompts.chosen(_PROMPTS.value or e.settings.bench.prompts)
  method = (*e.settings.decode.methods, 'lm')[0]
  engine = settings.engine(e, method, 1, measure=False)
  if engine.drafter.taps:
    raise ValueError(
      f"decode.methods={method!r}: after a window's first draft its q depends "
      'on its own drafts, so other gammas cannot be computed; take lm, ngram '
      'or early_exit'
    )
  plain = settings.engine(e, method, 0)
  (found,) = trace.record(
    plain, [engine], plan.make(e, chosen), samples=_SAMPLES.value
  )
  trace.write(output, found)
  print(f'{output}: {len(found.texts)} texts')


def analyse(files: list[str]) -> None:
  read = [trace.read(path) for path in files]
  found = [counterfactual.analyse(x, limit=_LIMIT.value) for x in read]
  for analysis in found:
    counterfactual.show(analysis, printing.console())
  print(printing.compact(found))


def run(words: list[str]) -> bool:
  match words:
    case ['record']:
      record()
    case ['analyse', *files] if files:
      analyse(files)
    case _:
      given = ' '.join(words)
      raise ValueError(f'{given!r}: want record, or analyse FILE...')
  return True


if __name__ == '__main__':
  program.launch(run, positional=True)
