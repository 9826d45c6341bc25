"""Block efficiency at every gamma under two rules, from one plain run.

python scripts/trace.py record --config=configs/pair.py \
  --config.target.source=SOURCE --config.draft.source=SOURCE --output=T.jsonl
python scripts/trace.py analyse T.jsonl MORE.jsonl   # loads no model

docs/counterfactuals.md explains both. analyse ends with a line of JSON.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from specdec_jax import runtime, settings  # noqa: E402
from specdec_jax.analysis import counterfactual, trace  # noqa: E402
from specdec_jax.bench import prompts  # noqa: E402

_CONFIG = runtime.config_flag('configs/pair.py')
_PROMPTS = flags.DEFINE_string('prompts', '', 'JSONL file; built in if empty')
_OUTPUT = flags.DEFINE_string('output', '', 'the trace that record writes')
_SAMPLES = flags.DEFINE_integer('samples', 1, 'texts of each prompt')
_LIMIT = flags.DEFINE_integer('limit', 16, 'the largest gamma of analyse')
_RESAMPLES = flags.DEFINE_integer('resamples', 2000, 'of the bootstrap')


def record() -> None:
  output = trace.check_output(_OUTPUT.value)
  s = settings.settings(trace.with_draft_model(_CONFIG.value))
  given = _PROMPTS.value
  chosen = prompts.read(given) if given else prompts.builtin()
  if s.bench.prompts_per_category:
    chosen = prompts.first_of_each(chosen, s.bench.prompts_per_category)
  e = settings.load(s)
  engines = settings.engine(e, 'lm', 0), settings.engine(e, 'lm', 1)
  found = trace.record(
    *engines,
    trace.items(chosen, e.target, s.bench),
    wanted=dataclasses.asdict(s.sampling),
    max_new_tokens=s.decode.max_new_tokens,
    rows=s.bench.batch_size,
    samples=_SAMPLES.value,
    track=runtime.track,
  )
  trace.write(output, found)
  tokens = sum(len(text.tokens) for text in found.texts)
  print(f'{output}: {len(found.texts)} texts, {tokens} tokens')


def analyse(files: list[str]) -> None:
  limit, resamples = _LIMIT.value, _RESAMPLES.value
  found = [
    counterfactual.analyse(trace.read(x), limit=limit, resamples=resamples)
    for x in files
  ]
  for analysis in found:
    counterfactual.show(analysis, runtime.console())
  print(runtime.compact(found))


def run(arguments: list[str]) -> bool:
  if arguments == ['record']:
    record()
  elif arguments[:1] == ['analyse'] and arguments[1:]:
    analyse(arguments[1:])
  else:
    given = ' '.join(arguments)
    raise ValueError(f'{given!r}: want record, or analyse FILE...')
  return True


if __name__ == '__main__':
  runtime.launch(run, positional=True)
