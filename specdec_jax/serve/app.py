"""Serves HTTP: OpenAI's endpoints, streams, limits, and its end."""

import asyncio
import contextlib
import functools
import hmac
import json
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import prometheus_client
import uvicorn
from starlette import applications, exceptions, requests, responses, routing
from starlette.middleware import cors

from specdec_jax import build, completion, pool, printing, show
from specdec_jax.io import files
from specdec_jax.serve import meters as meters_lib
from specdec_jax.serve import protocol
from specdec_jax.serve import worker as worker_lib


class Server:
  """The endpoints; `http` listens for what they answer."""

  def __init__(
    self,
    served: protocol.Served,
    worker: worker_lib.Worker,
    *,
    record: str = '',
    key: str = '',
    seconds: float = 600.0,
    silence: float = 3.0,
    body: int = 1 << 20,
    origins: Sequence[str] = (),
  ):
    """Opens the record.

    record: a JSONL file that answers are added to; '' for none.
    key: the API key that a request needs; '' for none.
    seconds: for a request, until it is answered.
    silence: seconds after which a waiting stream gets a comment.
    body: a request's bytes, at most.
    origins: other pages that may ask; '*' for all.
    """
    self._served, self._worker, self._key = served, worker, key
    self._seconds, self._silence, self._most = seconds, silence, body
    why = f'record {record}: its last line is no text: name another'
    self._record = files.Lines(record, why).open() if record else None
    self._meters = meters_lib.Meters(served.name, worker)
    partial = functools.partial
    routes = (
      ('POST', '/v1/chat/completions', partial(self._answer, chat=True)),
      ('POST', '/v1/completions', partial(self._answer, chat=False)),
      ('GET', '/v1/models', self._models),
      ('GET', '/health', self._health),
      ('GET', '/', lambda _: responses.FileResponse(show.PAGE)),
      ('GET', '/metrics', self._metrics),
    )
    app = applications.Starlette(
      routes=[routing.Route(at, run, methods=[x]) for x, at, run in routes],
      exception_handlers=dict.fromkeys(
        (protocol.Refused, exceptions.HTTPException, Exception), _refuse
      ),
    )
    if origins:
      any_ = dict.fromkeys(('allow_methods', 'allow_headers'), ['*'])
      app.add_middleware(cors.CORSMiddleware, allow_origins=origins, **any_)
    config = uvicorn.Config(
      app,
      log_level='warning',
      lifespan='off',
      # At its end no client is waited for longer than it may take.
      timeout_graceful_shutdown=math.ceil(seconds) + 1,
    )
    self.http = uvicorn.Server(config)

  async def _models(self, request: requests.Request) -> responses.Response:
    self._check_key(request)
    return _json(protocol.models(self._served))

  async def _health(self, request: requests.Request) -> responses.Response:
    if self._worker.error:
      raise protocol.Refused('the decoder has failed: start it again', 503)
    return _json({'status': 'ok'})

  async def _metrics(self, request: requests.Request) -> responses.Response:
    kind = {'content-type': prometheus_client.CONTENT_TYPE_LATEST}
    return responses.Response(self._meters.text(), headers=kind)

  async def _answer(
    self, request: requests.Request, *, chat: bool
  ) -> responses.Response:
    arrived = time.monotonic()
    self._check_key(request)
    plain = request.headers.get('x-speculation', 'on')
    if plain not in ('on', 'off'):
      raise protocol.Refused('X-Speculation: must be on or off')
    kind = request.headers.get('content-type', '').lower()
    if not kind.startswith('application/json'):
      raise protocol.Refused('Content-Type: must be application/json', 415)
    body = await self._body(request, arrived)
    # In a thread, for a long prompt takes a while to become tokens.
    asked = await asyncio.to_thread(
      protocol.read, body, self._served, chat=chat, plain=plain == 'off'
    )
    limits = self._seconds, self._silence
    talk = _Talk(asked, arrived, limits, self._meters.add)
    self._worker.submit(talk.jobs)
    if asked.stream:
      return _Stream(talk, self._chunks(talk))
    try:
      done = await _unless_gone(request, self._whole(talk))
    finally:
      talk.leave()
    return _json(done) if done else responses.Response(status_code=499)

  def _check_key(self, request: requests.Request) -> None:
    given = request.headers.get('authorization', '')
    wanted = f'Bearer {self._key}'
    same = hmac.compare_digest(given.encode(), wanted.encode())
    if self._key and not same:
      raise protocol.Refused('want Authorization: Bearer, with the key', 401)

  async def _body(self, request: requests.Request, arrived: float) -> bytes:
    body, most = bytearray(), self._most
    try:
      async with _in_time(arrived, self._seconds, 'no whole body came'):
        async for part in request.stream():
          body += part
          if len(body) > most:
            raise protocol.Refused(f'the body has over {most} bytes', 413)
    except requests.ClientDisconnect as error:
      raise protocol.Refused('the body is not complete') from error
    return bytes(body)

  async def _whole(self, talk: '_Talk') -> dict[str, Any]:
    """An answer that is given when it is complete."""
    async for _ in self._events(talk):
      pass
    choice = functools.partial(protocol.choice, self._served, talk.asked)
    done = sorted(talk.done.items())
    choices = [choice(index, x, x.finish_reason) for index, x in done]
    head = protocol.head(talk.asked, self._served)
    return head | {'choices': choices} | self._totals(talk)

  async def _chunks(self, talk: '_Talk') -> AsyncIterator[str]:
    """An answer as server-sent events."""
    head = protocol.head(talk.asked, self._served)
    begun = set()  # choices
    try:
      async for index, event in self._events(talk):
        if event is None:
          yield ': waiting\n\n'
          continue
        piece, reason = event, None
        if isinstance(event, completion.Completion):
          piece, reason = completion.Piece('', [], []), event.finish_reason
        part = self._served, talk.asked, index, piece, reason
        choice = protocol.choice(*part, first=index not in begun)
        begun.add(index)
        yield _event(head | {'choices': [choice]})
      if talk.asked.usage:
        yield _event(head | {'choices': []} | self._totals(talk))
    except protocol.Refused as refused:
      yield _event(refused.body())
    yield 'data: [DONE]\n\n'

  async def _events(self, talk: '_Talk') -> AsyncIterator[tuple[int, Any]]:
    """(choice, Piece, Completion or, in silence, None); records what is whole.

    Raises:
      protocol.Refused: there will be no more, since it took too long, or since
        something is wrong with the model or the decoder.
    """
    while len(talk.done) < len(talk.jobs):
      index, event = await talk.next()
      if isinstance(event, completion.Completion):
        if event.finish_reason == 'non-finite':
          count, label = len(event.tokens), self._served.engine.target.label
          raise protocol.Refused(
            f'the logits of {label} are not finite after {count} tokens', 500
          )
        talk.done[index] = event
        if self._record:
          row = protocol.document(self._served, talk.asked, index, event)
          self._record.write(json.dumps(row).encode() + b'\n')
      yield index, event

  def _totals(self, talk: '_Talk') -> dict[str, Any]:
    done, gamma = [*talk.done.values()], self._served.engine.drafter.gamma
    return {
      'usage': protocol.usage(talk.asked, done),
      'metrics': meters_lib.of_answer(talk.jobs, done, gamma),
    }


