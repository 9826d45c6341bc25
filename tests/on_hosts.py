"""What several processes do together; run by tests/many_hosts_test.py.

python scripts/launch_local.py --processes=P --devices=D -- tests/on_hosts.py
"""

import collections
import os
import pathlib
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np
from absl import flags

from specdec_jax import (
  build,
  decode,
  hosts,
  pool,
  printing,
  program,
  requests,
  sampling,
  sharding,
  types,
)
from specdec_jax.drafters import lm as lm_drafter
from specdec_jax.models import lm
from specdec_jax.train import data, runner
from tests import fakes
from tests.train import runs

_WHAT = flags.DEFINE_list('what', ['words'], 'a function, and words for it')

SIZES = dict(
  depth=1, heads=2, kv_heads=2, head_dim=4, width=16, mlp=32, vocab=16
)


def layout(config):
  devices = jax.device_count()
  data = devices // 2 if devices > 2 else devices
  return sharding.lay_out(sharding.make_mesh(data, devices // data), config)


def words() -> bool:
  """Arrays and values go from one process to the others and back."""
  index = jax.process_index()
  said = hosts.from_first(lambda: (os.getpid(), 'x' * 1000))
  assert (said[0] == os.getpid()) == (index == 0) and said[1] == 'x' * 1000
  try:
    hosts.from_first(lambda: int('none'))
    raise AssertionError
  except ValueError as error:
    assert "'none'" in str(error)
  assert not hosts.anywhere(False) and hosts.anywhere(index == 1)
  assert hosts.differing('a') is None
  assert hosts.differing('a' if index != 1 else 'b') == 1
  with tempfile.TemporaryDirectory() as own:  # another one in each process
    try:
      runner.open_run(pathlib.Path(own), {})
      raise AssertionError
    except ValueError as error:
      assert 'process 1 does not see' in str(error)
  over = layout(fakes.tiny(**SIZES))
  x_BT = np.arange(16 * 3).reshape(16, 3)
  placed = hosts.put(x_BT, over.sharding('batch', None))
  assert not placed.is_fully_addressable
  tree = hosts.fetch({'x': placed, 'sum': placed.sum(), 'host': x_BT})
  np.testing.assert_array_equal(tree['x'], x_BT)
  np.testing.assert_array_equal(tree['host'], x_BT)
  return tree['sum'] == x_BT.sum()


def tokens() -> bool:
  """Greedy and sampled texts, plain and speculative, are one device's."""
  config = fakes.tiny(**SIZES)
  asked = fakes.request(
    fakes.prompts(8, vocab=16, longest=5),
    8,
    vocab=16,
    length=16,
    temperature=[0.0, 0.8] * 4,
    seed=1,
  )
  for name in _WHAT.value[1:] or build.lossless_rules():
    case = asked, build.rule_of(name)
    found = _texts(config, layout(config), *case)
    # One device of one process, while the others wait.
    alone = hosts.from_first(lambda case=case: _texts(config, None, *case))
    assert found == alone, name
  found = _pooled(config, layout(config))
  return found == hosts.from_first(lambda: _pooled(config, None))


def _texts(config, over, asked, rule):
  model = lm.make(config, constrain=over and over.constrain)
  params = [lm.init(config, seed, put=over and over.put) for seed in (0, 1)]
  drafter = lm_drafter.make(model, gamma=2)
  options = decode.Options(chunk=8, widths=())
  programs = decode.programs(model, drafter, rule, options)
  asked = asked._replace(gamma_B=np.array([0, 0, 1, 1, 2, 2, 2, 2], np.int32))
  out = programs.generate(types.Weights(*params), requests.place(asked, over))
  return fakes.texts(hosts.fetch(out))


def _pooled(config, over):
  """Texts of rows that are refilled, after one that was cancelled."""
  model = lm.make(config, constrain=over and over.constrain)
  weights = types.Weights(lm.init(config, 0, put=over and over.put))
  options = decode.Options(chunk=8, widths=())
  loop = decode.Loop(model, decode.PLAIN, build.rule_of('reject'), options)
  held = pool.Pool(loop, weights, over, rows=4, length=16, stops=0)
  how = lambda i: sampling.Sampling(0.8 * (i % 2), seed=1)
  waiting = collections.deque(
    (i, x._replace(new=4 + i, sampling=how(i)))
    for i, x in enumerate(requests.items(fakes.prompts(8, vocab=16)))
  )
  one, item = waiting[0]
  held.begin([one], [item])
  assert not held.advance(1) and held.news().keys() == {one}
  held.cancel([one])
  return sorted((i, x.tokens) for i, x in held.answers(waiting))


def training() -> bool:
  """The run in a folder, to its end or until one process is told to stop."""
  folder, *stop = _WHAT.value[1:]
  whole = layout(fakes.tiny(**SIZES)).sharding()
  last = jax.process_index() == jax.process_count() - 1

  def refresh(step, params):
    if last and stop == [str(step)]:
      os.kill(os.getpid(), signal.SIGTERM)

  task = runs.task()
  params = hosts.put(task.params, whole)
  place = data.placer(layout(fakes.tiny(**SIZES)))
  task = task._replace(params=params, refresh=refresh, place=place)
  ended = runs.run(pathlib.Path(folder), task)
  return (ended.params is None) == bool(stop)


def death() -> bool:
  """One process sends itself a signal; the others wait for it."""
  name, number = _WHAT.value[1:]
  for step in range(10**6):
    if step == 3 and jax.process_index() == int(number):
      os.kill(os.getpid(), signal.Signals[name])
    hosts.anywhere(False)
  return False


def run() -> bool:
  parts = words, tokens, training, death
  what = {part.__name__: part for part in parts}
  good = bool(what[_WHAT.value[0]]())
  print(printing.compact({'processes': jax.process_count(), 'good': good}))
  return good


if __name__ == '__main__':
  program.launch(run, hosts=True)
