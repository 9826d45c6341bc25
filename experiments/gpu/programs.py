"""Compiles the parts' programs: a pass over n tokens, drafting, generation."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, decode, requests, types
from specdec_jax.costs import parts as parts_lib
from specdec_jax.costs import scripted as scripted_lib
from specdec_jax.drafters import table
from specdec_jax.io import load
from specdec_jax.verify import reject

OPTIONS = build.default_options(widths=())
# The id that a steered target always emits; drafts propose it, or the next.
RIGHT = 7
# XLA compiles outside Python's lock.
_pool = concurrent.futures.ThreadPoolExecutor(12)


class Sizes(NamedTuple):
  """What the parts run.

  target, draft, small: model sizes. t5, t5_drafts: encoder-decoders'.
  slots, batch_slots: the buffer's, and where there are many rows.
  start: a prompt's tokens. source: those that an encoder reads.
  new: tokens that plain decoding emits in a timed generation; speculation emits
    twice as many.
  rows: batches. sample: seconds of one.
  """

  target: str = 'llama3_8b'
  draft: str = 'llama3_1b'
  small: str = 'smollm2_135m'
  t5: str = 't5_xxl'
  t5_drafts: tuple[str, ...] = ('t5_small', 't5_base', 't5_large')
  slots: int = 4096
  batch_slots: int = 1024
  start: int = 128
  source: int = 128
  new: int = 192
  rows: tuple[int, ...] = (1, 4, 16, 64)
  sample: float = 0.15


TINY = Sizes(
  target='tiny',
  draft='tiny',
  small='tiny',
  t5='t5_tiny',
  t5_drafts=('t5_tiny',) * 3,
  slots=64,
  batch_slots=64,
  start=8,
  source=8,
  new=16,
  rows=(1, 2),
  sample=0.0,
)
SAMPLES = 5  # of every time


@functools.cache
def model(size: str, dtype: str = 'bfloat16') -> load.LanguageModel:
  """Makes a model with random weights, loaded once."""
  return load.load(f'random:{size}', dtype=dtype)


def free() -> None:
  """Drops the models, and what JAX holds of programs."""
  model.cache_clear()
  jax.clear_caches()
  gc.collect()


def compiled(lowered, options: Mapping[str, Any] | None = None):
  """Returns a future of (seconds, program); it compiles beside others."""
  make = functools.partial(lowered.compile, compiler_options=options)
  return _pool.submit(parts_lib.timed, make)


def steered(target: types.Model) -> types.Model:
  """Makes RIGHT the target's likeliest token everywhere.

  It does all its work; what rounding does to random logits, which would end a
  script, does not matter.
  """

  head = lambda *args: target.head(*args).at[..., RIGHT].set(1e4)
  return target._replace(head=head)


def scripted(drafter: types.Drafter) -> types.Drafter:
  """Replaces a drafter's tokens by a script's.

  It does all its work. weights.draft is (its own parameters, script_BL).
  """
  own = lambda weights: weights._replace(draft=weights.draft[0])
  reader = scripted_lib.make(gamma=drafter.gamma)

  def propose(weights, state, context, *rest):
    draft, *after = drafter.propose(own(weights), state, context, *rest)
    script_BL = weights.draft[1]
    every = script_BL, jnp.full_like(script_BL, drafter.gamma)
    read = reader.propose(weights._replace(draft=every), (), context, *rest)[0]
    # Adds 0, as XLA does not know: without it nothing would be drafted.
    tokens_BK = read.tokens_BK + jnp.minimum(draft.tokens_BK, 0)
    return draft._replace(tokens_BK=tokens_BK), *after

  return drafter._replace(
    init=lambda weights, *rest: drafter.init(own(weights), *rest),
    propose=propose,
  )


def script(alpha: float, rows: int, slots: int, seed: int) -> np.ndarray:
  """Draws RIGHT with probability alpha at every index, else the next id."""
  right_BL = np.random.default_rng(seed).random((rows, slots)) < alpha
  return np.where(right_BL, RIGHT, RIGHT + 1).astype(np.int32)


def request(
  m: load.LanguageModel,
  s: Sizes,
  *,
  new: int,
  gamma: int,
  rows: int = 1,
  slots: int = 0,
  start: int = 0,
) -> decode.Request:
  """Makes greedy rows with a prompt each, in a buffer with `slots`."""
  text, source = list(range(3, 3 + (start or s.start))), ()
  if m.start is not None:
    text, source = [m.start], [3] * s.source
  tokens = [x % m.ids for x in text]
  item = requests.Item(tokens, 0, source=source, new=new)
  slots = slots or room(m, s)
  return requests.make([item] * rows, gamma=gamma, length=slots)


def room(m: load.LanguageModel, s: Sizes) -> int:
  """Counts a buffer's slots."""
  return min(s.slots, m.context)