class _Talk:
  """Hands the worker's events to the event loop, for one request's jobs, a
  choice each. done: complete choices, by index."""

  def __init__(self, asked: protocol.Asked, arrived: float, limits, add):
    """arrived: as in worker.Job. limits: seconds, silence. add: of Meters."""
    self.asked, self._arrived, self._add = asked, arrived, add
    self._seconds, self._silence = limits
    self.done: dict[int, completion.Completion] = {}
    self._loop, self._inbox = asyncio.get_running_loop(), asyncio.Queue()
    self.jobs = [
      worker_lib.Job(asked, i, self._tell, arrived)
      for i in range(len(asked.items))
    ]

  def _tell(self, job: worker_lib.Job, event: Any) -> None:
    if isinstance(event, completion.Completion):
      self._add(job, event.metrics)
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
      self._loop.call_soon_threadsafe(
        self._inbox.put_nowait, (job.index, event)
      )

  async def next(self) -> tuple[int, Any]:
    async with _in_time(self._arrived, self._seconds, 'not answered'):
      try:
        async with asyncio.timeout(self._silence):
          index, event = await self._inbox.get()
      except TimeoutError:
        return 0, None
    if isinstance(event, BaseException):
      raise protocol.Refused('the decoder has failed', 500) from event
    return index, event

  def leave(self) -> None:
    """Cancels what is left of the answer."""
    for job in self.jobs:
      job.cancelled = True


