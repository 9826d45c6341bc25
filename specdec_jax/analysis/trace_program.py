"""The three verbs of scripts/trace.py, from flags to files."""

import dataclasses
from collections.abc import Sequence

from specdec_jax import runtime
from specdec_jax import settings as settings_lib
from specdec_jax.analysis import trace, trace_figures, trace_report
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts

VERBS = {'record': 0, 'analyse': None, 'check': 1}  # verb -> files it takes


def verb(arguments: Sequence[str]) -> tuple[str, list[str]]:
  """(verb, files) from the arguments that are no flags.

  Raises:
    ValueError: no verb, an unknown one, or a wrong number of files.
  """
  allowed = 'record, analyse FILE... or check FILE'
  if not arguments:
    raise ValueError(f'name a verb: {allowed}')
  name, *files = arguments
  if name not in VERBS:
    raise ValueError(f'{name!r} is no verb: want {allowed}')
  want = VERBS[name]
  if want is None and not files:
    raise ValueError(f'{name}: name one or more files that record has written')
  if want is not None and len(files) != want:
    raise ValueError(
      f'{name}: {len(files)} files given, want {want}'
      + ('' if want else ': name the trace with --output')
    )
  return name, files


def record(config, *, prompts_path: str, output: str, samples: int) -> bool:
  """Decodes plainly and writes a trace; true."""
  settings = trace.only_lm(settings_lib.settings(config))
  trace.seeds(settings.sampling.seed, samples)
  path = trace.check_output(output, prompts_path)
  chosen = prompts.read(prompts_path) if prompts_path else prompts.builtin()
  e = settings_lib.load(settings)
  plan = plan_lib.make(e, chosen)
  found = trace.record(plan_lib.arms(e), plan, samples, runtime.track)
  trace.write(path, found)
  tokens = sum(len(text.tokens) for text in found.texts)
  print(f'{path}: {len(found.texts)} texts, {tokens} tokens')
  return True


def analyse(
  files: Sequence[str], *, limit: int, resamples: int, workdir: str
) -> bool:
  """Prints what each trace says; true."""
  if workdir:
    trace_report.check_figures()
  folder = runtime.open_workdir(workdir)
  docs = [
    trace_figures.analyse(trace.read(file), limit=limit, resamples=resamples)
    for file in files
  ]
  return trace_report.finish(docs, folder)


def check(
  files: Sequence[str], config, *, rules: Sequence[str], workdir: str
) -> bool:
  """Decodes anew and compares; true if every cell agrees."""
  trace_figures.check_rules(rules)
  settings = settings_lib.settings(config)
  each = [_cells(settings, rule) for rule in dict.fromkeys(rules)]
  recorded = trace.read(files[0])
  trace_figures.check_settings(recorded, settings)
  folder = runtime.open_workdir(workdir)
  e = settings_lib.load(each[0])
  trace_figures.check_models(recorded, e.target, e.draft)
  plain, *_ = plan_lib.arms(e)
  arms = [plain]
  for cells in each:
    arms += plan_lib.arms(dataclasses.replace(e, settings=cells))[1:]
  plan = plan_lib.Plan(
    judged=(),
    others=(),
    max_new_tokens=settings.decode.max_new_tokens,
    sampling=settings.sampling,
    batch_size=settings.bench.batch_size,
  )
  doc = trace_figures.check(recorded, arms, plan, runtime.track)
  return trace_report.finish_check(doc, folder)


def _cells(settings: settings_lib.Settings, rule: str) -> settings_lib.Settings:
  """The draft model alone, under a rule, at the config's gammas."""
  lm = trace.only_lm(settings).decode
  d = dataclasses.replace(lm, rule=rule, gammas=settings.decode.gammas)
  return dataclasses.replace(settings, decode=d)