class Walk(NamedTuple):
  """A part of a window to be timed: a future program and its arguments."""

  program: Any
  weights: types.Weights
  asked: decode.Request
  more: tuple = ()

  def steps(self, count: int) -> None:
    _, run = self.program.result()
    given = self.weights, self.asked, *self.more, jnp.int32(count)
    jax.block_until_ready(run(*given))

  def at(self, start: int) -> 'Walk':
    """Starts at this buffer index."""
    was = self.asked
    start_B = np.full_like(was.lengths_B, start)
    limit_B = start_B + was.limit_B - was.lengths_B
    return self._replace(asked=was._replace(lengths_B=start_B, limit_B=limit_B))

  def wanting(self, count: int) -> 'Walk':
    """Asks for this many drafts in a window."""
    gamma_B = np.full_like(self.asked.gamma_B, count)
    return self._replace(asked=self.asked._replace(gamma_B=gamma_B))


STEPS = 32  # places of the buffer that a walk goes over


def passes(m, s: Sizes, n: int, options=None, **sizes) -> Walk:
  """Makes passes over n tokens; over 1, plain decoding."""
  asked = request(m, s, new=min(STEPS, s.new), gamma=n - 1, **sizes)
  weights, most = types.Weights(m.params), jnp.int32(n - 1)
  drafter = scripted_lib.make(gamma=n - 1) if n > 1 else decode.PLAIN
  lowered = parts_lib.verify_along.lower(
    weights,
    asked,
    most,
    most,
    loop=decode.Loop(m.model, drafter, reject.RULE, OPTIONS),
  )
  return Walk(compiled(lowered, options), weights, asked, (most,))


def drafting(m, draft: Any, s: Sizes, most: int, **sizes) -> Walk:
  """Makes drafting with up to `most` tokens a window."""
  made = table.method_of(m, draft, gamma=most, chunk=OPTIONS.chunk)
  asked = request(m, s, new=min(STEPS, s.new), gamma=most, **sizes)
  weights = types.Weights(m.params, made.params)
  lowered = parts_lib.propose_along.lower(
    weights,
    asked,
    jnp.int32(1),
    loop=decode.Loop(m.model, made.drafter, reject.RULE),
  )
  return Walk(compiled(lowered), weights, asked)


def seconds(walks: Mapping[Any, Walk], s: Sizes) -> dict[Any, list[float]]:
  """Times each part's step, in seconds, SAMPLES times; the parts take turns."""
  parts = {}
  for key, walk in walks.items():
    walk.steps(1)
    few, many = (parts_lib.timed(walk.steps, n)[0] for n in (2, 10))
    count = int(np.clip(s.sample / max((many - few) / 8, 1e-5), 4, 400))
    parts[key] = parts_lib.Part(walk.steps, count)
  return parts_lib.seconds(parts, range(SAMPLES))


def spread(samples: Sequence[float], unit: float = 1.0) -> dict[str, float]:
  """Returns the samples' median, least and most, in units."""
  of = dict(value=statistics.median, low=min, high=max)
  return {name: x(samples) / unit for name, x in of.items()}


@contextlib.contextmanager
def changed(module: Any, name: str, value: Any):
  """Changes a module's constant for the programs lowered inside."""
  jax.clear_caches()
  with mock.patch.object(module, name, value):
    yield
  jax.clear_caches()


