"""A pool's rows are those of fixed batches, whenever they are refilled."""

import jax
import numpy as np
import pytest

from specdec_jax import decode, pool, requests, sampling, sharding, types
from specdec_jax.certify import base
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.models import lm
from specdec_jax.verify import reject
from tests import fakes

V, L, N, ROWS = 13, 48, 12, 3
# Requests that differ in everything.
ITEMS = [
  requests.Item(
    tokens,
    100 + i,
    new=5 + 7 * i % 19,
    sampling=sampling.Sampling(
      temperature=0.9 * (i % 3 > 0),
      top_k=5 * (i % 2),
      top_p=0.9 if i % 3 == 1 else 1.0,
      seed=7 * i % 5,  # other than the neighbours'
    ),
    stop_ids=[i % V, 12][: i % 3],
  )
  for i, tokens in enumerate(fakes.prompts(N, vocab=V, seed=1))
]


@pytest.fixture(scope='module')
def table():
  """(loop, weights) of a table; the drafter proposes 0 to 2 tokens."""
  model = fakes.table_model(V)
  drafter = fakes.ragged(lm_drafter.make(model, gamma=2))
  loop = decode.Loop(model, drafter, reject.RULE)
  return loop, types.Weights(fakes.table(0, V), fakes.table(1, V))


@pytest.fixture(scope='module')
def batch(table):
  """(request, output) of all requests at once, on the host."""
  loop, weights = table
  request = requests.make(ITEMS, gamma=2, length=L)
  generate = decode.programs(*loop[:4]).generate
  return request, jax.device_get(generate(weights, request))


def refill(held, left, items=ITEMS):
  """Gives free rows the first of `left`, which it removes."""
  while left and held.free:
    some = [left.pop(0) for _ in range(min(held.part, held.free, len(left)))]
    held.begin(some, [items[i] for i in some])


def drain(held, left=(), *, most=None, items=ITEMS):
  """Answers all that the pool holds and `left`; requests.Ended by ticket."""
  left, found = list(left), {}
  while left or held.busy:
    refill(held, left, items)
    ended = held.advance(most)
    found |= zip(ended, held.take(ended), strict=True)
  return found


def check(found, batch):
  """What was found is what the batch has, counts included."""
  for i, one in found.items():
    want = requests.ended(*batch, i)
    assert one[:3] == want[:3], i
    # How wide a window is depends on the neighbours.
    counts = [x.info._replace(widths_BN=None) for x in (one, want)]
    jax.tree.map(np.testing.assert_array_equal, *counts)


def test_rows_that_end_are_given_the_next_request(table, batch):
  reasons = {requests.ended(*batch, i).reason for i in range(N)}
  assert reasons == {'stop', 'length'}
  held = pool.Pool(*table, rows=ROWS, length=L, stops=2)
  assert (held.rows, held.part, held.free, held.busy) == (ROWS, 1, ROWS, False)
  found = drain(held, range(N))
  assert sorted(found) == list(range(N))
  check(found, batch)
  # A second time, in another order and other rows, a window at a time.
  check(drain(held, reversed(range(N)), most=1), batch)


def test_what_is_cancelled_leaves_no_trace(table, batch):
  held = pool.Pool(*table, rows=ROWS, length=L, stops=2)
  refill(held, left := list(range(N)))
  held.advance(2)
  held.cancel([0, 2])
  assert held.free == 2 and held.ended == []
  found = drain(held, left)
  assert sorted(found) == [1, *range(3, N)]
  held.cancel([])
  check(found | drain(held, [2, 0]), batch)
  refill(held, [5])
  held.cancel([5])
  assert held.advance() == [] and not held.busy
  assert not held._held[1].live_B.any()  # or calls would wait for it


def test_a_row_may_draft_less_than_others(table, batch):
  """And nothing: plain decoding. Greedy rows say the same."""
  some = [i for i in range(N) if not ITEMS[i].sampling.temperature][:3]
  held = pool.Pool(*table, rows=ROWS, length=L, stops=2)
  for i, drafts in zip(some, (0, 9, 1), strict=True):
    held.begin([i], [ITEMS[i]._replace(drafts=drafts)])
  found = drain(held)
  longest = [int((found[i].info.proposed_BK[0] > 0).sum()) for i in some]
  assert longest == [0, 2, 1]
  for i in some:
    assert found[i].tokens == requests.ended(*batch, i).tokens


