"""A server on a port of this machine, for a test's time."""

import contextlib
import json
import socket
import threading

import httpx2

from specdec_jax.serve import app, worker
from tests.serve import small


@contextlib.contextmanager
def running(rows, served=None, *, waiting: int = small.WAITING, **limits):
  """Yields a client of a server of the tiny model, and its Worker."""
  served = served or small.served()
  work = worker.Worker(served.engine, rows, most=waiting)
  server = app.Server(served, work, **limits)
  listening = socket.create_server(('127.0.0.1', 0))
  http = server.http
  thread = threading.Thread(target=http.run, kwargs={'sockets': [listening]})
  work.start()
  thread.start()
  url = f'http://127.0.0.1:{listening.getsockname()[1]}'
  try:
    with httpx2.Client(base_url=url, timeout=None, trust_env=False) as client:
      yield client, work
  finally:
    http.should_exit = True
    thread.join()
    work.stop()


def events(response) -> list:
  """The data of server-sent events; the last of them is [DONE]."""
  # A stream that waits has comments.
  lines = [x for x in response.iter_lines() if x and x != ': waiting']
  assert all(x.startswith('data: ') for x in lines), lines
  *found, last = [x.removeprefix('data: ') for x in lines]
  assert last == '[DONE]'
  return [json.loads(x) for x in found]
