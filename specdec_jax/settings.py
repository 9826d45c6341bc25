"""Benchmark settings, and models and engines made from them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec_jax import build, fields, printing, sampling, sharding
from specdec_jax.drafters import lm, table
from specdec_jax.drafters import method as method_lib
from specdec_jax.io import memory, plan, sources, tokenizer
from specdec_jax.kernels import library
from specdec_jax.models import convert

DTYPES = ('float32', 'bfloat16', 'float64')
_SCANS = {'auto': None, 'yes': True, 'no': False}


@dataclasses.dataclass(frozen=True)
class Target(fields.Checked):
  source: str = fields.setting(needed='--config.target.source=hf:org/name')
  dtype: str = fields.setting(
    allowed=convert.DTYPES,
    help='stored: as the file has them; int8, int4: matrices as integers',
  )
  scan_layers: str = fields.setting(
    allowed=('auto', 'yes', 'no'), help='auto: on TPU'
  )
  kernels: str = fields.setting(
    allowed=library.CHOICES,
    help='auto: on one CPU, kernels for few rows; int8: the same with coarser '
    'rows for quantised matrices',
  )


@dataclasses.dataclass(frozen=True)
class Mesh(fields.Checked):
  """Devices along each mesh axis; 1 x 1 is one device without a mesh."""

  data: int = fields.setting(
    low=-1, help='-1: those that `model` leaves, at most one a row; 1 on CPU'
  )
  model: int = fields.setting(low=1)

  def __post_init__(self):
    super().__post_init__()
    if not self.data:
      raise ValueError('data=0: give a number, or -1 for all that are left')


@dataclasses.dataclass(frozen=True)
class Decode(fields.Checked):
  methods: tuple[str, ...] = fields.setting(
    help="names of drafters, or paths of one's own: file.py:make"
  )
  gammas: tuple[int, ...] = fields.setting(low=0)
  rule: str = fields.setting(help='see build.rule_of')
  max_new_tokens: int = fields.setting(
    low=0, help='0: as many as the context holds; only in generate.py'
  )

  def __post_init__(self):
    super().__post_init__()
    build.rule_of(self.rule)


@dataclasses.dataclass(frozen=True)
class Bench(fields.Checked):
  prompts: str = fields.setting(
    help="JSONL file; stdlib:prose: Python's manual; empty: built in"
  )
  repeats: int = fields.setting(low=1, help='timed runs of a method, at most')
  prompts_per_category: int = fields.setting(
    low=0, help='at most; 0: as many as there are'
  )
  prompt_tokens: int = fields.setting(
    low=0, help='keep the last tokens of a prompt; 0: all'
  )
  batch_size: int = fields.setting(low=1)
  chat: bool = fields.setting(
    help='put prompts through the chat template, without one as lines '
    '"User: ..."; False for a base model'
  )
  small: bool = fields.setting(help='smoke test: the ceiling of tiny arrays')


@dataclasses.dataclass(frozen=True)
class Settings:
  """A config as dataclasses, one a section; drafters by drafters.table name."""

  target: Target
  mesh: Mesh
  decode: Decode
  sampling: sampling.Sampling
  bench: Bench
  drafters: Mapping[str, Any]


def drafter_sections() -> dict[str, type]:
  """Lists each drafter's dataclass, by its section's name."""
  return {table.section(n): x.Settings for n, x in table.DRAFTERS.items()}


def settings(config) -> Settings:
  """Checks a ConfigDict, loads no model; ValueError: a bad value or key."""
  sections = {field.name: field.type for field in dataclasses.fields(Settings)}
  del sections['drafters']
  parts = fields.parse_sections(sections | drafter_sections(), config)
  own = {x: parts[table.section(x)] for x in table.DRAFTERS}
  drafters = {name: _linked(name, own) for name in own}
  for method in parts['decode'].methods:
    try:
      table.draft_of(drafters.get(method, method), 'decode.methods')
    except ValueError as error:
      raise ValueError(
        f'decode.methods has {method!r}, but {error}; or give other methods, '
        'such as --config.decode.methods="(\'lookup\',)"'
      ) from error
  return Settings(**{n: parts[n] for n in sections}, drafters=drafters)


def _linked(name: str, drafters: Mapping[str, Any]) -> Any:
  """Puts into a drafter's Settings those of the drafter inside it."""
  made = drafters[name]
  inner = getattr(made, 'drafter', None)
  if inner not in table.inside(name):
    return made
  return dataclasses.replace(made, drafter=_linked(inner, drafters))


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
  """Settings and the loaded target."""

  settings: Settings
  target: build.LanguageModel


