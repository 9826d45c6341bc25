"""The first hour's checks: does the loop decode right on this very machine?

Each is a promise of the certificate in little, or a mistake that others made on
TPUs and that shows in no error message. Its docstring is what is printed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import machine, printing
from specdec_jax import sampling as sampling_lib
from specdec_jax.bench import tables, timing
from specdec_jax.certify import base, certificate, enumerated, identity, load
from specdec_jax.chips import roofline
from specdec_jax.models import weights
from specdec_jax.verify import reject

# Of a row of 512 float32 products; in bfloat16 it is about 2e-3.
_PRECISE = 1e-5
_NEW = 32
_LENGTH = 48  # of every buffer: each program compiles once


def subject() -> base.Subject:
  """One rule and one draft model, with which the promises are checked."""
  return base.Subject((reject.RULE,), {'lm': load.RECIPES['lm']})


def float32_products(subject: base.Subject, amount: int) -> base.Figure:
  """float32 products are not computed in bfloat16"""
  rng = np.random.default_rng(0)
  x, kernel = rng.normal(size=(amount, 512)), rng.normal(size=(512, 256))
  x, kernel = x.astype(np.float32), kernel.astype(np.float32)
  got = np.asarray(weights.matmul(jnp.asarray(x), jnp.asarray(kernel)))
  exact = x.astype(np.float64) @ kernel.astype(np.float64)
  size = np.abs(x).astype(np.float64) @ np.abs(kernel)
  off = float((np.abs(got - exact) / size).max())
  if not off <= _PRECISE:
    raise base.Broken(
      f'off by {off:.1e} of the summed sizes; float32 rounds to some 1e-7, '
      'bfloat16 to 1e-3: see jax_default_matmul_precision and XLA_FLAGS'
    )
  return base.Figure(
    f'off by {off:.1e}', f'{_PRECISE:.0e}', f'{amount} x 512 x 256'
  )


def whole_vocabulary(subject: base.Subject, amount: int) -> base.Figure:
  """no top-k that nobody asked for"""
  logits_V = np.random.default_rng(0).normal(size=amount).astype(np.float32)
  settings = sampling_lib.settings(1, temperature=1.0)
  p_V = jax.jit(sampling_lib.probabilities)(logits_V[None, None], settings)
  exact_V = np.exp(logits_V.astype(np.float64))
  off_V = np.asarray(p_V, np.float64)[0, 0] / (exact_V / exact_V.sum()) - 1
  lost = int((np.asarray(p_V) == 0).sum())
  if lost:
    raise base.Broken(f'{lost:,} of {amount:,} ids can never be drawn')
  off = float(np.abs(off_V).max())
  if not off <= 1e-3:
    raise base.Broken(f'a probability is off by {off:.1e} of its size')
  return base.Figure(f'off by {off:.1e}', '1e-03', f'{amount:,} ids')


def fresh_draws(subject: base.Subject, amount: int) -> base.Figure:
  """a key of its own for every step and request"""
  # To this model all ids are alike: with one key for every step it would
  # repeat one token.
  world = base.tables(13)
  world = world._replace(weights=jax.tree.map(np.zeros_like, world.weights))
  request = base.make_request(
    world, [[1]] * amount, _NEW, length=_LENGTH, temperature=1.0, seed=3
  )
  for what, texts in _texts(subject, world, request).items():
    text_BT = np.array(texts)[:, 1:]
    equal = np.mean(text_BT[:, 1:] == text_BT[:, :-1])
    # 1 / 13 is expected; the bound is some ten standard deviations away.
    if equal > 0.3:
      raise base.Broken(
        f'{what}: {equal:.0%} of the tokens repeat the one before them, where '
        f'{1 / 13:.0%} should; {text_BT[0, :8].tolist()}...'
      )
    if len({tuple(x) for x in texts}) < amount:
      raise base.Broken(f'{what}: two requests drew the same text')
  return base.Figure(
    'no token is tied to the one before', '30 %', f'{amount * _NEW} draws'
  )


def own_temperature(subject: base.Subject, amount: int) -> base.Figure:
  """no row is drawn at padding's or another row's temperature"""
  world = base.tables(13)
  prompts = base.ragged_prompts(amount, world.vocab, 0)
  warm, sizes = np.resize([0.0, 0.7, 1.0], amount), dict(length=_LENGTH, seed=5)
  asked = functools.partial(base.make_request, world, prompts, _NEW, **sizes)
  request, greedy = asked(temperature=warm), base.plain(world, asked())
  together = _texts(subject, world, request)
  for what, texts in together.items():
    base.same_texts(texts[::3], greedy[::3], f'{what}, temperature 0')
    for b, temperature in enumerate(warm):
      if temperature and texts[b] == greedy[b]:
        raise base.Broken(
          f'{what}: request {b} at temperature {temperature} is greedy'
        )
  for b in range(3):
    copies = base.take(request, [b] * amount)
    for what, texts in _texts(subject, world, copies).items():
      wanted = [together[what][b]] * amount
      base.same_texts(texts, wanted, f'{what}, among copies of itself')
  return base.Figure('as among copies of itself', 'equal', f'{amount} requests')


def _texts(subject: base.Subject, world, request) -> dict[str, list]:
  pair = subject.pair(world, 3)
  return {
    'plain decoding': base.plain(world, request),
    'speculative decoding': base.texts(base.run(world, pair, request)),
  }


def windows(subject: base.Subject, amount: int) -> base.Figure:
  """the target's exact distribution, by every outcome of every draw"""
  (rule,), (name,) = subject.rules, subject.drafters
  one = enumerated.window_error(rule, 0, amount, 2, 4, 1.0)
  world = base.tables(3)
  pair = subject.pair(world, 2)
  pair = pair._replace(drafter=base.ragged(pair.drafter))
  three = enumerated.windows_error(world, pair, dict(temperature=0.7, top_k=2))
  return base.Figure(
    f'off by {one:.1e} and {three:.1e}',
    f'{base.bound():.0e}',
    f'{rule.name}: {amount} pairs (p, q) of one window; three with {name}',
  )