class _Stream(responses.StreamingResponse):
  """Sends a request's events until its client goes away."""

  def __init__(self, talk: _Talk, chunks: AsyncIterator[str]):
    super().__init__(chunks, media_type='text/event-stream')
    self._talk = talk

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._talk.leave()


@contextlib.asynccontextmanager
async def _in_time(arrived: float, seconds: float, late: str):
  """Refuses, as `late`, what takes over so many seconds from an arrival."""
  try:
    async with asyncio.timeout(arrived + seconds - time.monotonic()):
      yield
  except TimeoutError as error:
    raise protocol.Refused(f'{late} in {seconds:g} seconds', 408) from error


async def _unless_gone(request: requests.Request, answer: Coroutine) -> Any:
  """Returns the answer; None if the client goes away before."""

  async def gone():
    while (await request.receive())['type'] != 'http.disconnect':
      pass

  tasks = [asyncio.create_task(x) for x in (answer, gone())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return tasks[0].result() if tasks[0].done() else None
  finally:
    for task in tasks:
      task.cancel()


async def _refuse(request: requests.Request, error: Any):
  """Any error, in the protocol's form; OPTIONS is told what is allowed."""
  refused, headers = error, getattr(error, 'headers', None)
  if isinstance(error, exceptions.HTTPException):  # of a path or a method
    if request.method == 'OPTIONS' and error.status_code == 405:
      return responses.Response(None, 204, headers)
    sentence = f'{request.method} {request.url.path}: {error.detail}'
    refused = protocol.Refused(sentence, error.status_code)
  elif not isinstance(error, protocol.Refused):
    refused = protocol.Refused('the server has failed', 500)
  wait = {'Retry-After': '1'} if refused.status == 429 else headers
  return _json(refused.body(), refused.status, wait)


def _json(body: Any, status: int = 200, headers=None) -> responses.Response:
  # In ASCII: a refusal may quote half of a surrogate pair.
  text, kind = json.dumps(body), 'application/json'
  return responses.Response(text, status, headers, media_type=kind)


def _event(body: Any) -> str:
  return f'data: {json.dumps(body)}\n\n'


def open_server(
  engine: build.Engine,
  name: str,
  *,
  rows: int,
  length: int,
  waiting: int,
  **limits,
) -> tuple[Server, worker_lib.Worker]:
  """Makes an engine's server and what answers for it; nothing is asked yet.

  engine: if it has no costs yet, they are measured, at these rows.
  name: what requests call it.
  rows: answers decoded together.
  length: tokens for a prompt and its answer, at most.
  waiting: answers that wait for a row, at most.
  **limits: record, key, seconds, silence, body and origins, of Server.
  """
  # Where a pass costs by its width it costs by its rows, too.
  by_rows = engine.options.widths and not engine.target.layout
  few = [1] if by_rows and rows > 1 else []
  engine = build.measured(engine, rows, *few)
  target, gamma = engine.target, engine.drafter.gamma
  length = min(length, target.context)
  searched = target.start is not None or build.searches(engine)
  held = pool.Pool.of(
    engine,
    rows=(*few, rows),
    length=length + gamma,
    sources=length if searched else 0,
    stops=len(target.tokenizer.eos_ids) + protocol.STOPS,
    prefix_caching=True,
  )
  worker = worker_lib.Worker(engine, held, most=waiting)
  served = protocol.Served(name, engine, length, waiting)
  return Server(served, worker, **limits), worker


def serve(
  server: Server, worker: worker_lib.Worker, host: str, port: int
) -> None:
  """Answers until SIGINT or SIGTERM, then still what was asked; raises
  ValueError if the port cannot be had."""
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  try:
    listening = socket.create_server((host, port), family=family)
  except OSError as error:
    raise ValueError(
      f'port {port} of {host}: cannot be had ({error.strerror}): name another'
    ) from error
  http = server.http
  printing.progress_console().print('Compiling; then comes the address.')
  worker.warm()
  # uvicorn puts the handlers back and raises the signal again at its end.
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, http.handle_exit)
  worker.start(lambda: setattr(http, 'should_exit', True))
  print(f'http://{host}:{listening.getsockname()[1]}', flush=True)
  try:
    http.run(sockets=[listening])
  finally:
    worker.stop()
