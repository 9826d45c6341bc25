"""Promises about laws that are counted, with the production keys."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specdec_jax import sampling, types, windows
from specdec_jax.eval import certify, pairs, table_model
from specdec_jax.eval.promises import base, laws

# Chance of any false alarm in one promise.
ALPHA = 1e-9
# Longest text whose joint law is enumerated.
LONGEST = 9


def joint_law_of_tables(subject: base.Subject, amount: int) -> base.Figure:
  """Joint law of three windows and more on table models, by production keys."""
  tests: dict[str, float] = {}
  cells = list(itertools.product((2, 3), (3, 4)))
  for i, rule in enumerate(subject.lossless()):
    for j, (label, recipe) in enumerate(subject.drafters.items()):
      # The first drafter everywhere; the others once.
      for gamma, vocab in cells if j == 0 else cells[:1] if i == 0 else ():
        world = base.tables(vocab)
        drafter, other = recipe(world, gamma)
        warped = laws.warped(world.weights.target, **_WARM)
        # Longer than two whole windows.
        new = min(2 * drafter.gamma + 3, LONGEST)
        law = table_model.joint_law(warped, laws.PROMPT, new)
        counts = np.zeros(law.size, np.int64)
        for request in _requests(subject, world, drafter.gamma, new, amount):
          out = base.run(world, drafter, rule, other, request)
          text = out.tokens_BL[:, len(laws.PROMPT) :][:, :new]
          flat = np.ravel_multi_index(text.T, law.shape)
          counts += np.bincount(flat, minlength=law.size)
        name = f'{rule.name}, {label}, gamma {drafter.gamma}, V {vocab}'
        tests |= _prefix_tests(name, counts.reshape(law.shape), law)
  return judge(tests, f'{power(amount)} texts in each cell')


_WARM: dict[str, Any] = dict(temperature=0.9, top_p=0.95)


def _requests(subject, world, gamma: int, new: int, amount: int):
  rows = min(amount, 2**14)
  for at in range(0, amount, rows):
    yield base.make_request(
      world,
      [laws.PROMPT] * rows,
      new,
      length=len(laws.PROMPT) + new + gamma,
      gamma=gamma,
      seed=subject.seed,
      request=np.arange(rows) + at,
      **_WARM,
    )


def _prefix_tests(name: str, counts, law) -> dict[str, float]:
  """p-values of the first m tokens for every m, and of the last few alone."""
  n, tests = law.ndim, {}
  for m in range(1, n + 1):
    rest = tuple(range(m, n))
    tests[f'{name}: first {m} tokens'] = certify.chi_square(
      counts.sum(rest), law.sum(rest)
    )
  before = tuple(range(n - 3))
  tests[f'{name}: last 3 tokens'] = certify.chi_square(
    counts.sum(before), law.sum(before)
  )
  return tests


def judge(tests: dict[str, float], size: str, extra: str = '') -> base.Figure:
  """The least p-value against ALPHA over the number of tests."""
  name = min(tests, key=tests.__getitem__)
  bound = ALPHA / len(tests)
  if not tests[name] > bound:
    raise base.Broken(
      f'{name}: the counts do not follow the law, p = {tests[name]:.1e} in '
      f'{len(tests)} tests, allowed {bound:.0e}; {size}'
    )
  return base.Figure(
    f'p >= {tests[name]:.2g} in {len(tests)} tests{extra}',
    f'p > {bound:.0e} each',
    size,
  )


def power(amount: int) -> str:
  whole = math.log2(amount)
  return f'2^{int(whole)}' if whole == int(whole) else f'{amount:,}'


EOS = 3


def joint_law_of_transformer(subject: base.Subject, amount: int) -> base.Figure:
  """First tokens of a transformer, ragged batches of 64, EOS inside windows."""
  world = base.transformers(4, width=8, head_dim=4, mlp=16)
  # Four prompts, sixteen rows each, mixed: lengths 1 to 8.
  kinds = [[2], [0, 1, 2], [1, 1, 0, 2, 0], [2, 0, 0, 1, 2, 1, 0, 1]]
  prompts = [kinds[b % 4] for b in range(64)]
  tests: dict[str, float] = {}
  label, recipe = next(iter(subject.drafters.items()))
  cells = list(itertools.product(subject.lossless(), (2, 3)))
  each = amount // len(cells)
  for rule, gamma in cells:
    drafter, other = recipe(world, gamma)
    new = min(2 * drafter.gamma + 3, LONGEST)
    counts = [np.zeros((4,) * new, np.int64) for _ in kinds]
    for at in range(0, each, 64):
      request = base.make_request(
        world,
        prompts,
        new,
        length=24,
        gamma=drafter.gamma,
        seed=subject.seed,
        request=np.arange(64) + at,
        stop_ids=[EOS],
      )
      request = request._replace(sampling=_PLAIN_WARM)
      _count(base.run(world, drafter, rule, other, request), kinds, counts)
    for kind, seen in zip(kinds, counts, strict=True):
      name = f'{rule.name}, {label}, gamma {gamma}, prompt of {len(kind)}'
      tests |= _prefix_tests(name, seen, _autoregressive(world, kind, new))
  return judge(
    tests, f'{power(amount)} texts in {len(cells)} cells, batches of 64'
  )


_PLAIN_WARM = sampling.settings(64, 1.0)


def _count(output, kinds, counts) -> None:
  """Adds a batch to the counts; what follows an EOS is EOS."""
  for j, kind in enumerate(kinds):
    start, new = len(kind), counts[j].ndim
    tokens = output.tokens_BL[j :: len(kinds), start : start + new].copy()
    length = output.lengths_B[j :: len(kinds)] - start
    ended = np.arange(new) >= length[:, None]
    if (ended[:, 0]).any() or (tokens[~ended[:, -1]][:, :-1] == EOS).any():
      raise base.Broken('a text is empty, or goes on after its end')
    tokens[ended] = EOS
    flat = np.ravel_multi_index(tokens.T, counts[j].shape)
    np.add.at(counts[j].reshape(-1), flat, 1)


@functools.cache
def _reader(model: types.Model):
  def read(params, tokens_BL, index_B):
    B, L = tokens_BL.shape
    hidden_BLD, _, _ = windows.read(
      model,
      params,
      tokens_BL,
      jnp.zeros(B, jnp.int32),
      model.init_cache(B, L),
      slots=L,
    )
    hidden_BD = jnp.take_along_axis(hidden_BLD, index_B[:, None, None], 1)[:, 0]
    return jax.nn.softmax(model.head(params, hidden_BD), -1)

  return jax.jit(read)


def _autoregressive(world: base.World, prompt, new: int) -> np.ndarray:
  """Exact law of `new` tokens, one pass over the prompt and every prefix."""
  law, L, chunk = np.zeros((4,) * new), len(prompt) + new, 4096
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
      for v in range(4):
        if v == EOS or m == new - 1:
          law[(*prefix, v) + (EOS,) * (new - m - 1)] += mass * p_V[v]
        else:
          longer[(*prefix, v)] = mass * p_V[v]
    reach = longer
  return law


# --- one window, many times ---------------------------------------------------


def kernel_law(subject: base.Subject, amount: int) -> base.Figure:
  """Two windows in a row on peaked laws: every draw, and their independence."""
  gamma, V = 4, 16
  rng = np.random.default_rng(subject.seed)
  z = 2 * rng.normal(size=(gamma + 1, V, V))
  p_NVV = pairs.normal(np.exp(z))
  q_KVV = pairs.normal(np.exp(z + rng.normal(size=z.shape)))[:gamma]
  size = min(amount // 2, 2**16)
  tests: dict[str, float] = {}
  for rule in subject.lossless():
    run = functools.partial(
      _two_windows,
      rule,
      p_NVV.astype(np.float32),
      q_KVV.astype(np.float32),
      np.uint32(subject.seed),
    )
    total = None
    for i in range(amount // (2 * size)):
      one = jax.device_get(run(np.arange(size, dtype=np.uint32) + i * size))
      wide = jax.tree.map(lambda x: x.astype(np.float64), one)
      total = wide if total is None else jax.tree.map(np.add, total, wide)
    tests |= _kernel_tests(rule.name, total, p_NVV, rule.coupled)
  least = [
    _detectable(amount // 2, cells, ALPHA / len(tests)) for cells in (16, 256)
  ]
  return judge(
    tests,
    f'{power(amount)} windows, V {V}, gamma {gamma}',
    '; detects TV {:.1e} in single tokens, {:.1e} in pairs'.format(*least),
  )


@functools.partial(jax.jit, static_argnums=0)
def _two_windows(rule, p_NVV, q_KVV, seed, request_B):
  """Counts of two consecutive windows of each request, from the same state."""
  N, V, _ = p_NVV.shape
  B = request_B.shape[0]
  seed_B = jnp.full(B, seed)
  warm = sampling.settings(B, 1.0)
  pairs_of = lambda x, y: jnp.zeros((V, V), jnp.int32).at[x, y].add(1)
  lengths_B = jnp.full(B, 9, jnp.int32)
  out, firsts, accepted = [], [], []
  for _ in range(2):
    noise = sampling.noise(
      seed_B, request_B, lengths_B, warm, gamma=N - 1, coupled=rule.coupled
    )
    last_B, tokens, rows = jnp.zeros(B, jnp.int32), [], []
    for k in range(N - 1):
      rows.append(q_KVV[k, last_B])
      last_B = noise.draft(k, rows[-1])
      tokens.append(last_B)
    tokens_BK = jnp.stack(tokens, 1)
    before_BN = jnp.pad(tokens_BK, ((0, 0), (1, 0)))
    draft = types.Draft(
      tokens_BK, jnp.stack(rows, 1), jnp.full(B, N - 1, jnp.int32)
    )
    verdict = rule.verify(noise, draft, p_NVV[jnp.arange(N), before_BN])
    a_B = verdict.accepted_B
    next_B = noise.next(a_B, verdict.weights_BV)
    # The rest of the window by the target itself, with noise of its own.
    rest = sampling.noise(
      seed_B + 1, request_B, lengths_B, warm, gamma=0, coupled=False
    )
    said, last_B = [], jnp.zeros(B, jnp.int32)
    for k in range(N):
      drawn_B = rest.next(jnp.full(B, k, jnp.int32), p_NVV[k, last_B])
      mine_B = jnp.where(k == a_B, next_B, drawn_B)
      last_B = jnp.where(k < a_B, before_BN[:, min(k + 1, N - 1)], mine_B)
      said.append(last_B)
    prev_B = jnp.take_along_axis(before_BN, a_B[:, None], 1)[:, 0]
    weights_BV = verdict.weights_BV
    weights_BV /= jnp.sum(weights_BV, -1, keepdims=True)
    zeros = lambda t: jnp.zeros((N, V, V), t)
    out.append(
      dict(
        pairs=jnp.stack([pairs_of(x, y) for x, y in itertools.pairwise(said)]),
        last=zeros(jnp.int32).at[a_B, prev_B, next_B].add(1),
        law=zeros(jnp.float32).at[a_B, prev_B].add(weights_BV),
      )
    )
    firsts.append(said[0])
    accepted.append(a_B)
    lengths_B += a_B + 1
  summed = jax.tree.map(jnp.add, *out)
  return summed | dict(
    rows=pairs_of(firsts[0][:-1:2], firsts[0][1::2]),
    windows=pairs_of(*firsts),
    lengths=jnp.zeros((N, N), jnp.int32).at[accepted[0], accepted[1]].add(1),
  )


def _kernel_tests(name: str, seen, p_NVV, coupled: bool) -> dict[str, float]:
  N = len(p_NVV)
  law_V, tests = p_NVV[0, 0], {}
  both = np.outer(law_V, law_V)
  tests[f'{name}: token 1'] = certify.chi_square(seen['pairs'][0].sum(1), law_V)
  for k in range(N - 1):
    pair = law_V[:, None] * p_NVV[k + 1]
    law_V = pair.sum(0)
    tests[f'{name}: tokens {k + 1} and {k + 2}'] = certify.chi_square(
      seen['pairs'][k], pair
    )
    tests[f'{name}: token {k + 2}'] = certify.chi_square(
      seen['pairs'][k].sum(0), law_V
    )
  # Under a coupled rule these draws are not independent of the accept tests.
  for a in range(0 if coupled else N):
    kind = 'bonus' if a == N - 1 else f'recovered after {a} drafts'
    law = seen['law'][a]
    tests[f'{name}: {kind}'] = certify.chi_square(
      seen['last'][a], law / law.sum()
    )
  tests[f'{name}: rows are independent'] = certify.chi_square(
    seen['rows'], both
  )
  tests[f'{name}: windows are independent'] = certify.chi_square(
    seen['windows'], both
  )
  _, chance, *_ = stats.chi2_contingency(seen['lengths'] + 1e-9)
  tests[f'{name}: accepted lengths are independent'] = np.asarray(chance).item()
  return tests


def _detectable(n: int, cells: int, alpha: float, power: float = 0.999):
  """Least total variation that n draws over `cells` would show: worst case."""
  limit = stats.chi2.isf(alpha, cells - 1)
  low, high = 1.0, 1e4
  for _ in range(60):
    middle = (low + high) / 2
    seen = stats.ncx2.sf(limit, cells - 1, middle) >= power
    low, high = (low, middle) if seen else (middle, high)
  return math.sqrt(high / (4 * n))