def test_a_call_ends_with_a_row_or_after_so_many_windows(table):
  programs, weights = decode.programs(*table[0][:4]), table[1]
  request = requests.make(ITEMS[:4], gamma=2, length=L)
  calls = lambda info: np.asarray(info.calls_B).tolist()
  held = programs.start(weights, request)
  held = programs.advance(weights, request, *held, np.int32(2))
  assert calls(held[1]) == [2] * 4 and np.asarray(held[0].live_B).all()
  held = programs.advance(weights, request, *held, np.int32(99))
  live_B = np.asarray(held[0].live_B)
  assert 0 < live_B.sum() < 4 and calls(held[1])[0] > 2
  before = calls(held[1])
  held = programs.advance(weights, request, *held, np.int32(0))
  assert calls(held[1]) == before
  while np.asarray(held[0].live_B).any():
    held = programs.advance(weights, request, *held, np.int32(99))
  before = calls(held[1])
  held = programs.advance(weights, request, *held, np.int32(99))
  assert calls(held[1]) == before  # no row is live


def test_news_are_the_tokens_of_a_row_and_who_made_them(table, batch):
  held = pool.Pool(*table, rows=ROWS, length=L, stops=2)
  assert held.news() == {}
  left, told, found = list(range(N)), {}, {}
  while left or held.busy:
    refill(held, left)
    ended = held.advance(2)
    for i, (tokens, origins, *none, refused) in held.news().items():
      assert none == [None] * 3  # no log-probabilities are recorded
      assert len(refused) == 2  # the drafts of a window
      assert len(tokens) == len(origins) > 0
      told.setdefault(i, []).extend(zip(tokens, origins, strict=True))
    assert held.news() == {}
    found |= zip(ended, held.take(ended), strict=True)
  for i, one in found.items():
    tokens, origins = zip(*told[i], strict=True)
    assert list(tokens) == one.tokens[one.start :]
    made_by = one.info.origin_BL[0, one.start : len(one.tokens)]
    assert list(origins) == made_by.tolist()


def test_a_refill_compiles_nothing(table):
  held = pool.Pool(*table, rows=ROWS, length=L, stops=2)
  drain(held, range(ROWS + 1))
  programs = decode.programs(*table[0][:4])
  parts = *programs, held._put, pool._outputs
  sizes = lambda: [x._cache_size() for x in parts]
  before = sizes()
  refill(held, [0])
  held.cancel([0])
  drain(held, range(N), most=3)
  assert sizes() == before
  # Nor is a prompt kept, which is in the text.
  assert all(x.shape[-1:] != (L,) for x in jax.tree.leaves(held._held[0]))


def test_few_requests_are_decoded_as_few_rows(table, batch):
  """As they come and go and are cancelled, and nothing is compiled again."""
  held = pool.Pool(*table, rows=(1, 2, 5), length=L, stops=2)
  advance, widths, counts = decode.programs(*table[0][:4]).advance, set(), []
  for _ in range(2):
    left, told, found = list(range(N)), {}, {}
    for turn in range(99):
      for _ in range((1, 0, 0, 1, 0, 2, 0, 0)[turn % 8]):
        if left and held.free:
          refill(held, [left.pop(0)])
      if turn in (9, 12):
        held.cancel([i := max(held._row)])
        left.append(i)
        told.pop(i)
      ended = held.advance(1)
      if held._row:
        most = held._held[1].lengths_B.shape[0]
        assert most == min(x for x in (1, 2, 5) if x >= len(held._row))
        widths.add(most)
      for i, (tokens, *_) in held.news().items():
        told.setdefault(i, []).extend(tokens)
      found |= zip(ended, held.take(ended), strict=True)
    assert sorted(found) == list(range(N)) and widths == {1, 2, 5}
    check(found, batch)
    assert all(x.tokens[x.start :] == told[i] for i, x in found.items())
    parts = advance, held._put, pool._rows
    counts.append([x._cache_size() for x in parts])
  assert counts[0] == counts[1]


def in_chunks(table, size=2):
  """The loop with prompts read `size` tokens at a time."""
  return table[0]._replace(options=decode.Options(chunk=size)), table[1]


