"""What bodies ask for, and which are refused: one sentence and a status."""

import json
import types
from typing import Any

import pytest

from specdec_jax import build, completion
from specdec_jax.serve import protocol
from tests.io import stream_test
from tests.serve import small

USER = {'role': 'user', 'content': 'Hi'}
CHAT, TEXT = {'messages': [USER]}, {'prompt': 'Hi'}


def read(body, *, plain=False, logprobs=2):
  raw = body if isinstance(body, bytes) else json.dumps(body).encode()
  chat = b'messages' in raw and b'"prompt":' not in raw
  return protocol.read(raw, small.served(logprobs), chat=chat, plain=plain)


def test_defaults_are_those_of_openai():
  text, chat = read(TEXT), read(CHAT)
  assert [x.new for x in text.items] == [16]
  room = small.LENGTH - len(chat.items[0].tokens)
  assert [x.new for x in chat.items] == [room]
  for asked in (text, chat):
    wanted = asked.items[0]
    how = wanted.sampling
    assert (how.temperature, how.top_k, how.top_p) == (1.0, 0, 1.0)
    assert not asked.stream and not asked.usage and asked.top is None
  assert text.chat is False and chat.chat is True
  assert read(TEXT).settings.seed != read(TEXT).settings.seed


def test_what_is_asked_for_reaches_the_row():
  body = TEXT | dict(
    model=small.NAME, temperature=0.5, top_k=3, top_p=0.9, seed=7, n=2,
    max_tokens=5, stop=['ab', '<bos>'], stream=True,
    stream_options={'include_usage': True}, presence_penalty=0.0,
    repetition_penalty=1, logit_bias={}, frequency_penalty=None,
  )  # fmt: skip
  asked = read(body, plain=True)
  tokenizer = small.engine().target.tokenizer
  for wanted in asked.items:
    assert (wanted.new, wanted.drafts) == (5, 0)
    how = wanted.sampling
    assert (how.temperature, how.top_k, how.top_p) == (0.5, 3, 0.9)
    assert how.seed == 7
    assert {*wanted.stop_ids} == {*tokenizer.eos_ids, tokenizer.bos_id}
  one, two = asked.items
  assert one.tokens == two.tokens == tokenizer.encode('Hi')
  assert one.number != two.number
  assert asked.stream and asked.usage
  assert read(body).items[0].drafts > 100


def test_a_conversation_goes_through_the_template():
  same = dict(max_tokens=3, seed=1)
  asked = read({'messages': [{**USER, 'refusal': None}], **same})
  text = small.engine().target.tokenizer.decode(asked.items[0].tokens)
  assert text == 'user: Hi\n'
  same = dict(max_completion_tokens=3, seed=1)
  assert read({'messages': [USER], **same}).items == asked.items
  assert asked.items[0].new == 3


@pytest.mark.parametrize(
  ('prompt', 'tokens'),
  [
    ('a', [[97]]),
    (['a', 'b'], [[97], [98]]),
    ([97, 98], [[97, 98]]),
    ([[97], [98, 99]], [[97], [98, 99]]),
  ],
)
def test_forms_of_a_prompt(prompt, tokens):
  assert [x.tokens for x in read({'prompt': prompt}).items] == tokens


NOTHING = [
  *(dict.fromkeys((x,), 0.0) for x in ('presence_penalty', 'min_p')),
  *({x: 'some'} for x in ('user', 'safety_identifier', 'prompt_cache_key')),
  *({x: y} for x in ('tool_choice', 'function_call') for y in ('none', 'auto')),
  *(dict(service_tier=x) for x in ('auto', 'default')),
  *(dict(parallel_tool_calls=x) for x in (True, False)),
  *({x: []} for x in ('tools', 'functions', 'stop')),
  *({x: False} for x in ('store', 'stream')),
  dict(metadata={'a': 'b'}), dict(logit_bias={}), dict(penalties=None),
  dict(repetition_penalty=1.0), dict(response_format={'type': 'text'}),
  dict(modalities=['text']), dict(verbosity='medium'), dict(top_k=-1),
  dict(max_tokens=3.0), dict(n=1.0), dict(seed=7.0), dict(top_k=0.0),
]  # fmt: skip


@pytest.mark.parametrize('more', NOTHING)
def test_what_asks_for_nothing_is_taken(more):
  """The request is that without it."""
  same = dict(max_tokens=3, seed=7)
  for body in (TEXT, CHAT):
    with_it, without = read(body | same | more), read(body | same)
    assert with_it == without and with_it.items[0].new == 3


