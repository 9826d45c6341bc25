"""Decodes many prompts plainly, with the hidden states that it passes.

A fixed number of rows decode at a time; each that ends gets a new prompt, so
that none waits for a batch's longest answer.
"""

import collections
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, decode, hosts, pool, requests, sampling, types
from specdec_jax.distill import sections
from specdec_jax.models import eagle, lm
from specdec_jax.train import data as data_lib
from specdec_jax.train import logs
from specdec_jax.verify import reject

Array = jax.Array

# Prompts that are sorted: greedy rows cost less by themselves, and prompts that
# are read together should be of one length.
_SORTED = 512
# Tokens of a prompt that are read at a time; the last of them may be padding.
_CHUNK = 16


def source_room(data: sections.Data, target: build.LanguageModel) -> int:
  """Returns the ids that a source has room for; 0 without an encoder."""
  return 0 if target.start is None else data.source_length


def generate(
  target: build.LanguageModel,
  model: types.Model,
  params: types.Params,
  prompts: Sequence[requests.Item],
  data: sections.Data,
  seed: int,
  taps: tuple[int, ...] = (),
) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
  """Completes every prompt, in the order in which rows end.

  Yields which prompts [n], and their answers by name: 'tokens' [n, L], and
  'spans' [n, 2], lengths of prompt and whole, equal in a row left out, whose
  logits were not finite. With taps also 'features' [n, L, E] float16, hidden
  states at each token but the last, each tap divided by its root mean square, 0
  in a row left out; 'mass' [n, L], log-sum-exp over the logits after each token
  from the prompt's last on; 'scale' [n, L, taps], what taps were multiplied by.

  Args:
    target: has the model's tokenizer and mesh. model, params decode.
    prompts: each shorter than data.length, its source within source_room; their
      numbers key randomness and temperature, seed the draws.
    data: data.batch rows are decoded together, which changes no token.
    taps: target layers whose features are recorded, and the mass: ascending,
      the last layer among them; () is none.
  """
  drafter = _recorder(taps) if taps else decode.PLAIN
  options = decode.Options(_CHUNK, widths=(), logprobs=bool(taps))
  stop_ids = target.tokenizer.eos_ids
  held = pool.Pool(
    decode.Loop(model, drafter, reject.RULE, options),
    types.Weights(params),
    target.layout,
    rows=data.batch,
    length=data.length,
    sources=source_room(data, target),
    stops=max(len(stop_ids), 1),
  )
  heat = lambda x: data.temperatures[x.number % len(data.temperatures)]
  first = lambda i: (i // _SORTED, heat(prompts[i]), len(prompts[i].tokens))
  waiting = collections.deque(sorted(range(len(prompts)), key=first))
  asked = lambda x: x._replace(
    new=data.length - len(x.tokens),
    sampling=sampling.Sampling(heat(x), seed=seed),
    stop_ids=stop_ids,
  )
  read = _reader(taps, target.lm_config)
  while waiting or held.busy:
    # A part costs the same for few prompts.
    while waiting and held.free >= (count := min(held.part, len(waiting))):
      some = [waiting.popleft() for _ in range(count)]
      held.begin(some, [asked(prompts[i]) for i in some])
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
  """Makes plain decoding whose state is the (features, scale) it has read."""

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
def _reader(taps: tuple[int, ...], config: Any):
  """Makes a reader that returns some rows' answers; see pool.Pool.read."""

  def read(weights, request, state: decode.State, info: types.Info, where_B):
    kept = request.lengths_B, state.tokens_BL, state.lengths_B, info.broken_B
    starts_B, tokens_BL, ends_B, broken_B = (x[where_B] for x in kept)
    spans_B2 = jnp.stack([starts_B, jnp.where(broken_B, starts_B, ends_B)], 1)
    if not taps:
      return {'tokens': tokens_BL, 'spans': spans_B2}
    assert info.logprob_BL is not None
    features_BLE, scale_BLn = (x[where_B] for x in state.drafter)
    last_BLD = jnp.split(features_BLE, len(taps), -1)[-1]
    after = functools.partial(jnp.roll, shift=-1)
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
    return {
      'tokens': tokens_BL,
      'spans': jnp.where(ok_B[:, None], spans_B2, starts_B[:, None]),
      'features': jnp.where(is_read_BL[..., None], features_BLE, 0),
      'mass': jnp.where(is_read_BL, mass_BL, 0),
      'scale': jnp.where(is_read_BL[..., None], scale_BLn, 1),
    }

  return jax.jit(read)


# --- completions of the student, during training -----------------------------


def mixed(one: dict[str, np.ndarray], other: dict[str, np.ndarray], seed: int):
  """Picks each row from one or the other, with probability 1/2."""
  coin = np.random.default_rng(seed).random(len(one['tokens'])) < 0.5
  pick = lambda a, b: np.where(coin.reshape(-1, *[1] * (a.ndim - 1)), a, b)
  return {name: pick(one[name], other[name]) for name in one}


class OnPolicy:
  """Batches rows that are sampled anew every `every` steps.

  A folder keeps the rows, so that a resumed run reads the same ones.

  sample: (step, params) -> rows. batches: (rows, step) -> their batches.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    sample: Callable[[int, types.Params], dict[str, np.ndarray]],
    every: int,
    batches: Callable[[dict[str, np.ndarray], int], data_lib.Batches],
  ):
    self._folder, self._sample, self._every = folder, sample, every
    self._make, self._sampled_at = batches, -1
    self._batches: Any = None  # of the first refresh

  def refresh(self, step: int, params: types.Params) -> None:
    """Samples new rows if they are due at this step."""
    if step % self._every == 0 and step != self._sampled_at:
      rows = self._sample(step, params)

      def save() -> None:
        with logs.writing(self._folder):
          self._folder.mkdir(parents=True, exist_ok=True)
          # Not atomic: no checkpoint knows of it yet, and it is sampled again.
          np.savez(self._folder / f'{step}.npz', allow_pickle=False, **rows)

      hosts.from_first(save)
      self._open(step)

  def __next__(self) -> dict[str, np.ndarray]:
    return next(self._batches)

  def state(self) -> dict[str, Any]:
    """Returns the position in the batches for restore, as JSON."""
    return {'made': self._sampled_at, 'batches': self._batches.state()}

  def restore(self, state: dict[str, Any]) -> None:
    self._open(state['made']).restore(state['batches'])

  def _open(self, step: int) -> data_lib.Batches:
    with np.load(self._folder / f'{step}.npz', allow_pickle=False) as found:
      rows = dict(found)
    self._batches, self._sampled_at = self._make(rows, step), step
    return self._batches
