"""The server over loopback, as a client sees it."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time
import types as types_lib

import hypothesis
import pytest
from hypothesis import strategies as st

import specdec_jax
from specdec_jax import build, completion, pool, requests, show, types
from specdec_jax.costs import calibration
from specdec_jax.drafters import adaptive, lookup
from specdec_jax.serve import app, meters
from specdec_jax.serve import worker as worker_lib
from specdec_jax.train import text as text_lib
from tests.serve import loopback, small

CHAT = {'messages': [{'role': 'user', 'content': 'abcabcab'}]}
TEXT = {'prompt': 'abcabcab'}
HOW = dict(max_tokens=12, temperature=0.7, seed=3)


@pytest.fixture(scope='module')
def server():
  with loopback.running(small.rows(), body=5_000) as found:
    yield found


@pytest.fixture
def client(server):
  return server[0]


def generated(prompt, **changes):
  """What the library says to a prompt asked as HOW, twice: one program.

  The prediction is in no text, and gives no draft.
  """
  asked = dict(max_new_tokens=12, temperature=0.7, seed=3, n=2, prediction='~')
  how = dict(draft='lookup', gamma=small.GAMMA, rule='coupled')
  asked |= how | changes
  return specdec_jax.generate(small.engine().target, [prompt], **asked)


def post(client, body, where='completions', **headers):
  return client.post(f'/v1/{where}', json=body, headers=headers)


def stream(client, body, where='completions', **headers):
  with client.stream(
    'POST', f'/v1/{where}', json=body | {'stream': True}, headers=headers
  ) as response:
    assert response.status_code == 200
    kind = response.headers['content-type']
    assert kind.startswith('text/event-stream')
    return loopback.events(response)


def test_a_whole_answer_is_that_of_generate(client):
  body = post(client, TEXT | HOW | dict(n=2, logprobs=1)).json()
  whole = generated(TEXT['prompt'])
  for choice, x in zip(body['choices'], whole, strict=True):
    assert (choice['text'], choice['finish_reason']) == (x.text, 'length')
    made = choice['specdec_jax']
    assert (made['tokens'], made['origins']) == (x.tokens, x.origins)
    assert ''.join(made['texts']) == x.text
    assert len(made['entropies']) == 12 and 'refused' not in made
    assert len(choice['logprobs']['token_logprobs']) == 12
  assert body['object'] == 'text_completion' and body['model'] == small.NAME
  assert body['usage'] == dict(
    prompt_tokens=8, completion_tokens=24, total_tokens=32
  )
  spec = body['metrics']['speculative_decoding']
  add = lambda name: sum(x.metrics[name] for x in whole)
  assert spec['num_draft_tokens'] == add('drafted_tokens')
  assert spec['num_accepted_draft_tokens'] == add('accepted_tokens')
  assert spec['num_spec_steps'] == sum(spec['acceptance_histogram'].values())
  assert body['metrics']['time_to_first_token_ms'] > 0


def test_a_stream_is_the_same_answer_in_pieces(client):
  options = {'stream_options': {'include_usage': True}}
  greedy = CHAT | HOW | dict(temperature=0)
  *chunks, last = stream(client, greedy | options, 'chat/completions')
  x, _ = generated(CHAT['messages'], temperature=0)
  choices = [chunk['choices'][0] for chunk in chunks]
  deltas = [choice['delta'] for choice in choices]
  assert [delta.get('role') for delta in deltas[:2]] == ['assistant', None]
  assert ''.join(delta['content'] for delta in deltas) == x.text
  for delta, choice in zip(deltas, choices, strict=True):
    assert ''.join(choice['specdec_jax']['texts']) == delta['content']
  every = lambda name: [y for z in choices for y in z['specdec_jax'][name]]
  assert (every('tokens'), every('origins')) == (x.tokens, x.origins)
  assert {*x.origins} <= {*types.ORIGINS}
  reasons = [choice['finish_reason'] for choice in choices]
  assert reasons == [None] * (len(choices) - 1) + ['length']
  assert 2 < len(chunks) < 13  # a window is a chunk
  assert last['choices'] == [] and last['usage']['completion_tokens'] == 12
  assert last['metrics']['alone'] is True
  assert len({chunk['id'] for chunk in [*chunks, last]}) == 1
  assert chunks[0]['object'] == 'chat.completion.chunk'


def test_a_stream_has_the_refused_drafts_of_each_window(client):
  *pieces, end = stream(client, TEXT | HOW)
  (x, _) = generated(TEXT['prompt'], record=True)
  wanted = [[[*pair] for pair in w.refused] for w in x.record.windows]
  made = [piece['choices'][0]['specdec_jax'] for piece in pieces]
  assert [one['refused'] for one in made] == wanted
  assert any(wanted) and not end['choices'][0]['specdec_jax']['refused']


@pytest.mark.parametrize(
  ('where', 'body'),
  [
    ('completions', TEXT | dict(logprobs=2)),
    ('chat/completions', CHAT | dict(logprobs=True, top_logprobs=2)),
  ],
)
def test_a_stream_has_the_log_probabilities_of_the_whole(client, where, body):
  (whole,) = post(client, body | HOW, where).json()['choices']
  *pieces, end = stream(client, body | HOW, where)
  assert len(pieces) > 1 and end['choices'][0]['logprobs'] is None
  said = [piece['choices'][0]['logprobs'] for piece in pieces]
  for name, values in whole['logprobs'].items():
    assert [x for piece in said for x in piece[name]] == values, name
    assert len(values) == HOW['max_tokens']


def test_without_speculation_nothing_is_drafted_and_the_text_is_the_same(
  client,
):
  """Under `coupled`, and greedily under every rule."""
  fast, plain = (
    post(client, TEXT | HOW, **{'X-Speculation': x}).json()
    for x in ('on', 'off')
  )
  assert fast['choices'][0]['text'] == plain['choices'][0]['text']
  assert {*plain['choices'][0]['specdec_jax']['origins']} == {'plain'}
  assert plain['metrics']['speculative_decoding'] is None
  assert post(client, TEXT, **{'X-Speculation': 'no'}).status_code == 400


@pytest.mark.parametrize('temperature', [0, 0.7])
def test_a_prediction_saves_calls_and_changes_no_text(client, temperature):
  asked = TEXT | HOW | dict(temperature=temperature, top_k=3)

  def ask(**more):
    found = post(client, asked | more).json()
    (choice,) = found['choices']
    calls = sum(x != 'drafted' for x in choice['specdec_jax']['origins'])
    details = found['usage'].get('completion_tokens_details', {})
    return choice['text'], calls, [*details.values()]

  text, calls, counts = ask()
  assert text.isascii() and counts == []
  wrong = ''.join(text[i : i + 2] + '~' for i in range(4))
  for guess, saves in ((text, True), (wrong, False)):
    prediction = {'type': 'content', 'content': guess}
    same, fewer, counts = ask(prediction=prediction)
    assert same == text
    assert fewer < calls if saves else counts[1] > 0
    how = dict(temperature=temperature, top_k=3, prediction=guess)
    x, _ = generated(TEXT['prompt'], **how)
    kept = x.metrics['accepted_sourced_tokens']
    assert x.text == text
    assert counts == [kept, x.metrics['sourced_tokens'] - kept]


def test_a_stop_string_ends_the_answer_in_both_forms(client):
  text = generated(TEXT['prompt'])[0].text
  at = next(i for i in range(3, 9) if text.find(text[i : i + 2]) == i)
  body = TEXT | HOW | dict(stop=text[at : at + 2])
  (choice,) = post(client, body).json()['choices']
  assert (choice['text'], choice['finish_reason']) == (text[:at], 'stop')
  *_, end = chunks = stream(client, body)
  assert ''.join(x['choices'][0]['text'] for x in chunks) == text[:at]
  assert end['choices'][0]['finish_reason'] == 'stop'


def test_many_clients_get_their_own_answers(client):
  """Seeds and limits of each, in three rows."""
  asked = [dict(seed=i, max_tokens=6 + i) for i in range(8)]

  def one(how):
    while True:  # a full queue says so
      reply = post(client, TEXT | HOW | how)
      if reply.status_code != 429:
        return reply.json()['choices'][0]['text']
      assert reply.headers['retry-after'] == '1'

  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    texts = list(threads.map(one, asked))
  for how, text in zip(asked, texts, strict=True):
    same = dict(seed=how['seed'], max_new_tokens=how['max_tokens'])
    assert text == generated(TEXT['prompt'], **same)[0].text


def test_models_health_and_metrics(client):
  (model,) = client.get('/v1/models').json()['data']
  assert (model['id'], model['chat'], model['drafter']) == ('tiny', 1, 'lookup')
  assert client.get('/health').json() == {'status': 'ok'}
  post(client, TEXT | HOW)
  text = client.get('/metrics').text
  for name in (
    'vllm:spec_decode_num_drafts_total{model_name="tiny"}',
    'vllm:spec_decode_num_draft_tokens_total{model_name="tiny"}',
    'vllm:spec_decode_num_accepted_tokens_total{model_name="tiny"}',
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",'
    'position="0"}',
    'vllm:num_requests_running{model_name="tiny"} 0.0',
    'vllm:num_requests_waiting{model_name="tiny"} 0.0',
    'vllm:time_to_first_token_seconds_count{model_name="tiny"}',
    'vllm:inter_token_latency_seconds_bucket{le="0.01",model_name="tiny"}',
  ):
    assert name in text, name


def test_a_rate_is_of_what_came_after_its_clock_began():
  """The first windows of its choices came as it began, or later."""
  made = lambda first, tokens, *times: worker_lib.Job(
    None, 0, print, 1.0, times=[*times], tokens=tokens, first=first
  )
  nothing = dict(drafted_tokens=0, accepted_tokens=0)
  done = completion.Completion('', [], [], finish_reason='', metrics=nothing)
  of = lambda *jobs: meters.of_answer(jobs, [done] * len(jobs), 4)
  found = of(made(5, 32, 2.0, 3.0, 4.0))
  assert found['tokens_per_second'] == 27 / 2
  assert found['mean_itl_ms'] == 1e3 * 2 / 31  # as vLLM has it
  both = of(made(5, 32, 2.0, 4.0), made(3, 10, 3.0, 6.0))
  assert both['tokens_per_second'] == (27 + 10) / 4
  assert both['mean_itl_ms'] == 1e3 * (2 + 3) / (31 + 9)
  assert of(made(5, 5, 2.0))['tokens_per_second'] is None


class Seen(pool.Pool):
  """Rows that know how many windows were asked for."""

  asked = ()

  def advance(self, most):
    self.asked = [*self.asked, most]
    return super().advance(most)


def test_the_first_token_of_a_whole_answer_is_timed_with_its_window():
  rows = small.rows(Seen)
  with loopback.running(rows) as (client, _):
    post(client, TEXT | HOW, **{'X-Speculation': 'off'})
    text = client.get('/metrics').text
  assert rows.asked == [1, 4, 4, 4]
  # Between windows, of which a call has four.
  count = 'inter_token_latency_seconds_count{model_name="tiny"} 11.0'
  assert count in text


@pytest.fixture
def clock(monkeypatch):
  """A function that puts the server's clock forward, by seconds."""
  ahead = []
  now = lambda: time.monotonic() + sum(ahead)
  monkeypatch.setattr(app, 'time', types_lib.SimpleNamespace(monotonic=now))
  return ahead.append


