"""Changes of a config, written as on the command line."""

import ast


def apply(config, changes: str) -> None:
  """Sets keys: 'student.kind=lm data.prompts=8'; a value has no spaces."""
  for change in changes.split():
    key, _, value = change.partition('=')
    section, _, name = key.partition('.')
    try:
      config[section].update({name: ast.literal_eval(value)})
    except (SyntaxError, ValueError):  # a text
      config[section].update({name: value})
