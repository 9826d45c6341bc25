"""Writes the golden MTP module with speculators.

  python -m tests.io.golden.mtp.make

model.safetensors is a tiny random module as MiMo names it, which reads the
state before the embedding; logits.npz has tokens [T], states [T, D] of them,
the embedding and head [V, D], and the float64 logits [N, V] of those weights:
entry t is of state t and token t + 1.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

from tests.io.golden import speculating
from tests.io.golden.speculating import D, V

HERE = pathlib.Path(__file__).parent
T = 11


def inputs():
  """tokens, states, embed and head."""
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, V, T).astype(np.int32)
  states, embed, head = (
    rng.normal(size=(x, D)).astype(np.float32) for x in (T, V, V)
  )
  return dict(tokens=tokens, states=states, embed=embed, head=head)


def model():
  """A random MTPDraftModel."""
  import torch
  import transformers
  from speculators.models import mtp

  greedy = dict(proposal_type='greedy', speculative_tokens=1)
  about = dict(
    algorithm='mtp',
    proposal_methods=[greedy],
    default_proposal_method='greedy',
    verifier=dict(name_or_path=None, architectures=['LlamaForCausalLM']),
  )
  layers = transformers.AutoConfig.from_pretrained(HERE)
  config = mtp.MTPSpeculatorConfig(
    transformer_layer_config=layers, speculators_config=about
  )
  made = speculating.drawn(mtp.MTPDraftModel, config, rounded=False)
  given = inputs()
  with torch.no_grad():
    made.embed_tokens.weight.copy_(torch.tensor(given['embed']))
    made.lm_head.weight.copy_(torch.tensor(given['head']))
  return made


def make(folder: pathlib.Path) -> np.ndarray:
  """Writes the module; its logits."""
  import torch

  made, own = model(), {}
  for name, x in made.state_dict().items():
    if name.startswith('mtp_layers'):
      x = x.numpy()
      turned = name.endswith('input_proj.weight')
      own[f'model.{name}'] = np.roll(x, D, 1) if turned else x
  safetensors.numpy.save_file(own, folder / 'model.safetensors')
  settings = made.config.transformer_layer_config.to_diff_dict()
  text = json.dumps(settings, indent=1, default=str)
  (folder / 'config.json').write_text(text + '\n')
  given = inputs()
  with torch.no_grad():
    found, *_ = made.double()(
      input_ids=torch.tensor(given['tokens']).long()[None],
      hidden_states=torch.tensor(given['states']).double()[None],
    )
  return found[0].numpy()[0]


if __name__ == '__main__':
  logits = make(HERE).astype(np.float32)
  np.savez(HERE / 'logits.npz', logits=logits, **inputs())
