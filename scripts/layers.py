"""Draws the layers of the library as an SVG: packages above what they import.

  python scripts/layers.py [docs/layers.svg]

Of two packages that are joined through a third, no line is drawn.
"""

import ast
import collections
import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent / 'specdec_jax'
BOX, GAP, RISE = 104, 12, 58


def imports() -> dict[str, set[str]]:
  """The packages and modules on the ground floor that each one imports."""
  out = collections.defaultdict(set)
  for path in ROOT.rglob('*.py'):
    mine = path.relative_to(ROOT).with_suffix('').parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ImportFrom) and node.module:
        first, *rest = node.module.split('.')
        names = rest[:1] or [alias.name for alias in node.names]
        out[mine] |= set(names) if first == 'specdec_jax' else set()
  out.pop('__init__')
  return {x: sorted(y - {x}) for x, y in sorted(out.items())}


def floors(graph) -> dict[str, int]:
  """0 for who imports nothing; else one above the highest that is imported."""
  floor = {}

  def visit(name: str) -> int:
    if name not in floor:
      floor[name] = 1 + max(map(visit, graph[name]), default=-1)
    return floor[name]

  for name in graph:
    visit(name)
  return floor


def svg(graph) -> str:
  """The picture: one row of boxes a floor, the highest first."""
  floor = floors(graph)
  rows = [
    [x for x in graph if floor[x] == i] for i in range(max(floor.values()) + 1)
  ]
  width = max(map(len, rows)) * (BOX + GAP) + GAP
  at = {}
  for i, row in enumerate(reversed(rows)):
    left = (width - len(row) * (BOX + GAP) + GAP) / 2
    at |= {
      x: (left + k * (BOX + GAP), GAP + i * RISE) for k, x in enumerate(row)
    }

  def below(name: str) -> set[str]:
    return set(graph[name]).union(*map(below, graph[name]))

  lines, boxes = [], []
  for name, (x, y) in at.items():
    direct = set(graph[name]).difference(*map(below, graph[name]))
    for other in sorted(direct):
      to_x, to_y = at[other]
      lines.append(
        f'<line x1="{x + BOX / 2:.0f}" y1="{y + 34}" '
        f'x2="{to_x + BOX / 2:.0f}" y2="{to_y}" stroke="#bbb"/>'
      )
    package = (ROOT / name).is_dir()
    files = (ROOT / name).rglob('*.py') if package else [ROOT / f'{name}.py']
    count = sum(p.read_text().count('\n') for p in files)
    boxes += [
      f'<rect x="{x:.0f}" y="{y}" width="{BOX}" height="34" rx="4" '
      f'fill="{"#dbeafe" if package else "#f3f4f6"}" stroke="#999"/>',
      f'<text x="{x + BOX / 2:.0f}" y="{y + 15}">{name}{"/" * package}</text>',
      f'<text x="{x + BOX / 2:.0f}" y="{y + 28}" fill="#777">{count:,}</text>',
    ]
  head = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
    f'height="{len(rows) * RISE + GAP}" font-family="sans-serif" '
    'font-size="12" text-anchor="middle">'
  )
  back = '<rect width="100%" height="100%" fill="white"/>'
  return '\n'.join([head, back, *lines, *boxes, '</svg>', ''])


if __name__ == '__main__':
  out = sys.argv[1] if sys.argv[1:] else ROOT.parent / 'docs/layers.svg'
  pathlib.Path(out).write_text(svg(imports()))
