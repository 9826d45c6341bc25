"""Promises about requests: independence of the batch, and exact counts."""

import functools
from typing import Any

import jax
import numpy as np

from specdec_jax import decode, requests, sharding, types
from specdec_jax.bench import metrics
from specdec_jax.certify import base
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

NEW, GAMMA, VOCAB = 12, 2, 16
# Sizes that eight devices divide.
SIZES: dict[str, Any] = dict(
  width=16, heads=8, kv_heads=8, head_dim=4, mlp=32, depth=1, context=512
)


def invariance(subject: base.Subject, amount: int) -> base.Figure:
  """A request's tokens do not depend on the batch, its order or the devices."""
  tried, meshes = 0, [1]
  prompts = base.ragged_prompts(amount, VOCAB, subject.seed, longest=8)
  # Coupled text and greedy rows under any rule equal plain decoding's.
  greedy = [i for i in range(amount) if not _sampled(i)]
  with jax.enable_x64(True):
    world = subject.transformers(VOCAB, **SIZES)
    run = functools.partial(_texts, subject, world, prompts)
    plain = run(decode.PLAIN, (), base.PLAIN_RULE)
    for i, (rule, name) in enumerate(subject.pairs()):
      drafter, other = subject.drafters[name](world, GAMMA)
      what = f'{rule.name} with {drafter.name}, gamma {drafter.gamma}'
      mine = functools.partial(run, drafter, other, rule)
      wanted = mine()
      same = range(amount) if rule.coupled else greedy
      some = lambda texts, same=same: [texts[i] for i in same]
      tried += base.same_texts(
        some(wanted), some(plain), f'{what}: not plain decoding'
      )
      # For the drafters under the first rule this is enough.
      if i == 0 or rule is not subject.lossless()[0]:
        tried += _arrangements(mine, prompts, wanted, what, whole=i == 0)
      # A user's model is not split: its axes are unknown.
      if i == 0 and subject.model is None:
        tried += _on_meshes(subject, prompts, wanted, meshes)
  devices = f'{", ".join(map(str, meshes))} device{"s" * (len(meshes) > 1)}'
  return base.Figure(
    base.none_of(tried, 'texts differ', amount, 'requests'),
    '0',
    f'batches 1, 3, 8, 32, order, padding, prefix, plain decoding; '
    f'{subject.lossless()[0].name} on {devices}',
  )


def _sampled(i: int) -> bool:
  """One request in three is greedy, to mix both kinds in a batch."""
  return i % 3 > 0


def _texts(
  subject,
  world,
  prompts,
  drafter,
  other,
  rule,
  numbers=None,
  *,
  rows: int = 8,
  pad: int = 0,
  new: int = NEW,
  place=lambda request: request,
) -> list[list[int]]:
  """Texts of requests, decoded in batches of `rows`; request i has seed i."""
  out = []
  numbers = list(range(len(prompts)) if numbers is None else numbers)
  for start in range(0, len(numbers), rows):
    some = numbers[start : start + rows]
    request = base.make_request(
      world,
      [prompts[i] for i in some],
      new,
      length=requests.bucket(8 + NEW + drafter.gamma) + pad,
      rows=rows,
      gamma=drafter.gamma,
      temperature=[0.9 * _sampled(i) for i in some],
      top_p=[0.9 if i % 2 else 1.0 for i in some],
      seed=[subject.seed + i for i in some],
      request=some,
    )
    output = base.run(world, drafter, rule, other, place(request))
    out += base.texts(output)[: len(some)]
  return out


def _arrangements(run, prompts, wanted, what: str, *, whole: bool) -> int:
  """Compares texts in another order and limit; whole: in other batches too."""
  order = np.random.default_rng(0).permutation(len(prompts))
  mixed = run(order.tolist(), rows=3)
  found = {'batch 3, another order': [mixed[i] for i in np.argsort(order)]}
  if whole:
    found['batch 1'] = run(rows=1)
    found['batch 32, padded'] = run(rows=32, pad=32)
  tried = sum(
    base.same_texts(got, wanted, f'{what}, {how}') for how, got in found.items()
  )
  cut = [x[: len(p) + 5] for x, p in zip(wanted, prompts, strict=True)]
  return tried + base.same_texts(run(new=5), cut, f'{what}, max_new_tokens 5')