class Deserted(pool.Pool):
  """Rows that go on, after a window, when nobody reads them any more."""

  def advance(self, most):
    if any(job.times for job in self._row):
      until(lambda: all(job.cancelled for job in self._row))
    return super().advance(most)


@pytest.mark.parametrize('late', [True, False])
def test_what_is_cancelled_is_counted_too(late, clock):
  """By its client, or as it takes too long."""
  rows, body = small.rows(Deserted), TEXT | HOW
  body |= dict(max_tokens=50, stream=True)
  with loopback.running(rows, silence=0.05) as (client, worker):
    with client.stream('POST', '/v1/completions', json=body) as reply:
      lines = reply.iter_lines()
      next(x for x in lines if x.startswith('data: '))
      if late:
        clock(1e3)
        assert 'not answered in 600 seconds' in ''.join(lines)
    until(lambda: not worker.running)
    lines = client.get('/metrics').text.splitlines()
  count = lambda name: float(
    next(x for x in lines if x.startswith(f'vllm:{name}')).split()[-1]
  )
  assert 1 < count('generation_tokens_total') < 50
  assert count('spec_decode_num_drafts_total') > 0
  assert count('time_to_first_token_seconds_count') == 1


JSON = {'content-type': 'application/json'}


def test_the_key_is_asked_for():
  with loopback.running(small.rows(), key='s3cret') as (other, _):
    assert other.get('/health').status_code == 200
    page = other.get('/')
    assert page.headers['content-type'] == 'text/html; charset=utf-8'
    assert page.text == show.PAGE.read_text('utf-8')
    for headers in ({}, {'Authorization': 'Bearer other'}):
      reply = other.get('/v1/models', headers=headers)
      assert reply.status_code == 401
      assert reply.json()['error']['code'] == 401
      assert post(other, TEXT, **headers).status_code == 401
    good = {'Authorization': 'Bearer s3cret'}
    assert other.get('/v1/models', headers=good).status_code == 200


