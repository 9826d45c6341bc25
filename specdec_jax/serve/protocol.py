"""Reads OpenAI's bodies for a pool of rows, and writes answers as JSON."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax import api, build, completion, fields, requests
from specdec_jax.io.tokens import stream as stream_lib

# Tokens of an answer to a text where no number is given, as OpenAI has it.
_TEXT_TOKENS = 16
# Stop strings of a request, as OpenAI allows.
STOPS = 4
# Likeliest tokens of each place, at most.
TOP = 20
# What a setting of a body is called in completion.Settings.
_SETTINGS = {
  **{x: x for x in ('temperature', 'top_p', 'top_k', 'seed', 'stop', 'n')},
  'prediction': 'prediction',
  **dict.fromkeys(('max_tokens', 'max_completion_tokens'), 'max_new_tokens'),
}
_NAMES = 'model', 'stream', 'stream_options', 'logprobs', *_SETTINGS
# More, of a text and of a conversation; the first of them is what is answered.
_OWN = ('prompt',), ('messages', 'top_logprobs')
# What else OpenAI and vLLM know, with the values that ask for nothing.
_IDLE: dict[str, Any] = {
  **dict.fromkeys(('frequency_penalty', 'presence_penalty', 'min_p'), [0]),
  **dict.fromkeys(('repetition_penalty', 'best_of'), [1]),
  **dict.fromkeys(('tools', 'functions'), [[]]),
  **dict.fromkeys(('tool_choice', 'function_call'), ['none', 'auto']),
  **dict.fromkeys(('store', 'echo'), [False]),
  **dict.fromkeys(('audio', 'reasoning_effort', 'web_search_options'), []),
  **dict(top_k=[-1], logit_bias=[{}], suffix=[''], verbosity=['medium']),
  **dict(service_tier=['auto', 'default'], modalities=[['text']]),
  'response_format': [{'type': 'text'}],
  **dict.fromkeys(('messages.tool_calls', 'messages.annotations'), [[]]),
  **dict.fromkeys(('messages.tool_call_id', 'messages.refusal'), []),
}
# Of these all: they are about the client, or about tools.
_ABOUT = 'user', 'metadata', 'safety_identifier', 'parallel_tool_calls'
_ABOUT += 'prompt_cache_key', 'stream_options.include_obfuscation'


class Refused(ValueError):
  """A request that gets no answer; status: HTTP's code."""

  def __init__(self, sentence: str, status: int = 400):
    super().__init__(' '.join(sentence.split()))
    self.status = status

  def body(self) -> dict[str, Any]:
    kind = 'server' if self.status >= 500 else 'invalid_request'
    about = dict(message=str(self), type=f'{kind}_error', param=None)
    return {'error': about | {'code': self.status}}


class Served(NamedTuple):
  """A served model; requests call it `name`.

  context: room for a prompt with its answer. choices: in a request, at most.
  """

  name: str
  engine: build.Engine
  context: int
  choices: int


class Asked(NamedTuple):
  """A body, read and checked.

  chat: a conversation goes on; else texts.
  items: each prompt `n` times.
  top: how many of the likeliest tokens each token's place names; None: no
    log-probabilities either.
  stream, usage: answer in pieces; the last has the usage.
  """

  chat: bool
  items: list[requests.Item]
  settings: completion.Settings
  top: int | None
  stream: bool
  usage: bool


# --- a request ---------------------------------------------------------------


def read(body: bytes, served: Served, *, chat: bool, plain: bool) -> Asked:
  """Reads a request's body; raises Refused, with a sentence, if it cannot be
  answered as asked."""
  try:
    return _asked(_parsed(body), served, chat, plain)
  except Refused:
    raise
  except requests.TooLong as error:
    raise Refused(str(error), 413) from error
  except fields.Refusal as error:
    name = {'max_new_tokens': 'max_tokens'}.get(error.setting, error.setting)
    own = fields.Refusal(name, *error.args[1:])
    raise Refused(str(own)) from error
  except ValueError as error:
    raise Refused(str(error)) from error


def _parsed(body: bytes) -> dict[str, Any]:
  # Many clients write 4.0 for 4.
  number = lambda text: int(x) if (x := float(text)).is_integer() else x
  try:
    found = json.loads(body, parse_float=number)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'the body is not JSON: {error}') from error
  if not isinstance(found, dict):
    raise ValueError('the body must be a JSON object, {"model": ..., ...}')
  return found


def _allowed(
  found: Mapping[str, Any], allowed: Sequence[str], of: str = ''
) -> dict[str, Any]:
  """Drops null and what else asks for nothing; raises for disallowed names."""
  idle = lambda k, x: x is None or k in _ABOUT or x in _IDLE.get(k, ())
  given = {k: x for k, x in found.items() if not idle(of + k, x)}
  if known := [k for k in given if of + k in _IDLE and k not in allowed]:
    what, said = of + known[0], fields.short(given[known[0]])
    raise ValueError(f'{what}={said}: this server does not do {what}')
  completion.check_names(given, allowed, of)
  return given


