"""Plain decoding of many prompts, with the hidden states that it passes.

A fixed number of rows decode at a time; those that end are given new prompts,
so that none waits for the longest answer of a batch.
"""

import collections
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, hosts, requests, sharding, types
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.verify import reject

Array = jax.Array

# New prompts are read by this share of the rows at a time.
_SHARE = 8
# Prompts that are sorted: greedy rows cost less by themselves, and prompts that
# are read together should be of one length.
_SORTED = 512
# Tokens of a prompt that are read at a time; the last of them may be padding.
_CHUNK = 16


class Sampling(NamedTuple):
  """How completions are decoded.

  length: tokens of a row, prompt included.
  temperatures: rows alternate, by their request numbers.
  seed: keys the draws, together with the request number.
  stop_ids: end a completion.
  sources: ids of a source that there is room for; 0 without an encoder.
  """

  length: int
  temperatures: tuple[float, ...]
  seed: int
  stop_ids: tuple[int, ...]
  sources: int = 0

  def temperature(self, number: int) -> float:
    return self.temperatures[number % len(self.temperatures)]


class Answers(NamedTuple):
  """n rows of L tokens: prompts with their completions.

  tokens: [n, L] int32.
  spans: [n, 2] prompt length and total length; equal in a row left out, whose
    logits were not finite.
  features: [n, L, E] float16 or None: hidden states at each token but the last,
    each tap divided by its root mean square. 0 in a row left out.
  mass: [n, L] float32 or None: log-sum-exp of the logits after each token, from
    the last token of the prompt on.
  source: what an encoder reads before each of them, or None.
  """

  tokens: np.ndarray
  spans: np.ndarray
  features: np.ndarray | None = None
  mass: np.ndarray | None = None
  source: types.Source | None = None


class Recording(NamedTuple):
  """Arrays kept beside the tokens: features of the layers `taps`, and the mass.

  taps: ascending, the last layer among them.
  config: of the target.
  """

  taps: tuple[int, ...]
  config: model_config.LMConfig


def generate(
  model: types.Model,
  params: types.Params,
  prompts: Sequence[requests.Item],
  how: Sampling,
  *,
  rows: int,
  layout: sharding.Layout | None,
  recording: Recording | None = None,
) -> Iterator[tuple[np.ndarray, Answers]]:
  """Completes every prompt, in the order in which rows end.

  Yields which prompts [n], and their answers, without sources.

  Args:
    model, params: what decodes.
    prompts: each shorter than how.length, its source at most how.sources long;
      their numbers key randomness and temperature.
    how: the decoding.
    rows: decoded together; changes no token.
    layout: of the model on its mesh, or None.
    recording: features and mass are recorded; None: not.
  """
  pool = _Pool(model, params, how, rows, layout, recording)
  order = sorted(
    range(len(prompts)),
    key=lambda i: (
      i // _SORTED,
      how.temperature(prompts[i].number),
      len(prompts[i].tokens),
    ),
  )
  waiting = collections.deque(order)
  while waiting or pool.busy:
    while waiting and pool.free >= min(pool.part, len(waiting)):
      some = [waiting.popleft() for _ in range(min(pool.part, len(waiting)))]
      pool.begin(some, [prompts[i] for i in some])
    yield from pool.advance(rest=not waiting)