def test_answers_are_recorded_as_texts_to_train_with(tmp_path):
  """Behind those that a killed server has left whole."""
  file = tmp_path / 'texts.jsonl'
  file.write_bytes(b'{"text": "whole"}\n{"text": "to')
  with loopback.running(small.rows(), record=str(file)) as (client, _):
    guess = {'type': 'content', 'content': 'abc'}
    post(client, TEXT | HOW | dict(n=2, prediction=guess))
    assert post(client, TEXT | dict(min_p=1)).status_code == 400
    stream(client, CHAT | HOW, 'chat/completions')
  whole = [*generated(TEXT['prompt']), generated(CHAT['messages'])[0]]
  prompts = 'abcabcab', 'abcabcab', 'user: abcabcab\n'
  tokenizer = small.engine().target.tokenizer
  said = [tokenizer.decode(x.tokens, special=True) for x in whole]
  texts = [x + y for x, y in zip(prompts, said, strict=True)]
  found = text_lib.read(str(file), field='text').documents
  assert sorted(found) == sorted([*texts, 'whole'])
  file.write_text('# Notes')
  with pytest.raises(ValueError, match='its last line is no text: name anoth'):
    opened(small.engine(), record=str(file))
  assert file.read_text() == '# Notes'
  file.write_text(line := '{"text": "whole but for its end"}')
  opened(small.engine(), record=str(file))
  assert file.read_text() == f'{line}\n'


