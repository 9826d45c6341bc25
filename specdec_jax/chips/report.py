"""What a chip would do with a pair of models, on paper.

The estimates are chips.roofline's; temporaries, collectives and warnings are of
the programs that chips.aot compiles, for TPUs alone. Nothing runs, and there
are no weights.
"""

from typing import Any

from specdec_jax import decode, printing, sharding
from specdec_jax.chips import aot, roofline
from specdec_jax.costs import cost
from specdec_jax.drafters import method
from specdec_jax.models import weights

# At which the speeds of different weights are compared.
_ALPHA = 0.7


def check(s: aot.Setting) -> tuple[aot.Setting, roofline.Chip]:
  """(the setting with its mesh filled in, one device of the topology).

  Raises:
    ValueError: what cannot be compiled, in one sentence.
  """
  device, count = roofline.topology(s.topology)
  if s.data == s.model == 1:
    s = s._replace(model=count)
  if s.data * s.model > count:
    raise ValueError(
      f'mesh data={s.data} x model={s.model} needs {s.data * s.model} devices; '
      f'{s.topology} has {count}'
    )
  if s.rows % s.data:
    raise ValueError(
      f'batch_size={s.rows} does not divide over mesh data={s.data}: '
      'use a multiple of it'
    )
  for name, c in (('target', s.target), ('draft', s.draft)):
    if c.dtype != 'bfloat16':
      raise ValueError(
        f'{name}.dtype={c.dtype!r}: peaks of chips are of bfloat16: set '
        f'--config.{name}.dtype=bfloat16'
      )
  if (s.target.encoder is None) != (s.draft.encoder is None):
    raise ValueError('an encoder: target and draft both need one, or neither')
  least, most = s.gamma + 4, min(s.target.context, s.draft.context)
  if not least <= s.slots <= most:
    raise ValueError(
      f'context={s.slots}: must be in {least} to {most}, what both models read'
    )
  return s, device


def make(s: aot.Setting) -> dict[str, Any]:
  """Compiles for TPUs, and returns all figures as a dict.

  Raises:
    ValueError: see check.
  """
  s, device = check(s)
  split = s.tensor_parallel or s.model
  target = roofline.share(s.target, s.model, s.weights[0])
  draft = roofline.share(s.draft, split, s.weights[1])
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
  draft_step = lambda split: roofline.forward(
    device, roofline.share(s.draft, split, s.weights[1]), tokens=1, **sizes
  )
  passes = {
    'plain step': roofline.forward(device, target, tokens=1, **sizes),
    'verify': roofline.forward(device, target, tokens=s.gamma + 1, **sizes),
    'draft step': draft_step(split),
  }
  predicted = {
    kind or 'bfloat16': roofline.predict(
      device, roofline.share(s.target, s.model, kind), draft, **sizes
    )
    for kind in ('', *weights.INTEGERS)
  }
  room = roofline.room(
    device, (target, draft), temporaries=temporaries, **sizes
  )
  read = min(s.target.context, s.draft.context)
  splits = [n for n in range(1, s.model + 1) if s.model % n == 0]
  return dict(
    setting=s._replace(target=None, draft=None),
    device=device,
    shares=shares,
    caches=caches,
    temporaries=temporaries,
    room=room._replace(slots=min(room.slots, read)),
    passes=passes,
    draft_steps={n: draft_step(n).seconds for n in splits},
    roofline=predicted[s.weights[0] or 'bfloat16'],
    speeds={
      kind: (1 / x.step, x.best[_ALPHA][1] / x.step)
      for kind, x in predicted.items()
    },
    programs=programs,
  )


def _compiled(s: aot.Setting, rows: int, shares):
  """Plain and speculative generate by name; rows: of a device."""
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
  """The report of `make` for a terminal."""
  s, device, room = doc['setting'], doc['device'], doc['room']
  held = {f'{n} weights': x.weights for n, x in doc['shares'].items()}
  held |= {f'{n} cache': x for n, x in doc['caches'].items()}
  held |= {'temporaries': doc['temporaries']}
  refused = [
    f'{n}: {x.refused}' for n, x in doc['programs'].items() if x.refused
  ]
  fits = 'fits' if room.fits and not refused else 'DOES NOT FIT'
  out = [
    f'{" + ".join(s.names)} on {s.topology}: '
    f'{"compiled for, " if doc["programs"] else "by its data sheet, "}'
    'not run on',
    f'mesh data={s.data} x model={s.model}, batch {s.rows}, '
    f'context {s.slots}, gamma {s.gamma}',
    '',
    f'memory of a device: {fits} ({gb(sum(held.values()))} of '
    f'{gb(device.memory)})',
    *(f'  {name:15} {gb(x)}' for name, x in held.items()),
    f'  longest context at batch {s.rows}: {room.slots}; largest batch at '
    f'context {s.slots}: {room.rows * s.data}',
    *(f'  the compiler refuses {x}' for x in refused),
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
      f'  {name:10} reads {gb(x.bytes)}, {_ms(x.bytes / device.bandwidth)}; '
      f'{x.operations / 1e9:.1f} G operations, '
      f'{_ms(x.operations / device.peak)}; sends {x.sent / 1e6:.2f} MB, '
      f'{_ms(x.sent / device.links)}; in all {_ms(x.seconds)}'
    )
  steps = [f'{n}: {_ms(x)}' for n, x in doc['draft_steps'].items()]
  out.append(f'  draft step by draft.tensor_parallel: {", ".join(steps)}')
  out += ['', *_predicted(doc['roofline'], s.gamma)]
  speeds = [f'{n}: {x:.0f}, {y:.0f}' for n, (x, y) in doc['speeds'].items()]
  out += [
    f'  tokens/s of a row by target.dtype, plain and at alpha {_ALPHA}: '
    f'{"; ".join(speeds)}',
    '',
  ]
  for name, program in doc['programs'].items():
    out += program_lines(f'{name} generate', program, device)
  return out


def _predicted(found: roofline.Prediction, gamma: int) -> list[str]:
  best = [
    f'{alpha}: {gain:.2f} (gamma {g})' if g else f'{alpha}: do not speculate'
    for alpha, (g, gain) in found.best.items()
  ]
  trees = [
    f'{alpha}: {gain:.2f} ({nodes} nodes, {levels} levels)'
    if gain > 1
    else f'{alpha}: do not speculate'
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


def program_lines(
  title: str, x: aot.Compiled, device: roofline.Chip
) -> list[str]:
  """The figures of a compiled program; caches are temporaries."""
  if x.refused:
    return []
  out = [
    f'{title}, compiled in {x.seconds:.0f} s: arguments '
    f'{gb(x.arguments)}, temporaries {gb(x.temporaries)}'
  ]
  for scope, found in sorted(x.collectives.items()):
    kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(found.kinds.items()))
    out.append(
      f'  {scope}: {kinds}; sends {found.sent / 1e6:.2f} MB, '
      f'{_ms(found.sent / device.links)}'
    )
  if x.operations is not None and x.bytes is not None:
    out.append(
      f"  the compiler's own count, every loop's body once: "
      f'{x.operations / 1e9:.2f} G operations, {gb(x.bytes)} accessed'
    )
  return out + [f'  WARNING {line}' for line in x.warnings]


def gb(x: float) -> str:
  return f'{x / 1e9:.3f} GB'


def _ms(seconds: float) -> str:
  return f'{seconds * 1e3:.3f} ms'
