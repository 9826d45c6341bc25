"""Writes the golden folders with speculators.

  pip install speculators==0.9.0  # elsewhere: it wants other versions of ours
  python tests/io/golden/eagle3/make.py

Each folder is what save_pretrained writes for a tiny random EAGLE-3 in bfloat16
beside a target of ten layers; logits.npz has tokens [T], features [T, 3 D] of
the tokens before them, and for each folder the logits [3, T, R] of those
weights in float64: entry [k, t] follows token t + k, which was read beside the
draft's own hidden states from t + 1 on.
"""

import copy
import json
import pathlib
import shutil

import numpy as np

HERE = pathlib.Path(__file__).parent
KINDS = ('llama', 'qwen3')
FLAGS = {
  'plain': {},
  'residual': dict(norm_before_residual=True),
  'joined': dict(norm_before_fc=True),
  'each_fed': dict(fc_norm=True, norm_output=True),
  'residual_fed': dict(norm_before_residual=True, norm_output=True),
}
T, D, V, R, STEPS = 9, 16, 40, 12, 3


def inputs():
  """(tokens [T], features [T, 3 D])."""
  rng = np.random.default_rng(1)
  features = rng.normal(size=(T, 3 * D)).astype(np.float32)
  return rng.integers(0, V, T).astype(np.int32), features


def model(kind: str, flags: dict):
  """A random Eagle3DraftModel, its weights rounded to bfloat16."""
  import speculators
  import torch
  import transformers
  from speculators.models import eagle3
  from speculators.proposals import greedy

  settings = {
    'llama': transformers.LlamaConfig,
    'qwen3': transformers.Qwen3Config,
  }[kind](
    vocab_size=V,
    hidden_size=D,
    intermediate_size=24,
    num_hidden_layers=2 if flags.get('norm_before_fc') else 1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type='default', rope_theta=5000.0),
  )
  settings._attn_implementation = 'eager'
  verifier = speculators.VerifierConfig(
    name_or_path=None, architectures=['LlamaForCausalLM']
  )
  proposal = greedy.GreedyTokenProposalConfig(speculative_tokens=STEPS)
  config = eagle3.Eagle3SpeculatorConfig(
    transformer_layer_config=settings,
    draft_vocab_size=R,
    eagle_aux_hidden_state_layer_ids=[2, 5, 9],
    speculators_config=speculators.SpeculatorsConfig(
      algorithm='eagle3',
      proposal_methods=[proposal],
      default_proposal_method='greedy',
      verifier=verifier,
    ),
    **flags,
  )
  torch.manual_seed(0)
  made = eagle3.Eagle3DraftModel(config)
  with torch.no_grad():
    for x in made.parameters():
      drawn = torch.randn(x.shape)
      drawn = 1 + 0.3 * drawn if x.ndim == 1 else 0.4 * drawn
      x.copy_(drawn.bfloat16())
  ids = np.sort(np.random.default_rng(0).choice(V, R, replace=False))
  t2d = torch.zeros(V, dtype=torch.bool)
  t2d[torch.tensor(ids)] = True
  made.load_vocab_mappings(t2d, torch.tensor(ids - np.arange(R)))
  return made.eval()


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
  for kind in KINDS:
    for name, flags in FLAGS.items():
      made, path = model(kind, flags), folder / f'{kind}_{name}'
      shutil.rmtree(path, ignore_errors=True)
      # Not of the model that runs: it would round the angles of RoPE too.
      copy.deepcopy(made).bfloat16().save_pretrained(path)
      (path / 'config.py').unlink()  # of code that nobody runs
      settings = json.loads((path / 'config.json').read_text())
      (path / 'config.json').write_text(json.dumps(settings, indent=1) + '\n')
      out[path.name] = logits(made, *inputs())
  return out


if __name__ == '__main__':
  tokens, features = inputs()
  found = {name: x.astype(np.float32) for name, x in make(HERE).items()}
  np.savez(HERE / 'logits.npz', tokens=tokens, features=features, **found)