def opened(engine, rows=1, **limits):
  sizes = dict(rows=rows, length=32, waiting=1)
  return app.open_server(engine, 'tiny', **sizes, **limits)


class Stuck:
  """One row that never says anything, until it is let go, and fails."""

  part = rows = free = 1

  def __init__(self):
    self.left, self.cancelled = threading.Event(), []

  def begin(self, tickets, items, most):
    self.free = 0

  def advance(self, most):
    if self.left.wait(0.01):
      raise RuntimeError('let go')
    return []

  def news(self):
    return {}

  def take(self, tickets):
    return []

  def cancel(self, tickets):
    self.free = 1
    self.cancelled += tickets


@contextlib.contextmanager
def stuck(**limits):
  """(client, worker, rows) of a server that answers nothing."""
  rows = Stuck()
  with loopback.running(rows, waiting=1, **limits) as found:
    try:
      yield *found, rows
    finally:
      rows.left.set()


def until(there):
  for _ in range(20_000):  # longer than any load
    if there():
      return
    time.sleep(0.01)
  raise AssertionError('it never came')


def test_a_client_that_goes_away_frees_its_row():
  with stuck() as (client, worker, rows):
    for body in (TEXT, TEXT | dict(stream=True)):
      rows.cancelled.clear()
      raw = json.dumps(body)
      with socket.create_connection(where(client)) as connection:
        length = f'Content-Length: {len(raw)}\r\n\r\n'
        connection.sendall((HEAD + length + raw).encode())
        until(lambda: worker.running)
      until(lambda: rows.cancelled)
      until(lambda: not worker.running)