def test_what_asks_for_nothing_in_a_message_or_a_text():
  text = dict(best_of=1, echo=False, suffix='', logprobs=None)
  assert read(TEXT | text | dict(seed=7)) == read(TEXT | dict(seed=7))
  asked = TEXT | dict(stream=True, seed=7)
  options = {'stream_options': {'include_obfuscation': False}}
  assert read(asked | options) == read(asked)
  said = dict(
    role='assistant', content='b', tool_calls=[], annotations=[], refusal=None
  )
  plain = dict(role='assistant', content='b')
  how = dict(max_tokens=3, seed=7)
  chat = lambda *x: read({'messages': [USER, *x, USER], **how})
  assert chat(said) == chat(plain)
  assert chat(plain | {'content': None}) == chat(plain | {'content': ''})


def guess(content):
  return TEXT | {'prediction': {'type': 'content', 'content': content}}


def test_a_prediction_is_searched_where_something_searches():
  assert read(guess('ab')).items[0].prediction == [97, 98]
  assert read(guess('')).items[0].prediction == ()
  plain = small.served()._replace(engine=build.engine(small.engine().target))
  body = json.dumps(guess('a')).encode()
  with pytest.raises(protocol.Refused, match='autoregressive searches none'):
    protocol.read(body, plain, chat=False, plain=False)


REFUSED = [
  (b'{', 400, 'the body is not JSON'),
  (b'\xff', 400, 'the body is not JSON'),
  (b'[' * 100_000, 400, 'the body is not JSON'),
  (b'[]', 400, 'the body must be a JSON object'),
  ({}, 400, 'prompt is missing'),
  (TEXT | dict(model='gpt'), 404, "model='gpt': this server has 'tiny'"),
  (TEXT | dict(model='\ud800'), 404, 'this server has'),
  (TEXT | dict(tool=[]), 400, "unknown setting 'tool': allowed are logprobs"),
  (TEXT | dict(tools=[{'a': 1}]), 400, 'this server does not do tools'),
  (TEXT | {'\ud800' * 99: 1}, 400, 'unknown setting <str>'),
  (TEXT | dict(messages=[]), 400, "unknown setting 'messages'"),
  (TEXT | dict(min_p=0.1), 400, 'min_p=0.1: this server does not do min_p'),
  (TEXT | dict(logit_bias={'5': 1}), 400, "logit_bias={'5': 1}: this serv"),
  (TEXT | dict(presence_penalty=True), 400, 'does not do presence_penalty'),
  (CHAT | dict(response_format={'type': 'json_object'}), 400, "t'}: this se"),
  (CHAT | dict(reasoning_effort='low'), 400, 'not do reasoning_effort'),
  (CHAT | dict(max_tokens=4.5), 400, 'max_tokens=4.5: must be'),
  (CHAT | dict(n=float('inf')), 400, 'n=inf: must be'),
  (TEXT | dict(temperature='a'), 400, "temperature='a': must be a number"),
  (TEXT | dict(temperature=10**400), 400, 'temperature=<int>: must be a num'),
  (TEXT | dict(top_k=2**63), 400, 'top_k='),  # beside 5 it would be a float
  (TEXT | dict(n=7), 400, '1 prompts with n=7: must be at most 6 choices'),
  (TEXT | dict(max_tokens=60), 400, 'max_tokens=60: no room after'),
  (
    CHAT | dict(max_tokens=3, max_completion_tokens=4),
    400,
    'max_tokens and max_completion_tokens differ',
  ),
  (TEXT | dict(stop=['a'] * 5), 400, 'stop: has 5 texts, allowed are 4'),
  (TEXT | dict(prediction='a'), 400, "prediction='a': must be {"),
  (guess(5), 400, "'content': 5}: must be {"),
  (guess('a' * 62), 413, 'the prediction has 62 tokens, the context holds 61'),
  (TEXT | dict(stream=1), 400, 'stream=1: must be true or false'),
  (TEXT | dict(stream_options={'a': 1}), 400, 'beside stream=true'),
  (
    TEXT | dict(stream=True, stream_options={'a': 1}),
    400,
    "unknown setting 'stream_options.a': allowed are include_usage",
  ),
  (TEXT | dict(logprobs=-1), 400, 'logprobs=-1: allowed are 0 to 20'),
  (TEXT | dict(logprobs=3), 400, 'keeps 2 of each token; start it with --logp'),
  (TEXT | dict(logprobs=21), 400, 'logprobs=21: allowed are 0 to 20'),
  (CHAT | dict(logprobs=1), 400, 'logprobs=1: must be true or false'),
  (CHAT | dict(top_logprobs=1), 400, 'top_logprobs=1: needs logprobs=true'),
  (dict(prompt=''), 400, 'empty prompt'),
  (dict(prompt=[1.5]), 400, 'prompt 1.5: must be a text'),
  (dict(prompt=[[USER]]), 400, 'messages go to /v1/chat/completions'),
  (dict(prompt='\ud83d'), 400, 'half of a UTF-16 surrogate pair'),
  (dict(prompt='a' * 61), 413, 'the prompt has 61 tokens, the context holds'),
  (dict(messages=[]), 400, 'messages=[]: must be a list of objects'),
  (dict(messages='Hi'), 400, "messages='Hi': must be a list of objects"),
  (dict(messages=[USER, 5]), 400, 'message 5: must be a dict'),
  (dict(messages=[{'role': 'user'}]), 400, "needs strings 'role' and"),
  (dict(messages=[USER | {'a': 1}]), 400, "unknown setting 'messages.a'"),
  (
    dict(messages=[USER | {'tool_calls': [1]}]),
    400,
    'messages.tool_calls=[1]: this server does not do messages.tool_calls',
  ),
  (dict(messages=[USER | {'content': [{'type': 'a'}]}]), 400, "of type 'a'"),
  (dict(messages=[USER | {'content': 'a' * 99}]), 413, 'the prompt has '),
]