def test_prompts_are_read_between_windows(table, batch):
  """A chunk at a time, while the others decode."""
  held = pool.Pool(*in_chunks(table, 1), rows=ROWS, length=L, stops=2)
  some = sorted(range(N), key=lambda i: len(ITEMS[i].tokens))
  assert len(ITEMS[some[-1]].tokens) > 3  # three chunks, and the last token
  refill(held, [some[0]])
  held.begin([some[-1]], [ITEMS[some[-1]]], 0)
  assert held.busy and held.free == ROWS - 2
  for _ in range(2):
    assert held.advance(1) == [] and some[-1] not in held.news()
  found = drain(held, most=1)
  assert sorted(found) == sorted([some[0], some[-1]])
  check(found, batch)
  # Cancelled while it is read, it never had a row.
  refill(held, [0])
  held.begin([1], [ITEMS[1]], 0)
  held.cancel([1])
  assert sorted(drain(held, [2, 1])) == [0, 1, 2]


def test_what_is_read_takes_turns_and_a_short_prompt_overtakes(table, batch):
  held = pool.Pool(*in_chunks(table, 1), rows=9, length=L, stops=2)
  some = sorted(range(N), key=lambda i: -len(ITEMS[i].tokens))
  long, short = some[:4], some[-1]
  chunks = [len(ITEMS[i].tokens) - 1 for i in long]
  assert chunks[-1] >= 3 and len(ITEMS[short].tokens) <= 2
  for i in long[:3]:
    held.begin([i], [ITEMS[i]], 0)
  held.begin([short], [ITEMS[short]], 1)
  assert held.free == 5 and [*held._row] == [short]
  held.begin([long[3]], [ITEMS[long[3]]], 0)
  assert held.free == 0  # as many are read as may be
  found, before = {}, sum(chunks)
  for turn in range(before):
    at = [x.at for x in held._refills]
    assert max(at) - min(at) <= 1, turn
    ended = held.advance(1)
    found |= zip(ended, held.take(ended), strict=True)
  assert not held._refills
  found |= drain(held)
  assert {*found} == {*long, short}
  check(found, batch)


def test_what_is_cancelled_is_read_no_further(table):
  held = pool.Pool(*in_chunks(table, 1), rows=ROWS, length=L, stops=2)
  longest = max(range(N), key=lambda i: len(ITEMS[i].tokens))
  refill(held, [some := (longest + 1) % N])
  held.begin([longest], [ITEMS[longest]], 0)
  assert held.advance(9) == [] and held.free == ROWS - 2  # a chunk, a window
  held.cancel([some, longest])
  assert held.free == ROWS and not held.busy


def test_of_two_that_are_read_one_is_cancelled(table, batch):
  held = pool.Pool(*in_chunks(table, 1), rows=9, length=L, stops=2)
  assert held.part == 2
  held.begin([0, 1], ITEMS[:2], 0)
  held.cancel([0])
  found = drain(held)
  assert [*found] == [1] and held.free == 9
  check(found, batch)


def test_what_is_read_together_keeps_to_itself(table, batch):
  """A long prompt beside a short one, of another seed, in either order."""
  held = pool.Pool(*in_chunks(table, 1), rows=9, length=L, stops=2)
  sizes = [len(x.tokens) for x in ITEMS]
  assert all(x < y for x, y in zip(sizes[::2], sizes[1::2], strict=True))
  assert held.part == 2
  for order in (range(N), reversed(range(N))):
    check(drain(held, order), batch)


@pytest.mark.more
def test_a_chat_goes_on_in_its_row(table):
  """What is asked next is read after what the row has."""
  sizes = dict(length=2 * L, stops=2)
  held = pool.Pool(*in_chunks(table), rows=2, prefix_caching=True, **sizes)
  first = drain(held, [3, 4, 5])
  assert held.cached_tokens == 0
  chats = [
    x._replace(tokens=(*first[3 + i % 3].tokens, *x.tokens))
    for i, x in enumerate(ITEMS)
  ]
  for i, had in ((5, 5), (1, 4)):
    before, text = held.cached_tokens, first[had].tokens
    found = drain(held, [i], items=chats)[i]
    assert held.cached_tokens - before == len(text) - 1
    alone = pool.Pool(*in_chunks(table), rows=1, **sizes)
    assert found.tokens == drain(alone, [i], items=chats)[i].tokens
    assert alone.cached_tokens == 0


