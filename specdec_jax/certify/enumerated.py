"""Promises about laws that are enumerated: no sampling error in them."""

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, sampling, types
from specdec_jax.certify import (
  base,
  enumerate_steps,
  enumerate_window,
  pairs,
  table_model,
)
from specdec_jax.drafters import scripted

# (gamma, vocab, share of the problems): each compiles once. Smallest first, so
# that the first failing case is a small one.
SHAPES = ((1, 2, 0.25), (1, 6, 0.25), (2, 4, 0.25), (3, 3, 0.2), (3, 6, 0.05))
BOUNDS = {False: 1e-6, True: 1e-12}  # float32, float64


def window_law(subject: base.Subject, amount: int) -> base.Figure:
  """The law of gamma + 1 tokens of a window, by every outcome of its tests."""
  worst = {False: 0.0, True: 0.0}
  names, skipped = [], []
  for rule in subject.lossless():
    if rule.coupled or enumerate_window.draws(rule):
      skipped.append(f'{rule.name} draws inside verify')
      continue
    try:
      for x64 in worst:
        with jax.enable_x64(x64):
          found = [law_of_shape(rule, subject.seed, amount, *x) for x in SHAPES]
          if amount > 5000:
            found.append(_law_of_a_real_vocabulary(rule, subject.seed))
        worst[x64] = max(worst[x64], *found)
      names.append(rule.name)
    except enumerate_window.NotEnumerable as why:
      skipped.append(f'{rule.name}: {why}')
  if not names:
    raise base.NotChecked('; '.join(skipped) + '; the counted laws cover it')
  return _off_by(worst, f'{", ".join(names)}: {amount} pairs (p, q)', skipped)


def _off_by(worst: dict[bool, float], size: str, skipped) -> base.Figure:
  if skipped:
    size += f'; not checked: {"; ".join(dict.fromkeys(skipped))}'
  return base.Figure(
    f'off by {worst[False]:.1e}, {worst[True]:.1e}',
    f'{BOUNDS[False]:.0e} in float32, {BOUNDS[True]:.0e} in float64',
    size,
  )


def law_of_shape(rule, seed, amount, gamma, vocab, share) -> float:
  """The largest error over all families, for three kinds of drafts."""
  each = max(1, round(amount * share / len(pairs.FAMILIES)))
  names = list(pairs.FAMILIES)
  parts = [
    pairs.problems(
      name, [seed, gamma, vocab, i], count=each, gamma=gamma, vocab=vocab
    )
    for i, name in enumerate(names)
  ]
  p, q = (np.concatenate(x) for x in zip(*parts, strict=True))
  rng = np.random.default_rng([seed, gamma, vocab])
  ragged = rng.integers(0, gamma + 1, len(p)).astype(np.int32)
  script = rng.integers(0, vocab, (len(p), gamma))
  kinds = {
    'sampled drafts': (q, np.full_like(ragged, gamma), None),
    'sampled drafts, fewer proposed': (q, ragged, None),
    'certain drafts (q None)': (None, ragged, script),
  }
  bound, worst = BOUNDS[base.wide()], 0.0
  for kind, (q_XKVV, count_X, script_XK) in kinds.items():
    batch = enumerate_window.windows(p, q_XKVV, count_X, script_XK)
    _check_support(rule, batch, kind)
    law = enumerate_window.window_law(rule, batch, p)
    off_X = (
      np.abs(law - enumerate_window.target_law(p)).reshape(len(p), -1).max(1)
    )
    if not off_X.max() <= bound:
      x = int(np.nanargmax(np.where(np.isnan(off_X), np.inf, off_X)))
      raise base.Broken(
        f'{rule.name}, {kind}, family {names[x // each]!r}: '
        + _case(
          p[x], q[x], law[x], enumerate_window.target_law(p[x : x + 1])[0]
        )
        + f'; off by {off_X[x]:.1e}, allowed {bound:.0e}'
      )
    worst = max(worst, float(off_X.max()))
  return worst


