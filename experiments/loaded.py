"""Loads a row's models and texts; tells whether its target does its task."""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from configs import default
from experiments import papers, replay, resampled
from experiments import texts as texts_lib
from experiments.rows import Row
from specdec_jax import build, printing, sampling
from specdec_jax import settings as settings_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.drafters import ngram, table
from specdec_jax.io.published import draft_file
from specdec_jax.train import text, text_metrics

ROWS = 16  # texts that are decoded together
CHUNK = 32  # tokens read at a time: most answers are shorter
LOSSY = papers.LENIENCE[1:]
# What a target that translates has to reach, or tables call it a toy.
BLEU, DISTINCT = 25.0, 0.95


class Loaded(NamedTuple):
  """A row with its models."""

  row: Row
  experiment: settings_lib.Setup  # the target
  plain: build.Engine  # decodes without a draft
  engines: dict[str, build.Engine]  # by draft, of the largest gamma
  prompts: tuple[prompts_lib.Prompt, ...]  # in the order of their use
  references: dict[str, str]  # by prompt; {} where there are none
  # What `traces` has found, which several tables read.
  traced: dict[tuple[float, int, int], dict[str, list[replay.Text]]]


def load(row: Row, gammas: tuple[int, ...], most: int) -> Loaded:
  """Loads target and drafts, and reads the prompts.

  gammas: those that table 2 chooses from, ascending. most: prompts. Raises
  ValueError for an unreadable source, too few texts, or a metric not installed.
  """
  if row.metric:
    text_metrics.metric_of(row.metric)
  c = default.get_config().unlock()
  c.target.update(source=row.target, dtype='float32')
  gamma = max(gammas)
  c.decode.update(methods=(), gammas=(gamma,), max_new_tokens=row.new)
  options = build.default_options(chunk=CHUNK)
  if options.widths:
    options = dataclasses.replace(options, widths=(0, *gammas))
  c.bench.prompt_tokens = row.read
  e = settings_lib.load(settings_lib.settings(c))
  engines = {}
  for draft in row.drafts:
    if draft.optional and not pathlib.Path(draft.source).exists():
      continue
    given, model = dict(draft.settings), draft.method
    with tempfile.TemporaryDirectory() as folder:
      if draft.method == 'ngram':
        given = {'source': _counted(e.target, row, given['order'], folder)}
      elif draft.method == 'lm':
        model = build.load(draft.source, dtype=draft.dtype)
      model = table.with_options(model, given)
      engines[draft.name] = build.engine(
        e.target, model, gamma=gamma, options=options
      )
  plain = build.engine(e.target, gamma=0, options=options)
  prompts, references = texts_lib.prompts(
    row.prompts,
    most,
    counted=row.counted,
    field=row.counted_field if row.metric else '',
    tokenizer=e.target.tokenizer,
  )
  return Loaded(row, e, plain, engines, prompts, references, {})


def _counted(target, row: Row, order: int, folder: str) -> str:
  """Writes a file with the n-grams in the row's text."""
  corpus = text.read(
    row.counted,
    field=row.counted_field,
    source_field=texts_lib.SOURCES.get(row.counted_field, ''),
  )
  inner, vocab = target.tokenizer.inner, target.tokenizer.size
  encoded = inner.encode_batch(corpus.documents, add_special_tokens=False)
  counts = ngram.count([x.ids for x in encoded], order=order, vocab=vocab)
  about = {'order': order, 'tokenizer': target.tokenizer.fingerprint()}
  path = f'{folder}/counts'
  draft_file.write(draft_file.NGRAM, path, counts._asdict(), about)
  return path


def plan(loaded: Loaded, temperature: float, rows: int, seed: int = 0):
  """Plans all prompts, `rows` at a time, at one temperature."""
  e, row = loaded.experiment, loaded.row
  top_k = row.top_k if temperature else 0
  found = plan_lib.make(e, loaded.prompts)
  # In the order of the file, not in that of a benchmark.
  at = {x.id: i for i, x in enumerate(loaded.prompts)}
  items = sorted(found.test + found.calibration, key=lambda x: at[x.id])
  return found._replace(
    test=tuple(items),
    calibration=(),
    sampling=sampling.Sampling(temperature, top_k, seed=seed),
    bench=dataclasses.replace(found.bench, batch_size=rows),
  )


