"""What a window commits: ragged acceptance, stop ids, limits, buffer ends."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import decode, sampling, types
from specdec_jax.costs import scripted
from specdec_jax.verify import reject
from tests import fakes

GAMMA = 3
SCRIPTED = scripted.make(gamma=GAMMA)
TABLE = fakes.table_model(40)


def script_for(text, start, accepted, vocab):
  """The text, wrong once in each of the first windows: they accept so many."""
  script = np.array(text)
  for n in accepted:
    if n < GAMMA and start + n < len(script):
      script[start + n] = (script[start + n] + 1) % vocab
    start += n + 1
  return script


def weights_of(params, scripts, count=GAMMA):
  """A target, and drafts of `count` tokens at every place of these scripts."""
  scripts = np.stack(scripts).astype(np.int32)
  count_BL = np.broadcast_to(np.int32(count), scripts.shape)
  return types.Weights(params, (scripts, count_BL))


def generate(weights, request, drafter=SCRIPTED):
  """Of the table model, under reject."""
  programs = decode.programs(TABLE, drafter, reject.RULE)
  return jax.tree.map(np.asarray, programs.generate(weights, request))


@pytest.fixture(scope='module')
def table_text():
  return fakes.table_text()


@pytest.mark.more
def test_stop_ids_at_every_offset_of_the_window(table_text):
  params, text = table_text
  start, L = 2, len(text)
  cases = list(itertools.product(range(10), range(GAMMA + 1), range(3)))
  B = len(cases)
  request = fakes.request([[1, 2]] * B, 14, vocab=40, length=L)
  stop_BX = np.full((B, 3), -1, np.int32)
  for row, (offset, _, column) in zip(stop_BX, cases, strict=True):
    row[column] = text[start + offset]
    if column == 2:  # a later stop in the list must not win over a nearer one
      row[0] = text[start + offset + 2]
  scripts = [script_for(text, start, [n] * 12, 40) for _, n, _ in cases]
  weights = weights_of(params, scripts)
  request = request._replace(stop_BX=stop_BX)
  out, plain = (
    generate(weights, request, drafter) for drafter in (SCRIPTED, decode.PLAIN)
  )
  seen = set()
  for b, (offset, n, _) in enumerate(cases):
    end = start + offset + 1
    assert out.lengths_B[b] == plain.lengths_B[b] == end
    assert out.tokens_BL[b, :end].tolist() == text[:end].tolist()
    assert (out.tokens_BL[b, end:] == 0).all()
    assert (out.info.origin_BL[b, end:] == types.PROMPT).all()
    seen.add((int(out.info.origin_BL[b, end - 1]), offset % (n + 1)))
  drafted = {(types.DRAFTED, i) for i in range(GAMMA)}
  recovered = {(types.RECOVERED, i) for i in range(GAMMA)}
  assert seen == drafted | recovered | {(types.BONUS, GAMMA)}
  np.testing.assert_array_equal(out.tokens_BL, plain.tokens_BL)


@pytest.mark.more
def test_limits_at_every_offset_and_buffers_without_room(table_text):
  params, text = table_text
  start, canary = 2, 39
  most = 3 * GAMMA + 1
  # L is the longest limit: the last windows cross the end of the memory.
  L = start + most
  cases = list(itertools.product(range(most + 1), ('right', 'wrong', 'mixed')))
  scripts = dict(
    right=text[:L],
    wrong=fakes.adversary(text[:L], 40),
    mixed=script_for(text[: L + 4], start, [1, 2, 0, 1], 40)[:L],
  )
  B = len(cases)
  tokens_BL = np.full((B, L), canary, np.int32)
  tokens_BL[:, :start] = text[:start]
  request = fakes.request([[1, 2]] * B, 1, vocab=40, length=L)
  new_B = np.array([n for n, _ in cases], np.int32)
  request = request._replace(tokens_BL=tokens_BL, limit_B=start + new_B)
  weights = weights_of(params, [scripts[name] for _, name in cases])
  out = generate(weights, request)
  for b, n in enumerate(new_B):
    end = start + n
    assert out.lengths_B[b] == end
    assert out.tokens_BL[b, :end].tolist() == text[:end].tolist()
    assert (out.tokens_BL[b, end:] == canary).all()
    assert (out.info.origin_BL[b] != types.PROMPT).sum() == n
    assert (out.info.window_BL[b, end:] == -1).all()
  assert out.info.calls_B[new_B == 0].tolist() == [0] * 3
  # Nothing is proposed that memory cannot hold: 3, 3 and then 1 of 3.
  assert out.info.proposed_BK[cases.index((most, 'right'))].sum() == 7
  alone = out.info.proposed_BK[cases.index((most, 'wrong'))]
  assert alone.tolist() == [most - k for k in range(1, GAMMA + 1)]


@pytest.mark.more
def test_finished_rows_change_no_more(table_text):
  """Tokens, lengths, counters and cache of a row stand still once it ends."""
  params, text = table_text
  L = len(text)
  limits = np.array([2, 3, 7, 13], np.int32)  # the first never starts
  request = fakes.request([[1, 2]] * 4, 1, vocab=40, length=L)
  request = request._replace(limit_B=limits)
  weights = weights_of(params, [text] * 4)
  programs = decode.programs(TABLE, SCRIPTED, reject.RULE)
  ended = {}

  def look(state, info):
    now = jax.tree.map(np.array, (state, info))
    for b in np.flatnonzero(~now[0].live_B):
      # The first look after the end still holds the last window's writes.
      mine = jax.tree.map(lambda x, b=b: x[b], now)
      chex.assert_trees_all_equal(ended.setdefault(b, mine), mine)

  fakes.run_steps(programs, weights, request, look=look)
  assert sorted(ended) == [0, 1, 2, 3]
  assert ended[0][1].calls_B == 0 and ended[1][1].calls_B == 1


@pytest.mark.more
def test_a_drafter_is_told_what_was_verified_and_emitted(table_text):
  """One row with a wrong draft, one that a stop id cuts, one that its limit."""
  params, text = table_text
  L = len(text)
  request = fakes.request([[1, 2]] * 3, [5, 5, 1], vocab=40, length=L)
  stop_BX = np.array([[-1], [text[3]], [-1]], np.int32)
  weights = weights_of(params, [script_for(text, 2, [1], 40), text, text])
  drafter = SCRIPTED._replace(
    init=lambda weights, context, features: jnp.zeros((3, 3), jnp.int32),
    commit=lambda state, context, outcome, features: jnp.stack(outcome[:3], 1),
  )
  told = []
  fakes.run_steps(
    decode.programs(TABLE, drafter, reject.RULE),
    weights,
    request._replace(stop_BX=stop_BX),
    look=lambda state, info: told.append(np.array(state.drafter).tolist()),
  )
  # Verified, accepted, emitted of each row.
  assert told[0] == [[3, 1, 2], [3, 3, 2], [3, 3, 1]]
  assert told[1] == [[3, 3, 3], [0, 0, 0], [0, 0, 0]]


@pytest.mark.more
def test_a_nan_ends_its_row_and_touches_no_other(table_text):
  params, text = table_text
  L, bad = len(text), int(text[6])
  prompts = [[1, 2], [bad], [3, 4, 5]]
  request = fakes.request(prompts, 13, vocab=40, length=L)
  clean, broken = params.copy(), params.copy()
  broken[:, bad, 7] = np.nan  # what follows this token is not known
  right = fakes.texts(generate(types.Weights(clean), request, decode.PLAIN))
  with jax.debug_nans(False):
    out = generate(weights_of(broken, fakes.pad(right, L)), request)
  for b, (got, wanted) in enumerate(zip(fakes.texts(out), right, strict=True)):
    start = len(prompts[b])
    met = bad in wanted[start - 1 : -1]
    assert bool(out.info.broken_B[b]) == met
    assert got == wanted[: len(got)]
    assert met or len(got) == len(wanted)
    # No token after the first that the target could not judge.
    assert bad not in got[start - 1 : -1]
  assert out.info.broken_B.tolist()[:2] == [True, True]
  assert out.lengths_B[1] == 1 and not out.info.broken_B[2]


@pytest.mark.more
def test_a_nan_past_a_refused_draft_does_not_count(table_text):
  """What the target cannot read is not said, so the row goes on."""
  params, text = table_text
  L = len(text)
  bad = min(set(range(40)) - set(text.tolist()))
  broken, script = params.copy(), text.copy()
  broken[:, bad] = np.nan
  script[3::GAMMA] = bad
  request = fakes.request([[1, 2]], 14, vocab=40, length=L)
  with jax.debug_nans(False):
    out = generate(weights_of(broken, [script]), request)
  assert not out.info.broken_B[0]
  np.testing.assert_array_equal(out.tokens_BL[0], text)


@pytest.mark.more
def test_finished_rows_widen_no_window(table_text):
  params, text = table_text
  L = len(text)
  request = fakes.request([[1, 2]] * 2, [1, 9], vocab=40, length=L)
  weights = weights_of(params, [text] * 2, [[GAMMA], [0]])
  info = generate(weights, request).info
  assert info.widths_BN.tolist() == [[0, 0, 0, 1], [8, 0, 0, 1]]


@pytest.mark.more
@pytest.mark.parametrize(
  'widths, wanted',
  [
    ((), [3, 3, 3, 3, 3, 3]),
    ((0,), [3, 0, 3, 0, 3, 0]),
    ((2, 1, 8), [3, 1, 1, 1, 2, 1]),
  ],
)
def test_a_window_is_as_wide_as_its_proposals_need(widths, wanted):
  """The least of gamma and the widths below it that holds them."""

  def verify(noise, draft, p_BNV):
    width = draft.tokens_BK.shape[1]
    verdict = reject.verify(noise, draft, p_BNV)
    one_V = np.arange(V) == width  # says how wide its window was
    return types.Verdict(
      0 * verdict.accepted_B, jnp.broadcast_to(one_V.astype(float), (1, V))
    )

  V, L = 40, 16
  count = np.array([[0, 0, 3, 0, 1, 0, 2, 0] + [0] * 8], np.int32)
  weights = types.Weights(fakes.table(0, V), (np.zeros_like(count), count))
  request = fakes.request([[1, 2]], 6, vocab=V, length=L, temperature=1.0)
  rule = types.Rule('telling', verify)
  programs = decode.programs(
    TABLE, SCRIPTED, rule, decode.Options(widths=widths)
  )
  out = programs.generate(weights, request)
  assert out.tokens_BL[0, 2:8].tolist() == wanted
  counts = np.bincount(wanted, minlength=GAMMA + 1)
  assert out.info.widths_BN.tolist() == [counts.tolist()]


def test_plain_decoding_is_a_loop_over_single_draws(x64):
  """The oracle of everything else, itself against ten lines of Python."""
  model, V = fakes.table_model(5), 5
  params = fakes.table(3, V)
  prompts = fakes.prompts(6, vocab=V)
  temperature = [0.0, 0.7, 1.0, 1.5, 0.7, 0.7]
  request = fakes.request(
    prompts, 9, vocab=V, seed=4, temperature=temperature, top_k=3, top_p=0.9
  )
  out = decode.programs(model, decode.PLAIN, reject.RULE).generate(
    types.Weights(params), request
  )

  @jax.jit
  def next_tokens(logits_BNV, lengths_B):
    p_BNV = sampling.probabilities(logits_BNV, request.sampling)
    noise = sampling.noise(
      request.seed_B,
      request.request_B,
      lengths_B,
      request.sampling,
      gamma=0,
      coupled=False,
    )
    return noise.next(jnp.zeros_like(lengths_B), p_BNV[:, 0])

  texts = [list(text) for text in prompts]
  for _ in range(9):
    logits = np.stack([fakes.row_of(params, text) for text in texts])
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = next_tokens(logits[:, None], lengths)
    for text, token in zip(texts, tokens.tolist(), strict=True):
      text.append(token)
  assert fakes.texts(out) == texts