class _Pool:
  """Rows that decode together, each with a prompt of its own."""

  def __init__(self, model, params, how: Sampling, rows, layout, recording):
    self._model, self._how, self._layout = model, how, layout
    self._weights = types.Weights(params)
    self._rows = requests.rows_on(layout, rows)
    self.part = requests.rows_on(layout, -(-rows // _SHARE))
    drafter = _recorder(recording.taps) if recording else decode.PLAIN
    options = decode.Options(_CHUNK, widths=(), logprobs=bool(recording))
    self._programs = decode.programs(model, drafter, reject.RULE, options)
    self._read = _reader(recording)
    self._index_B = np.full(self._rows, -1)  # the prompt of each row, -1: none
    self._live_B = np.zeros(self._rows, bool)
    self._request: Any = None  # on the host
    self._state: Any = None  # (decode.State, types.Info)

  @property
  def free(self) -> int:
    return int((self._index_B < 0).sum())

  @property
  def busy(self) -> bool:
    return self.free < self._rows

  def begin(self, index: Sequence[int], prompts) -> None:
    """Gives new prompts, at most `part`, to rows that are free."""
    how = self._how
    wanted = requests.Wanted(
      [how.length - len(x.tokens) for x in prompts],
      [how.temperature(x.number) for x in prompts],
      seed=how.seed,
      stop_ids=how.stop_ids,
    )
    request = requests.make(
      prompts,
      wanted,
      rows=self.part,
      length=how.length,
      sources=how.sources,
    )
    placed = requests.place(request, self._layout)
    began = self._programs.start(self._weights, placed)
    if self._state is None:
      self._request = jax.tree.map(lambda x: self._blank(np, x), request)
      self._state = jax.tree.map(
        lambda x: self._blank(jnp, x, device=x.sharding), began
      )
    where = np.flatnonzero(self._index_B < 0)[: len(index)]
    self._index_B[where], self._live_B[where] = index, True

    def put(old, new):
      old[where] = new[: len(where)]

    jax.tree.map(put, self._request, request)
    # Rows without a prompt go past the end, where they are dropped.
    beyond = self.part - len(where)
    where_B = np.pad(where, (0, beyond), constant_values=self._rows)
    self._state = _put(self._state, began, where_B)

  def _blank(self, kind, x, **where):
    shape = (self._rows, *x.shape[1:]) if x.ndim else ()
    return kind.zeros(shape, x.dtype, **where)

  def advance(self, *, rest: bool) -> Iterator[tuple[np.ndarray, Answers]]:
    """Decodes one token of every row; yields what ended, if that is enough.

    rest: no prompts are left, so it is enough once all rows have ended.
    """
    if self._live_B.any():
      placed = requests.place(self._request, self._layout)
      self._state = self._programs.step(self._weights, placed, *self._state)
      self._live_B = np.array(hosts.fetch(self._state[0].live_B))
    ended = np.flatnonzero((self._index_B >= 0) & ~self._live_B)
    last = rest and not self._live_B.any()
    while len(ended) >= self.part or (last and len(ended)):
      yield self._taken(ended[: self.part])
      ended = ended[self.part :]

  def _taken(self, where: np.ndarray) -> tuple[np.ndarray, Answers]:
    """The prompts and answers of rows that ended, which are free now."""
    count = len(where)
    # Any row will do where fewer ended.
    where_B = np.pad(where, (0, self.part - count))
    found = self._read(self._weights.target, *self._state, where_B)
    found = jax.tree.map(lambda x: x[:count], hosts.fetch(found))
    tokens, ends, broken, features, mass = found
    starts = self._request.lengths_B[where]
    spans = np.stack([starts, np.where(broken, starts, ends)], 1)
    index = self._index_B[where]
    self._index_B[where] = -1
    return index, Answers(tokens, spans, features, mass)


@functools.partial(jax.jit, donate_argnums=0)
def _put(all_rows, some, where_B: Array):
  """Replaces rows; scalars are counts of steps, which go on."""
  return jax.tree.map(
    lambda old, new: old.at[where_B].set(new, mode='drop') if old.ndim else old,
    all_rows,
    some,
  )


@functools.cache
def _recorder(taps: tuple[int, ...]) -> types.Drafter:
  """Plain decoding, whose state is the features of every token read."""
  narrow = lambda x: eagle.normed(x, len(taps)).astype(jnp.float16)

  def commit(state_BLE, context, outcome, features_B1E):
    # The token read last is the one before those emitted.
    at_B = context.lengths_B - outcome.emitted_B - 1
    at_B = jnp.where(outcome.emitted_B > 0, at_B, state_BLE.shape[1])
    at = state_BLE.at[jnp.arange(len(at_B)), at_B]
    return at.set(narrow(features_B1E[:, 0]), mode='drop')

  return decode.PLAIN._replace(
    name='recorder',
    init=lambda weights, context, features_BLE: narrow(features_BLE),
    commit=commit,
    taps=taps,
  )


@functools.cache
def _reader(recording: Recording | None):
  """(params, state, info, where_B) -> tokens, ends, broken, features, mass."""

  def read(params, state: decode.State, info: types.Info, where_B: Array):
    kept = state.tokens_BL, state.lengths_B, info.broken_B
    tokens_BL, ends_B, broken_B = (x[where_B] for x in kept)
    if recording is None:
      return tokens_BL, ends_B, broken_B, None, None
    assert info.logprob_BL is not None
    features_BLE = state.drafter[where_B]
    last_BLD = jnp.split(features_BLE, len(recording.taps), -1)[-1]
    config, after = recording.config, functools.partial(jnp.roll, shift=-1)
    logit_BL = lm.token_logits(
      config,
      params,
      last_BLD.astype(config.activations),
      after(tokens_BL, axis=1),
    )
    mass_BL = logit_BL - after(info.logprob_BL[where_B], axis=1)
    # What the prefill computed past the end of a prompt is not of a token.
    ok_B = ~broken_B & jnp.isfinite(features_BLE).all((1, 2))
    is_read_BL = jnp.arange(tokens_BL.shape[1])[None] < ends_B[:, None] - 1
    is_read_BL &= ok_B[:, None]
    features_BLE = jnp.where(is_read_BL[..., None], features_BLE, 0)
    mass_BL = jnp.where(is_read_BL, mass_BL, 0)
    return tokens_BL, ends_B, ~ok_B, features_BLE, mass_BL

  return jax.jit(read)
