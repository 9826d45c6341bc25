"""From a config to models, methods and settings, checked before any work."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specdec_jax import api, build, requests, sharding
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import prompts as prompts_lib
from specdec_jax.bench import timing
from specdec_jax.drafters import lm

DTYPES = ('float32', 'bfloat16', 'float64')


@dataclasses.dataclass(frozen=True)
class Target:
  source: str
  dtype: str
  scan_layers: str  # 'auto': on TPU; 'yes', 'no'

  def __post_init__(self):
    _one_of('target.dtype', self.dtype, DTYPES)
    _one_of('target.scan_layers', self.scan_layers, ('auto', 'yes', 'no'))
    if not self.source:
      raise ValueError(
        "target.source='': name a model, for example "
        '--config.target.source=hf:org/name'
      )


@dataclasses.dataclass(frozen=True)
class Draft:
  """source '': no draft model. replicated: whole on every device."""

  source: str
  dtype: str
  replicated: bool
  min_confidence: float  # see drafters.lm

  def __post_init__(self):
    _one_of('draft.dtype', self.dtype, DTYPES)
    lm.check_confidence('draft.min_confidence', self.min_confidence)


@dataclasses.dataclass(frozen=True)
class Mesh:
  """1 x 1 is one device, without a mesh."""

  data: int
  model: int

  def __post_init__(self):
    _at_least('mesh.data', self.data, 1)
    _at_least('mesh.model', self.model, 1)


@dataclasses.dataclass(frozen=True)
class Decode:
  """methods: 'lm' (the draft model) or names of build.DRAFTERS.

  chunk: prompt tokens that one prefill pass reads.
  """

  methods: tuple[str, ...]
  gammas: tuple[int, ...]
  rule: str
  max_new_tokens: int
  chunk: int

  def __post_init__(self):
    allowed = ('lm', *build.DRAFTERS)
    _a_tuple('decode.methods', self.methods, "('lm', 'lookup')")
    _a_tuple('decode.gammas', self.gammas, '(2, 4)')
    for name in self.methods:
      _one_of('decode.methods', name, allowed)
    for gamma in self.gammas:
      _at_least('decode.gammas', gamma, 0)
    build.rule_of(self.rule)
    _at_least('decode.max_new_tokens', self.max_new_tokens, 1)
    _at_least('decode.chunk', self.chunk, 1)


@dataclasses.dataclass(frozen=True)
class Sampling:
  temperature: float
  top_k: int
  top_p: float
  seed: int

  def __post_init__(self):
    sampling_lib.settings(1, self.temperature, self.top_k, self.top_p)
    _at_least('sampling.seed', self.seed, 0)
    if self.seed >= 2**32:
      raise ValueError(f'sampling.seed={self.seed}: must be less than 2**32')


@dataclasses.dataclass(frozen=True)
class Lookup:
  min_match: int
  max_match: int

  def __post_init__(self):
    if not 1 <= self.min_match <= self.max_match:
      raise ValueError(
        f'lookup.min_match={self.min_match}, max_match={self.max_match}: '
        'allowed is 1 <= min_match <= max_match'
      )


@dataclasses.dataclass(frozen=True)
class NGram:
  """path: a file that scripts/ngram.py wrote."""

  path: str
  min_confidence: float

  def __post_init__(self):
    lm.check_confidence('ngram.min_confidence', self.min_confidence)


@dataclasses.dataclass(frozen=True)
class EarlyExit:
  """exit: how many of the target's layers draft."""

  exit: int

  def __post_init__(self):
    _at_least('early_exit.exit', self.exit, 1)


@dataclasses.dataclass(frozen=True)
class Eagle:
  """path: a file that scripts/distill.py wrote, or zoo:NAME."""

  path: str
  min_confidence: float

  def __post_init__(self):
    lm.check_confidence('eagle.min_confidence', self.min_confidence)