def test_two_chats_that_begin_alike_take_turns(table):
  """Each goes on in its own row, and the second begins in that of the first."""
  sizes = dict(rows=3, length=2 * L, stops=2)
  chats = [ITEMS[0]._replace(tokens=(3, 1, 4, x)) for x in (1, 2)]
  held = pool.Pool(*in_chunks(table), prefix_caching=True, **sizes)

  def check_alone(i):
    alone = pool.Pool(*in_chunks(table), **sizes)
    found = drain(held, [i], items=chats)[i]
    assert found.tokens == drain(alone, [i], items=chats)[i].tokens
    chats[i] = chats[i]._replace(tokens=(*found.tokens, 5, 6))
    return held.cached_tokens

  cached = check_alone(0)
  assert (cached, check_alone(1)) == (0, 3)
  for i in (0, 1, 0):
    cached = held.cached_tokens + len(chats[i].tokens) - 3
    assert check_alone(i) == cached


def test_a_row_that_is_given_away_has_no_past(table):
  held = pool.Pool(
    *in_chunks(table), rows=1, length=2 * L, stops=2, prefix_caching=True
  )
  first = drain(held, [3])[3]
  refill(held, [4])
  held.cancel([4])
  chat = ITEMS[5]._replace(tokens=(*first.tokens, 1, 2))
  found = drain(held, [0], items=[chat])[0]
  assert held.cached_tokens == 0
  alone = pool.Pool(*in_chunks(table), rows=1, length=2 * L, stops=2)
  assert found.tokens == drain(alone, [0], items=[chat])[0].tokens


def test_a_row_whose_logits_broke_is_no_past(table):
  """What follows would be read after what made them so."""
  loop, weights = in_chunks(table)
  weights = weights._replace(target=np.full_like(weights.target, np.nan))
  sizes = dict(rows=1, length=2 * L, stops=2)
  held = pool.Pool(loop, weights, prefix_caching=True, **sizes)
  item = ITEMS[3]._replace(tokens=(3, 1, 4, 1, 5))
  for _ in range(2):
    assert drain(held, [0], items=[item])[0].reason == 'non-finite'
    assert held.cached_tokens == 0


@pytest.mark.more
def test_sources_belong_to_their_requests(x64):
  """T5s; eight rows are more than there are requests: some stay blank."""
  world = base.transformers(V, encoder=True, depth=1)
  loop = decode.Loop(world.target, *base.PLAIN[1::-1], base.OPTIONS)
  items = [x._replace(source=[1 + i] * (1 + i)) for i, x in enumerate(ITEMS)]
  items, sizes = items[:5], dict(length=L, sources=16, stops=2)
  request = requests.make(items, **sizes)
  generate = decode.programs(*loop[:4]).generate
  out = jax.device_get(generate(world.weights, request))
  held = pool.Pool(loop, world.weights, rows=8, **sizes)
  for order in (range(5), [4, 2, 0, 3, 1]):
    check(drain(held, order, items=items), (request, out))


@pytest.mark.more
def test_a_mesh_has_parts_of_whole_rows(x64):
  """With a draft model on it too; and a refill compiles no other loop."""
  sizes = dict(heads=4, kv_heads=2, head_dim=4, mlp=16, vocab=V + 3, depth=1)
  config = fakes.tiny(**sizes)
  layout = sharding.lay_out(sharding.make_mesh(2, 2), config)
  found = []
  for over in (layout, None):
    model = lm.make(config, constrain=over and over.constrain)
    both = (lm.init(config, seed, over and over.put) for seed in range(2))
    weights, drafter = types.Weights(*both), lm_drafter.make(model, gamma=2)
    loop = decode.Loop(model, drafter, reject.RULE)
    held = pool.Pool(loop, weights, over, rows=3, length=L, stops=2)
    found.append(drain(held, range(N)))
    if over:
      assert (held.rows, held.part) == (4, 2)
      for x in jax.tree.leaves(held._held[1].cache):
        assert x.sharding.shard_shape(x.shape) == (2, 1, L, 4)
      advance = decode.programs(*loop[:4]).advance
      before = advance._cache_size()
      drain(held, range(N))
      assert advance._cache_size() == before
  over, alone = found
  assert over.keys() == alone.keys()
  assert any(x.info.accepted_BK.any() for x in over.values())
  assert all(x[:3] == alone[i][:3] for i, x in over.items())