def _asked(given: dict[str, Any], served: Served, chat: bool, plain: bool):
  engine, about = served.engine, _OWN[chat][0]
  given = _allowed(given, _NAMES + _OWN[chat])
  if (name := given.get('model', served.name)) != served.name:
    said = fields.short(name)
    raise Refused(f'model={said}: this server has {served.name!r}', 404)
  if about not in given:
    raise ValueError(f'{about} is missing')
  asked, stream = _settings(given, chat), _flag(given, 'stream')
  prompts = _conversation(given[about]) if chat else _texts(given[about])
  if len(prompts) * asked.n > served.choices:
    raise ValueError(
      f'{len(prompts)} prompts with n={asked.n}: must be at most '
      f'{served.choices} choices together'
    )
  if asked.prediction:
    build.check_prediction(engine)
  items, room = api.items_of(engine.target, prompts, asked), served.context
  items = [api.ask(engine.target, x, asked, room).item for x in items]
  if plain:
    items = [item._replace(drafts=0) for item in items]
  top = _top(given, engine.options.logprobs, chat)
  usage = _usage_wanted(given, stream)
  return Asked(chat, items, asked, top, stream, usage)


def _settings(given: Mapping[str, Any], chat: bool) -> completion.Settings:
  """Reads the settings for all choices of a request."""
  if len({str(given[x]) for x in given if x.startswith('max_')}) > 1:
    raise ValueError('max_tokens and max_completion_tokens differ: give one')
  # OpenAI's defaults; without a seed every request is another draw.
  new = None if chat else _TEXT_TOKENS
  options: dict[str, Any] = dict(temperature=1.0, max_new_tokens=new)
  options['seed'] = secrets.randbits(32)
  options |= {_SETTINGS[x]: given[x] for x in given if x in _SETTINGS}
  if 'prediction' in given:
    options['prediction'] = _predicted(given['prediction'])
  found = completion.Settings(**options)
  if len(found.stop) > STOPS:
    raise ValueError(f'stop: has {len(found.stop)} texts, allowed are {STOPS}')
  return found


def _predicted(given: Any) -> str:
  """Reads a prediction's text."""
  match given:
    case {'type': 'content', 'content': str(text)} if len(given) == 2:
      return text
  raise ValueError(
    f'prediction={fields.short(given)}: must be {{"type": "content", '
    '"content": TEXT}'
  )


def _flag(given: Mapping[str, Any], name: str) -> bool:
  value = given.get(name, False)
  if not isinstance(value, bool):
    raise ValueError(f'{name}={fields.short(value)}: must be true or false')
  return value


def _usage_wanted(given: Mapping[str, Any], stream: bool) -> bool:
  options = given.get('stream_options', {})
  if not isinstance(options, dict) or (options and not stream):
    raise ValueError('stream_options: must be an object, beside stream=true')
  options = _allowed(options, ['include_usage'], 'stream_options.')
  return _flag(options, 'include_usage')


def _top(given: Mapping[str, Any], kept: int, chat: bool) -> int | None:
  """Reads Asked.top; kept: the log-probabilities that the engine records."""
  name = 'top_logprobs' if chat else 'logprobs'
  asked = _flag(given, 'logprobs') if chat else 'logprobs' in given
  top = given.get(name, 0)
  if not requests.is_id(top) or not 0 <= top <= TOP:
    raise ValueError(f'{name}={fields.short(top)}: allowed are 0 to {TOP}')
  if top and not asked:
    raise ValueError(f'{name}={top}: needs logprobs=true beside it')
  need = max(top, 2) if top else 1
  if asked and need > kept:
    raise ValueError(
      f'{name}={top}: this server keeps {kept} of each token; start it with '
      f'--logprobs={need}'
    )
  return top if asked else None


def _texts(given: Any) -> list[Any]:
  """Reads the prompts: one text or list of ids, or several."""
  several = isinstance(given, list) and not all(map(requests.is_id, given))
  prompts = given if several else [given]
  if any(map(requests.is_chat, prompts)):
    raise ValueError('prompt: messages go to /v1/chat/completions')
  return prompts


def _conversation(given: Any) -> list[Any]:
  if not isinstance(given, list) or not requests.is_chat(given):
    raise ValueError(
      f'messages={fields.short(given)}: must be a list of objects, each with '
      'role and content'
    )
  names = 'role', 'content', 'name'
  only = lambda x: _allowed(x, names, 'messages.') if isinstance(x, dict) else x
  return [[*map(only, given)]]


# --- an answer ---------------------------------------------------------------