HEAD = (
  'POST /v1/completions HTTP/1.1\r\nHost: x\r\n'
  'Content-Type: application/json\r\n'
)


def where(client):
  return client.base_url.host, client.base_url.port


def test_time_limit_and_full_queue(clock):
  with stuck(silence=0.05) as (client, worker, _):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
      first = threads.submit(post, client, TEXT)
      until(lambda: worker.running)
      second = threads.submit(stream, client, TEXT)
      until(lambda: worker.waiting)
      full = post(client, TEXT)
      assert (full.status_code, full.headers['retry-after']) == (429, '1')
      clock(1e3)
      late = first.result()
      assert late.status_code == 408
      assert late.json()['error']['message'] == 'not answered in 600 seconds'
      (event,) = second.result()
      assert event['error']['code'] == 408
    until(lambda: not worker.running and not worker.waiting)


def test_a_body_that_does_not_come_is_refused_in_time():
  with stuck(seconds=0.5) as (client, _, _):
    with socket.create_connection(where(client)) as half:
      half.sendall(f'{HEAD}Content-Length: 9\r\n\r\n{{"pr'.encode())
      found = b''
      while b'seconds' not in found:
        found += (new := half.recv(1 << 16))
        assert new, found
  assert found.startswith(b'HTTP/1.1 408 ')
  assert b'no whole body came in 0.5 seconds' in found


class Broken(Stuck):
  """Rows whose device is lost."""

  def advance(self, most):
    raise RuntimeError('device lost')


@pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnhandledThreadExceptionWarning'
)
def test_a_decoder_that_fails_is_said():
  with loopback.running(Broken()) as (client, _):
    reply = post(client, TEXT)
    assert reply.status_code == 500
    assert reply.json()['error']['message'] == 'the decoder has failed'
    assert client.get('/health').status_code == 503
    assert post(client, TEXT).status_code == 503


class Odd(pool.Pool):
  """Rows in which the logits of one seed were not finite."""

  def take(self, tickets):
    bad = [job.asked.settings.seed == 13 for job in tickets]
    found = zip(bad, super().take(tickets), strict=True)
    return [x._replace(reason='non-finite') if y else x for y, x in found]


def test_logits_that_are_not_finite_end_one_request(client):
  bad = TEXT | HOW | dict(seed=13)
  with loopback.running(small.rows(Odd)) as (odd, _):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
      other = threads.submit(post, odd, TEXT | HOW)
      reply = post(odd, bad)
    assert reply.status_code == 500
    said = reply.json()['error']['message']
    assert 'not finite after 12 tokens' in said
    *_, error = stream(odd, bad)
    assert error['error']['type'] == 'server_error'
  whole = generated(TEXT['prompt'])[0]
  assert other.result().json()['choices'][0]['text'] == whole.text


