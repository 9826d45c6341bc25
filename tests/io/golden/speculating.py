"""What the makers of golden drafts share: tiny models of speculators.

pip install speculators==0.9.0  # elsewhere: it wants other versions of ours
"""

import copy
import json
import pathlib
import shutil

import numpy as np

D, V, R = 16, 40, 12


def folders(here: pathlib.Path) -> list[str]:
  """The golden folders beside a maker."""
  return sorted(x.parent.name for x in here.glob('*/config.json'))


def drawn(model, config, *, rounded: bool = True):
  """A random model of a config; rounded: its weights to bfloat16."""
  import torch

  config.transformer_layer_config._attn_implementation = 'eager'
  torch.manual_seed(0)
  made = model(config)
  with torch.no_grad():
    for x in made.parameters():
      x.copy_(torch.randn(x.shape))
      x.copy_(1 + 0.3 * x if x.ndim == 1 else 0.4 * x)
      x.copy_(x.bfloat16() if rounded else x)
  return made.eval()


def map_ids(made) -> None:
  """Gives a draft R of the V ids."""
  import torch

  ids = np.sort(np.random.default_rng(0).choice(V, R, replace=False))
  t2d = torch.zeros(V, dtype=torch.bool)
  t2d[torch.tensor(ids)] = True
  made.load_vocab_mappings(t2d, torch.tensor(ids - np.arange(R)))


def save(made, path: pathlib.Path) -> None:
  """Writes its folder, of bfloat16."""
  shutil.rmtree(path, ignore_errors=True)
  # Not of the model that runs: it would round the angles of RoPE too.
  copy.deepcopy(made).bfloat16().save_pretrained(path)
  (path / 'config.py').unlink()  # of code that nobody runs
  settings = json.loads((path / 'config.json').read_text())
  (path / 'config.json').write_text(json.dumps(settings, indent=1) + '\n')
