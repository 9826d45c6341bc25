"""Promises about requests: what their tokens depend on, and how they count."""

import functools
import itertools
from typing import Any

import jax
import numpy as np

from specdec_jax import decode, requests, sharding, types
from specdec_jax.bench import metrics
from specdec_jax.certify import base, enumerate_window, statistics, table_model
from specdec_jax.models import config as model_config
from specdec_jax.models import lm

NEW, GAMMA = 12, 2
# Sizes that eight devices divide.
SIZES: dict[str, Any] = dict(
  width=16, heads=8, kv_heads=8, head_dim=4, mlp=32, depth=1, context=512
)
VOCAB = 16


def invariance(subject: base.Subject, amount: int) -> base.Figure:
  """A request's tokens do not depend on who else runs, or where."""
  prompts = base.ragged_prompts(amount, VOCAB, subject.seed, longest=8)
  tried = 0
  with jax.enable_x64(True):
    world = subject.transformers(VOCAB, **SIZES)
    texts = functools.partial(_texts, subject, world)
    rules = subject.lossless()
    plain = texts(decode.PLAIN, (), rules[0], prompts, range(amount), rows=8)
    for i, rule in enumerate(rules):
      wanted, more = _one_rule(
        subject, texts, world, rule, prompts, whole=i == 0
      )
      tried += more
      # Greedy text with every drafter has a promise of its own.
      used = subject if rule.coupled else subject.one_drafter()
      for name, recipe in used.drafters.items():
        # Coupled text, and greedy rows under any rule, are plain decoding's.
        gamma = 5 if rule.coupled else GAMMA
        got = texts(*recipe(world, gamma), rule, prompts, range(amount), rows=8)
        same = [rule.coupled or not _sampled(i) for i in range(amount)]
        only = lambda texts, same=same: itertools.compress(texts, same)
        what = f'{rule.name}, {name}, gamma {gamma}: plain decoding'
        tried += _equal(only(got), only(plain), what, amount)
      if i == 0:
        meshes, more = _on_meshes(subject, prompts, wanted)
        tried += more
  return base.Figure(
    base.none_of(tried, 'texts differ'),
    '0',
    f'{amount} seeds: batches 1, 3, 8, 32, order, padding, prefix, plain '
    f'decoding; {rules[0].name} on {", ".join(meshes)} devices',
  )


def _sampled(i: int) -> bool:
  """One request in three is greedy: a batch may mix them."""
  return i % 3 > 0


def _one_rule(subject, texts, world, rule, prompts, *, whole: bool):
  """(the texts, which no arrangement changes, how many were compared).

  whole: try every arrangement.
  """
  name, recipe = next(iter(subject.drafters.items()))
  seeds = range(len(prompts))
  run = functools.partial(texts, *recipe(world, GAMMA), rule, prompts)
  wanted = run(seeds, rows=8)
  check = lambda got, wanted, what: _equal(
    got, wanted, f'{rule.name}, {name}: {what}', len(prompts)
  )
  tried = 0
  for what, got in _arrangements(run, len(prompts), whole):
    tried += check(got, wanted, what)
  cut = [x[: len(p) + 5] for x, p in zip(wanted, prompts, strict=True)]
  tried += check(run(seeds, rows=8, new=5), cut, 'max_new_tokens 5')
  return wanted, tried


def _texts(
  subject,
  world,
  drafter,
  other,
  rule,
  prompts,
  numbers,
  *,
  rows: int,
  pad: int = 0,
  new: int = NEW,
  place=lambda request: request,
) -> list[list[int]]:
  """Texts of requests in batches of `rows`; number i has seed and key i."""
  out = []
  numbers = list(numbers)
  for at in range(0, len(numbers), rows):
    some = numbers[at : at + rows]
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


def _arrangements(run, n: int, whole: bool):
  """(what was changed, the texts) of n requests."""
  yield 'batch 3', run(range(n), rows=3)
  order = np.random.default_rng(0).permutation(n)
  mixed = run(order.tolist(), rows=8)
  yield 'another order', [mixed[i] for i in np.argsort(order)]
  if whole:
    yield 'batch 1', run(range(n), rows=1)
    yield 'batch 32', run(range(n), rows=32)
    yield 'padding', run(range(n), rows=8, pad=32)


def _on_meshes(subject: base.Subject, prompts, wanted) -> tuple[list[str], int]:
  """The same on 1, 2, 4 and 8 devices; those that there are, and the texts.

  A user's model is not split: it has no axes that we know.
  """
  recipe = next(iter(subject.drafters.values()))
  rule = subject.lossless()[0]
  config = model_config.sized('tiny', **SIZES, vocab=VOCAB, dtype='float64')
  plain = base.transformers(VOCAB, **SIZES).weights
  done, tried = ['1'], 0
  if subject.model is not None:
    return done, tried
  for data, model in ((2, 1), (1, 4), (4, 2)):
    if data * model > len(jax.devices()):
      continue
    layout = sharding.lay_out(sharding.make_mesh(data, model), config)
    built = lm.make(config, constrain=layout.constrain)
    weights = types.Weights(
      *(
        lm.nest({k: layout.put(k, v) for k, v in lm.flatten(x).items()})
        for x in (plain.target, plain.draft)
      )
    )
    world = base.World(built, built, weights, VOCAB)
    drafter, other = recipe(world, GAMMA)
    got = _texts(
      subject,
      world,
      drafter,
      other,
      rule,
      prompts,
      range(len(prompts)),
      rows=8,
      place=functools.partial(requests.place, layout=layout),
    )
    what = f'{rule.name}: {data} x {model} devices'
    tried += _equal(got, wanted, what, len(prompts))
    done.append(str(data * model))
  return done, tried


