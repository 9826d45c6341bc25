"""Reads the parts of compiled programs from their text."""

import collections
import math
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

_NAMES = r'\{?(%[\w.\-]+(?:, %[\w.\-]+)*)'
CALLED = re.compile(r'(?:body|condition|calls|to_apply|computations)=' + _NAMES)
_END = re.compile(r's32\[\]\S* constant\((\d+)\)')
# Elements of an array that a program may gather: more are weights or logits.
_GATHERED = 2**20


def instructions(text: str) -> Iterator[tuple[str, str, str]]:
  """Yields (opcode, result shape, line) for every HLO instruction."""
  for line in text.splitlines():
    found = re.match(r'\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(', line)
    if found:
      yield found[2], found[1], line


def dimensions(shape: str) -> list[int]:
  """Reads [24, 8] from bf16[24,8], from a tuple its first shape; else [0]."""
  dims = re.search(r'\[([\d,]*)\]', shape)
  return [int(d) for d in dims[1].split(',') if d] if dims else [0]


def size(shape: str) -> int:
  """Counts an HLO shape's elements."""
  return math.prod(dimensions(shape))


def computations(text: str) -> tuple[dict[str, list[str]], str]:
  """Returns every computation's lines by name, and the entry's name."""
  parts: dict[str, list[str]] = {}
  entry = ''
  for line in text.splitlines():
    if begins := re.match(r'(ENTRY )?(%[\w.\-]+) .*\{$', line):
      lines = parts[begins[2]] = []
      entry = begins[2] if begins[1] else entry
    elif parts:
      lines.append(line)
  return parts, entry


class Collective(NamedTuple):
  """Devices' communication in a part of a program."""

  kinds: dict[str, int]  # how many instructions run, by opcode
  sent: float  # bytes that a device sends


COLLECTIVE = re.compile(
  r'(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)'
  r'(?:-start)?'
)


def collectives(text: str, devices: int) -> dict[str, Collective]:
  """Counts by scope: 'prefill', 'draft_init', 'propose', 'verify'; 'other' in a
  train step. devices: the group of a collective that names none.

  What is in a loop counts as often as the loop runs, if its condition has the
  number (layers), else once (windows, drafts of a window). Branches, which run
  for sampled rows, are apart: 'verify, in branches'.
  """
  parts, entry = computations(text)
  out: dict[str, Collective] = {}
  fused: set[str] = set()

  def visit(name: str, times: int):
    for opcode, shape, line in instructions('\n'.join(parts[name])):
      inside = times * (_turns(line, parts) if opcode == 'while' else 1)
      for names in CALLED.findall(line):
        for other in names.split(', '):
          visit(other, inside)
      if found := COLLECTIVE.fullmatch(opcode):
        kind, channel = found[1], re.search(r'channel_id=\d+', line)
        if 'fus' in name and channel:
          # One that runs beside products is in the fusion of each of them.
          if channel[0] in fused:
            continue
          fused.add(channel[0])
        size, group = _bytes(opcode, shape), _group(line, devices)
        if name.startswith('%all-reduce-scatter'):  # the name of the fusion
          kind, size = 'reduce-scatter', size / group
        scope = re.search(r'/(prefill|draft_init|propose|verify)/', line)
        where = scope[1] if scope else 'other'
        where += ', in branches' * ('/branch_' in line)
        kinds, sent = out.get(where, (collections.Counter(), 0))
        kinds[kind] += times
        sent += times * _sent(kind, size, group)
        out[where] = Collective(kinds, sent)

  visit(entry, 1)
  return out


def _turns(loop: str, parts: dict[str, list[str]]) -> int:
  """Returns how often a loop runs that counts to a number (scans); else 1."""
  condition = re.search(r'condition=(%[\w.\-]+)', loop)
  lines = '\n'.join(parts[condition[1]]) if condition else ''
  ends = _END.findall(lines)
  counts = len(ends) == 1 and re.search(r'ROOT .*compare\(.*LT', lines)
  return int(ends[0]) if counts else 1


def _group(line: str, devices: int) -> int:
  """Returns a collective's group size, `devices` where it names none, from
  {{0,2},{1,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'a'}."""
  if found := re.search(r'replica_groups=mesh\[(.*?)\].*?\{(.*?)\}', line):
    sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
    several = (int(sizes.get(a, devices)) for a in found[2].split(','))
    return min(devices, math.prod(several))
  if found := re.search(r'replica_groups=\[\d+,(\d+)\]', line):
    return int(found[1])
  found = re.search(r'replica_groups=\{\{([\d,]+)\}', line)
  return found[1].count(',') + 1 if found else devices


def _sent(opcode: str, size: float, devices: int) -> float:
  """Counts bytes that a device sends, on a ring; size: the result's."""
  share = (devices - 1) / devices
  factors = {'all-reduce': 2 * share, 'reduce-scatter': devices - 1}
  return size * (1 if 'permute' in opcode else factors.get(opcode, share))


def _bytes(opcode: str, shape: str) -> int:
  """Counts bytes in all a result's arrays; if it starts one, which names its
  operands too, in the largest."""
  each = [
    size(x) * max(int(bits or 8) // 8, 1)
    for x, bits in re.findall(r'((?:pred|bf|f|s|u)(\d*)\w*\[[\d,]*\])', shape)
  ]
  return max(each, default=0) if opcode.endswith('-start') else sum(each)


def _moves(shape: str) -> bool:
  """Returns whether the two ends of a copy lie in different memories: the
  compiler keeps a small cache on the chip, which copies none."""
  ends = re.findall(r'\w+\[[^\]]*\]\{[^}]*\}', shape)[:2]
  return len({'S(' in x for x in ends}) == 2


def warnings(
  text: str,
  caches: Collection[int],
  slots: int,
  gathers: Collection[int] = (),
) -> list[str]:
  """Returns a line a copy of a whole cache, gathered weight or host transfer.

  caches, gathers: elements of a device's caches, and of the weights to be
    gathered. slots: an axis of the caches.
  """
  out = []
  for opcode, shape, line in instructions(text):
    why = ''
    if opcode in ('copy', 'copy-start', 'transpose'):
      whole = size(shape) in caches and slots in dimensions(shape)
      whole &= not _moves(shape)
      why = 'a whole cache is copied' * whole
    if opcode.startswith(('all-gather', 'all-to-all')):
      large = size(shape) >= _GATHERED and size(shape) not in gathers
      why = 'weights or logits are gathered' * large
    if opcode in ('infeed', 'outfeed', 'send', 'recv') or re.search(
      'callback|host_compute', line
    ):
      why = 'the host takes part'
    if why:
      name = re.search(r'op_name="([^"]*)"', line)
      out.append(f'{why}: {opcode} {shape} of {name[1] if name else "?"}')
  return out
