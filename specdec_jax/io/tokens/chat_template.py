"""Chat templates, rendered as transformers renders them.

The environment is that of utils/chat_template_utils.py of transformers 5.24:
its tags, filters, functions and variables, in jinja's sandbox.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# What an expression of a template may raise.
_ERRORS = TypeError, ValueError, ArithmeticError, LookupError, RecursionError


def render(
  source: str,
  template: str,
  messages: Sequence[Mapping[str, Any]],
  specials: Mapping[str, str],
) -> str:
  """The text of a conversation, up to the start of the assistant's reply.

  source: whose template it is, for errors.
  messages: with 'role', 'content' and whatever else the template reads; what is
    None is left out.
  specials: variables such as bos_token.
  """
  given = dict(
    messages=[
      {key: x for key, x in message.items() if x is not None}
      for message in messages
    ],
    add_generation_prompt=True,
    tools=None,
    documents=None,
  )
  try:
    return _environment().from_string(template).render(specials, **given)
  except (jinja2.TemplateError, *_ERRORS) as e:
    raise ValueError(f'{source}: chat template: {e}') from e


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
