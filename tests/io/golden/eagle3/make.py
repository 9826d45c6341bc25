"""Writes the golden folders with speculators.

  python -m tests.io.golden.eagle3.make

Each folder is what save_pretrained writes for a tiny random EAGLE-3 in bfloat16
of the config.json there, beside a target of ten layers; logits.npz has tokens
[T], features [T, 3 D] of the tokens before them, and for each folder the logits
[3, T, R] of those weights in float64: entry [k, t] follows token t + k, which
was read beside the draft's own hidden states from t + 1 on.
"""

import pathlib

import numpy as np

from tests.io.golden import speculating
from tests.io.golden.speculating import D, V

HERE = pathlib.Path(__file__).parent
T, STEPS = 9, 3


def inputs():
  """(tokens [T], features [T, 3 D])."""
  rng = np.random.default_rng(1)
  features = rng.normal(size=(T, 3 * D)).astype(np.float32)
  return rng.integers(0, V, T).astype(np.int32), features


def model(name: str):
  """A random Eagle3DraftModel, its weights rounded to bfloat16."""
  from speculators.models import eagle3

  config = eagle3.Eagle3SpeculatorConfig.from_pretrained(HERE / name)
  made = speculating.drawn(eagle3.Eagle3DraftModel, config)
  speculating.map_ids(made)
  return made


def logits(made, tokens, features) -> np.ndarray:
  """[STEPS, T, R], teacher-forced from every token at once."""
  import torch

  found, wide = [], made.double()
  keep = lambda module, given, out: found.append(out.detach().numpy()[0])
  hook = wide.lm_head.register_forward_hook(keep)
  with torch.no_grad():
    wide(
      hidden_states=torch.tensor(features, dtype=torch.double)[None],
      input_ids=torch.tensor(tokens)[None],
      document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
      ttt_steps=STEPS,
    )
  hook.remove()
  return np.stack(found)


def make(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Writes a folder for each model; {its name: logits}."""
  out = {}
  for name in speculating.folders(HERE):
    made = model(name)
    speculating.save(made, folder / name)
    out[name] = logits(made, *inputs())
  return out


if __name__ == '__main__':
  tokens, features = inputs()
  found = {name: x.astype(np.float32) for name, x in make(HERE).items()}
  np.savez(HERE / 'logits.npz', tokens=tokens, features=features, **found)
