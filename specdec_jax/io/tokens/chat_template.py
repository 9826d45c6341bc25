"""Renders chat templates as transformers does. The environment is
utils/chat_template_utils.py's in transformers 5.24: its tags, filters,
functions and variables, in jinja's sandbox."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from specdec_jax import fields

# What an expression of a template may raise.
_ERRORS = TypeError, ValueError, ArithmeticError, LookupError, RecursionError


def texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Makes each content a text: joins parts, takes an assistant's None for '';
  ValueError where there is no text."""
  found = []
  for message in messages:
    role, said = message.get('role'), message.get('content')
    parts = said if isinstance(said, list) else [{'type': 'text', 'text': said}]
    parts = [] if said is None and role == 'assistant' else parts
    kinds = [x.get('type') if isinstance(x, dict) else x for x in parts]
    if bad := [x for x in kinds if x != 'text']:
      raise ValueError(
        f'content of type {fields.short(bad[0])}: this model reads text alone'
      )
    every: list[Any] = [role, *(x.get('text') for x in parts)]
    if not all(isinstance(x, str) for x in every):
      raise ValueError(
        f"message {fields.short(message)}: needs strings 'role' and 'content'"
      )
    rest = {k: x for k, x in message.items() if x is not None}
    found.append(rest | {'content': ''.join(every[1:])})
  return found


def render(source: str, template: str, messages, specials) -> str:
  """Renders a conversation, up to the start of the assistant's reply;
  ValueError if it cannot, or if a text leaves no trace.

  source: whose template it is, for errors. specials: such as bos_token.
  messages: from `texts`, with what else the template reads; a developer's
    become the system's if it names none.
  """
  if 'developer' not in template:
    role = lambda x: {'role': 'system'} if x['role'] == 'developer' else {}
    messages = [x | role(x) for x in messages]
  given = dict(add_generation_prompt=True, tools=None, documents=None)
  mark = '\ue000{}\ue001'.format  # characters of no text
  put = lambda i, x: x | {'content': x['content'] + mark(i)}
  try:
    write = _environment().from_string(template).render
    text = write(specials, **given, messages=messages)
    marked = [put(i, x) for i, x in enumerate(messages)]
    traced = write(specials, **given, messages=marked)
  except (jinja2.TemplateError, *_ERRORS) as e:
    raise ValueError(f'{source}: chat template: {e}') from e
  gone = lambda i, x: x['content'] and mark(i) not in traced
  if lost := [x for i, x in enumerate(messages) if gone(i, x)]:
    raise ValueError(
      f'{source}: its chat template writes nothing of a message of role '
      f'{fields.short(lost[0]["role"])}: give it another role, or leave it out'
    )
  return text


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  # jinja2's own would escape HTML.
  env.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  env.globals['raise_exception'] = _raise
  env.globals['strftime_now'] = lambda f: datetime.datetime.now().strftime(f)
  return env


class _Generation(jinja2.ext.Extension):
  """{% generation %}: marks what the assistant says, for training; no text."""

  tags = {'generation'}

  def parse(self, parser):
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    # In a block of its own: what it sets ends with it.
    return jinja2.nodes.CallBlock(
      self.call_method('_said'), [], [], body
    ).set_lineno(line)

  def _said(self, caller) -> str:
    return caller()


def _raise(message):
  raise jinja2.TemplateError(message)