@dataclasses.dataclass(frozen=True)
class Bench:
  """What to run and how often.

  prompts_per_category, prompt_tokens (a prompt's last ones): 0 is all. chat:
  put text prompts through the chat template. windows: timed in a calibration
  run. stream_prompts: judged prompts streamed for the gaps between tokens.
  small: smoke test, the ceiling from tiny arrays.
  """

  repeats: int
  prompts_per_category: int
  prompt_tokens: int
  batch_size: int
  windows: int
  stream_prompts: int
  chat: bool
  small: bool

  def __post_init__(self):
    for name in ('repeats', 'batch_size', 'windows'):
      _at_least(f'bench.{name}', getattr(self, name), 1)
    for name in ('prompts_per_category', 'prompt_tokens', 'stream_prompts'):
      _at_least(f'bench.{name}', getattr(self, name), 0)


@dataclasses.dataclass(frozen=True)
class Settings:
  target: Target
  draft: Draft
  mesh: Mesh
  decode: Decode
  sampling: Sampling
  lookup: Lookup
  ngram: NGram
  early_exit: EarlyExit
  eagle: Eagle
  bench: Bench

  def __post_init__(self):
    if 'ngram' in self.decode.methods and not self.ngram.path:
      raise ValueError(
        "decode.methods has 'ngram' but ngram.path is empty: count a text with "
        'scripts/ngram.py and set --config.ngram.path=FILE'
      )
    if 'eagle' in self.decode.methods and not self.eagle.path:
      raise ValueError(
        "decode.methods has 'eagle' but eagle.path is empty: set "
        '--config.eagle.path=FILE, a file of scripts/distill.py, or zoo:NAME'
      )
    if 'lm' in self.decode.methods and not self.draft.source:
      raise ValueError(
        "decode.methods has 'lm' but draft.source is empty: set "
        '--config.draft.source=SOURCE, or take lm out with '
        '--config.decode.methods="(\'lookup\',)"'
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
  settings: Settings
  target: build.LanguageModel
  draft: build.LanguageModel | None


def settings(config) -> Settings:
  """A ConfigDict as checked dataclasses; nothing is loaded.

  Raises:
    ValueError: a value out of range, or a key that is missing or unknown.
  """
  parts: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Settings)}
  if set(config) != set(parts):
    raise ValueError(f'config sections {sorted(config)}: want {sorted(parts)}')
  try:
    return Settings(**{k: make(**config[k]) for k, make in parts.items()})
  except TypeError as error:
    raise ValueError(f'config: {error}') from error


def from_config(config) -> Experiment:
  """Checks a config and loads its models."""
  return load(settings(config))


def load(s: Settings) -> Experiment:
  """Loads the models that the methods of the settings need."""
  mesh = sharding.mesh_of(s.mesh.data, s.mesh.model)
  scan = {'auto': None, 'yes': True, 'no': False}[s.target.scan_layers]
  target = build.load(
    s.target.source, dtype=s.target.dtype, mesh=mesh, scan_layers=scan
  )
  draft = None
  if 'lm' in s.decode.methods:
    draft = build.load(
      s.draft.source,
      dtype=s.draft.dtype,
      mesh=mesh,
      replicated=s.draft.replicated,
      scan_layers=scan,
    )
  return Experiment(s, target, draft)


def engine(e: Experiment, method: str, gamma: int) -> build.Engine:
  """The engine of one method; gamma 0 is plain decoding."""
  s = e.settings
  return build.engine(
    e.target,
    e.draft if method == 'lm' else method,
    rule=s.decode.rule,
    gamma=gamma,
    options=build.default_options(chunk=s.decode.chunk),
    **_own(s, method),
  )


def _own(s: Settings, method: str) -> dict[str, Any]:
  """The settings of a method: the section of its name, if there is one."""
  if method == 'lm':
    return {'min_confidence': s.draft.min_confidence}
  section = getattr(s, method, None)
  return dataclasses.asdict(section) if section else {}


