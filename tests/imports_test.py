"""The import graph: a module imports from lower layers only (docs: design)."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent / 'specdec_jax'

# Package or top-level module -> layer.
LAYERS = {
  'fields': 0,
  'types': 0,
  'hosts': 0,
  'printing': 0,
  'program': 0,
  'kernels': 0.5,
  'sampling': 0,
  'sharding': 0,
  'forward': 0,
  'models': 1,
  'machine': 2,
  'verify': 2,
  'io': 2,
  'decode': 3,
  'requests': 3,
  'metrics': 3,
  'along': 3,
  'drafters': 4,
  'debug': 5,
  'pool': 5,
  'show': 5,
  'costs': 5,
  'build': 6,
  'completion': 7,
  'settings': 7,
  'api': 8,
  'bench': 8,
  'serve': 9,
  'train': 9,
  'chips': 10,
  'distill': 10,
  'certify': 11,
  '__init__': 12,
}


def imported(source: str, exists) -> set[str]:
  """The modules of specdec_jax that a source text imports, as dotted names."""
  out = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, 'a relative import'
      both = [f'{node.module}.{alias.name}' for alias in node.names]
      names = [n if exists(n) else node.module for n in both]
    else:
      continue
    out |= {n for n in names if n.split('.')[0] == 'specdec_jax'}
  return out


def exists(name: str) -> bool:
  path = ROOT.parent / name.replace('.', '/')
  return path.with_suffix('.py').exists() or path.is_dir()


def graph() -> dict[str, set[str]]:
  out = {}
  for path in sorted(ROOT.rglob('*.py')):
    name = '.'.join(path.relative_to(ROOT.parent).with_suffix('').parts)
    name = name.replace('.__init__', '') if name.count('.') > 1 else name
    out[name] = imported(path.read_text(), exists)
  return out


def part(module: str) -> str:
  """'specdec_jax.models.lm' -> 'models'; the package itself is __init__."""
  return (module.split('.') + ['__init__'])[1]


GRAPH = graph()


@pytest.mark.parametrize('module', GRAPH)
def test_imports_point_down(module):
  mine = part(module)
  assert mine in LAYERS, f'give {mine} a layer'
  for other in GRAPH[module]:
    theirs = part(other)
    if theirs == mine:
      continue
    same = LAYERS[theirs] == LAYERS[mine]
    modules = not (ROOT / theirs).is_dir() and not (ROOT / mine).is_dir()
    assert LAYERS[theirs] < LAYERS[mine] or (same and modules), (
      f'{module} imports {other}, which is not below it'
    )


def test_the_loop_knows_no_method_and_no_model():
  # judge applies whatever rule it is given; these know none.
  known = GRAPH['specdec_jax.decode'] - {
    f'specdec_jax.verify.{x}' for x in ('counts', 'judge', 'tree')
  }
  assert {part(m) for m in known} == {'types', 'sampling', 'forward'}
  for module in ('specdec_jax.verify.reject', 'specdec_jax.verify.coupled'):
    assert {part(m) for m in GRAPH[module]} == {'types', 'verify'}


def test_no_import_cycle():
  done, path = set(), []

  def visit(module):
    assert module not in path, ' -> '.join([*path, module])
    if module in done:
      return
    path.append(module)
    for other in GRAPH.get(module, ()):
      visit(other)
    done.add(path.pop())

  for module in GRAPH:
    visit(module)


def functions() -> list[tuple[str, int]]:
  """(path:line name, lines) of every function of the library."""
  out = []
  for path in sorted(ROOT.rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.FunctionDef):
        at = f'{path.relative_to(ROOT)}:{node.lineno} {node.name}'
        out.append((at, node.end_lineno - node.lineno + 1))
  return out


def test_a_function_fits_on_a_screen():
  assert not [f'{at}: {n} lines' for at, n in functions() if n > 60]


def test_a_folder_can_be_read_in_one_sitting():
  """At most 13 modules in a package, and at most 400 lines in a module.

  The ground floor has up to 20.
  """
  for folder in (ROOT, *(p for p in ROOT.rglob('*') if p.is_dir())):
    modules = [p for p in folder.glob('*.py') if p.name != '__init__.py']
    most = 20 if folder == ROOT else 13
    assert len(modules) <= most, folder
    for path in modules:
      assert path.read_text().count('\n') <= 400, path
