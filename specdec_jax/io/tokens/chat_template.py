"""Chat templates, rendered as transformers renders them.

The environment is that of utils/chat_template_utils.py of transformers 5.24:
its tags, filters, functions and variables, in jinja's sandbox.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# Names that a message's reasoning comes under.
_REASONING = ('reasoning_content', 'thinking', 'reasoning')


def render(
  template: str,
  messages: Sequence[Mapping[str, Any]],
  specials: Mapping[str, str],
) -> str:
  """The text of a conversation, up to the start of the assistant's reply.

  Args:
    messages: dicts with 'role', 'content' and whatever else the template reads.
    specials: variables such as bos_token.
  """
  given = dict(
    messages=[_message(m) for m in messages],
    add_generation_prompt=True,
    tools=None,
    documents=None,
  )
  try:
    return _environment().from_string(template).render(specials, **given)
  # Whatever an expression of a template may raise.
  except (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
  ) as e:
    raise ValueError(f'chat template: {e}') from e


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
  """Without what is None; reasoning under the names that templates read."""
  given = {key: x for key, x in message.items() if x is not None}
  said = [given[key] for key in _REASONING if key in given][:1]
  for reasoning in said:
    given.setdefault('thinking', reasoning)
    given['reasoning_content'] = reasoning
  return given


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  env.filters['tojson'] = _to_json
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


def _to_json(
  x, ensure_ascii=False, indent=None, separators=None, sort_keys=False
) -> str:
  """jinja2's own filter would escape HTML."""
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
