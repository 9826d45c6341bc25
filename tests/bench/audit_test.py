"""Planted ties are ties, planted bugs are bugs, in greedy and in sampling."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, requests, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import audit, records
from specdec_jax.models import weights
from specdec_jax.verify import coupled
from tests import fakes

V, LENGTH, GAMMA = 16, 32, 3
PROMPT = (3, 1, 4)
LARGEST = 1000.0


def hides(params, tokens_BT, slots_BT, positions_BT, mask_BTS, *rest, **more):
  """apply of a table model whose windows have a fault: at params['offset'] a
  token does not see the one before it. One program serves all offsets."""
  T = tokens_BT.shape[1]
  if T == GAMMA + 1:
    slot_11S = jnp.arange(mask_BTS.shape[-1])[None, None]
    before_BTS = slot_11S == positions_BT[..., None] - 1
    here_1T1 = (jnp.arange(T) == params['offset'])[None, :, None]
    mask_BTS &= ~(before_BTS & here_1T1)
  args = tokens_BT, slots_BT, positions_BT, mask_BTS, *rest
  return fakes.table_model(V).apply(params['table'], *args, **more)


def adds(params, hidden):
  """head of a table model whose windows have the noise params['noise']."""
  logits = fakes.table_model(V).head(params['table'], hidden)
  shift = params['noise'] * (hidden.shape[-2] > 1)
  sign_V = jnp.where(jnp.arange(V) % 2, 1, -1).at[-1].set(0)
  return logits + shift * sign_V.reshape((1,) * (logits.ndim - 1) + (V,))


FAULTY = fakes.table_model(V)._replace(apply=hides, head=adds)


def faulty(table, noise=1e-4, offset=-1):
  """Parameters of FAULTY; at offset -1 every token sees the one before it."""
  noise = jnp.asarray(noise, table.dtype)
  return {'table': table, 'offset': np.int32(offset), 'noise': noise}


def run(model, params, *, request=0, **sampled):
  """Plain decoding of PROMPT, 8 tokens."""
  item, how = requests.Item(PROMPT, request), sampling_lib.Sampling(**sampled)
  request = requests.make([item._replace(new=8, sampling=how)], length=LENGTH)
  programs = decode.programs(model, decode.PLAIN, coupled.RULE)
  out = programs.generate(types.Weights(params), request)
  return np.asarray(out.tokens_BL)[0, 3 : int(out.lengths_B[0])].tolist()


def case(*texts):
  """The answers of two methods to PROMPT."""
  return [records.Answer(requests.Item(PROMPT, 0), x) for x in texts]


def near_tie(params, prefix, gap):
  """(second after a prefix, a table where it is `gap` below the best)."""
  at = fakes.prefix_hash(prefix) % 5, prefix[-1]
  second = int(jnp.argsort(-params[at])[1])
  return second, params.at[(*at, second)].set(params[at].max() - gap)


def find(model, params, pair, **changes):
  """audit.audit of a greedy run."""
  options = dict(gamma=GAMMA, chunk=8, length=LENGTH) | changes
  passes = audit.Passes(sampling_lib.Sampling(0.0, 0, 1.0, 0), **options)
  return audit.audit(model, params, *pair, passes)


@pytest.fixture(name='params')
def _params():
  """Logits of some 3; that of an id that nothing chooses makes one rounding
  6e-5, so that noise of 1e-4 is no bug and float32 can hold it."""
  table = 3 * jax.random.normal(jax.random.key(0), (5, V, V))
  return table.at[..., -1].set(-LARGEST)


@pytest.mark.more
def test_equal_texts_are_identical_and_swapped_or_shorter_ones_a_bug(params):
  text = run(FAULTY, faulty(params))
  wrong = text[:4] + [(text[4] + 1) % V] + text[5:]
  compare = lambda other: find(FAULTY, faulty(params), case(text, other))
  assert compare(text).verdict == 'identical'
  assert compare(text[:-1]).verdict == 'BUG'
  found = compare(wrong)
  assert found.verdict == 'BUG'
  assert (found.position, found.plain, found.other) == (4, text[4], wrong[4])
  assert found.gap > 4 * found.noise > 0


@pytest.mark.parametrize(
  'noise, seen, verdicts',
  [
    (1e-4, 1e-4, {1e-4: 'tie', 3.9e-4: 'tie', 4.3e-4: 'BUG'}),
    # Where passes agree to the bit, one rounding is.
    (0.0, 2**-24 * LARGEST, {2e-4: 'tie', 3e-4: 'BUG'}),
  ],
)
def test_near_tie_is_a_tie_and_its_size_counts(params, noise, seen, verdicts):
  """The runner-up is put `gap` below the best of the fifth step."""
  text = run(FAULTY, faulty(params, noise))
  prefix = [*PROMPT, *text[:4]]
  for gap, verdict in verdicts.items():
    second, near = near_tie(params, prefix, gap)
    other = text[:4] + [second] + text[5:]
    found = find(FAULTY, faulty(near, noise), case(text, other))
    assert found.verdict == verdict, (gap, found)
    np.testing.assert_allclose(found.gap, gap, rtol=0.02)
    np.testing.assert_allclose(found.noise, seen, rtol=0.02)


@pytest.mark.more
@pytest.mark.parametrize(
  'dtype, limit, times',
  [
    ('float64', 1e-12, 20),
    ('float32', 1e-3, 20),
    ('float16', 0.019, 4),
    ('bfloat16', 0.15, 4),
  ],
)
def test_noise_that_rounding_does_not_explain_is_itself_a_bug(
  dtype, limit, times, request
):
  """Whatever the gap: two tokens tie here, and either arm has one of them."""
  if dtype == 'float64':
    request.getfixturevalue('x64')
  one = float(jnp.finfo(dtype).eps) / 2
  table = np.random.default_rng(0).normal(size=(5, V, V))
  table[..., :2], table[..., -1] = 4, -LARGEST
  tied = case([0, 0], [0, 1])

  def reason(noise: float) -> str:
    params = faulty(jnp.asarray(table, dtype), noise * LARGEST)
    found = find(FAULTY, params, tied)
    assert found.verdict == ('BUG' if found.reason else 'tie')
    assert found.gap == 0 and found.rounding <= 2.1 * one * LARGEST
    return found.reason

  assert not reason(0.9 * times * one)
  for noise in (2.2 * times * one, 0.9 * limit):
    assert 'times what rounding changes' in reason(noise)
  assert 'over its limit' in reason(1.1 * limit)


def test_the_coarsest_weights_set_the_limit():
  """Kernels in bfloat16 beside norms in float32 and integers."""
  leaf = lambda dtype: jnp.zeros(2, dtype)
  params = {'a': leaf('float32'), 'b': leaf('bfloat16'), 'c': leaf('int8')}
  assert weights.coarsest(params) == 'bfloat16'
  own = {'a': leaf('float32'), 'c': leaf('int32')}
  assert weights.coarsest(own) == 'float32'
  # On the CPU kernels what bfloat16 is multiplied with is float32.
  own['b'] = weights.pack(jnp.ones((2, 2), jnp.bfloat16))
  own['embed'] = leaf('bfloat16')  # whose rows are looked up
  assert weights.coarsest(own) == 'float32'
  moved = audit._shaken(own | {'a': jnp.ones(2)})
  assert moved['b'].array is own['b'].array and (moved['a'] != 1).all()


@pytest.mark.parametrize('which', range(3))
def test_nan_in_any_pass_is_a_bug(which, monkeypatch):
  """Of one id: by one token, with moved weights, in a window."""
  passes = np.zeros((3, 1, V))
  passes[which, 0, 5] = np.nan
  monkeypatch.setattr(audit, '_logits', lambda *_: [*passes])
  found = find(FAULTY, faulty(jnp.zeros((5, V, V))), case([0], [1]))
  assert (found.verdict, found.reason) == ('BUG', 'logits are not finite')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_wrong_mask_at_any_offset_of_a_window_is_no_noise(dtype):
  """No pass of one token has it, wherever the texts part."""
  table = jnp.asarray(fakes.table(0, V, hashes=7), dtype)
  text = [(3 * i) % 7 for i in range(6)]
  for offset in (-1, *range(GAMMA + 1)):
    params = faulty(table, 0.0, offset)
    for same in (0, 2, 5):
      one = case(text, [*text[:same], text[same] + 1])
      found = find(FAULTY, params, one)
      assert found.verdict == 'BUG'
      assert ('over its limit' in found.reason) == (offset >= 0), offset
      assert offset >= 0 or found.noise < 0.1


@pytest.mark.more
def test_sampled_token_needs_no_change(params):
  """The race of the audit is the race of decoding: it names every token."""
  asked = dict(seed=11, temperature=0.9, top_k=6, top_p=0.8)
  text = run(fakes.table_model(V), params, request=5, **asked)
  s = sampling_lib.Sampling(**asked)
  for i, token in enumerate(text):
    prefix = [*PROMPT, *text[:i]]
    logits_V = np.asarray(params[fakes.prefix_hash(prefix) % 5, prefix[-1]])
    arrival_V = audit.arrivals(s.seed, 5, len(prefix), V)
    needs = [audit.needed(logits_V, x, s, arrival_V) for x in range(V)]
    assert needs[token] == 0
    assert sum(n == 0 for n in needs) == 1


def test_batch_rows_are_part_of_the_noise(params):
  """Logits that depend on the row: one row alone would show no noise."""
  base = fakes.table_model(V)

  def head(params, hidden):
    logits = base.head(params, hidden)
    row = jnp.arange(hidden.shape[0]) % 2
    even = (jnp.arange(V) + 1) % 2
    shift = 1e-4 * row.reshape((-1,) + (1,) * (logits.ndim - 1))
    return logits + shift * even.reshape((1,) * (logits.ndim - 1) + (V,))

  model = base._replace(head=head)
  text = run(base, params)
  second, near = near_tie(params, PROMPT, 3e-4)
  one = case(text, [second, *text[1:]])
  assert find(model, near, one).verdict == 'BUG'
  found = find(model, near, one, rows=2)
  assert found.verdict == 'tie'
  np.testing.assert_allclose(found.noise, 1e-4, rtol=0.05)


# --- against production, by brute force ---------------------------------------

X, SMALL = 120, 5
MOVES_MV = np.concatenate(
  [
    np.array(list(itertools.product((-1, 0, 1), repeat=SMALL)), float),
    np.random.default_rng(1).uniform(-1, 1, (100, SMALL)),
  ]
)


@jax.jit
def law(logits_BV, sampling):
  return sampling_lib.probabilities(logits_BV[:, None], sampling)[:, 0]


def problems():
  """Logits and settings, many of them at the edge of a cut, many tied."""
  rng = np.random.default_rng(0)
  logits_XV = 1.5 * rng.normal(size=(X, SMALL))
  tied_XV = np.round(2 * logits_XV) / 2  # as in bfloat16
  logits_XV = np.where(np.arange(X)[:, None] % 2, tied_XV, logits_XV)
  t_X = rng.choice([0.6, 1.0, 1.5], X)
  k_X = rng.choice([0, 0, 2, 3, 4], X)
  p_XV = -np.sort(-np.exp(logits_XV / t_X[:, None]))
  mass_XV = p_XV.cumsum(1) / p_XV.sum(1, keepdims=True)
  edge_X = mass_XV[np.arange(X), rng.integers(0, SMALL - 1, X)]
  off_X = rng.choice([0, 1e-3, -1e-3, 0.02, -0.02, 0.1, -0.1], X)
  top_X = np.clip(edge_X * (1 + off_X), 0.01, 1)
  return logits_XV.astype(np.float32), t_X, k_X, top_X.astype(np.float32)


def winners(logits_XV, t_X, k_X, top_X, arrival_XV, size_X):
  """[X, V]: which tokens production emits under some move of that size."""
  moved_XMV = logits_XV[:, None] + size_X[:, None, None] * MOVES_MV
  M = len(MOVES_MV)
  settings = sampling_lib.settings(
    X * M, *(np.repeat(a, M) for a in (t_X, k_X, top_X))
  )
  p_BV = law(moved_XMV.reshape(-1, SMALL).astype(np.float32), settings)
  race_XMV = np.asarray(p_BV).reshape(X, M, SMALL) / arrival_XV[:, None]
  emitted_XM = race_XMV.argmax(-1)
  return (emitted_XM[..., None] == np.arange(SMALL)).any(1)


@pytest.mark.more
def test_what_noise_can_emit_is_a_tie_and_the_rest_is_a_bug():
  logits_XV, t_X, k_X, top_X = problems()
  arrival_XV = np.stack([audit.arrivals(1, x, 9, SMALL) for x in range(X)])
  asked = zip(*(x.tolist() for x in (t_X, k_X, top_X)), strict=True)
  cases = [sampling_lib.Sampling(*x, seed=1) for x in asked]
  needed_XV = np.array(
    [
      [audit.needed(row_V, v, s, arrival_V) for v in range(SMALL)]
      for row_V, s, arrival_V in zip(logits_XV, cases, arrival_XV, strict=True)
    ]
  )
  won_by = lambda size_X: winners(
    logits_XV, t_X, k_X, top_X, arrival_XV, size_X
  )
  sizes = (1e-3, 0.02, 0.1, 0.3, 0.6, 1.0, 2.0)
  won = {size: won_by(np.full(X, size)) for size in sizes}
  for size in sizes:
    # Two logits part by twice the size: half of what FACTOR allows. Where large
    # moves shift several cuts at once, the one move tried may be too large.
    over_XV = needed_XV / (2 * size) > 1 + 1e-2
    assert (over_XV & won[size]).sum() <= 0.06 * won[size].sum() * (size > 0.1)
    assert (needed_XV[won[size]] <= 5 * size).all(), size
  # A token that only large moves can emit needs a large gap.
  for size in (0.1, 0.3, 1.0):
    assert (needed_XV[~won[size]] > size / 2).mean() > 0.97, size
  assert won[1e-3].sum() > X and won[0.3].sum() > 1.2 * X