def traces(
  loaded: Loaded, temperature: float, tokens: int, seed: int = 0
) -> dict[str, list[replay.Text]]:
  """Records each draft's probabilities along one set of the target's texts.

  Where it is sampled, with every rule of LOSSY. Recorded once for all tables.

  tokens: decodes texts until they have as many, or no prompt is left.
  """
  if (key := (temperature, tokens, seed)) in loaded.traced:
    return loaded.traced[key]
  names = [f'lenient:{x:g}' for x in LOSSY] if temperature else []
  rules = [build.rule_of(x) for x in names]
  whole = plan(loaded, temperature, ROWS, seed)
  found: dict[str, list[replay.Text]] = {x: [] for x in loaded.engines}
  have = 0
  engines, step = list(loaded.engines.values()), 4 * ROWS
  for start in range(0, len(whole.test), step):
    part = whole._replace(test=whole.test[start : start + step])
    each = replay.record(loaded.plain, engines, part, rules=rules)
    for texts, more in zip(found.values(), each, strict=True):
      texts += more
    have += sum(len(x.tokens) for x in each[0])
    if have >= tokens:
      break
  loaded.traced[key] = found
  return found


class Gate(NamedTuple):
  """Whether a target does its task, greedily on `texts` sources.

  metric: the row's; value: the answers'; least: what it has to reach. distinct:
  share of answers unlike all before.
  """

  metric: str
  value: float
  least: float
  distinct: float
  texts: int

  @property
  def passed(self) -> bool:
    # Functions share summaries, those that people wrote too (LOG.md).
    repeats = self.metric == 'bleu' and self.distinct < DISTINCT
    return self.value >= self.least and not repeats


def gate(loaded: Loaded) -> Gate | None:
  """Returns a target's Gate; None without references."""
  if not loaded.references:
    return None
  arm = plan_lib.Arm('the target', '', 0, loaded.plain)
  ((_, found),) = _answered(loaded, [arm], 0.0)
  distinct = len(set(found.values())) / len(found)
  value, least = quality(loaded, found), least_of(loaded)
  return Gate(loaded.row.metric, value, least, distinct, len(found))


def least_of(loaded: Loaded) -> float:
  """Returns what the answers have to reach in the row's metric.

  A function's summary has to say more than the function's name in words.
  """
  if loaded.row.metric == 'bleu':
    return BLEU
  names = {x.id: texts_lib.name_of(x.turns[0]) for x in loaded.prompts}
  return quality(loaded, names)


def quality(loaded: Loaded, found: Mapping[str, str]) -> float | None:
  """Scores answers by prompt in the row's metric; None without references."""
  if not loaded.references:
    return None
  metric = text_metrics.metric_of(loaded.row.metric)
  return metric([*found.values()], [loaded.references[x] for x in found])


def qualities(
  loaded: Loaded, arms: Sequence[plan_lib.Arm], temperature: float
) -> dict[str, np.ndarray]:
  """Scores answers to all prompts with references in the row's metric.

  Returns by the arm's name the metric, then that of resampled prompts, the same
  ones for every arm.
  """
  metric, out = text_metrics.metric_of(loaded.row.metric), {}
  for name, found in _answered(loaded, arms, temperature):
    wanted = [loaded.references[x] for x in found]
    parts_NK = metric.parts([*found.values()], wanted)
    sums_RK = resampled.draws(len(found)) @ parts_NK
    out[name] = np.array([metric.total(x) for x in sums_RK])
  return out


def _answered(
  loaded: Loaded, arms: Sequence[plan_lib.Arm], temperature: float
) -> Iterator[tuple[str, dict[str, str]]]:
  """Yields each arm's name, and its answers to all prompts by prompt."""
  whole = plan(loaded, temperature, ROWS)
  groups = plan_lib.groups(arms, whole, whole.test)
  for arm in arms:
    engine = arm.engine
    outputs = [
      engine.programs.generate(engine.weights, plan_lib.capped(arm, x.full))
      for x in printing.track(groups, f'answers of {arm.name}')
    ]
    yield arm.name, texts_of(loaded, plan_lib.answers(groups, outputs))


def texts_of(loaded: Loaded, answers) -> dict[str, str]:
  """Decodes the answers by prompt, without the token that ends them."""
  tokenizer = loaded.experiment.target.tokenizer
  stop, out = set(tokenizer.eos_ids), {}
  for x in answers.values():
    kept = [token for token in x.tokens if token not in stop]
    out.setdefault(x.item.id, tokenizer.decode(kept))
  return out
