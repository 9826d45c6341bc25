"""From a config to models, methods and settings, checked before any work."""

import dataclasses
from typing import Any

from specdec_jax import build, fields, sharding
from specdec_jax import sampling as sampling_lib
from specdec_jax.drafters import lm

DTYPES = ('float32', 'bfloat16', 'float64')


@dataclasses.dataclass(frozen=True)
class Target(fields.Checked):
  source: str = fields.setting(needed='a model, such as hf:org/name')
  dtype: str = fields.setting(allowed=DTYPES)
  scan_layers: str = fields.setting(
    allowed=('auto', 'yes', 'no'), help='auto: on TPU'
  )

  def __post_init__(self):
    super().__post_init__()
    fields.check_needed(self)


@dataclasses.dataclass(frozen=True)
class Draft(fields.Checked):
  source: str = fields.setting(
    needed='a model, such as hf:org/name, or decode.methods without lm',
    help='the draft model; empty: none',
  )
  dtype: str = fields.setting(allowed=DTYPES)
  replicated: bool = fields.setting(help='on a mesh, a copy on every device')
  min_confidence: float = fields.setting(low=0, below=1, help=lm.CONFIDENCE)


@dataclasses.dataclass(frozen=True)
class Mesh(fields.Checked):
  """1 x 1 is one device, without a mesh."""

  data: int = fields.setting(low=1)
  model: int = fields.setting(low=1)


@dataclasses.dataclass(frozen=True)
class Decode(fields.Checked):
  methods: tuple[str, ...] = fields.setting(
    help='lm (the draft model) or names of build.DRAFTERS'
  )
  gammas: tuple[int, ...] = fields.setting(low=0)
  rule: str = fields.setting(help='see build.rule_of')
  max_new_tokens: int = fields.setting(low=1)
  chunk: int = fields.setting(
    low=1, help='prompt tokens that one prefill pass reads'
  )

  def __post_init__(self):
    super().__post_init__()
    allowed = ('lm', *build.DRAFTERS)
    for name in self.methods:
      if name not in allowed:
        raise ValueError(f'methods={name!r}: allowed are {", ".join(allowed)}')
    build.rule_of(self.rule)


@dataclasses.dataclass(frozen=True)
class Sampling(fields.Checked):
  temperature: float
  top_k: int
  top_p: float
  seed: int = fields.setting(low=0, below=2**32)

  def __post_init__(self):
    super().__post_init__()
    sampling_lib.settings(1, self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class Lookup(fields.Checked):
  min_match: int = fields.setting(low=1)
  max_match: int = fields.setting(low=1)

  def __post_init__(self):
    super().__post_init__()
    if self.min_match > self.max_match:
      raise ValueError(
        f'min_match={self.min_match}: must be at most max_match, '
        f'{self.max_match}'
      )


@dataclasses.dataclass(frozen=True)
class NGram(fields.Checked):
  path: str = fields.setting(needed='a file that scripts/ngram.py wrote')
  min_confidence: float = fields.setting(low=0, below=1, help=lm.CONFIDENCE)


@dataclasses.dataclass(frozen=True)
class EarlyExit(fields.Checked):
  exit: int = fields.setting(low=1, help="the target's layers that draft")


@dataclasses.dataclass(frozen=True)
class Eagle(fields.Checked):
  path: str = fields.setting(
    needed='a file that scripts/distill.py wrote, or zoo:NAME'
  )
  min_confidence: float = fields.setting(low=0, below=1, help=lm.CONFIDENCE)


@dataclasses.dataclass(frozen=True)
class Bench(fields.Checked):
  repeats: int = fields.setting(low=1, help='timed runs of every method')
  prompts_per_category: int = fields.setting(low=0, help='0: all')
  prompt_tokens: int = fields.setting(
    low=0, help='keep the last tokens of a prompt; 0: all'
  )
  batch_size: int = fields.setting(low=1)
  windows: int = fields.setting(low=1, help='timed in a calibration run')
  stream_prompts: int = fields.setting(
    low=0, help='prompts streamed for the gaps between tokens'
  )
  chat: bool = fields.setting(help='put prompts through the chat template')
  small: bool = fields.setting(help='smoke test: the ceiling of tiny arrays')


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
    for name in self.decode.methods:
      section = 'draft' if name == 'lm' else name
      if hasattr(self, section):
        try:
          fields.check_needed(getattr(self, section))
        except ValueError as error:
          raise ValueError(
            f'decode.methods has {name!r}, but {section}.{error}'
          ) from error


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
  return fields.parse(Settings, config)


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