def reference(e: Setup, asked: str) -> build.LanguageModel:
  """Loads the model that the target is compared with.

  asked: a dtype to load the target's source in, or a source, loaded as float32.
  """
  own = asked in convert.DTYPES
  changes = {'dtype': asked} if own else {'source': asked, 'dtype': 'float32'}
  target = dataclasses.replace(e.settings.target, **changes)
  if target.kernels == 'int8' and target.dtype not in convert.CODES:
    target = dataclasses.replace(target, kernels='auto')
  s, found = dataclasses.replace(e.settings, target=target), target.source
  if sources.FUNCTION.fullmatch(found):
    return _load(s, found)
  opened = method_lib.opened(e.target, found)
  tokenizer.check_same(e.target.tokenizer, opened.tokenizer)
  _say(memory.check({'reference': _planned(s, opened, target.dtype)}))
  return _load(s, opened)


def load(s: Settings, tokens: int = 0) -> Setup:
  """Loads the target; a draft is loaded when its engine is made.

  tokens: how many caches hold, over all rows; 0: those of a batch of s.
  """
  own = sources.FUNCTION.fullmatch(s.target.source)
  opened = {} if own else _room(s, tokens)
  target = _load(s, opened.get(s.target.source, s.target.source))
  for source, found in opened.items():
    target.once(('opened', source), lambda found=found: found)
  return Setup(s, target)


def _load(s: Settings, found: sources.Source | str) -> build.LanguageModel:
  """Loads the target from an open source, or from a function."""
  # A model of one's own runs on one device.
  rows = 1 if isinstance(found, str) else s.bench.batch_size
  return build.load(
    found,
    dtype=s.target.dtype,
    mesh=_mesh(s, rows),
    scan_layers=_SCANS[s.target.scan_layers],
    kernels=s.target.kernels,
  )


def _mesh(s: Settings, rows: int) -> Any:
  split = s.drafters['lm'].tensor_parallel
  return sharding.mesh_of(s.mesh.data, s.mesh.model, rows, split)


def _planned(
  s: Settings, source: sources.Source, dtype: str, split: int = 0
) -> plan.Plan:
  """Plans an open source; split: as lay_out's tensor_parallel."""
  mesh, config = _mesh(s, s.bench.batch_size), source.config
  return plan.make(
    source,
    dtype,
    layout=mesh and sharding.lay_out(mesh, config, tensor_parallel=split),
    scan_layers=_SCANS[s.target.scan_layers],
    kernels='xla' if s.target.dtype == 'float64' else s.target.kernels,
  )


def _room(s: Settings, tokens: int) -> dict[str, sources.Source]:
  """Opens target and draft by source, unread; says what memory they will take.

  Raises ValueError: more than is free, or a draft that is not for this target.
  """
  opened = {s.target.source: sources.open_source(s.target.source)}
  target, draft = opened[s.target.source], s.drafters['lm']
  models = {'target': _planned(s, target, s.target.dtype)}
  inner = [table.innermost(s.drafters.get(x)) for x in s.decode.methods]
  split = draft.tensor_parallel
  if draft in inner and lm.is_model(draft.source):
    source = str(draft.source)
    if not sources.FUNCTION.fullmatch(source):
      opened[source] = opened.get(source) or sources.open_source(source)
      method_lib.check_pair(target, opened[source])
      models['draft'] = _planned(s, opened[source], draft.dtype, split)
  if (rounded := s.drafters['self']) in inner:
    models['self'] = _planned(s, target, rounded.dtype)
  each = [(table.name_of(x), table.numbers(x)) for x in inner]
  held = {table.section(name): count for name, count in each if count}
  new = s.decode.max_new_tokens
  slots = new + s.bench.prompt_tokens if new else target.config.context
  tokens = tokens or s.bench.batch_size * slots
  _say(memory.check(models, tokens, held))
  return opened


def _say(line: str) -> None:
  printing.progress_console().print(f'memory: {line}', soft_wrap=True)


def gamma_of(s: Settings, method: str, gamma: int) -> int:
  """Counts the drafts in a method's window: the nodes of its tree, or gamma."""
  return table.gamma_of(s.drafters.get(method, method), gamma)


def engine(
  e: Setup, method: str, gamma: int, measure: bool = True
) -> build.Engine:
  """Makes a method's engine; gamma 0 is plain decoding, a tree has its own."""
  s = e.settings
  options = build.default_options()
  if options.widths:  # A cap at another gamma of the config has its own width.
    widths = {*options.widths, *s.decode.gammas}
    options = dataclasses.replace(options, widths=tuple(sorted(widths)))
  return build.engine(
    e.target,
    s.drafters.get(method, method) if gamma else None,
    rule=s.decode.rule,
    gamma=gamma and gamma_of(s, method, gamma),
    options=options,
    measure=measure,
  )


def first(e: Setup, measure: bool = True) -> build.Engine:
  """Makes the first method's engine at the first gamma."""
  d = e.settings.decode
  return engine(e, (*d.methods, 'lookup')[0], d.gammas[0], measure)
