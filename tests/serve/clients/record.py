"""Records what clients of OpenAI's protocol send: NAME.json beside this file.

python -m venv clients
clients/bin/pip install openai langchain-openai litellm
clients/bin/python tests/serve/clients/record.py

Each call is made with what the client sends unasked, and with settings that
users give. A server that knows one answer stands for ours.
"""

import http.server
import importlib.metadata
import json
import pathlib
import threading

# These packages are not those of the project.
import langchain_openai  # pyright: ignore[reportMissingImports]
import litellm  # pyright: ignore[reportMissingImports]
import openai  # pyright: ignore[reportMissingImports]

HERE = pathlib.Path(__file__).parent
KEPT = 'accept', 'content-type', 'user-agent'
USER = {'role': 'user', 'content': 'Say hello.'}
SET = dict(
  temperature=0.5,
  top_p=0.9,
  seed=3,
  stop=['\n'],
  presence_penalty=0.0,
  frequency_penalty=0.0,
)
found: dict[str, list] = {}
sent: list[dict] = []


class Answers(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'

  def log_message(self, *_):
    pass

  def do_POST(self):
    size = int(self.headers['content-length'])
    given = {k.lower(): v for k, v in self.headers.items()}
    headers = {k: given[k] for k in KEPT if k in given}
    body = json.loads(self.rfile.read(size))
    sent.append(dict(path=self.path, headers=headers, body=body))
    chat, stream = 'chat' in self.path, body.get('stream')
    said = {'role': 'assistant', 'content': 'a'}
    said = {'delta' if stream else 'message': said} if chat else {'text': 'a'}
    choice = {'index': 0, 'finish_reason': 'stop'} | said
    kind = 'chat.completion' if chat else 'text_completion'
    kind += '.chunk' * bool(chat and stream)
    usage = dict(prompt_tokens=1, completion_tokens=1, total_tokens=2)
    head = dict(id='x', created=1, model='tiny', object=kind)
    text = json.dumps(head | dict(choices=[choice], usage=usage))
    if stream:
      text = f'data: {text}\n\ndata: [DONE]\n\n'
    self.send_response(200)
    type_ = 'text/event-stream' if stream else 'application/json'
    self.send_header('content-type', type_)
    self.send_header('content-length', str(len(text)))
    self.end_headers()
    self.wfile.write(text.encode())


def note(package: str, call: str, answer) -> None:
  """Notes what the call has sent; a stream is read to its end."""
  if not hasattr(answer, 'model_dump') and not isinstance(answer, str):
    list(answer)
  (request,) = sent
  sent.clear()
  version = importlib.metadata.version(package)
  about = dict(client=f'{package} {version}', call=call)
  found.setdefault(package, []).append(about | request)


def with_openai(url: str) -> None:
  made = openai.OpenAI(base_url=url, api_key='none')
  chat, text = made.chat.completions.create, made.completions.create
  how = dict(model='tiny', messages=[USER])
  tell = lambda call, answer: note('openai', call, answer)
  tell('chat', chat(**how))
  tell('chat, stream', chat(**how, stream=True))
  developer = {'role': 'developer', 'content': 'Be brief.'}
  parts = [{'type': 'text', 'text': 'Say '}, {'type': 'text', 'text': 'hello.'}]
  silent = [USER, {'role': 'assistant', 'content': None}]
  more = SET | dict(
    messages=[developer, *silent, {'role': 'user', 'content': parts}],
    max_completion_tokens=8,
    n=2,
    logprobs=True,
    top_logprobs=2,
    user='u',
    metadata={'a': 'b'},
    store=False,
    service_tier='auto',
    parallel_tool_calls=True,
    tool_choice='none',
    tools=[],
    modalities=['text'],
    logit_bias={},
    response_format={'type': 'text'},
  )
  tell('chat, set', chat(**how | more))
  answered = chat(**how).choices[0].message
  sent.clear()
  tell(
    'chat, its own answer', chat(**how | dict(messages=[USER, answered, USER]))
  )
  tell('text', text(model='tiny', prompt='Say hello.'))
  more = SET | dict(
    max_tokens=4, echo=False, best_of=1, suffix=None, logprobs=1
  )
  several = ['Say', 'hello.']
  tell('text, set', text(model='tiny', prompt=several, user='u', **more))


def with_langchain(url: str) -> None:
  how = dict(base_url=url, api_key='none', model='tiny')
  chat, text = langchain_openai.ChatOpenAI, langchain_openai.OpenAI
  tell = lambda call, answer: note('langchain-openai', call, answer)
  tell('chat', chat(**how).invoke('Say hello.'))
  tell('chat, stream', chat(**how).stream('Say hello.'))
  more = SET | dict(
    stream_usage=True, max_tokens=8, n=1, logprobs=True, top_logprobs=2
  )
  parts = [{'type': 'text', 'text': 'Say hello.'}]
  said = ('system', 'Be brief.'), ('human', 'Hi'), ('ai', ''), ('human', parts)
  tell('chat, set', chat(**how, **more).stream([*said]))
  tell('text', text(**how).invoke('Say hello.'))


def with_litellm(url: str) -> None:
  how = dict(model='openai/tiny', api_base=url, api_key='none')
  chat, text = litellm.completion, litellm.text_completion
  tell = lambda call, answer: note('litellm', call, answer)
  tell('chat', chat(messages=[USER], **how))
  tell('chat, stream', chat(messages=[USER], stream=True, **how))
  more = SET | dict(
    stream=True,
    stream_options={'include_usage': True},
    max_tokens=8,
    n=1,
    logprobs=True,
    top_logprobs=2,
    user='u',
    logit_bias={},
    response_format={'type': 'text'},
  )
  tell('chat, set', chat(messages=[USER], **how, **more))
  how['model'] = 'text-completion-openai/tiny'
  tell('text', text(prompt='Say hello.', **how))


def main():
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Answers)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  url = f'http://127.0.0.1:{server.server_port}/v1'
  for use in (with_openai, with_langchain, with_litellm):
    use(url)
  for name, calls in found.items():
    text = json.dumps(calls, indent=1)
    (HERE / f'{name}.json').write_text(f'{text}\n')


if __name__ == '__main__':
  main()
