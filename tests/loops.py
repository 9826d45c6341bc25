"""The loops of a compiled program."""

import re

from specdec_jax.chips import hlo


def bodies(text: str) -> list[str]:
  """For every loop, the text of all that its body runs."""
  parts, _ = hlo.computations(text)

  def called(name: str, seen: dict[str, None]) -> dict[str, None]:
    if name not in seen:
      seen[name] = None
      for names in hlo.CALLED.findall('\n'.join(parts[name])):
        for other in names.split(', '):
          called(other, seen)
    return seen

  found = re.findall(r'body=(%[\w.\-]+)', text)
  return ['\n'.join(sum((parts[x] for x in called(b, {})), [])) for b in found]
