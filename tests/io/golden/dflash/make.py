"""Writes the golden folders of DFlash with speculators.

  python -m tests.io.golden.dflash.make

Each folder is what save_pretrained writes for a tiny random DFlash in bfloat16
of the config.json there, beside a target of four layers; logits.npz has tokens
[T], features [T, n D] of these tokens, the target's embedding and head [V, D],
and for each folder the logits [A, size, R] of those weights in float64: entry
[a, j] is of the j-th token of the block that begins with token a.
"""

import pathlib

import numpy as np

from tests.io.golden import speculating
from tests.io.golden.speculating import D, V

HERE = pathlib.Path(__file__).parent
T, TAPS = 11, 2


def inputs():
  """tokens, features, embed and head."""
  rng = np.random.default_rng(1)
  wide = rng.normal(size=(T, TAPS * D)), *rng.normal(size=(2, V, D))
  features, embed, head = (x.astype(np.float32) for x in wide)
  tokens = rng.integers(0, V, T).astype(np.int32)
  return dict(tokens=tokens, features=features, embed=embed, head=head)


def model(name: str):
  """A random DFlashDraftModel, its weights rounded to bfloat16."""
  import torch
  from speculators.models import dflash

  config = dflash.DFlashSpeculatorConfig.from_pretrained(HERE / name)
  made = speculating.drawn(dflash.DFlashDraftModel, config)
  given = inputs()
  with torch.no_grad():
    made.embed_tokens.weight.copy_(torch.tensor(given['embed']))
    if config.draft_vocab_size == V:
      made.lm_head.weight.copy_(torch.tensor(given['head']))
    else:
      speculating.map_ids(made)
  return made


def logits(made, tokens, features) -> np.ndarray:
  """[A, SIZE, R]: of a block from every token that has one behind it."""
  import torch

  T, D = len(tokens), made.fc.out_features
  count = T - made.block_size
  ones = torch.ones(1, T, dtype=torch.long)
  with torch.no_grad():
    _, found, *_ = made.double()._backbone_forward(
      hidden_states=torch.tensor(features).double()[None],
      input_ids=torch.tensor(tokens).long()[None],
      loss_mask=ones,
      verifier_last_hidden_states=torch.zeros(1, T, D, dtype=torch.double),
      document_ids=0 * ones,
      max_anchors=count,
    )
  return found.numpy()[0].reshape(count, made.block_size, -1)


def make(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Writes a folder for each model; {its name: logits}."""
  given, out = inputs(), {}
  for name in speculating.folders(HERE):
    made = model(name)
    speculating.save(made, folder / name)
    out[name] = logits(made, given['tokens'], given['features'])
  return out


if __name__ == '__main__':
  found = {name: x.astype(np.float32) for name, x in make(HERE).items()}
  np.savez(HERE / 'logits.npz', **inputs(), **found)
