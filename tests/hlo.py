"""What compiled programs consist of, from their text."""

import math
import re

_NAMES = r'\{?(%[\w.\-]+(?:, %[\w.\-]+)*)'
_CALLED = re.compile(
  r'(?:body|condition|calls|to_apply|computations)=' + _NAMES
)


def instructions(text: str):
  """(opcode, result shape, line) of every HLO instruction."""
  for line in text.splitlines():
    found = re.match(
      r'\s*(?:ROOT )?%?[\w.\-]+ = (\(?[\w\[\],]+)[^ ]* ([\w\-]+)\(', line
    )
    if found:
      yield found[2], found[1], line


def dimensions(shape: str) -> list[int]:
  """Of an HLO shape such as bf16[24,8,1024,256]; [0] of none."""
  dims = re.search(r'\[([\d,]*)\]', shape)
  return [int(d) for d in dims[1].split(',') if d] if dims else [0]


def size(shape: str) -> int:
  """Elements of an HLO shape."""
  return math.prod(dimensions(shape))


def loops(text: str) -> list[str]:
  """For every loop of a program, the text of all that its body runs."""
  parts: dict[str, list[str]] = {}
  for line in text.splitlines():
    if begins := re.match(r'(?:ENTRY )?(%[\w.\-]+) .*\{$', line):
      lines = parts[begins[1]] = []
    elif parts:
      lines.append(line)

  def called(name: str, seen: dict[str, None]) -> dict[str, None]:
    if name not in seen:
      seen[name] = None
      for names in _CALLED.findall('\n'.join(parts[name])):
        for other in names.split(', '):
          called(other, seen)
    return seen

  bodies = re.findall(r'body=(%[\w.\-]+)', text)
  return ['\n'.join(sum((parts[x] for x in called(b, {})), [])) for b in bodies]
