"""Estimates what a chip would do with a pair of models, by chips.roofline.

Temporaries, collectives and warnings come from programs that chips.aot
compiles, for TPUs alone. Nothing runs, and there are no weights.
"""

from collections.abc import Iterator
from typing import Any

from specdec_jax import decode, printing, sharding
from specdec_jax.chips import aot, roofline, train_step
from specdec_jax.costs import cost
from specdec_jax.drafters import method


def check(s: aot.Setting) -> tuple[aot.Setting, roofline.Chip]:
  """Returns (the setting with its mesh, one device of the topology); raises
  ValueError, in one sentence, for what cannot be compiled."""
  device, count = roofline.topology(s.topology)
  if s.data == s.model == 1:
    s = s._replace(model=count)
  for sentence in _refusals(s, count):
    raise ValueError(sentence)
  return s, device


def _refusals(s: aot.Setting, count: int) -> Iterator[str]:
  if s.data * s.model > count:
    yield (
      f'mesh data={s.data} x model={s.model} needs {s.data * s.model} devices; '
      f'{s.topology} has {count}'
    )
  if s.rows % s.data:
    yield f'batch_size={s.rows}: must be a multiple of mesh data={s.data}'
  for name, c in (('target', s.target), ('draft', s.draft)):
    if c.dtype != 'bfloat16':
      yield (
        f'{name}.dtype={c.dtype!r}: peaks of chips are of bfloat16: set '
        f'--config.{name}.dtype=bfloat16'
      )
  if (s.target.encoder is None) != (s.draft.encoder is None):
    yield 'an encoder: target and draft both need one, or neither'
  least, most = s.gamma + 4, min(s.target.context, s.draft.context)
  if not least <= s.slots <= most:
    yield f'context={s.slots}: must be in {least} to {most}, what both read'
  if s.train and not (aot.knows(s.topology) and s.draft.encoder is None):
    yield f'train={s.train}: of models without an encoder, on TPUs only'
  if s.train and not 2 <= s.train <= s.draft.context:
    yield f'train={s.train}: must be in 2 to {s.draft.context} of the draft'


def make(s: aot.Setting) -> dict[str, Any]:
  """Compiles for TPUs, and returns all figures; raises as `check` does."""
  s, device = check(s)
  target = roofline.share(s.target, s.model, s.weights[0])
  draft = roofline.share(s.draft, s.tensor_parallel or s.model, s.weights[1])
  shares = dict(target=target, draft=draft)
  source, rows = aot.SOURCE if s.target.encoder else 0, s.rows // s.data
  sizes: dict[str, Any] = dict(rows=rows, slots=s.slots, source=source)
  caches = {
    name: rows * (s.slots * x.slot + source * x.source_slot)
    for name, x in shares.items()
  }
  programs = _compiled(s, rows, shares) if aot.knows(s.topology) else {}
  held = programs['speculative'].temporaries if programs else 0
  temporaries = max(0.0, held - sum(caches.values()))
  passes = {
    name: roofline.forward(device, share, tokens=tokens, **sizes)
    for name, share, tokens in (
      ('plain step', target, 1),
      ('verify', target, s.gamma + 1),
      ('draft step', draft, 1),
    )
  }
  room = roofline.room(
    device, (target, draft), temporaries=temporaries, **sizes
  )
  read = min(s.target.context, s.draft.context)
  return dict(
    setting=s._replace(target=None, draft=None),
    device=device,
    shares=shares,
    caches=caches,
    temporaries=temporaries,
    room=room._replace(slots=min(room.slots, read)),
    passes=passes,
    roofline=roofline.predict(device, target, draft, **sizes),
    programs=programs,
    fits=room.fits and not any(x.refused for x in programs.values()),
    train=train_step.make(s, device) if s.train else {},
  )