def _equal(got, wanted, what: str, seeds: int) -> int:
  """How many were compared."""
  compared = list(zip(got, wanted, strict=True))
  for i, (one, two) in enumerate(compared):
    if one != two:
      raise base.Broken(
        f'{what}: request {i} of {seeds} says {one}, alone it says {two}'
      )
  return len(compared)


# --- accounting ---------------------------------------------------------------


def accounting(subject: base.Subject, amount: int) -> base.Figure:
  """Emitted is counted, and the accepted lengths follow their law."""
  rows, vocab, gamma, done = 500, 5, 3, 0
  world = base.tables(vocab)
  arms = subject.pairs()
  each = -(-amount // len(arms))
  for rule, name in arms:
    drafter, other = subject.drafters[name](world, gamma)
    for at in range(0, each, rows):
      numbers = np.arange(rows) + at
      request = base.make_request(
        world,
        base.ragged_prompts(rows, vocab, subject.seed + at),
        1 + numbers % 17,
        length=32 + drafter.gamma,
        gamma=drafter.gamma,
        temperature=0.9,
        seed=subject.seed,
        request=numbers,
        stop_ids=[vocab - 1],
      )
      _check_counts(base.run(world, drafter, rule, other, request), request)
      done += rows
  tests: dict[str, statistics.Test] = {}
  # A lossless rule or drafter of one's own may accept less.
  if subject.judges_acceptance():
    for rule in subject.lossless():
      tests |= _accepted_lengths(subject, rule, 20 * amount)
  figure = statistics.judge(tests, f'{done:,} requests')
  return base.Figure(
    f'{base.none_of(done, "requests")} miscounted; lengths {figure.reached}',
    f'0; {figure.bound}',
    f'gamma {gamma}, EOS and limits inside windows',
  )


def _check_counts(out: decode.Output, request: decode.Request) -> None:
  """Every way of counting a request's tokens gives the same number."""
  info, B = out.info, len(out.lengths_B)
  emitted_B = out.lengths_B - request.lengths_B
  origins = lambda *which: np.isin(info.origin_BL, which).sum(1)
  offsets = np.arange(info.hist_BN.shape[1])
  facts = {
    'origins': origins(
      types.DRAFTED, types.RECOVERED, types.BONUS, types.PLAIN
    ),
    'windows': (info.window_BL >= 0).sum(1),
    'accepted + others': info.accepted_BK.sum(1)
    + origins(types.RECOVERED, types.BONUS, types.PLAIN),
  }
  for name, counted_B in facts.items():
    _none(counted_B != emitted_B, name, request, out)
  drafted_B = (info.hist_BN * offsets).sum(1)
  _none(drafted_B != origins(types.DRAFTED), 'histogram', request, out)
  _none(info.hist_BN.sum(1) != info.calls_B, 'calls', request, out)
  stop = int(request.stop_BX[0, 0])
  for b in range(B):
    new = out.tokens_BL[b, request.lengths_B[b] : out.lengths_B[b]].tolist()
    at_limit = out.lengths_B[b] == request.limit_B[b]
    good = stop not in new[:-1] and (at_limit or new[-1:] == [stop])
    _none(np.arange(B) == (-1 if good else b), 'the end', request, out)
  total = metrics.summary(info)
  if total.emitted_tokens != emitted_B.sum():
    raise base.Broken(f'metrics count {total}, emitted {emitted_B.sum()}')


def _none(wrong_B, what: str, request, out) -> None:
  if wrong_B.any():
    b = int(wrong_B.argmax())
    raise base.Broken(
      f'{what}: the counts of request {b} do not add up: prompt of '
      f'{request.lengths_B[b]}, limit {request.limit_B[b]}, tokens '
      f'{out.tokens_BL[b, : out.lengths_B[b]].tolist()}'
    )


def _accepted_lengths(subject, rule, amount: int) -> dict[str, statistics.Test]:
  """Drafts accepted in first windows, of laws that do not see the text."""
  gamma, vocab, rows = 3, 5, 2**13
  rng = np.random.default_rng(subject.seed)
  rows_2V = rng.normal(size=(2, vocab))
  spread = lambda x: np.broadcast_to(x, (1, vocab, vocab)).astype(np.float32)
  model = table_model.make(vocab)
  weights = types.Weights(*map(spread, rows_2V))
  world = base.World(model, model, weights, vocab)
  p_V, q_V = (np.exp(x) / np.exp(x).sum() for x in rows_2V)
  tests = {}
  for name, recipe in subject.drafters.items():
    drafter, other = recipe(world, gamma)
    if other is not weights.draft:
      continue  # only of these q is known
    seen = np.zeros(gamma + 1)
    for at in range(0, amount, rows):
      request = base.make_request(
        world,
        [[1]] * rows,
        gamma + 1,
        length=8,
        gamma=gamma,
        temperature=1.0,
        seed=subject.seed,
        request=np.arange(rows) + at,
      )
      out = base.run(world, drafter, rule, other, request)
      first_B = (out.info.window_BL == 0).sum(1) - 1
      seen += np.bincount(first_B, minlength=gamma + 1)
    with jax.enable_x64(True):
      law = enumerate_window.length_law(rule, p_V, q_V, gamma)
    tests[f'{rule.name}, {name}: accepted lengths'] = statistics.Test(seen, law)
  return tests