def test_no_answer_waits_for_a_program():
  """Alone in a window of one row, beside others, or after what was said."""
  rows, engine = small.rows(prefix_caching=True), small.engine()
  work = worker_lib.Worker(engine, rows, most=small.WAITING)
  work.warm()
  parts = *engine.programs, rows._put, pool._resumed
  sizes = lambda: [x._cache_size() for x in parts]
  before, item = sizes(), requests.Item([1, 2], 0, new=3)
  for count in (1, 2, small.ROWS, 1):
    for i in range(count):
      rows.begin([i], [item], 1)
    while len(rows.ended) < count:
      rows.advance(1)
    rows.take(range(count))
  assert rows.widths == [1, small.ROWS] and sizes() == before


def test_an_address_that_is_not_here_is_refused():
  server = opened(small.engine())
  with pytest.raises(ValueError, match='of nowhere.invalid: cannot be had'):
    app.serve(*server, 'nowhere.invalid', 0)


def test_an_adaptive_drafter_chooses_by_the_costs_of_its_rows(monkeypatch):
  costs = lambda rows: dict.fromkeys(('verify', 'lookup'), [rows, rows + 0.1])
  measured = lambda engine, rows: costs(rows)
  monkeypatch.setattr(calibration, 'measure', measured)
  target = small.engine().target
  draft = adaptive.Settings(lookup.Settings())
  engine = build.engine(target, draft, gamma=1, measure=False)
  server, worker = opened(engine, rows=5)
  assert server._served.engine.costs == costs(5) | {'few': {'1': costs(1)}}
  own = worker._pool._weights.draft
  assert [x.verify_N[0] for x in (own.costs, own.few[1])] == [5, 1]
  assert worker._pool._sizes['sources'] == 32  # for predictions
  assert worker._pool.widths == [1, 5]


# --- fuzzed bodies -----------------------------------------------------------

NAMES = (
  'model', 'prompt', 'messages', 'max_tokens', 'max_completion_tokens', 'n',
  'temperature', 'top_p', 'top_k', 'seed', 'stop', 'stream', 'stream_options',
  'logprobs', 'top_logprobs', 'min_p', 'logit_bias', 'presence_penalty', 'best',
  'prediction',
)  # fmt: skip
VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-3, 70)
  | st.integers()
  | st.floats()
  | st.text(max_size=5)
  | st.sampled_from(['tiny', '\ud800', 'assistant', 'a' * 70]),
  lambda x: (
    st.lists(x, max_size=4)
    | st.dictionaries(st.sampled_from(['role', 'content', 'a']), x, max_size=3)
  ),
  max_leaves=6,
)
GOOD = st.fixed_dictionaries(
  {'max_tokens': st.integers(1, 3)},
  optional=dict(
    prompt=st.text(min_size=1, max_size=5)
    | st.lists(st.integers(0, 257), min_size=1, max_size=4),
    messages=st.just(CHAT['messages']),
    temperature=st.floats(0, 3),
    stream=st.booleans(),
  ),
)
BODIES = st.builds(
  lambda good, bad: json.dumps(good | bad).encode(),
  GOOD,
  st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
) | st.binary(max_size=20)


@hypothesis.settings(
  max_examples=200,
  derandomize=True,
  deadline=None,
  suppress_health_check=[*hypothesis.HealthCheck],
  database=None,
)
@hypothesis.given(
  body=BODIES, where=st.sampled_from(['completions', 'chat/completions'])
)
def test_any_body_is_answered_or_refused_in_a_sentence(client, body, where):
  how = dict(content=body, headers=JSON)
  with client.stream('POST', f'/v1/{where}', **how) as reply:
    if reply.headers['content-type'].startswith('text/event-stream'):
      assert all('error' not in x for x in loopback.events(reply))
      return
    reply.read()
  found = reply.json()
  if reply.status_code == 200:
    assert found['choices']
    return
  assert 400 <= reply.status_code < 500
  sentence = found['error']['message']
  assert sentence and '\n' not in sentence and len(sentence) < 500
