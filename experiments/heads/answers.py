"""Records a teacher's answers once, for several kinds of drafts."""

import json
import pathlib

import numpy as np

from specdec_jax.io import files


def fewer(folder: pathlib.Path, into: pathlib.Path, taps: list[int]) -> None:
  """Writes a teacher's answers anew with some of their layers."""
  facts = files.read_json(folder / 'facts.json')
  at = [facts['taps'].index(i) for i in taps]
  read = lambda name: np.load(folder / f'{name}.npy', mmap_mode='r')
  arrays = {name: read(name) for name in ('tokens', 'spans', 'mass')}
  n, L, _ = (features := read('features')).shape
  of_tap = features.reshape(n, L, len(facts['taps']), -1)
  arrays['features'] = of_tap[:, :, at].reshape(n, L, -1)
  arrays['scale'] = read('scale')[..., at]
  into.mkdir(parents=True, exist_ok=True)
  for name, x in arrays.items():
    np.save(into / f'{name}.npy', x)
  # Last: without it the folder counts as empty.
  files.write(into / 'facts.json', json.dumps(facts | {'taps': taps}))