def _on_meshes(subject, prompts, wanted, meshes: list[int]) -> int:
  """Compares the texts on 2, 4 and 8 devices; appends the sizes to meshes."""
  rule = subject.lossless()[0]
  recipe = next(iter(subject.drafters.values()))
  config = model_config.sized('tiny', **SIZES, vocab=VOCAB, dtype='float64')
  weights, tried = base.transformers(VOCAB, **SIZES).weights, 0
  # A user's part on the largest mesh only: every mesh compiles again.
  shapes = ((4, 2),) if subject.brought else ((2, 1), (1, 4), (4, 2))
  for data, model in shapes:
    if data * model > len(jax.devices()):
      continue
    layout = sharding.lay_out(sharding.make_mesh(data, model), config)
    built = lm.make(config, constrain=layout.constrain)
    put = lambda params, layout=layout: lm.nest(
      {k: layout.put(k, v) for k, v in lm.flatten(params).items()}
    )
    placed = types.Weights(put(weights.target), put(weights.draft))
    world = base.World(built, built, placed, VOCAB)
    place = functools.partial(requests.place, layout=layout)
    drafter, other = recipe(world, GAMMA)
    got = _texts(subject, world, prompts, drafter, other, rule, place=place)
    what = f'{rule.name} on {data} x {model} devices'
    tried += base.same_texts(got, wanted, what)
    meshes.append(data * model)
  return tried


# --- accounting ---------------------------------------------------------------


def accounting(subject: base.Subject, amount: int) -> base.Figure:
  """All counters agree on the number of emitted tokens."""
  rows, vocab, gamma, done = 500, 5, 3, 0
  world = base.tables(vocab)
  each = -(-amount // len(subject.pairs()) // rows) * rows
  for rule, name in subject.pairs():
    drafter, other = subject.drafters[name](world, gamma)
    for start in range(0, each, rows):
      numbers = np.arange(rows) + start
      request = base.make_request(
        world,
        base.ragged_prompts(rows, vocab, subject.seed + start),
        1 + numbers % 17,
        length=32 + drafter.gamma,
        gamma=drafter.gamma,
        temperature=0.9,
        seed=subject.seed,
        request=numbers,
        stop_ids=[vocab - 1],
      )
      out = base.run(world, drafter, rule, other, request)
      _check_counts(out, request, f'{rule.name} with {drafter.name}')
      done += rows
  return base.Figure(
    base.none_of(done, 'requests miscounted', each, 'requests'),
    '0',
    f'gamma {gamma}, EOS and limits inside windows',
  )


def _check_counts(out: decode.Output, request: decode.Request, what: str):
  """Compares the counts of every request of a batch.

  Raises:
    base.Broken: counts of one request that do not add up.
  """
  info = out.info
  emitted_B = out.lengths_B - request.lengths_B
  origins = lambda *which: np.isin(info.origin_BL, which).sum(1)
  offsets = np.arange(info.hist_BN.shape[1])
  others_B = origins(types.RECOVERED, types.BONUS, types.PLAIN)
  drafted_B = origins(types.DRAFTED)
  equal = {
    'origins': (drafted_B + others_B, emitted_B),
    'windows': ((info.window_BL >= 0).sum(1), emitted_B),
    'accepted': (info.accepted_BK.sum(1), drafted_B),
    'histogram': ((info.hist_BN * offsets).sum(1), drafted_B),
    'target calls': (info.hist_BN.sum(1), info.calls_B),
    'ends': (_ends_well(out, request), True),
  }
  for name, (one_B, two_B) in equal.items():
    wrong_B = one_B != two_B
    if wrong_B.any():
      b = int(wrong_B.argmax())
      raise base.Broken(
        f'{what}: the {name} of request {b} do not add up: prompt of '
        f'{request.lengths_B[b]}, limit {request.limit_B[b]}, tokens '
        f'{out.tokens_BL[b, : out.lengths_B[b]].tolist()}'
      )
  total = metrics.summary(info).emitted_tokens
  if total != emitted_B.sum():
    raise base.Broken(f'{what}: metrics count {total} of {emitted_B.sum()}')


def _ends_well(out: decode.Output, request: decode.Request) -> np.ndarray:
  """Whether each text ends at its first stop id or, without one, its limit."""
  stop, good = int(request.stop_BX[0, 0]), []
  spans = zip(request.lengths_B, out.lengths_B, request.limit_B, strict=True)
  for row, (start, end, limit) in zip(out.tokens_BL, spans, strict=True):
    new = row[start:end].tolist()
    good.append(stop not in new[:-1] and (end == limit or new[-1:] == [stop]))
  return np.array(good)