def greedy_text(subject: base.Subject, amount: int) -> base.Figure:
  """a text of a transformer is that of plain decoding, but for ties"""
  ((arm, tokens, ties),) = identity.audited(subject, 'float32', amount)
  return base.Figure(
    f'{tokens} tokens equal, {ties} texts part at a tie', 'no bug', arm
  )


def bandwidth(subject: base.Subject, amount: int) -> base.Figure:
  """memory is read at half its stated speed or more"""
  found = timing.bandwidth(timing.reads('bfloat16'))['sustained']
  kind = jax.devices()[0].device_kind
  chip = roofline.called(kind)
  if not chip:
    raise base.NotChecked(
      f'{found:.0f} GB/s; what {kind!r} should reach is not known here'
    )
  stated = roofline.CHIPS[chip].device.bandwidth / 1e9
  reached = f'{found:.0f} GB/s of the {stated:.0f} of {chip}'
  if not found >= amount / 100 * stated:
    raise base.Broken(f'{reached}; is another program on this chip?')
  return base.Figure(reached, f'{amount} %', 'reads of 1 GB')


CHECKS = [
  base.Promise(x.__name__.replace('_', '-'), str(x.__doc__), x, amount, amount)
  for x, amount in (
    (float32_products, 64),  # rows
    (whole_vocabulary, 50_000),  # ids
    (fresh_draws, 8),  # requests
    (own_temperature, 8),  # requests
    (windows, 200),  # pairs (p, q)
    (greedy_text, 40),  # tokens
    (bandwidth, 50),  # per cent
  )
]


def run() -> bool:
  """Makes all checks and prints each; the last line is JSON.

  Returns whether none failed.
  """
  console, about = printing.console(), machine.describe()
  tables.machine(about, console)
  memory = jax.devices()[0].memory_stats() or {}
  if memory.get('bytes_limit'):
    console.print(
      f'[bold]Memory[/bold]   {memory["bytes_limit"] / 1e9:.1f} GB a device, '
      f'{memory.get("bytes_in_use", 0) / 1e9:.1f} in use'
    )
  console.print()
  rows = list(certificate.rows(CHECKS, subject(), False, console))
  wrong = [row.name for row in rows if row.passed is False]
  verdict = 'OK: this machine decodes as it should.'
  if wrong:
    verdict = f'Wrong here: {", ".join(wrong)}. Trust no text of this machine.'
  tables.close([verdict], dict(machine=about, checks=rows), console)
  return not wrong