def _case(p_NVV, q_KVV, law, wanted) -> str:
  """One failing problem in words, by the first token where that shows it."""
  gamma, V = len(p_NVV) - 1, p_NVV.shape[-1]
  show = lambda x: np.array2string(np.asarray(x), precision=6, separator=', ')
  one = tuple(range(1, law.ndim))
  first, want = law.sum(one), wanted.sum(one)
  text = f'gamma {gamma}, V {V}; p of the first token {show(p_NVV[0, 0])}, '
  text += f'q {show(q_KVV[0, 0])}; '
  if np.abs(first - want).max() > 0.1 * np.abs(law - wanted).max():
    return text + f'emitted {show(first)} instead of {show(want)}'
  at = np.unravel_index(np.abs(law - wanted).argmax(), law.shape)
  words = ' '.join(map(str, at))
  return text + f'tokens {words}: {law[at]:.6g} instead of {wanted[at]:.6g}'


def _check_support(rule, batch: enumerate_window.Windows, kind: str) -> None:
  """At u = 0 no token may be accepted that the target excludes."""
  K = batch.draft.tokens_BK.shape[1]
  zeros = np.zeros(batch.draft.tokens_BK.shape, batch.p_BNV.dtype)
  accepted_B, _ = enumerate_window.run_rule(rule, batch, zeros)
  over_B = accepted_B > np.asarray(batch.draft.count_B)
  if over_B.any():
    raise base.Broken(
      f'{rule.name}, {kind}: it accepts {accepted_B[over_B][0]} of '
      f'{np.asarray(batch.draft.count_B)[over_B][0]} proposed tokens'
    )
  can_B = batch.chance_XR.reshape(-1) > 0
  tokens_BK = np.asarray(batch.draft.tokens_BK)
  p_BK = np.take_along_axis(
    np.asarray(batch.p_BNV)[:, :K], tokens_BK[..., None], -1
  )[..., 0]
  wrong_B = ((np.arange(K) < accepted_B[:, None]) & (p_BK == 0)).any(1) & can_B
  if wrong_B.any():
    b = int(wrong_B.argmax())
    raise base.Broken(
      f'{rule.name}, {kind}: at u = 0 it accepts {accepted_B[b]} of the drafts '
      f'{tokens_BK[b].tolist()}, whose p are {p_BK[b].tolist()}'
    )


def _law_of_a_real_vocabulary(rule, seed: int) -> float:
  """The first token's law at V = 50,257; the draft samples among 64 tokens."""
  V, worst = 50257, 0.0
  bound, dtype = BOUNDS[base.wide()], np.dtype(jnp.result_type(float))
  for i, name in enumerate(pairs.FAMILIES):
    rng = np.random.default_rng([seed, i])
    p_2V, q_2V = pairs.FAMILIES[name](rng, (2, V), dtype)
    kept = np.argsort(-q_2V[0], kind='stable')[:64].astype(np.int32)
    q_V = np.zeros(V, dtype)
    q_V[kept] = pairs.normal(q_2V[0, kept])
    law = enumerate_window.first_token_law(rule, p_2V.astype(dtype), q_V, kept)
    off = np.abs(law - pairs.normal(p_2V[0].astype(np.float64))).max()
    if not off <= bound:
      raise base.Broken(
        f'{rule.name}, V 50257, gamma 1, family {name!r}: the first token is '
        f'off by {off:.1e}, allowed {bound:.0e}'
      )
    worst = max(worst, float(off))
  return worst


