"""One of two processes that save and restore an array they share."""

import pathlib
import sys

import jax
import numpy as np

from specdec_jax.io import checkpoint, manifest


def shared(value: float) -> jax.Array:
  sharding = jax.NamedSharding(
    jax.make_mesh((4,), ('a',)), jax.sharding.PartitionSpec('a')
  )
  whole = np.arange(12, dtype=np.float32).reshape(4, 3) + value
  return jax.make_array_from_callback((4, 3), sharding, lambda i: whole[i])


def main(folder: str, address: str, number: int) -> None:
  jax.config.update('jax_num_cpu_devices', 2)
  jax.distributed.initialize(address, 2, number)
  assert jax.process_count() == 2 and jax.device_count() == 4
  x = shared(1)
  like = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  with checkpoint.Checkpoints(folder) as c:
    c.save(1, x, {'n': 1})
    c.save(2, shared(2), {})
    c.wait()
    steps = c.steps()
    if number == 0:
      (pathlib.Path(folder) / '2' / manifest.NAME).write_text('{}')
      # Process 0 alone cannot write what comes next.
      manifest.files.write = lambda *_: (_ for _ in ()).throw(OSError('no'))
    got = c.restore(like)
    for a, b in zip(
      got.arrays.addressable_shards, x.addressable_shards, strict=True
    ):
      np.testing.assert_array_equal(a.data, b.data)
    try:
      c.save(3, x, {})
      c.wait()
      said = 'saved 3'
    except checkpoint.Unsaved:
      said = 'unsaved 3'
    # The last line that is read: what both came to.
    print(f'restored {got.step} of {steps}; {said}', flush=True)


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
