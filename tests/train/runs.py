"""A run that takes milliseconds: a linear map, trained on 40 rows."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.chips import train_step
from specdec_jax.io import checkpoint
from specdec_jax.train import data, loop, runner, train_lm
from specdec_jax.train import step as step_lib

OPTIMISER = dataclasses.replace(train_step.ADAM, learning_rate=0.1, warmup=2)
SETTINGS = dict(
  steps=14, checkpoint_every=4, evaluate_every=5, log_every=1, keep=2, seed=3
)


def params():
  draw = np.random.default_rng(0)
  w = jnp.asarray(draw.normal(size=(4, 3)), jnp.float32)
  return {'w': w, 'b': jnp.zeros(3)}


def loss(params, frozen, batch, key):
  """A mean over rows that count, with noise that is keyed by the step."""
  out = batch['x'] @ params['w'] + params['b'][None]
  out += frozen['noise'] * jax.random.normal(key, out.shape)
  error = jnp.mean((out - batch['y']) ** 2, 1)
  count = jnp.maximum(jnp.sum(batch['counted']), 1)
  value = jnp.sum(jnp.where(batch['counted'], error, 0)) / count
  return value, {'train_alpha': jnp.stack([value, value / 2])}


def bad_loss(params, frozen, batch, key):
  """The same, but of a batch marked bad the gradient alone is not finite."""
  value, figures = loss(params, frozen, batch, key)
  slope = lambda w: jnp.sqrt(0 * w.sum())
  flat = lambda w: jnp.zeros(())
  return value + jax.lax.cond(batch['bad'], slope, flat, params['w']), figures


_make, _made = step_lib.make, {}


def make(o, steps, loss, seed, start):
  """step.make, which compiles a program once for all runs of these tests."""
  which = o, steps, loss, seed
  if which not in _made:
    _made[which] = _make(o, steps, loss, seed, start)
  return _made[which]


def rows():
  draw = np.random.default_rng(1)
  return {
    'x': draw.normal(size=(40, 4)).astype(np.float32),
    'y': draw.normal(size=(40, 3)).astype(np.float32),
    'counted': draw.random(40) < 0.7,
  }


def evaluate(params):
  w = np.asarray(params['w'])
  return {'alpha': float(np.abs(w).sum()), 'alpha_at': [1.0, float('nan')]}


def task():
  return loop.Task(
    params=params(),
    loss=loss,
    frozen={'noise': jnp.float32(0.1)},
    batches=data.Batches(rows(), batch=4, seed=3),
    evaluate=evaluate,
    score=lambda figures: -figures['alpha'],
    tokens=4,
    flops=1.0,
  )


def run(workdir, task, *, changed=False, **settings):
  """A run; settings: those of loop.Run that are not SETTINGS."""
  run = SETTINGS | settings
  config = {'run': run, 'data': {'keep': 1}}
  runner.open_run(workdir, config, changed=changed, fixed=('run.seed',))
  return loop.run(task, loop.Run(**run), OPTIMISER, workdir, config)


def trained(config, workdir, few, changed=False, **sections):
  """A run of a config, with these sections' keys changed."""
  c = config.get_config('tiny').unlock()
  for section, values in [*few.items(), *sections.items()]:
    c[section].update(values)
  return train_lm.run(train_lm.settings(c), workdir, changed=changed)


def saved(workdir):
  """step -> (the bytes of its leaves, its facts)."""
  out, like = {}, step_lib.start(OPTIMISER, SETTINGS['steps'], params())
  with checkpoint.Checkpoints(workdir / 'checkpoints') as steps:
    for step in steps.steps():
      got = steps.restore(like, step)
      leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(got.arrays)]
      out[step] = leaves, got.facts
  return out


def left(workdir):
  """What must not depend on kills."""
  return saved(workdir)[SETTINGS['steps']], metrics(workdir)


def metrics(workdir):
  return (workdir / 'metrics.jsonl').read_text()


def lines(workdir):
  return [json.loads(line) for line in metrics(workdir).splitlines()]
