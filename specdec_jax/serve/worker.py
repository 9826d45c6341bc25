"""Decodes in one thread, which alone runs programs: takes jobs from a queue and
refills a pool of rows. Jobs come in, and pieces go out, between two of its
calls, so a job is cancelled within a window or a few."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from specdec_jax import api, build, completion, pool, printing, requests
from specdec_jax.serve import protocol

# Windows of a call while nobody reads along.
_WINDOWS = 4


@dataclasses.dataclass(eq=False)
class Job:
  """One choice of a request, `asked`, which a row answers.

  tell(job, event): called in the thread with a Piece for each window, if asked
    for, then with the Completion, cut short if cancelled in mid-answer; or with
    the exception that ended the thread.
  arrived: when it was handed in, in seconds of time.monotonic.
  alone: no other request's job has had a row beside it.
  began, times: when it was given a row, and when its windows came.
  tokens, first: how many have come, and with the first of these windows.
  """

  asked: protocol.Asked
  index: int
  tell: Callable[['Job', Any], None]
  arrived: float
  cancelled: bool = False
  alone: bool = True
  began: float = 0.0
  times: list[float] = dataclasses.field(default_factory=list)
  tokens: int = 0
  first: int = 0


class Worker:
  """The thread, from start to stop; waiting jobs have no row, running ones
  have. error: what ended it, if not stop()."""

  def __init__(
    self,
    engine: build.Engine,
    rows: pool.Pool,
    *,
    most: int,
  ):
    """Starts nothing yet; most: jobs that may wait."""
    self.waiting: collections.deque[Job] = collections.deque()
    self.running: dict[Job, completion.Reader] = {}
    self.error: BaseException | None = None
    self._engine, self._pool, self._most = engine, rows, most
    self._stopping, self._changed = False, threading.Condition()
    self._thread = threading.Thread()

  def warm(self) -> None:
    """Compiles what the first job would wait for."""
    item = requests.item(self._engine.target, [0, 0], 0, chat=False)
    item = item._replace(new=1)
    # The last goes on in the row of one before.
    counts = 1, *(x + 1 for x in self._pool.widths[:-1]), 1
    for count in printing.track(counts, 'Compiled'):
      for i in range(count):
        self._pool.begin([i], [item])
      self._pool.advance(1)
      self._pool.take(range(count))

  def start(self, ended: Callable[[], None] = lambda: None) -> None:
    """Starts it; ended() is called as the thread ends, also by an error."""
    self._thread = threading.Thread(target=self._run, args=[ended])
    self._thread.start()

  def stop(self) -> None:
    """Refuses new jobs, and returns when the present ones have ended."""
    with self._changed:
      self._stopping = True
      self._changed.notify()
    self._thread.join()

  def submit(self, jobs: Sequence[Job]) -> None:
    """Lets jobs wait for rows; raises protocol.Refused if too many wait, or
    none will get a row any more."""
    with self._changed:
      if self._stopping or self.error:
        raise protocol.Refused('the server is about to end', 503)
      if len(self.waiting) + len(jobs) > self._most:
        raise protocol.Refused('too many requests wait: try again', 429)
      self.waiting.extend(jobs)
      self._changed.notify()

  # --- in the thread ---------------------------------------------------------

  def _run(self, ended: Callable[[], None]) -> None:
    try:
      while self._has_work():
        self._drop()
        self._begin()
        self._advance()
    except BaseException as error:
      with self._changed:
        self.error = error
        left = [*self.running, *self.waiting]
      for job in left:
        job.tell(job, error)
      raise
    finally:
      ended()

  def _has_work(self) -> bool:
    """Waits for work; False if there is none and none will come."""
    with self._changed:
      idle = lambda: not self.waiting and not self.running
      self._changed.wait_for(lambda: self._stopping or not idle())
      return not idle()

  def _drop(self) -> None:
    """Frees cancelled jobs' rows."""
    with self._changed:
      for job in [x for x in self.waiting if x.cancelled]:
        self.waiting.remove(job)
    gone = [job for job in self.running if job.cancelled]
    self._end([job for job in gone if job.times])  # so that it is counted
    if left := [job for job in gone if not job.times]:
      self._pool.cancel(left)
      for job in left:
        del self.running[job]

  def _begin(self) -> None:
    """Gives rows to the jobs that have waited longest."""
    tokenizer = self._engine.target.tokenizer
    while self.waiting and self._pool.free:
      # One where a prompt may go on from what a row has.
      count = min(self._pool.part, self._pool.free, len(self.waiting))
      jobs = [self.waiting.popleft() for _ in range(count)]
      for job in jobs:
        job.began, stop = time.monotonic(), job.asked.settings.stop
        self.running[job] = completion.Reader(tokenizer, stop)
      items = [job.asked.items[job.index] for job in jobs]
      # One chunk, so that many short prompts begin together.
      self._pool.begin(jobs, items, 1)
    if len({id(job.asked) for job in self.running}) > 1:
      for job in self.running:
        job.alone = False

  def _advance(self) -> None:
    """Decodes a window, or a few, and tells the jobs what came."""
    if not self.running:
      return
    # The time of its first token is waited for as well.
    follow = any(job.asked.stream or not job.times for job in self.running)
    ended = set(self._pool.advance(1 if follow else _WINDOWS))
    now = time.monotonic()
    for job, (*told, refused_K) in self._pool.news().items():
      told += [refused_K] * job.asked.stream  # nobody else is told
      reader = self.running[job]
      piece = reader.piece(*told, last=job in ended)
      if reader.stopped:  # the row itself knows no stop strings
        ended.add(job)
      job.times.append(now)
      job.tokens += len(piece.tokens)
      job.first = job.first or job.tokens
      if job.asked.stream:
        job.tell(job, piece)
    self._end([job for job in self.running if job in ended])

  def _end(self, jobs: Sequence[Job]) -> None:
    """Frees jobs' rows, and tells these what their rows have."""
    for job, row in zip(jobs, self._pool.take(jobs), strict=True):
      how = self._engine, job.asked.settings
      answer = api.completion_of(*how, row, self.running[job])
      del self.running[job]
      job.tell(job, answer)