def models(served: Served) -> dict[str, Any]:
  """Lists the served models: one."""
  engine = served.engine
  rule, drafter, target = engine.rule, engine.drafter, engine.target
  about: dict[str, Any] = dict(id=served.name, object='model')
  about |= dict(created=_STARTED, owned_by='specdec_jax')
  about |= dict(max_model_len=served.context, target=target.label)
  about['chat'] = target.tokenizer.chat_template is not None
  about['draft'] = engine.draft and engine.draft.label
  about |= dict(drafter=drafter.name, gamma=drafter.gamma, rule=rule.name)
  about |= dict(lossless=rule.lossless, logprobs=engine.options.logprobs)
  return {'object': 'list', 'data': [about]}


_STARTED = int(time.time())


def head(asked: Asked, served: Served) -> dict[str, Any]:
  """Returns the fields with which every piece of an answer begins."""
  kind = 'text_completion'
  if asked.chat:
    kind = 'chat.completion' + '.chunk' * asked.stream
  id = ('chatcmpl-' if asked.chat else 'cmpl-') + secrets.token_hex(12)
  now = int(time.time())
  return {'id': id, 'object': kind, 'created': now, 'model': served.name}


def choice(
  served: Served,
  asked: Asked,
  index: int,
  x: completion.Piece,
  reason: str | None = None,
  *,
  first: bool = True,
) -> dict[str, Any]:
  """Writes a choice, or what a piece adds to it. reason: why it ended, if this
  is the end. first: nothing came before."""
  said: dict[str, Any] = {'text': x.text}
  if asked.chat:
    role = {'role': 'assistant'} if first else {}
    name = 'delta' if asked.stream else 'message'
    said = {name: role | {'content': x.text}}
  names = 'tokens', 'origins', 'texts', 'entropies', *['refused'] * asked.stream
  made = {k: y for k in names if (y := getattr(x, k)) is not None}
  chances = None
  if asked.top is not None and x.logprobs is not None:
    chances = logprobs(served, asked, x)
  end = dict(logprobs=chances, finish_reason=reason, specdec_jax=made)
  return {'index': index} | said | end


def logprobs(
  served: Served, asked: Asked, x: completion.Piece
) -> dict[str, Any]:
  """Writes a piece's log-probabilities in the form of the answer."""
  tokenizer = served.engine.target.tokenizer

  def entries(pairs) -> list[dict[str, Any]]:
    """Names one place's tokens; different tokens get different names."""
    ids, found = {}, []
    for i, chance in pairs:
      raw = stream_lib.bytes_of(tokenizer, i)
      name = raw.decode(errors='backslashreplace')
      if not name or ids.setdefault(name, i) != i:
        name = f'token_id:{i}'
      # JSON has no number for -inf; as vLLM writes it.
      about = dict(token=name, logprob=max(chance, -9999.0))
      found.append(about | {'bytes': [*raw] or None})
    return found

  best = [y[: asked.top] for y in x.top_logprobs or [()] * len(x.tokens)]
  own = zip(x.tokens, x.logprobs or (), strict=True)
  places = [entries([y, *z]) for y, z in zip(own, best, strict=True)]
  if asked.chat:
    return {'content': [y | {'top_logprobs': z} for y, *z in places]}
  return {
    'tokens': [y['token'] for y, *_ in places],
    'token_logprobs': [y['logprob'] for y, *_ in places],
    'top_logprobs': [{y['token']: y['logprob'] for y in z} for _, *z in places],
  }


def document(
  served: Served, asked: Asked, index: int, done: completion.Completion
) -> dict[str, Any]:
  """Writes a choice as a record for train.text.read: `text` has prompt and
  answer, `source` what an encoder reads, `specdec_jax` the ids, which not every
  text gives back."""
  item, tokenizer = asked.items[index], served.engine.target.tokenizer
  ids = {'text': [*item.tokens, *done.tokens]}
  if item.source:
    ids = {'source': [*item.source], 'text': done.tokens}
  own = ids | {'tokenizer': tokenizer.fingerprint()}
  return {k: tokenizer.spell(x) for k, x in ids.items()} | {'specdec_jax': own}


def usage(
  asked: Asked, done: Sequence[completion.Completion]
) -> dict[str, Any]:
  """Counts tokens; done: all choices."""
  tokens = sum(len(x.tokens) for x in done)
  read = sum(
    len(x.source or x.tokens) for x in asked.items[:: asked.settings.n]
  )
  found: dict[str, Any] = dict(prompt_tokens=read, completion_tokens=tokens)
  found['total_tokens'] = read + tokens
  if asked.settings.prediction:
    add = lambda name: sum(x.metrics[name] for x in done)
    drafted, kept = add('sourced_tokens'), add('accepted_sourced_tokens')
    found['completion_tokens_details'] = {
      'accepted_prediction_tokens': kept,
      'rejected_prediction_tokens': drafted - kept,
    }
  return found
