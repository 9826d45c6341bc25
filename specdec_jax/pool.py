"""Rows that decode together and are refilled: none waits for the longest.

A request's row, time and neighbours never change its tokens: promise `pool`.
"""

import collections
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import decode, forward, hosts, requests, sharding, types
from specdec_jax.drafters import method

# New prompts are read by this share of the rows at a time, in so many parts at
# most, which take turns: each holds a cache of its own.
_SHARE, _PARTS = 8, 4


class _Refill(NamedTuple):
  """Requests whose prompts are being read.

  rows: the pool's, which they are given; past its end if they are cancelled.
  lengths_B: of the prompts, on the host. at: how much is read, on the host.
  """

  rows: dict[Hashable, int]
  request: decode.Request
  lengths_B: np.ndarray
  at: int
  reading: Any


class Pool:
  """Rows that decode together, each with a request of its own.

  A request is known by its ticket, anything that can be hashed. In a job with
  several processes all make the same calls.

  widths: how many rows a window may decode, ascending.
  part: the most rows that one refill reads.
  cached_tokens: prompt tokens that were not read, since their row had them.
  """

  def __init__(
    self,
    loop: decode.Loop,
    weights: types.Weights,
    layout: sharding.Layout | None = None,
    *,
    rows: int | Sequence[int],
    length: int,
    sources: int = 0,
    stops: int = 8,
    prefix_caching: bool = False,
  ):
    """Compiles nothing yet.

    rows: rounded up on a mesh, whose data axis divides them. Off a mesh it may
      list widths, such as (1, 8): with 8 rows, a window decodes 1 while one
      request runs. Where logits depend on how many tokens are read together,
      they then depend on the neighbours.
    length: tokens in a row: prompt, output and the drafter's gamma.
    sources: room for the ids of a source or a prediction; 0 for a target
      without an encoder that is given no predictions. stops: room for stop ids.
    prefix_caching: a prompt that begins with the tokens of a free row goes on
      in that row, as a chat does; the drafter's features are kept for it. Where
      logits depend on how many tokens are read together, they then depend on
      earlier requests. Not on a mesh, nor with an encoder. Prompts are read one
      by one: none waits for a longer one.
    """
    self._caching = prefix_caching and not (loop.target.encode or layout)
    self._features = self._caching and bool(loop.drafter.taps)
    if self._features:
      loop = loop._replace(drafter=method.keeping_features(loop.drafter))
    self._programs = decode.programs(*loop[:4])
    self._chunk = loop.options.chunk
    self._weights, self._layout = weights, layout
    *few, most = np.unique(rows).tolist()
    assert not (few and layout), rows
    self.rows = requests.rows_on(layout, most)
    part = 1 if self._caching else -(-most // _SHARE)
    self.part = requests.rows_on(layout, part)
    self.widths = [*few, self.rows]
    sizes = dict(length=length, sources=sources, stops=stops, rows=self.part)
    self._sizes = dict(sizes, gamma=loop.drafter.gamma)
    self._row: dict[Hashable, int] = {}
    self._live_B = np.zeros(self.rows, bool)
    self._told_B = np.zeros(self.rows, int)  # tokens that `news` has told
    self._past: dict[int, list[int]] = {}  # what free rows have, oldest first
    self._refills: collections.deque[_Refill] = collections.deque()
    self.cached_tokens = 0
    self._at = [*range(self.rows)]  # the rows that a window decodes
    self._held: Any = None  # their decode.Request, State and Info
    self._all: Any = None  # those of all rows, stale in _at, while _at is few

  @classmethod
  def of(cls, engine: Any, **sizes) -> 'Pool':
    """Makes an engine's pool; sizes: rows, length, sources, stops."""
    layout = engine.target.layout
    return cls(engine.loop, engine.weights, layout, **sizes)

  @property
  def free(self) -> int:
    """Rows that can be given a request now; 0 while too many are read."""
    return len(self._unused()) if len(self._refills) < _PARTS else 0

  @property
  def busy(self) -> bool:
    """Whether there is a request, which may have ended."""
    return bool(self._row or self._refills)

  @property
  def ended(self) -> list[Any]:
    """Tickets whose rows have ended and are not taken."""
    return [x for x, row in self._row.items() if not self._live_B[row]]

  def begin(
    self,
    tickets: Sequence[Hashable],
    items: Sequence[requests.Item],
    most: int | None = None,
  ) -> None:
    """Gives requests to free rows, and reads their prompts.

    tickets: one a request, in no other row.
    items: at most `part`, and no more than rows are free.
    most: chunks to read now; `advance` reads the others. None: all.
    """
    count = len(items)
    assert len({*tickets} - self._row.keys()) == count <= self.free, tickets
    request = requests.make(items, mixed=True, **self._sizes)
    placed = requests.place(request, self._layout)
    placed = placed if self._layout else jax.device_put(placed)
    rows, at, best = self._unused()[:count], 0, 0
    if self._caching:
      at, best = self._cached(items[0].tokens)
    if at:
      if at == len(self._past[best]) - 1:  # all that the row has
        rows = [best]
      state = self._whole()[1]
      held = state.cache, state.drafter[1] if self._features else None
      kept = _rows(held, np.array([best]))
      reading = _resumed(np.int32(at), *kept, self._chunk)
    else:
      reading = self._programs.opened(self._weights, placed)
    self.cached_tokens += at
    for row in rows:
      self._past.pop(row, None)
    owners = dict(zip(tickets, rows, strict=True))
    refill = _Refill(owners, placed, request.lengths_B, at, reading)
    self._read_on(refill, most)

  def _unused(self) -> list[int]:
    """Lists rows without a request: those with nothing, then the oldest."""
    used = [*self._row.values(), *self._past]
    used += [row for x in self._refills for row in x.rows.values()]
    return [*sorted({*range(self.rows)} - {*used}), *self._past]

  def _cached(self, tokens: Sequence[int]) -> tuple[int, int]:
    """Finds how many first tokens of a prompt a free row has, and which row."""
    # The last token of a prompt, as of a text, is not in the cache. Of lists
    # commonprefix finds the elements that they share.
    own = [*tokens[:-1]]
    shared = lambda past: len(os.path.commonprefix([past[:-1], own]))
    many = ((shared(past), row) for row, past in self._past.items())
    return max(many, key=lambda pair: pair[0], default=(0, self.rows))

  def _read_on(self, refill: _Refill, most: int | None) -> None:
    """Reads `most` chunks of a refill's prompts, or all; read, they decode."""
    left = -(-(int(refill.lengths_B.max()) - 1 - refill.at) // self._chunk)
    count = left if most is None else min(most, left)
    given = refill.request, refill.reading, np.int32(count)
    reading = self._programs.read(self._weights, *given)
    at = refill.at + count * self._chunk
    if count < left:
      self._refills.append(refill._replace(at=at, reading=reading))
    else:
      self._start(refill, reading)

  def _start(self, refill: _Refill, reading) -> None:
    """Puts what is read into its rows."""
    request = refill.request
    began = self._programs.begin(self._weights, request, reading)
    # Steps read the tokens of State: no copy of the prompts is kept.
    began = request._replace(tokens_BL=None), *began
    if self._held is None:
      self._held = jax.tree.map(self._blank, began)
      where = jax.tree.map(lambda x: x.sharding, self._held)
      self._put = jax.jit(_put, donate_argnums=0, out_shardings=where)
    # Rows of the part without a prompt go past the end: they are dropped.
    where_B = np.full(self.part, self.rows)
    where_B[: len(refill.rows)] = [*refill.rows.values()]
    self._held = self._put(self._whole(), began, where_B)
    self._row |= {x: row for x, row in refill.rows.items() if row < self.rows}
    kept_B = where_B < self.rows
    self._live_B[where_B[kept_B]] = True
    self._told_B[where_B[kept_B]] = refill.lengths_B[kept_B]

  def _blank(self, x: jax.Array) -> jax.Array:
    where: Any = x.sharding
    if self._layout:
      # As a loop's results are labelled, so that it is compiled once.
      rows, *axes = *self._layout.spec('batch'), *where.spec[1:]
      while axes and axes[-1] is None:
        axes.pop()
      spec = jax.sharding.PartitionSpec(rows, *axes)
      where = jax.sharding.NamedSharding(self._layout.mesh, spec)
    return jnp.zeros((self.rows, *x.shape[1:]), x.dtype, device=where)

  def advance(self, most: int | None = None) -> list[Any]:
    """Decodes in one call until a row ends; returns the tickets that ended.

    First reads a chunk of one `begin`'s prompts; several take turns. Returns
    after `most` windows anyhow: 1 while prompts are read.
    """
    if self._refills:
      self._read_on(self._refills.popleft(), 1)
    most = 1 if self._refills else most
    if self._live_B.any():
      self._narrow()
      request, *held = self._held
      count = np.int32(requests.ANY if most is None else most)
      held = self._programs.advance(self._weights, request, *held, count)
      self._held = request, *held
      self._live_B[self._at] = hosts.fetch(held[0].live_B)
    return self.ended

  def _narrow(self) -> None:
    """Takes the rows that have requests from all, where they are few.

    Keeps them while the same have: taking copies their caches. A row that is
    given a request puts the others back: see _start.
    """
    used = {*self._row.values()}
    width = next(x for x in self.widths if x >= len(used))
    if width == len(self._at):
      return
    held = self._whole()
    if width < self.rows:
      # Of rows without a request any will do: none is live.
      self._at = [*used, *({*range(self.rows)} - used)][:width]
      self._held, self._all = _rows(held, np.array(self._at)), held

  def _whole(self) -> Any:
    """Returns decode.Request, State and Info for all rows."""
    if self._all is not None:
      self._held = self._put(self._all, self._held, np.array(self._at))
      self._at, self._all = [*range(self.rows)], None
    return self._held

  def news(self) -> dict[Any, tuple[Any, ...]]:
    """Returns, by ticket, what is new since the last call, for Reader.piece."""
    if self._held is None:
      return {}
    _, state, info = self._held
    told = state.tokens_BL, *info.of_tokens
    more = state.lengths_B, info.refused_BK
    told, (ends_B, refused_BK) = hosts.fetch((told, more))
    found = {}
    for ticket, row in self._row.items():
      at = self._at.index(row)
      new = slice(self._told_B[row], ends_B[at])
      if new.start < new.stop:
        own = requests.cut(told, at, new)
        found[ticket] = *own, np.array(refused_BK[at])
      self._told_B[row] = ends_B[at]
    return found

  def read(self, function: Callable, tickets: Sequence[Hashable]) -> Any:
    """Calls a jitted function on at most `part` rows; its result, on the host.

    function: takes weights, decode.Request, State and Info of all rows, and the
      indices of the wanted ones; what it returns has as many rows.
    """
    rows = [self._row[x] for x in tickets]
    # As many as a part has: any will do where fewer are wanted.
    where_B = np.pad(rows, (0, self.part - len(rows)), mode='edge')
    found = function(self._weights, *self._whole(), where_B)
    return jax.tree.map(lambda x: x[: len(rows)], hosts.fetch(found))

  def take(self, tickets: Sequence[Hashable]) -> list[requests.Ended]:
    """Returns requests as far as they are decoded; frees their rows."""
    done = []
    for i in range(0, len(tickets), self.part):
      some = tickets[i : i + self.part]
      request, out = self.read(_outputs, some)
      done += [requests.ended(request, out, row) for row in range(len(some))]
    rows = [self._row[x] for x in tickets]
    self.cancel(tickets)
    for row, one in zip(rows, done, strict=True):
      if self._caching and one.reason != 'non-finite':
        self._past[row] = one.tokens
    return done

  def refill(self, waiting: collections.deque) -> None:
    """Gives free rows what waits, as in `answers`, and reads its prompts."""
    while waiting and self.free:
      count = min(self.part, self.free, len(waiting))
      some = [waiting.popleft() for _ in range(count)]
      tickets, items = zip(*some, strict=True)
      self.begin(tickets, items)

  def answers(
    self, waiting: collections.deque[tuple[Any, requests.Item]]
  ) -> Iterator[tuple[Any, requests.Ended]]:
    """Answers what waits, or is appended meanwhile; yields each as it ends."""
    while waiting or self.busy:
      self.refill(waiting)
      done = self.advance()
      yield from zip(done, self.take(done), strict=True)

  def cancel(self, tickets: Sequence[Hashable]) -> None:
    """Frees rows whatever they hold, which is lost."""
    for x in self._refills:
      x.rows.update(dict.fromkeys(x.rows.keys() & {*tickets}, self.rows))
    wanted = [x for x in self._refills if min(x.rows.values()) < self.rows]
    self._refills = collections.deque(wanted)
    rows = [self._row.pop(x) for x in tickets if x in self._row]
    if self._live_B[rows].any():  # the others have ended by themselves
      self._live_B[rows] = False
      request, state, info = self._whole()
      # Not put from the host: committed arrays would compile `advance` again.
      live_B = state.live_B & self._live_B
      self._held = request, state._replace(live_B=live_B), info


@jax.jit
def _outputs(weights, request, state, info, where_B):
  """Picks the Request and Output of some rows."""
  out = decode.Output(state.tokens_BL, state.lengths_B, info)
  return _rows((request, out), where_B)


_resumed = jax.jit(forward.resumed, static_argnums=3, donate_argnums=1)


@jax.jit
def _rows(tree, where_B):
  """Picks some rows in every leaf."""
  return jax.tree.map(lambda x: x[where_B], tree)


def _put(held, began, where_B):
  """Replaces rows; drops those past the end."""
  put = lambda old, new: old.at[where_B].set(new, mode='drop')
  return jax.tree.map(put, held, began)
