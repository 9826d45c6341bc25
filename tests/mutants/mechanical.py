"""Mechanical mutants: mutmut's operators, a seeded sample of what they make.

Left out: type annotations, docstrings, what a `raise` says, and the operators
whose mutants cannot run and prove nothing when they fail (a missing argument,
an assigned None, other strings, lambdas of None).
"""

import pathlib
import random
import types as python_types
from collections.abc import Iterator

import libcst as cst
from mutmut.mutation import mutators

from tests.mutants import equivalent
from tests.mutants.mutant import Mutant

ROOT = pathlib.Path(__file__).parents[2]

_OPERATORS = {
  mutators.operator_number: 'number + 1',
  mutators.operator_name: 'constant',
  mutators.operator_augmented_assignment: 'assignment',
  mutators.operator_remove_unary_ops: 'negation',
  mutators.operator_keywords: 'keyword',
  mutators.operator_swap_op: 'operator',
  mutators.operator_if_exp: 'condition',
}

_RULE_TESTS = (
  'tests/verify/window_law_test.py::'
  'test_u_zero_rejects_what_the_target_excludes',
  'tests/verify/window_law_test.py::test_certain_draft_equals_its_one_hot',
  'tests/verify/window_law_test.py::test_accept_test_flips_at_the_ratio',
  'tests/verify/window_law_test.py::test_law_of_a_window_is_the_targets',
  'tests/decode_identity_test.py::test_coupled_says_what_plain_sampling_says',
  'tests/joint_law_test.py::test_joint_law_of_generate',
)
# Path -> the tests that should see its mutants, cheapest first.
TESTS = {
  'specdec_jax/sampling.py': (
    'tests/draws_test.py::test_bits_are_jaxs_own',
    'tests/draws_test.py::test_next_draw_belongs_to_its_position',
    'tests/draws_test.py::test_no_two_draws_share_a_key',
    'tests/sampling_test.py::test_invalid_settings_are_refused',
    'tests/sampling_test.py::test_greedy_is_the_first_maximum',
    'tests/sampling_test.py',
    'tests/draws_test.py',
    'tests/decode_identity_test.py::'
    'test_plain_decoding_is_a_loop_over_single_draws',
  ),
  'specdec_jax/verify/block.py': ('tests/verify/block_test.py',),
  'specdec_jax/verify/chain.py': _RULE_TESTS,
  'specdec_jax/verify/coupled.py': (
    'tests/verify/coupled_test.py',
    'tests/decode_identity_test.py::'
    'test_proposing_nothing_is_plain_decoding_bit_for_bit',
    *_RULE_TESTS[-2:],
  ),
  'specdec_jax/verify/lenient.py': ('tests/verify/lenient_test.py',),
  'specdec_jax/verify/reject.py': _RULE_TESTS,
  'specdec_jax/decode.py': (
    'tests/decode_info_test.py',
    'tests/decode_windows_test.py::test_finished_rows_change_no_more',
    'tests/decode_windows_test.py::'
    'test_limits_at_every_offset_and_buffers_without_room',
    'tests/decode_windows_test.py::'
    'test_a_nan_ends_its_row_and_touches_no_other',
    'tests/drafters/features_test.py',
    'tests/decode_windows_test.py',
    'tests/decode_programs_test.py',
    'tests/joint_law_test.py',
  ),
}


class _Sites(cst.CSTVisitor):
  """Collects (node, mutated node, operator)."""

  def __init__(self):
    super().__init__()
    self.found: list[tuple[cst.CSTNode, cst.CSTNode, str]] = []

  def on_visit(self, node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Annotation | cst.Raise):
      return False
    for kind, operator in mutators.mutation_operators:
      if operator in _OPERATORS and isinstance(node, kind):
        name = _OPERATORS[operator]
        self.found += [(node, new, name) for new in operator(node)]
    return True


class _Replace(cst.CSTTransformer):
  def __init__(self, old: cst.CSTNode, new: cst.CSTNode):
    super().__init__()
    self.old, self.new = old, new

  def on_leave(self, original_node, updated_node):
    return self.new if original_node is self.old else updated_node


def candidates(path: str) -> Iterator[Mutant]:
  """Every mechanical mutant of a file that changes its bytecode."""
  source = (ROOT / path).read_text()
  module = cst.parse_module(source)
  sites = _Sites()
  module.visit(sites)
  plain = _code(compile(source, path, 'exec'))
  for old, new, operator in sites.found:
    text = module.visit(_Replace(old, new)).code
    if _code(compile(text, path, 'exec')) == plain:
      continue
    line, before, after = _changed(source, text)
    name = f'{path}:{line} {operator}: {after}'
    failure = f'was: {before}'
    same = _explained(path, before, after)
    yield Mutant(name, 0, failure, path, source, text, TESTS[path], same)


def sample(size: int, seed: int = 0) -> list[Mutant]:
  """A sample over all files; some may be known to be equivalent.

  Raises:
    ValueError: more than there are.
  """
  every = [mutant for path in TESTS for mutant in candidates(path)]
  unique = list({mutant.new: mutant for mutant in every}.values())
  if not 0 <= size <= len(unique):
    raise ValueError(f'mechanical={size}: allowed are 0 to {len(unique)}')
  return random.Random(seed).sample(unique, size)


def _explained(path: str, before: str, after: str) -> str:
  known = (
    x.reason
    for x in equivalent.EQUIVALENT
    if (x.path, x.before, x.after) == (path, before, after)
  )
  return next(known, '')


def _changed(old: str, new: str) -> tuple[int, str, str]:
  """Number of the first line that differs; what differs, in old and new."""
  a, b = old.splitlines(), new.splitlines()
  same = lambda pairs: next(i for i, (x, y) in enumerate(pairs) if x != y)
  head = same(zip(a, b, strict=False))
  tail = same(zip(a[::-1], b[::-1], strict=False))
  of = lambda lines: ' '.join(
    x.strip() for x in lines[head : len(lines) - tail]
  )
  return head + 1, of(a), of(b)


def _code(code: python_types.CodeType):
  """What of the bytecode matters: no line numbers."""
  constants = [
    _code(x) if isinstance(x, python_types.CodeType) else repr(x)
    for x in code.co_consts
  ]
  return code.co_code, code.co_names, code.co_varnames, constants
