"""Plain decoding of many prompts, with the hidden states that it passes.

A fixed number of rows decode at a time; those that end are given new prompts,
so that none waits for the longest answer of a batch.
"""

import collections
import functools
import io
import pathlib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, hosts, pool, requests, sharding, types
from specdec_jax.io import files
from specdec_jax.models import config as model_config
from specdec_jax.models import eagle, lm
from specdec_jax.train import data, logs
from specdec_jax.verify import reject

Array = jax.Array

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

  def wanted(self, items: Sequence[requests.Item]) -> requests.Wanted:
    """What is asked of the prompts."""
    return requests.Wanted(
      [self.length - len(x.tokens) for x in items],
      [self.temperature(x.number) for x in items],
      seed=self.seed,
      stop_ids=self.stop_ids,
    )


class Answers(NamedTuple):
  """n rows of L tokens: prompts with their completions.

  tokens: [n, L] int32.
  spans: [n, 2] prompt length and total length; equal in a row left out, whose
    logits were not finite.
  features: [n, L, E] float16 or None: hidden states at each token but the last,
    each tap divided by its root mean square. 0 in a row left out.
  mass: [n, L] float32 or None: log-sum-exp of the logits after each token, from
    the last token of the prompt on.
  scale: [n, L, taps] float32 or None: what each tap was multiplied by.
  source: what an encoder reads before each of them, or None.
  """

  tokens: types.Array
  spans: types.Array
  features: types.Array | None = None
  mass: types.Array | None = None
  scale: types.Array | None = None
  source: types.Source | None = None


class Recording(NamedTuple):
  """Arrays kept beside the tokens: features of the layers `taps`, and the mass.

  taps: ascending, the last layer among them.
  config: of the target.
  scaled: the scale is kept too.
  """

  taps: tuple[int, ...]
  config: model_config.LMConfig
  scaled: bool = False


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
  drafter = _recorder(recording.taps) if recording else decode.PLAIN
  options = decode.Options(_CHUNK, widths=(), logprobs=bool(recording))
  held = pool.Pool(
    decode.Loop(model, drafter, reject.RULE, options),
    types.Weights(params),
    layout,
    rows=rows,
    length=how.length,
    sources=how.sources,
    stops=max(len(how.stop_ids), 1),
  )
  order = sorted(
    range(len(prompts)),
    key=lambda i: (
      i // _SORTED,
      how.temperature(prompts[i].number),
      len(prompts[i].tokens),
    ),
  )
  waiting, read = collections.deque(order), _reader(recording)
  while waiting or held.busy:
    while waiting and held.free >= min(held.part, len(waiting)):
      some = [waiting.popleft() for _ in range(min(held.part, len(waiting)))]
      items = [prompts[i] for i in some]
      held.begin(some, items, how.wanted(items))
    ended = held.advance()
    # A read costs the same for few rows; the last ones are read together.
    last = not waiting and len(ended) + held.free == held.rows
    while len(ended) >= held.part or (last and ended):
      some, ended = ended[: held.part], ended[held.part :]
      found = held.read(read, some)
      held.cancel(some)
      yield np.array(some), found


@functools.cache
def _recorder(taps: tuple[int, ...]) -> types.Drafter:
  """Plain decoding, whose state is the features of every token read, and what
  their taps were multiplied by."""

  def narrow(features):
    normed, scale = eagle.scaled(features, len(taps))
    return normed.astype(jnp.float16), scale.astype(jnp.float32)

  def commit(state, context, outcome, features_B1E):
    # The token read last is the one before those emitted.
    at_B = context.lengths_B - outcome.emitted_B - 1
    at_B = jnp.where(outcome.emitted_B > 0, at_B, context.tokens_BL.shape[1])
    row_B, new = jnp.arange(len(at_B)), narrow(features_B1E[:, 0])
    put = lambda old, x: old.at[row_B, at_B].set(x, mode='drop')
    return jax.tree.map(put, state, new)

  return decode.PLAIN._replace(
    name='recorder',
    init=lambda weights, context, features_BLE: narrow(features_BLE),
    commit=commit,
    taps=taps,
  )


