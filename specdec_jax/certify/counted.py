"""Promises about whole texts that are counted, with the production keys."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import forward, types
from specdec_jax.certify import base, enumerated, pairs, statistics, table_model

# Above these, every rule meets every gamma and vocabulary.
QUICK_TABLES, QUICK_TRANSFORMER = 2**20, 2**18
_WARM: dict[str, Any] = dict(temperature=0.9, top_p=0.95)


def joint_law_of_tables(subject: base.Subject, amount: int) -> base.Figure:
  """Joint law of three windows and more on table models, by production keys."""
  tests: dict[str, statistics.Test] = {}
  seen, first = [], next(iter(subject.drafters))
  cells = _cells(subject, whole=amount > QUICK_TABLES)
  for rule, (label, recipe), gamma, vocab in cells:
    drafter, _ = recipe(base.tables(vocab), gamma)
    # A drafter may have a gamma of its own; a long window, fewer tokens.
    vocab = vocab if drafter.gamma <= 3 else 2
    cell = (rule.name, label, drafter.gamma, vocab)
    if cell in seen:
      continue
    seen.append(cell)
    world = base.tables(vocab)
    drafter, other = recipe(world, gamma)
    new = _length(drafter.gamma, vocab)
    warped = table_model.warped(world.weights.target, **_WARM)
    law = table_model.joint_law(warped, enumerated.PROMPT[vocab], new)
    counts = np.zeros(law.size, np.int64)
    each = amount if label == first else -(-amount // 8)
    for request in _requests(subject, world, drafter.gamma, new, each):
      out = base.run(world, drafter, rule, other, request)
      text = out.tokens_BL[:, len(enumerated.PROMPT[vocab]) :][:, :new]
      flat = np.ravel_multi_index(text.T, law.shape)
      counts += np.bincount(flat, minlength=law.size)
    name = f'{rule.name}, {label}, gamma {drafter.gamma}, V {vocab}'
    tests |= statistics.prefix_tests(name, counts.reshape(law.shape), law)
  return statistics.judge(
    tests,
    f'{statistics.amount_of(amount)} texts in each of {len(seen)} cells, an '
    f'eighth with other drafters than {first}: ' + _names(seen),
  )


def _names(cells) -> str:
  return ', '.join(sorted({f'{rule} {label}' for rule, label, *_ in cells}))


def _cells(subject: base.Subject, *, whole: bool):
  """(rule, drafter, gamma, V).

  The first rule with the first drafter everywhere; other rules at both gammas
  and vocabularies, everywhere too if whole; other drafters once.
  """
  grid = list(itertools.product((2, 3), (3, 4)))
  first = next(iter(subject.drafters))
  for i, (rule, name) in enumerate(subject.pairs()):
    own = grid[:1]
    if name == first:
      own = grid if whole or i == 0 else grid[1:3]
    for gamma, vocab in own:
      yield rule, (name, subject.drafters[name]), gamma, vocab


def _length(gamma: int, vocab: int) -> int:
  """Longer than two whole windows, as long as V ** length stays small."""
  return min(2 * gamma + 3, {2: 19, 3: 9, 4: 9}[vocab])


def _requests(subject, world, gamma: int, new: int, amount: int):
  rows, prompt = min(amount, 2**14), enumerated.PROMPT[world.vocab]
  # Made once: checking 16,384 prompts takes an eighth of the time of a batch.
  request = base.make_request(
    world,
    [prompt] * rows,
    new,
    length=len(prompt) + new + gamma,
    gamma=gamma,
    seed=subject.seed,
    **_WARM,
  )
  for at in range(0, amount, rows):
    numbers = np.arange(rows, dtype=request.request_B.dtype) + at
    yield request._replace(request_B=numbers)


# --- a transformer ------------------------------------------------------------

EOS, VOCAB, TEMPERATURE = 3, 4, 0.8
# Mixed in one batch of 64, half of the rows each.
PROMPTS = ([2, 0], [2, 0, 0, 1, 2, 1, 0])


def joint_law_of_transformer(subject: base.Subject, amount: int) -> base.Figure:
  """First tokens of a transformer, ragged batches of 64, EOS inside windows."""
  world = subject.transformers(VOCAB, width=8, head_dim=4, mlp=16)
  tests: dict[str, statistics.Test] = {}
  label, recipe = next(iter(subject.drafters.items()))
  drafters = {recipe(world, gamma)[0]: gamma for gamma in (2, 3)}
  first, *others = subject.lossless()
  cells = [(first, x) for x in drafters]
  used = list(drafters)
  if amount <= QUICK_TRANSFORMER:
    used = [max(drafters, key=lambda x: x.gamma)]
  cells += itertools.product(others, used)
  each = amount // len(cells) // 64 * 64
  for rule, drafter in cells:
    _, other = recipe(world, drafters[drafter])
    new = _length(drafter.gamma, VOCAB)
    counts = [np.zeros((VOCAB,) * new, np.int64) for _ in PROMPTS]
    for at in range(0, each, 64):
      request = base.make_request(
        world,
        [PROMPTS[b % 2] for b in range(64)],
        new,
        length=16 + drafter.gamma,
        gamma=drafter.gamma,
        temperature=TEMPERATURE,
        seed=subject.seed,
        request=np.arange(64) + at,
        stop_ids=[EOS],
      )
      _count(base.run(world, drafter, rule, other, request), counts)
    for prompt, seen in zip(PROMPTS, counts, strict=True):
      name = f'{rule.name}, {label}, gamma {drafter.gamma}'
      name += f', prompt of {len(prompt)}'
      law = _autoregressive(world, prompt, new)
      tests |= statistics.prefix_tests(name, seen, law)
  least = statistics.detectable(each // 2, VOCAB, len(tests))
  return statistics.judge(
    tests,
    f'{statistics.amount_of(amount)} texts in {len(cells)} cells, batches of '
    '64',
    f'; detects TV {least:.1e} in single tokens',
  )


def _count(output, counts) -> None:
  """Adds a batch to the counts; what follows an EOS is EOS."""
  for j, prompt in enumerate(PROMPTS):
    start, new = len(prompt), counts[j].ndim
    tokens = output.tokens_BL[j::2, start : start + new].copy()
    ended = np.arange(new) >= (output.lengths_B[j::2] - start)[:, None]
    if ended[:, 0].any() or (tokens[~ended[:, -1]][:, :-1] == EOS).any():
      raise base.Broken('a text is empty, or goes on after its end')
    tokens[ended] = EOS
    flat = np.ravel_multi_index(tokens.T, counts[j].shape)
    np.add.at(counts[j].reshape(-1), flat, 1)


@functools.cache
def _reader(model: types.Model):
  def read(params, tokens_BL, index_B):
    B, L = tokens_BL.shape
    hidden_BLD, _, _ = forward.read(
      model,
      params,
      tokens_BL,
      jnp.zeros(B, jnp.int32),
      model.init_cache(B, L),
      slots=L,
    )
    hidden_BD = jnp.take_along_axis(hidden_BLD, index_B[:, None, None], 1)[:, 0]
    return jax.nn.softmax(model.head(params, hidden_BD) / TEMPERATURE, -1)

  return jax.jit(read)


def _autoregressive(world: base.World, prompt, new: int) -> np.ndarray:
  """Exact law of `new` tokens, one pass over the prompt and every prefix."""
  law, L, chunk = np.zeros((VOCAB,) * new), len(prompt) + new, 4096
  reach = {(): 1.0}
  for m in range(new):
    prefixes = list(reach)
    tokens = np.zeros((-(-len(prefixes) // chunk) * chunk, L), np.int32)
    for row, prefix in zip(tokens, prefixes, strict=False):
      row[: len(prompt) + m] = [*prompt, *prefix]
    last = np.full(chunk, len(prompt) + m - 1, np.int32)
    p = np.concatenate(
      [
        _reader(world.target)(world.weights.target, tokens[i : i + chunk], last)
        for i in range(0, len(tokens), chunk)
      ]
    )
    p = pairs.normal(p[: len(prefixes)].astype(np.float64))
    longer = {}
    for prefix, p_V in zip(prefixes, p, strict=True):
      mass = reach[prefix]
      for v in range(VOCAB):
        if v == EOS or m == new - 1:
          law[(*prefix, v) + (EOS,) * (new - m - 1)] += mass * p_V[v]
        else:
          longer[(*prefix, v)] = mass * p_V[v]
    reach = longer
  return law
