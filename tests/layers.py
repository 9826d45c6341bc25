"""Draws docs/layers.svg: packages and ground-floor modules, by their layer.

  python -m tests.layers

A line joins what imports to what is imported, but for what is joined through a
third one anyway. Blue are packages.
"""

import pathlib

from tests import imports_test

PATH = pathlib.Path(__file__).parent.parent / 'docs/layers.svg'
WIDTH, HEIGHT, GAP, RISE = 92, 24, 12, 54


def imports() -> dict[str, set[str]]:
  """By package or module, those that it imports."""
  out = {}
  for module, others in imports_test.GRAPH.items():
    mine = imports_test.part(module)
    out.setdefault(mine, set()).update(map(imports_test.part, others))
  out.pop('__init__')
  return {name: out[name] - {name} for name in sorted(out)}


def floors(graph: dict[str, set[str]]) -> list[list[str]]:
  """Names by floor: what imports nothing, then what imports only those, ..."""
  out, placed = [], set()
  while len(placed) < len(graph):
    out.append([x for x in graph if x not in placed and graph[x] <= placed])
    placed.update(out[-1])
  return out


def svg(graph: dict[str, set[str]]) -> str:
  rows = floors(graph)[::-1]
  wide = max(map(len, rows)) * (WIDTH + GAP) + GAP
  at = {}  # the middle of each box's upper edge
  for i, row in enumerate(rows):
    left = (wide - (len(row) - 1) * (WIDTH + GAP)) // 2
    for k, name in enumerate(row):
      at[name] = left + k * (WIDTH + GAP), GAP + i * RISE

  def below(name: str) -> set[str]:
    return graph[name].union(*map(below, graph[name]))

  lines, boxes = [], []
  for name, (x, y) in at.items():
    for other in sorted(graph[name].difference(*map(below, graph[name]))):
      to_x, to_y = at[other]
      ends = f'x1="{x}" y1="{y + HEIGHT}" x2="{to_x}" y2="{to_y}"'
      lines.append(f'<line {ends} stroke="#bbb"/>')
    package = (imports_test.ROOT / name).is_dir()
    size = f'width="{WIDTH}" height="{HEIGHT}" rx="4" stroke="#999"'
    fill = '#dbeafe' if package else '#f3f4f6'
    boxes += [
      f'<rect x="{x - WIDTH // 2}" y="{y}" {size} fill="{fill}"/>',
      f'<text x="{x}" y="{y + 16}">{name}{"/" * package}</text>',
    ]
  size = f'width="{wide}" height="{len(rows) * RISE}"'
  font = 'font-family="sans-serif" font-size="13" text-anchor="middle"'
  head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
  back = '<rect width="100%" height="100%" fill="white"/>'
  return '\n'.join([head, back, *lines, *boxes, '</svg>', ''])


if __name__ == '__main__':
  PATH.write_text(svg(imports()))