@functools.cache
def _reader(recording: Recording | None):
  """Makes Answers of some rows; see pool.Pool.read."""

  def read(weights, request, state: decode.State, info: types.Info, where_B):
    kept = request.lengths_B, state.tokens_BL, state.lengths_B, info.broken_B
    starts_B, tokens_BL, ends_B, broken_B = (x[where_B] for x in kept)
    spans_B2 = jnp.stack([starts_B, jnp.where(broken_B, starts_B, ends_B)], 1)
    if recording is None:
      return Answers(tokens_BL, spans_B2)
    assert info.logprob_BL is not None
    features_BLE, scale_BLn = (x[where_B] for x in state.drafter)
    last_BLD = jnp.split(features_BLE, len(recording.taps), -1)[-1]
    config, after = recording.config, functools.partial(jnp.roll, shift=-1)
    logit_BL = lm.token_logits(
      config,
      weights.target,
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
    scale_BLn = jnp.where(is_read_BL[..., None], scale_BLn, 1)
    spans_B2 = jnp.where(ok_B[:, None], spans_B2, starts_B[:, None])
    scale = scale_BLn if recording.scaled else None
    return Answers(tokens_BL, spans_B2, features_BLE, mass_BL, scale)

  return jax.jit(read)


# --- completions of the student, during training -----------------------------


def mixed(one: dict[str, np.ndarray], other: dict[str, np.ndarray], seed: int):
  """Takes each row from one of both, with probability 1/2."""
  coin = np.random.default_rng(seed).random(len(one['tokens'])) < 0.5
  pick = lambda a, b: np.where(coin.reshape(-1, *[1] * (a.ndim - 1)), a, b)
  return {name: pick(one[name], other[name]) for name in one}


class OnPolicy:
  """Batches of rows that are sampled anew every `every` steps.

  The rows are saved in a folder, so that a resumed run reads the same ones.

  Args:
    folder: for the rows, one file for each sampling.
    sample: (step, params) -> rows, arrays that share their leading axis.
    every: steps from one sampling to the next.
    batches: (rows, step) -> their batches.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    sample: Callable[[int, types.Params], dict[str, np.ndarray]],
    every: int,
    batches: Callable[[dict[str, np.ndarray], int], data.Batches],
  ):
    self._folder, self._sample, self._every = folder, sample, every
    self._make, self._sampled_at, self._batches = batches, -1, None

  def refresh(self, step: int, params: types.Params) -> None:
    """Samples new rows if they are due at this step."""
    if step % self._every == 0 and step != self._sampled_at:
      rows = self._sample(step, params)
      hosts.from_first(lambda: self._save(step, rows))
      self._open(step)

  def _save(self, step: int, rows: dict[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **rows)
    with logs.writing(self._folder):
      self._folder.mkdir(parents=True, exist_ok=True)
      files.write(self._folder / f'{step}.npz', content.getvalue())

  def __next__(self) -> dict[str, np.ndarray]:
    assert self._batches is not None, 'refresh comes first'
    return next(self._batches)

  def state(self) -> dict[str, Any]:
    """The position in the batches for restore, as JSON."""
    assert self._batches is not None, 'refresh comes first'
    return {'made': self._sampled_at, 'batches': self._batches.state()}

  def restore(self, state: dict[str, Any]) -> None:
    self._open(state['made']).restore(state['batches'])

  def _open(self, step: int) -> data.Batches:
    path = self._folder / f'{step}.npz'
    try:
      with np.load(path, allow_pickle=False) as found:
        rows = dict(found)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
      raise ValueError(
        f'{path}: the completions of the student cannot be read ({error}); '
        'remove the checkpoints from there on, or take another workdir'
      ) from error
    self._batches, self._sampled_at = self._make(rows, step), step
    return self._batches