def coupled_identity(subject: base.Subject, amount: int) -> base.Figure:
  """A coupled rule's tokens are those of plain sampling with the same noise."""
  names, each = [], -(-amount // (len(pairs.FAMILIES) * len(SHAPES)))
  tried = 0
  for rule in subject.lossless():
    if not rule.coupled:
      continue
    names.append(rule.name)
    with jax.enable_x64(True):
      for gamma, vocab, _ in SHAPES:
        for i, family in enumerate(pairs.FAMILIES):
          p, q = pairs.problems(
            family,
            [subject.seed, gamma, vocab, i],
            count=each,
            gamma=gamma,
            vocab=vocab,
          )
          _compare_coupled(rule, p, q, [subject.seed, gamma, i])
          tried += each
  if not names:
    raise base.NotChecked('no coupled rule; the counted laws cover the others')
  return base.Figure(
    base.none_of(tried, 'windows differ'), '0', f'{", ".join(names)}, float64'
  )


def _compare_coupled(rule, p_XNVV, q_XKVV, seed) -> None:
  X, N, V, _ = p_XNVV.shape
  K = N - 1
  rng = np.random.default_rng(seed)
  arrive_XNV = rng.exponential(size=(X, N, V))
  race = lambda w, k: np.argmax(w / arrive_XNV[np.arange(X), k], -1)
  # Drafts by the same noise, and one token in four replaced at random.
  last_X, columns = np.zeros(X, int), []
  for k in range(K):
    last_X = race(q_XKVV[np.arange(X), k, last_X], np.full(X, k))
    other_X = rng.integers(0, V, X)
    last_X = np.where(rng.random(X) < 0.25, other_X, last_X)
    columns.append(last_X)
  tokens_XK = np.stack(columns, 1).astype(np.int32)
  before_XN = np.pad(tokens_XK, ((0, 0), (1, 0)))
  rows = lambda x, n: x[np.arange(X)[:, None], np.arange(n), before_XN[:, :n]]
  p_XNV = rows(p_XNVV, N)
  draft = types.Draft(
    tokens_XK, rows(q_XKVV, K), rng.integers(0, N, X).astype(np.int32)
  )
  accepted_X, next_X = _run_coupled(
    rule.verify, draft, p_XNV, arrive_XNV, rng.random((X, K))
  )
  plain_XN = np.stack([race(p_XNV[:, n], np.full(X, n)) for n in range(N)], 1)
  said_XN = np.pad(tokens_XK, ((0, 0), (0, 1)))
  said_XN[np.arange(X), accepted_X] = next_X
  emitted_XN = np.arange(N) <= accepted_X[:, None]
  wrong_X = (emitted_XN & (said_XN != plain_XN)).any(1)
  wrong_X |= accepted_X > draft.count_B
  if wrong_X.any():
    x = int(wrong_X.argmax())
    n = int(accepted_X[x]) + 1
    raise base.Broken(
      f'{rule.name}: gamma {K}, V {V}, drafts {tokens_XK[x].tolist()} of which '
      f'{draft.count_B[x]} proposed: emits {said_XN[x, :n].tolist()}, plain '
      f'sampling with the same noise {plain_XN[x, :n].tolist()}'
    )


def _run_coupled(verify, draft, p_BNV, arrive_BNV, accept_BK):
  """(accepted, next token) with injected exponentials, as decode draws."""

  def next_token(offset_B, weights_BV):
    arrive_BV = jnp.take_along_axis(
      jnp.asarray(arrive_BNV), offset_B[:, None, None], 1
    )[:, 0]
    return sampling.largest(weights_BV / arrive_BV)[1][:, 0]

  noise = types.Noise(
    jnp.asarray(accept_BK), enumerate_window.draws_nothing, next_token
  )
  draft = jax.tree.map(jnp.asarray, draft)
  verdict = verify(noise, draft, jnp.asarray(p_BNV))
  take = verdict.accepted_B[:, None, None]
  p_BV = jnp.take_along_axis(jnp.asarray(p_BNV), take, 1)[:, 0]
  empty_B1 = ~(jnp.sum(verdict.weights_BV, -1, keepdims=True) > 0)
  weights_BV = jnp.where(empty_B1, p_BV, verdict.weights_BV)
  return jax.device_get(
    (verdict.accepted_B, next_token(verdict.accepted_B, weights_BV))
  )


# By vocabulary.
PROMPT = {2: [1, 0, 1], 3: [1, 2, 0], 4: [1, 2, 0]}


def enumerated_windows(subject: base.Subject, amount: int) -> base.Figure:
  """Three windows of production steps with every outcome of every draw."""
  gamma, windows, worst, done = 2, 3, {False: 0.0, True: 0.0}, []
  why = {
    rule: enumerate_window.not_enumerable(rule) for rule in subject.lossless()
  }
  skipped = [f'{rule.name}: {reason}' for rule, reason in why.items() if reason]
  for i, rule in enumerate(x for x, reason in why.items() if not reason):
    used = subject.one_drafter() if i else subject
    for x64, settings in (
      (True, dict(temperature=1.0)),
      (False, dict(temperature=0.7, top_k=2)),
    ):
      with jax.enable_x64(x64):
        world = base.tables(amount)
        for name, (drafter, other) in _walkers(used, world, gamma).items():
          if drafter.gamma > gamma:
            continue  # too many outcomes
          off, case = walk(world, drafter, other, rule, settings, windows)
          if not off <= BOUNDS[x64]:
            raise base.Broken(
              f'{rule.name} with {name}: the joint law of three windows, '
              f'gamma {drafter.gamma}, V {amount}, {settings}: after '
              f'{PROMPT[amount]} {case}; off by {off:.1e}, allowed '
              f'{BOUNDS[x64]:.0e}'
            )
          worst[x64] = max(worst[x64], off)
          done.append(f'{rule.name} {name}')
  if not done:
    reasons = '; '.join(skipped) or 'gamma > 2'
    raise base.NotChecked(f'{reasons}; the counted laws cover it')
  names = ', '.join(sorted(set(done)))
  return _off_by(worst, f'{len(done)} walks, V {amount}: {names}', skipped)


def _walkers(subject: base.Subject, world: base.World, gamma: int):
  out = {}
  for name, recipe in subject.drafters.items():
    drafter, other = recipe(world, gamma)
    out[name] = (drafter, other)
    out[f'ragged {name}'] = (base.ragged(drafter), other)
  script = np.random.default_rng(1).integers(0, world.vocab, (1, 48))
  script = np.repeat(script.astype(np.int32), ROWS, 0)
  played = scripted.make(gamma=gamma)
  out['scripted'] = (played, (script, script % (gamma + 1)))
  # Each in one width: they differ in nothing but their rounding.
  return dict(list(out.items())[0 if base.wide() else 1 :: 2])


ROWS = 8192


def walk(world, drafter, other, rule, settings, windows: int):
  """(largest error of the joint law of `windows` windows of production steps,
  the fewest first tokens that show one of that size, in words)."""
  gamma, prompt = drafter.gamma, PROMPT[world.vocab]
  weights = types.Weights(world.weights.target, other)
  request = base.make_request(world, [prompt] * ROWS, 40, length=48, **settings)
  state, info = decode.programs(world.target, drafter, rule).start(
    weights, request
  )
  tokens_RL, lengths_R, chance_R = enumerate_steps.walk(
    enumerate_steps.step_with(world.target, drafter, rule),
    weights,
    request,
    state,
    info,
    enumerate_steps.outcomes(world.vocab, gamma),
    windows=windows,
  )
  law = table_model.joint_law(
    table_model.warped(world.weights.target, **settings),
    prompt,
    windows * (gamma + 1),
  )
  got = enumerate_steps.completed(
    tokens_RL, lengths_R, chance_R, law, len(prompt)
  )
  all_in_all = float(chance_R.sum())
  off = max(float(np.abs(got - law).max()), abs(all_in_all - 1))
  return off, _first_tokens(got, law, off) or (
    f'the outcomes have a probability of {all_in_all:.6g} together'
  )


def _first_tokens(got, law, off: float) -> str:
  """The shortest text whose probability is off by so much, or ''."""
  for m in range(1, law.ndim + 1):
    rest = tuple(range(m, law.ndim))
    one, two = got.sum(rest), law.sum(rest)
    error = np.abs(one - two)
    if error.max() >= off:
      at = np.unravel_index(error.argmax(), error.shape)
      tokens = ' '.join(map(str, at))
      return f'tokens {tokens} come {one[at]:.6g} instead of {two[at]:.6g}'
  return ''
