"""Errors in the protocol's form, pages of other origins, streams that wait."""

import json
import threading

import pytest

from specdec_jax import pool, requests
from specdec_jax.serve import protocol
from specdec_jax.serve import worker as worker_lib
from tests.serve import app_test, loopback, small
from tests.serve.app_test import CHAT, HOW, TEXT, until

client, server = app_test.client, app_test.server  # fixtures
ORIGIN = 'http://localhost:5173'
JSON = app_test.JSON


@pytest.mark.parametrize(
  'method, path, more, status, said',
  [
    ('GET', '/v1/nothing', {}, 404, 'GET /v1/nothing: Not Found'),
    ('POST', '/v1/models', {}, 405, 'POST /v1/models: Method Not Allowed'),
    ('GET', '/v1/completions', {}, 405, 'GET /v1/completions: Method'),
    (
      'POST', '/v1/completions', dict(json=TEXT | dict(model='other')), 404,
      "this server has 'tiny'",
    ),
    (
      'POST', '/v1/completions', dict(content=b'{', headers=JSON), 400,
      'the body is not JSON',
    ),
    (
      'POST', '/v1/completions', dict(content=b'{"prompt": "a"}'), 415,
      'Content-Type: must be application/json',
    ),
    (
      'POST', '/v1/chat/completions', dict(data={'messages': 'a'}), 415,
      'Content-Type: must be application/json',
    ),
    (
      'POST', '/v1/completions', dict(content=b' ' * 9_999, headers=JSON), 413,
      'the body has over 5000 bytes',
    ),
  ],
)  # fmt: skip
def test_errors_have_the_form_of_the_protocol(
  client, method, path, more, status, said
):
  reply = client.request(method, path, **more)
  assert reply.status_code == status
  about = reply.json()['error']
  assert said in about['message'] and about['code'] == status
  assert about['type'] == 'invalid_request_error'
  assert {*about} == {'message', 'type', 'param', 'code'}
  if status == 405:
    assert reply.headers['allow'] in ('GET, HEAD', 'HEAD, GET', 'POST')


def test_what_fails_in_the_server_has_the_form_too(client, monkeypatch):
  def broken(*_, **__):
    raise KeyError('a mistake of ours')

  monkeypatch.setattr(protocol, 'read', broken)
  # The server closes the connection behind it.
  reply = client.post(
    '/v1/completions', json=TEXT, headers={'connection': 'close'}
  )
  assert reply.status_code == 500
  assert reply.json()['error']['type'] == 'server_error'


def test_a_charset_of_the_body_is_no_other_kind(client):
  kind = {'content-type': 'Application/JSON; charset=utf-8'}
  raw = json.dumps(TEXT | dict(max_tokens=1))
  reply = client.post('/v1/completions', content=raw, headers=kind)
  assert reply.status_code == 200


def preflight(client, origin):
  asked = {
    'Origin': origin,
    'Access-Control-Request-Method': 'POST',
    'Access-Control-Request-Headers': 'content-type,x-speculation',
  }
  return client.options('/v1/chat/completions', headers=asked)


def test_no_page_of_another_origin_may_ask(client):
  found = preflight(client, ORIGIN)
  assert found.status_code == 204 and found.headers['allow'] == 'POST'
  body = TEXT | dict(max_tokens=1)
  reply = client.post('/v1/completions', json=body, headers={'Origin': ORIGIN})
  for headers in (found.headers, reply.headers):
    assert not [x for x in headers if x.startswith('access-control')]
  # What a page may send unasked is refused before it is read.
  for kind in ('text/plain', 'text/plain; application/json'):
    how = dict(content=json.dumps(body), headers={'content-type': kind})
    assert client.post('/v1/completions', **how).status_code == 415


def test_pages_of_named_origins_may_ask():
  limits = dict(origins=[ORIGIN], key='s')
  with loopback.running(app_test.Stuck(), **limits) as (client, _):
    found = preflight(client, ORIGIN)
    assert found.status_code == 200
    assert found.headers['access-control-allow-origin'] == ORIGIN
    assert 'POST' in found.headers['access-control-allow-methods']
    allowed = found.headers['access-control-allow-headers']
    assert 'x-speculation' in allowed and 'content-type' in allowed
    other = preflight(client, 'http://other')
    assert 'access-control-allow-origin' not in other.headers
    # A refusal can be read there, too.
    refused = client.get('/v1/models', headers={'Origin': ORIGIN})
    assert refused.status_code == 401
    assert refused.headers['access-control-allow-origin'] == ORIGIN