def _compiled(s: aot.Setting, rows: int, shares):
  """Compiles plain and speculative generate; rows: a device's."""
  devices = aot.devices(s.topology)
  mesh = sharding.make_mesh(s.data, s.model, devices, s.tensor_parallel)
  # Of keys or values, 2 bytes each.
  elements = [int(rows * s.slots * x.slot) // 4 for x in shares.values()]
  drafters = {'plain': method.Method(decode.PLAIN), 'speculative': None}
  return {
    name: aot.compiled(aot.lower(mesh, s, x), s.model, elements, s.slots)
    for name, x in printing.track(drafters.items(), 'compiling')
  }


def lines(doc: dict[str, Any]) -> list[str]:
  """Writes the report of `make` for a terminal."""
  s, device, room = doc['setting'], doc['device'], doc['room']
  held = {f'{n} weights': x.weights for n, x in doc['shares'].items()}
  held |= {f'{n} cache': x for n, x in doc['caches'].items()}
  held |= {'temporaries': doc['temporaries']}
  out = [
    f'{" + ".join(s.names)} on {s.topology}: '
    f'{"compiled for, " if doc["programs"] else "by its data sheet, "}'
    'not run on',
    f'mesh data={s.data} x model={s.model}, batch {s.rows}, '
    f'context {s.slots}, gamma {s.gamma}',
    '',
    *_memory('memory of a device', held, device, doc['fits']),
    f'  longest context at batch {s.rows}: {room.slots}; largest batch at '
    f'context {s.slots}: {room.rows * s.data}',
  ]
  for name, x in doc['shares'].items():
    if x.whole:
      out.append(
        f'  {name}: model={x.split} does not divide {", ".join(x.whole)}: '
        'every device has all of it'
      )
  out += ['', 'roofline estimate, a pass on a device:']
  for name, x in doc['passes'].items():
    out.append(
      f'  {name:10} reads {_gb(x.bytes)}, {_ms(x.bytes / device.bandwidth)}; '
      f'{x.operations / 1e9:.1f} G operations, '
      f'{_ms(x.operations / device.peak)}; {_sends(x.sent, device)}; '
      f'in all {_ms(x.seconds)}'
    )
  out += ['', *_predicted(doc['roofline'], s.gamma), '']
  for name, program in doc['programs'].items():
    out += _program(f'{name} generate', program, device)
  if train := doc['train']:
    names = 'parameters', 'moments', 'activations'
    held = {name: train[name] for name in names}
    title = f'train step of {s.names[1]}, {s.rows} rows of {s.train} tokens'
    out += [
      '',
      *_memory(title, held, device, train['fits']),
      f'  parameters and moments are split over {train["parts"]} of '
      f'{s.data * s.model} devices',
      *_program('train step', train['program'], device),
    ]
  return out


def _memory(
  title: str, held: dict[str, float], device: roofline.Chip, fits: bool
) -> Iterator[str]:
  yield (
    f'{title}: {"fits" if fits else "DOES NOT FIT"} '
    f'({_gb(sum(held.values()))} of {_gb(device.memory)})'
  )
  yield from (f'  {name:15} {_gb(x)}' for name, x in held.items())


def _predicted(found: roofline.Prediction, gamma: int) -> list[str]:
  told = lambda alpha, gain, how: (
    f'{alpha}: ' + (f'{gain:.2f} ({how})' if gain > 1 else 'do not speculate')
  )
  best = [told(a, gain, f'gamma {g}') for a, (g, gain) in found.best.items()]
  trees = [
    told(alpha, gain, f'{nodes} nodes, {levels} levels')
    for alpha, (gain, nodes, levels) in found.trees.items()
  ]
  wide = max(roofline.NODES) + 1
  return [
    f'roofline estimate: c {found.c:.3f}, v({gamma + 1}) '
    f'{found.v[gamma + 1]:.3f}, v({wide}) {found.v[wide]:.3f}; improvement at '
    'the best gamma, by alpha:',
    '  ' + ', '.join(best),
    f'with the best tree, if each further child takes {cost.LATER} of what its '
    'elder siblings leave:',
    '  ' + ', '.join(trees),
  ]


def _program(title: str, x: aot.Compiled, device: roofline.Chip) -> list[str]:
  """Writes a program's figures; caches are temporaries."""
  if x.refused:
    return [f'{title}: the compiler refuses it: {x.refused}']
  out = [
    f'{title}, compiled in {x.seconds:.0f} s: arguments '
    f'{_gb(x.arguments)}, temporaries {_gb(x.temporaries)}'
  ]
  for scope, found in sorted(x.collectives.items()):
    kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(found.kinds.items()))
    out.append(f'  {scope}: {kinds}; {_sends(found.sent, device)}')
  if x.operations is not None and x.bytes is not None:
    out.append(
      f"  the compiler's own count, every loop's body once: "
      f'{x.operations / 1e9:.2f} G operations, {_gb(x.bytes)} accessed'
    )
  return out + [f'  WARNING {line}' for line in x.warnings]


def _sends(sent: float, device: roofline.Chip) -> str:
  return f'sends {sent / 1e6:.2f} MB, {_ms(sent / device.links)}'


def _gb(x: float) -> str:
  return f'{x / 1e9:.3f} GB'


def _ms(seconds: float) -> str:
  return f'{seconds * 1e3:.3f} ms'
