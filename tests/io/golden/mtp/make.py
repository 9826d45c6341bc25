"""Writes the golden MTP module with speculators.

  pip install speculators==0.9.0  # elsewhere: it wants other versions of ours
  python tests/io/golden/mtp/make.py

model.safetensors is a tiny random module as MiMo names it, which reads the
state before the embedding; logits.npz has tokens [T], states [T, D] of them,
the embedding and head [V, D], and the float64 logits [N, V] of those weights:
entry t is of state t and token t + 1.
"""

import json
import pathlib

import numpy as np
import safetensors.numpy

HERE = pathlib.Path(__file__).parent
T, D, V = 11, 16, 40


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
  import speculators
  import torch
  import transformers
  from speculators.models import mtp
  from speculators.proposals import greedy

  layers = transformers.Qwen3Config(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type='default', rope_theta=5000.0),
  )
  layers._attn_implementation = 'eager'
  config = mtp.MTPSpeculatorConfig(
    transformer_layer_config=layers,
    speculators_config=speculators.SpeculatorsConfig(
      algorithm='mtp',
      proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=1)],
      default_proposal_method='greedy',
      verifier=speculators.VerifierConfig(
        name_or_path=None, architectures=['LlamaForCausalLM']
      ),
    ),
  )
  torch.manual_seed(0)
  made, given = mtp.MTPDraftModel(config), inputs()
  with torch.no_grad():
    for x in made.parameters():
      drawn = torch.randn(x.shape)
      x.copy_(1 + 0.3 * drawn if x.ndim == 1 else 0.4 * drawn)
    made.embed_tokens.weight.copy_(torch.tensor(given['embed']))
    made.lm_head.weight.copy_(torch.tensor(given['head']))
  return made.eval()


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