class Generation(NamedTuple):
  """A future program that generates; asked: rows whose limit is traced."""

  program: Any
  weights: types.Weights
  asked: decode.Request

  def run(self, new: int, script_BL=None) -> tuple[float, decode.Output]:
    """Returns (seconds, output) of `new` tokens; no script_BL: no drafter."""
    weights = self.weights
    if script_BL is not None:
      weights = weights._replace(draft=(weights.draft[0], script_BL))
    asked = self.asked._replace(limit_B=self.asked.lengths_B + new)
    _, run = self.program.result()
    return parts_lib.timed(run, weights, asked)


def generation(
  m, model: types.Model, draft: Any, gamma: int, s: Sizes, options=None
):
  """Makes a steered model's Generation, with a scripted draft or without."""
  asked = request(m, s, new=2 * s.new, gamma=gamma)
  drafter, weights = decode.PLAIN, types.Weights(m.params)
  if gamma:
    made = table.method_of(m, draft, gamma=gamma, chunk=OPTIONS.chunk)
    drafter = scripted(made.drafter)
    weights = weights._replace(draft=(made.params, asked.tokens_BL))
  loop = decode.programs(model, drafter, reject.RULE, OPTIONS)
  lowered = loop.generate.lower(weights, asked)
  return Generation(compiled(lowered, options), weights, asked)


def prefill(m, s: Sizes, chunk: int) -> Generation:
  """Reads a prompt that fills the buffer; generates one token."""
  asked = request(m, s, new=1, gamma=0, start=room(m, s) - 1)
  options = dataclasses.replace(OPTIONS, chunk=chunk)
  loop = decode.programs(m.model, decode.PLAIN, reject.RULE, options)
  weights = types.Weights(m.params)
  lowered = loop.generate.lower(weights, asked)
  return Generation(compiled(lowered), weights, asked)


def profiled(go: Callable[[], Any], steps: int) -> dict[str, float | None]:
  """Profiles what a GPU does in each step of go(), with JAX's profiler.

  kernels: how many. busy_ms: of them all. waits: copies to the host, which
  waits for each. None where there is no GPU.
  """
  go()
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      go()
    (path,) = pathlib.Path(folder).rglob('*.xplane.pb')
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [
      (x.name, x.duration_ns)
      for plane in planes
      if plane.name.startswith('/device:GPU')
      for line in plane.lines
      if line.name.startswith('Stream')
      for x in line.events
    ]
  if not events:
    return dict(kernels=None, busy_ms=None, waits=None)
  copies = [name for name, _ in events if 'emcpy' in name]
  return dict(
    kernels=(len(events) - len(copies)) / steps,
    busy_ms=sum(x for _, x in events) / steps / 1e6,
    waits=sum('D2H' in x for x in copies) / steps,
  )


def joules() -> float | None:
  """Reads what the card has taken so far; None if it does not say."""
  return _nvml(
    lambda x, card: x.nvmlDeviceGetTotalEnergyConsumption(card) / 1e3
  )


def card() -> dict[str, Any]:
  """Reads the card's name, driver and clocks; {} without one."""
  text = lambda x: x.decode() if isinstance(x, bytes) else x
  read = lambda x, card: dict(
    card=text(x.nvmlDeviceGetName(card)),
    driver=text(x.nvmlSystemGetDriverVersion()),
    sm_mhz=x.nvmlDeviceGetClockInfo(card, x.NVML_CLOCK_SM),
    memory_mhz=x.nvmlDeviceGetClockInfo(card, x.NVML_CLOCK_MEM),
    watts=x.nvmlDeviceGetPowerManagementLimit(card) / 1e3,
  )
  return _nvml(read) or {}


def _nvml(read: Callable[[Any, Any], Any]) -> Any:
  """Reads something of the first card by NVML; None if that fails."""
  try:
    import pynvml

    pynvml.nvmlInit()
    return read(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
  except Exception:  # no card, no library, or a card that does not count
    return None