@pytest.mark.parametrize(('body', 'status', 'said'), REFUSED)
def test_refusals_say_in_a_sentence_what_is_wrong(body, status, said):
  with pytest.raises(protocol.Refused) as found:
    read(body)
  assert found.value.status == status
  about = found.value.body()['error']
  assert said in about['message'] and len(about['message']) < 500
  assert '\n' not in about['message'] and 'max_new' not in about['message']
  assert about['type'] == 'invalid_request_error'


def test_log_probabilities_that_are_not_kept_are_refused():
  for body in (CHAT | dict(logprobs=True), TEXT | dict(logprobs=0)):
    with pytest.raises(protocol.Refused, match='start it with --logprobs=1'):
      read(body, logprobs=0)
    assert read(body).top == 0
  assert read(CHAT | dict(logprobs=True, top_logprobs=2)).top == 2
  # One likeliest token takes as much as two: 1 keeps each token's own.
  for kept in (0, 1):
    with pytest.raises(protocol.Refused, match='start it with --logprobs=2'):
      read(TEXT | dict(logprobs=1), logprobs=kept)


def test_tokens_that_differ_have_names_that_do():
  """Behind a text, as a Llama 2 joins them; bytes tell parts of one apart."""
  words = stream_test.fallback(['▁a', 'a', ' ', '▁'])  # from id 259
  target = types.SimpleNamespace(tokenizer=words)
  engine = types.SimpleNamespace(target=target)
  served: Any = types.SimpleNamespace(engine=engine)
  every = [259, 260, 3 + ord('a'), 3 + 0xE4, 3 + 0xBD, 2, 261, 262, 999, 998]
  likely = [(i, -float(n)) for n, i in enumerate(every)]
  done = completion.Completion(
    *('', [3 + ord('a'), 259], []),
    finish_reason='stop',
    metrics={},
    logprobs=[-2.0, 0.0],
    top_logprobs=[likely, likely],
  )
  names = (
    ' a', 'a', 'token_id:100', '\\xe4', '\\xbd', '</s>', ' ', 'token_id:262',
    'token_id:999', 'token_id:998',
  )  # fmt: skip
  text = protocol.logprobs(served, asked_of(chat=False), done)
  assert text['tokens'] == ['a', ' a']
  assert text['top_logprobs'][1] == {x: -float(n) for n, x in enumerate(names)}
  # What was said has its own name, whatever else was likely.
  own = [*names]
  own[1:3] = 'token_id:260', 'a'
  assert [*text['top_logprobs'][0]] == own
  chat = protocol.logprobs(served, asked_of(chat=True), done)['content']
  assert [x['token'] for x in chat[1]['top_logprobs']] == [*names]
  raw = [x['bytes'] for x in chat[1]['top_logprobs']]
  assert raw[:5] == [[32, 97], [97], [97], [0xE4], [0xBD]]
  assert raw[-2:] == [None, None]


def asked_of(*, chat: bool) -> protocol.Asked:
  settings = completion.Settings()
  return protocol.Asked(chat, [], settings, protocol.TOP, False, False)


def test_an_answer_with_log_probabilities():
  served = small.served()
  top = [[(97, -0.5), (99, -1.0)], [(98, float('-inf')), (1, -2.0)]]
  done = completion.Completion(
    *('ab', [97, 98], []),
    finish_reason='stop',
    metrics={},
    logprobs=[-0.5, float('-inf')],
    top_logprobs=top,
    texts=['a', 'b'],
  )
  text = read(TEXT | dict(logprobs=1))
  assert protocol.logprobs(served, text, done) == {
    'tokens': ['a', 'b'],
    'token_logprobs': [-0.5, -9999.0],
    'top_logprobs': [{'a': -0.5}, {'b': -9999.0}],
  }
  chat = read(CHAT | dict(logprobs=True, top_logprobs=1))
  first, _ = protocol.logprobs(served, chat, done)['content']
  said = {'token': 'a', 'logprob': -0.5, 'bytes': [97]}
  assert first == said | {'top_logprobs': [said]}
  assert protocol.choice(served, read(TEXT), 0, done)['logprobs'] is None
