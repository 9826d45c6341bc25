"""What official clients send unasked: clients/*.json, of clients/record.py."""

import json
import pathlib

import pytest

from specdec_jax import pool
from specdec_jax.serve import protocol
from tests.serve import loopback, small

CALLS = [
  call
  for path in sorted(pathlib.Path(__file__).parent.glob('clients/*.json'))
  for call in json.loads(path.read_text())
]
LENGTH = 320  # of a row: LangChain asks for 256 tokens
TOKENS = 24  # of an answer without a limit, which would fill its row


@pytest.fixture(scope='module')
def client():
  served = small.served()._replace(context=LENGTH)
  stops = len(small.engine().target.tokenizer.eos_ids) + protocol.STOPS
  sizes = dict(length=LENGTH + small.GAMMA, sources=LENGTH, stops=stops)
  rows = pool.Pool.of(small.engine(), rows=small.ROWS, **sizes)
  with loopback.running(rows, served) as (found, _):
    yield found


def named(call):
  return f'{call["client"]}: {call["call"]}'


@pytest.mark.parametrize('call', CALLS, ids=named)
def test_what_clients_send_is_answered(client, call):
  body = call['body']
  chat, limits = 'messages' in body, ('max_tokens', 'max_completion_tokens')
  if chat and not any(x in body for x in limits):
    # All that was said is read; the answer is cut short to save time.
    body = body | {'max_tokens': TOKENS}
  how = dict(content=json.dumps(body), headers=call['headers'])
  with client.stream('POST', call['path'], **how) as reply:
    assert reply.status_code == 200, reply.read()
    if body.get('stream'):
      check_stream(loopback.events(reply), body, chat=chat)
      return
    found = json.loads(reply.read())
  check_choices(found['choices'], body, chat=chat)
  kind = 'chat.completion' if chat else 'text_completion'
  assert found['object'] == kind
  usage = found['usage']
  total = usage['prompt_tokens'] + usage['completion_tokens']
  assert usage['total_tokens'] == total > 2


def check_choices(choices, body, *, chat):
  prompts = body.get('prompt', '')
  several = len(prompts) if isinstance(prompts, list) else 1
  assert len(choices) == several * body.get('n', 1)
  for index, choice in enumerate(choices):
    assert choice['index'] == index
    assert choice['finish_reason'] in ('stop', 'length')
    said = choice['message'] if chat else choice
    assert isinstance(said['content' if chat else 'text'], str)
    if chat:
      assert said['role'] == 'assistant'
    if not body.get('logprobs'):
      assert choice['logprobs'] is None
    elif chat:
      for place in choice['logprobs']['content']:
        assert {'token', 'logprob', 'bytes'} < place.keys()
        names = [x['token'] for x in place['top_logprobs']]
        assert len({*names}) == body['top_logprobs']
    else:
      likely = choice['logprobs']['top_logprobs']
      assert {len(x) for x in likely} == {body['logprobs']}


def check_stream(chunks, body, *, chat):
  asked = body.get('stream_options', {}).get('include_usage')
  assert ('usage' in chunks[-1]) == bool(asked)
  chunks = chunks[: len(chunks) - bool(asked)]
  kind = 'chat.completion.chunk' if chat else 'text_completion'
  assert {x['object'] for x in chunks} == {kind}
  choices = [x['choices'][0] for x in chunks]
  assert choices[0]['delta']['role'] == 'assistant'
  assert all(isinstance(x['delta']['content'], str) for x in choices)
  *before, last = [x['finish_reason'] for x in choices]
  assert {*before} <= {None} and last in ('stop', 'length')


def test_three_clients_were_recorded():
  clients = {call['client'].split()[0] for call in CALLS}
  assert clients == {'openai', 'langchain-openai', 'litellm'}
  for client in clients:
    own = [x for x in CALLS if x['client'].split()[0] == client]
    assert any(x['body'].get('stream') for x in own)
    assert {'/v1/completions', '/v1/chat/completions'} == {
      x['path'] for x in own
    }