def first(e: Experiment) -> build.Engine:
  """The engine of the first method at the first gamma."""
  d = e.settings.decode
  return engine(e, (*d.methods, 'lookup')[0], d.gammas[0])


def asked(s: Settings, **options) -> api.Settings:
  """The settings of a request, as the Python API has them."""
  sampling = dataclasses.asdict(s.sampling)
  return api.Settings(s.decode.max_new_tokens, **sampling, **options)


def arms(e: Experiment) -> list[timing.Arm]:
  """Plain decoding, then every method at every gamma of the config."""
  d = e.settings.decode
  model = build.target_model(e.target)
  plain = engine(e, d.methods[0] if d.methods else 'lookup', 0)
  out = [timing.Arm('autoregressive', 'autoregressive', 0, plain, model)]
  for method in d.methods:
    for gamma in sorted(set(d.gammas) - {0}):
      name = f'{method} g={gamma}'
      made = engine(e, method, gamma)
      out.append(timing.Arm(name, method, gamma, made, model, made.q))
  return out


def batch_sizes(texts: Sequence[str]) -> tuple[int, ...]:
  """The flag --batch_sizes as numbers.

  Raises:
    ValueError: anything but whole numbers of 1 or more.
  """
  for text in texts:
    if not text.isdecimal() or int(text) < 1:
      raise ValueError(
        f'batch_sizes={",".join(texts)}: want whole numbers, as in 1,4,16'
      )
  return tuple(sorted({int(text) for text in texts}))


def plan(
  e: Experiment,
  chosen: Sequence[prompts_lib.Prompt],
  sizes: Sequence[int] = (),
) -> timing.Plan:
  """What to run on these prompts; every prompt is checked.

  Raises:
    ValueError: a prompt that is empty, too long or has unknown ids, by its id.
  """
  s = e.settings
  if s.bench.prompts_per_category:
    chosen = prompts_lib.first_of_each(chosen, s.bench.prompts_per_category)
  judged, others = prompts_lib.halves(chosen)
  return timing.Plan(
    judged=tuple(_item(e, prompt) for prompt in judged),
    others=tuple(_item(e, prompt) for prompt in others),
    max_new_tokens=s.decode.max_new_tokens,
    sampling=s.sampling,
    batch_size=s.bench.batch_size,
    batch_sizes=tuple(sizes),
    repeats=s.bench.repeats,
    windows=s.bench.windows,
    stream_prompts=s.bench.stream_prompts,
    small=s.bench.small,
  )


def _item(e: Experiment, prompt: prompts_lib.Prompt) -> timing.Item:
  """The first turn of a prompt as tokens."""
  tokens = prompt.tokens
  try:
    if tokens is None:
      tokens = api.encode(e.target, prompt.turns[0], chat=e.settings.bench.chat)
    tokens = tokens[-e.settings.bench.prompt_tokens :]
    requests.check_prompt(
      tokens,
      max_new_tokens=e.settings.decode.max_new_tokens,
      context=e.target.config.context,
      ids=e.target.ids,
    )
  except ValueError as error:
    raise ValueError(f'prompt {prompt.id!r}: {error}') from error
  number = prompts_lib.request_number(prompt.id)
  return timing.Item(prompt.id, prompt.category or '', tuple(tokens), number)


def _one_of(name: str, value: Any, allowed: tuple) -> None:
  if value not in allowed:
    raise ValueError(f'{name}={value!r}: allowed are {", ".join(allowed)}')


def _a_tuple(name: str, value: Any, example: str) -> None:
  # A text would be read letter by letter, 'lm,lookup' as one name.
  listed = isinstance(value, tuple | list)
  if not listed or any(',' in str(x) for x in value):
    raise ValueError(
      f'{name}={value!r}: want a tuple of single values, as in '
      f'--config.{name}="{example}"'
    )


def _at_least(name: str, value: Any, low: int) -> None:
  whole = isinstance(value, int) and not isinstance(value, bool)
  if not whole or value < low:
    raise ValueError(f'{name}={value}: must be a whole number, {low} or more')
