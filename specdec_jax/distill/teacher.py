"""What a teacher answers, and what it had in mind: what its drafts learn from.

Answers are decoded by the loop that users run, batch after batch, into a
folder that a later run of the same settings goes on with or reads back. Of a
text that is given the teacher is only asked what it makes of it.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, requests, sharding, types
from specdec_jax.io import files
from specdec_jax.train import logs


@dataclasses.dataclass(frozen=True)
class Asked:
  """How the teacher answers, as facts.json records it.

  teacher: the digest of its weights; dtype: what it computes in. questions: the
  digest of the prompts. stop_ids: what ends an answer. rows: how many there
  are. length: tokens of a row, prompt included. temperatures: of the rows, in
  turn; () for a text that is given. taps: layers whose residual streams are
  kept, the last one among them; none are if empty.
  """

  teacher: str
  dtype: str
  questions: str
  stop_ids: tuple[int, ...]
  rows: int
  length: int
  temperatures: tuple[float, ...]
  seed: int
  taps: tuple[int, ...]


class Answers(NamedTuple):
  """n rows of L tokens, some of them memory-mapped.

  tokens: [n, L] int32. spans: [n, 2], the prompt's and the whole length.
  features: [n, L, E] float16, or None without taps: what the teacher made of
  each token, each tap divided by its root mean square. mass: [n, L] float32,
  the logarithm of the sum of its exponentiated logits after each token.
  """

  tokens: np.ndarray
  spans: np.ndarray
  features: np.ndarray | None
  mass: np.ndarray | None


def answer(
  folder: pathlib.Path,
  prompts: Sequence[Sequence[int]],
  asked: Asked,
  target: types.Model,
  params: types.Params,
  *,
  rule: types.Rule,
  batch: int,
  track: Callable[..., Any],
  texts: np.ndarray | None = None,
  layout: sharding.Layout | None = None,
) -> Answers:
  """The answers to all prompts, in a folder; what is there is not made again.

  Args:
    folder: made if need be; facts.json in it says what it holds.
    prompts: token ids, each shorter than asked.length.
    texts: [n, L] prompts with what follows them: there is nothing to say, and
      what the teacher makes of them is kept.
    asked: what the answers are; another value in the folder is refused.
    target, params: the teacher, as for decode.programs.
    rule: never asked for anything; plain decoding needs one by its contract.
    batch: rows decoded together; changes no token.
    track: track(iterable, description) -> the same, with a progress bar.
    layout: of the target, if it lies on a mesh; its data axis divides `batch`.

  Raises:
    ValueError: a folder of other answers, naming what differs; a damaged one;
      no room for all of them, before the first is asked for.
  """
  arrays, done = _open(folder, asked, sum(_widths(target, params, asked.taps)))
  starts = range(done, len(prompts), batch)
  for first in track(starts, 'teacher answers'):
    part = prompts[first : first + batch]
    rows = slice(first, first + len(part))
    if texts is not None:
      spans, out, features, mass = _hear(
        target,
        params,
        part,
        texts[rows],
        rows=batch,
        taps=asked.taps,
        layout=layout,
      )
    else:
      spans, out, features, mass = say(
        target,
        params,
        part,
        np.arange(first, first + len(part)),
        rule=rule,
        length=asked.length,
        temperatures=asked.temperatures,
        seed=asked.seed,
        stop_ids=asked.stop_ids,
        rows=batch,
        taps=asked.taps,
        layout=layout,
      )
    arrays.tokens[rows], arrays.spans[rows] = out, spans
    if arrays.features is not None and arrays.mass is not None:
      arrays.features[rows], arrays.mass[rows] = features, mass
    _record(folder, asked, arrays, rows.stop)
  return arrays


def say(
  target: types.Model,
  params: types.Params,
  prompts: Sequence[Sequence[int]],
  numbers: np.ndarray,
  *,
  rule: types.Rule,
  length: int,
  temperatures: Sequence[float],
  seed: int,
  stop_ids: Sequence[int],
  rows: int,
  taps: tuple[int, ...] = (),
  layout: sharding.Layout | None = None,
):
  """One batch of at most `rows` prompts: (spans, tokens, features, mass).

  numbers: the request number of each, which its randomness is keyed by; it
  takes the temperature of its turn. As for Answers, of these prompts alone.
  """
  count = len(prompts)
  request = requests.make(
    requests.items(prompts, numbers),
    ids=target.vocab,
    context=max(target.context, length),
    max_new_tokens=np.array([length - len(x) for x in prompts]),
    temperature=np.array(temperatures)[numbers % len(temperatures)],
    seed=seed,
    stop_ids=stop_ids,
    rows=rows,
    length=length,
  )
  program = _program(target, rule, taps)
  placed = requests.place(request, layout)
  out, *more = jax.device_get(program(types.Weights(params), placed))
  spans = np.stack([request.lengths_B, out.lengths_B], 1)
  features, mass = (None if x is None else x[:count] for x in more)
  return spans[:count], out.tokens_BL[:count], features, mass


def _hear(target, params, prompts, texts, *, rows: int, taps, layout=None):
  """As say, of at most `rows` texts that are given, [n, L]."""
  count, L = texts.shape
  spans = np.array([[len(x), L] for x in prompts])
  full = np.pad(texts, ((0, rows - count), (0, 0)))
  if layout is not None:
    full = jax.device_put(full, layout.sharding('batch', None))
  kept = jax.device_get(_reading(target, taps)(types.Weights(params), full))
  features, mass = (x[:count] for x in kept)
  return spans, texts, features, mass


def _widths(target, params, taps) -> list[int]:
  """The width of every tap."""
  read = lambda: forward.read(
    target,
    params,
    jnp.zeros((1, 1), jnp.int32),
    jnp.zeros((1,), jnp.int32),
    target.init_cache(1, 1),
    slots=1,
    taps=taps,
  )
  return [x.shape[-1] for x in jax.eval_shape(read)[1]]


def _open(folder: pathlib.Path, asked: Asked, width: int):
  """(Answers to write to, how many rows are done)."""
  with logs.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  facts, done = json.loads(json.dumps(dataclasses.asdict(asked))), 0
  path = folder / 'facts.json'
  if path.exists():
    found = files.read_json(path)
    done = found.pop('done')
    differ = sorted(k for k in facts if found.get(k) != facts[k])
    if differ:
      raise ValueError(
        f'{folder}: holds answers with other {", ".join(differ)}; name another '
        'folder, or remove it'
      )
  n, L = asked.rows, asked.length

  def array(name: str, dtype, *shape: int) -> np.memmap:
    at = folder / f'{name}.npy'
    if not done:
      with logs.writing(at):
        np.lib.format.open_memmap(at, 'w+', dtype, shape)
        _take_room(at)
    try:
      # Mode r+ alone would fill up a file that was cut.
      found = np.lib.format.open_memmap(at, 'r')
      if (found.dtype, found.shape) != (np.dtype(dtype), shape):
        raise ValueError(f'it holds {found.dtype}{list(found.shape)}')
      return np.lib.format.open_memmap(at, 'r+')
    except (OSError, ValueError) as error:
      raise ValueError(
        f'{at}: cannot be read ({error}); remove {folder} to ask again'
      ) from error

  answers = Answers(
    tokens=array('tokens', np.int32, n, L),
    spans=array('spans', np.int32, n, 2),
    features=array('features', np.float16, n, L, width) if width else None,
    mass=array('mass', np.float32, n, L) if width else None,
  )
  return answers, done


def _take_room(path: pathlib.Path) -> None:
  """A write to a mapped file for which there is no room would be a crash."""
  if hasattr(os, 'posix_fallocate'):
    with open(path, 'r+b') as file:
      os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _record(folder, asked: Asked, arrays: Answers, done: int) -> None:
  """Rows count when their bytes are on the disk."""
  for x in arrays:
    if isinstance(x, np.memmap):
      x.flush()
  facts = dataclasses.asdict(asked) | {'done': done}
  with logs.writing(folder):
    files.write(folder / 'facts.json', json.dumps(facts))


def recorder(taps: tuple[int, ...]) -> types.Drafter:
  """Proposes nothing and keeps the target's features of every token.

  Its state: (features_BLE, the lengths before the window).
  """

  def init(weights, context, features):
    return features, context.lengths_B

  def propose(weights, state, context, noise, cache):
    draft, _, cache = decode.PLAIN.propose(weights, (), context, noise, cache)
    return draft, state, cache

  def commit(state, context, outcome, features_BNE):
    features_BLE, lengths_B = state
    row_B = jnp.arange(lengths_B.shape[0])
    new = features_BLE.at[row_B, lengths_B - 1].set(features_BNE[:, 0])
    return new, context.lengths_B

  return types.Drafter('recorder', 0, init, propose, commit, taps=taps)


@functools.cache
def _program(target: types.Model, rule: types.Rule, taps: tuple[int, ...]):
  """weights, request -> (Output, features, mass), of one batch."""
  drafter = recorder(taps) if taps else decode.PLAIN
  options = decode.Options(narrow=False)

  def answer(weights, request):
    loop = decode.Loop(target, drafter, rule, options)
    state, info = decode.start(loop, weights, request)
    state, info = jax.lax.while_loop(
      lambda carry: jnp.any(carry[0].live_B),
      lambda carry: decode.step(loop, weights, request, *carry),
      (state, info),
    )
    out = decode.Output(state.tokens_BL, state.lengths_B, info)
    if not taps:
      return out, None, None
    return out, *_kept(target, weights, state.drafter[0], len(taps))

  return jax.jit(answer)


@functools.cache
def _reading(target: types.Model, taps: tuple[int, ...]):
  """weights, [B, L] tokens -> (features, mass), of one batch."""

  def read(weights, tokens_BL):
    B, L = tokens_BL.shape
    zeros_B = jnp.zeros((B,), jnp.int32)
    cache = target.init_cache(B, L)
    _, found, _ = forward.read(
      target, weights.target, tokens_BL, zeros_B, cache, slots=L, taps=taps
    )
    return _kept(target, weights, forward.concat(found), len(taps))

  return jax.jit(read)


def _kept(target: types.Model, weights, features_BLE, taps: int):
  """(normed features, float16, [B, L] logarithms of the normaliser)."""
  last_BLD = jnp.split(features_BLE, taps, -1)[-1]
  mass_LB = jax.lax.map(
    lambda x_BD: jax.nn.logsumexp(target.head(weights.target, x_BD), -1),
    jnp.moveaxis(last_BLD, 1, 0),
  )
  return normed(features_BLE, taps).astype(jnp.float16), mass_LB.T


def normed(features, taps: int):
  """Every tap divided by its root mean square; zeros stay zeros."""
  parts = jnp.stack(jnp.split(features, taps, -1), -2)
  mean = jnp.mean(parts * parts, -1, keepdims=True)
  return (parts * jax.lax.rsqrt(mean + 1e-6)).reshape(features.shape)
