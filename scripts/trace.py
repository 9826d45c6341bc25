"""From one plain run: what every gamma would have given, under two rules.

python scripts/trace.py record --config=configs/pair.py \
  --config.target.source=SOURCE --config.draft.source=SOURCE --output=T.jsonl
python scripts/trace.py analyse T.jsonl MORE.jsonl   # loads no model
python scripts/trace.py check T.jsonl --config=...   # the config of record

check decodes the prompts anew under --rules, at the config's gammas; its exit
status is 1 if a block efficiency is not what the trace says.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from specdec_jax.analysis import trace_program  # noqa: E402

_CONFIG = runtime.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'JSONL file; built in if empty')
_OUTPUT = flags.DEFINE_string('output', '', 'the trace that record writes')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'texts of each prompt')
_LIMIT = flags.DEFINE_integer('limit', 16, 'the largest gamma of analyse')
_RESAMPLES = flags.DEFINE_integer('resamples', 2000, 'of the bootstrap')
_RULES = flags.DEFINE_list('rules', ['reject', 'block'], 'rules to check')
_WORKDIR = flags.DEFINE_string('workdir', '', 'folder for the results')


def run(arguments: list[str]) -> bool:
  """True unless check finds a difference."""
  verb, files = trace_program.verb(arguments)
  if verb == 'record':
    return trace_program.record(
      _CONFIG.value,
      prompts_path=_PROMPTS.value,
      output=_OUTPUT.value,
      samples=_SAMPLES.value,
    )
  if verb == 'analyse':
    return trace_program.analyse(
      files,
      limit=_LIMIT.value,
      resamples=_RESAMPLES.value,
      workdir=_WORKDIR.value,
    )
  return trace_program.check(
    files, _CONFIG.value, rules=_RULES.value, workdir=_WORKDIR.value
  )


if __name__ == '__main__':
  runtime.launch(run, positional=True)