class Held(pool.Pool):
  """Rows that decode nothing until they are let go."""

  def __init__(self, *args, **more):
    super().__init__(*args, **more)
    self.go = threading.Event()

  def advance(self, most):
    return super().advance(most) if self.go.wait(0.01) else []


@pytest.mark.parametrize('where', ['completions', 'chat/completions'])
def test_a_stream_that_waits_says_so(where):
  rows = small.rows(Held)
  body = (CHAT if 'chat' in where else TEXT) | HOW | dict(stream=True)
  with loopback.running(rows, silence=0.02) as (client, _):
    with client.stream('POST', f'/v1/{where}', json=body) as reply:
      lines = reply.iter_lines()
      waited = [next(lines) for _ in range(4)]
      rows.go.set()
      events = [x for x in lines if x and x != ': waiting']
    assert waited == [': waiting', ''] * 2
    assert events[-1] == 'data: [DONE]' and len(events) > 2
    # A whole answer is JSON alone.
    whole = client.post(f'/v1/{where}', json=body | dict(stream=False))
    assert whole.json()['choices']


# --- the worker --------------------------------------------------------------


def jobs(tell, **more):
  raw = json.dumps(TEXT | HOW | more).encode()
  asked = protocol.read(raw, small.served(), chat=False, plain=False)
  indices = range(len(asked.items))
  return [worker_lib.Job(asked, i, tell, 0.0) for i in indices]


def test_an_end_answers_what_waits_for_a_row():
  told, rows = [], small.rows(Held)
  work = worker_lib.Worker(small.engine(), rows, most=9)
  work.submit(jobs(lambda job, _: told.append(job.index), n=5))
  work.start()
  ending = threading.Thread(target=work.stop)
  ending.start()
  until(lambda: work._stopping and work.waiting)
  rows.go.set()
  ending.join()
  assert sorted(told) == [*range(5)]
  with pytest.raises(protocol.Refused, match='about to end'):
    work.submit([])


def test_two_requests_that_overlap_are_both_not_alone():
  told, rows = [], small.rows(Held)
  work = worker_lib.Worker(small.engine(), rows, most=9)
  tell = lambda job, _: told.append(job)
  first, second, third = (jobs(tell, n=n, max_tokens=3) for n in (1, 1, 2))
  work.start()
  work.submit(first)
  until(lambda: work.running)
  work.submit(second)
  until(lambda: len(work.running) == 2)
  rows.go.set()
  until(lambda: len(told) == 2)
  work.submit(third)
  work.stop()
  assert [x.alone for x in first + second] == [False, False]
  # Choices of one request are no company.
  assert [x.alone for x in third] == [True, True]


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_decoder_that_fails_tells_who_waits():
  told, rows = [], app_test.Stuck()
  work = worker_lib.Worker(small.engine(), rows, most=9)
  tell = lambda job, event: told.append((job, type(event)))
  both = jobs(tell) + jobs(tell)
  work.submit(both)
  work.start()
  until(lambda: work.running and work.waiting)
  rows.left.set()
  work._thread.join()
  assert told == [(job, RuntimeError) for job in both]


def test_each_choice_of_a_stream_has_a_role(client):
  body = CHAT | HOW | dict(n=2)
  chunks = app_test.stream(client, body, 'chat/completions')
  choices = [x['choices'][0] for x in chunks]
  for index in range(2):
    own = [x['delta'] for x in choices if x['index'] == index]
    roles = [x.get('role') for x in own]
    assert roles == ['assistant'] + [None] * (len(own) - 1)


def test_the_usage_of_a_source_is_its_tokens():
  item = requests.Item((0,), 0, source=(5, 6, 7, 1))
  raw = json.dumps(TEXT | dict(n=2)).encode()
  asked = protocol.read(raw, small.served(), chat=False, plain=False)
  asked = asked._replace(items=[item, item])
  assert protocol.usage(asked, [])['prompt_tokens'] == 4
