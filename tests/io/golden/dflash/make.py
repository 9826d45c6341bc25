"""Writes the golden folders of DFlash with speculators.

  pip install speculators==0.9.0  # elsewhere: it wants other versions of ours
  python tests/io/golden/dflash/make.py

Each folder is what save_pretrained writes for a tiny random DFlash in bfloat16
beside a target of four layers; logits.npz has tokens [T], features [T, n D] of
these tokens, the target's embedding and head [V, D], and for each folder the
logits [A, size, R] of those weights in float64: entry [a, j] is of the j-th
token of the block that begins with token a.
"""

import copy
import json
import pathlib
import shutil

import numpy as np

HERE = pathlib.Path(__file__).parent
T, D, V, R, SIZE, MASK, TAPS = 11, 16, 40, 12, 4, 37, (1, 3)
FOLDERS = {
  'masks': dict(draft_vocab_size=V),
  'anchor': dict(draft_vocab_size=R, sample_from_anchor=True),
}


def inputs():
  """tokens, features, embed and head."""
  rng = np.random.default_rng(1)
  wide = rng.normal(size=(T, len(TAPS) * D)), *rng.normal(size=(2, V, D))
  features, embed, head = (x.astype(np.float32) for x in wide)
  tokens = rng.integers(0, V, T).astype(np.int32)
  return dict(tokens=tokens, features=features, embed=embed, head=head)


def model(**settings):
  """A random DFlashDraftModel, its weights rounded to bfloat16."""
  import speculators
  import torch
  import transformers
  from speculators.models import dflash
  from speculators.proposals import greedy

  layers = transformers.Qwen3Config(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type='default', rope_theta=5000.0),
  )
  layers._attn_implementation = 'eager'
  config = dflash.DFlashSpeculatorConfig(
    transformer_layer_config=layers,
    block_size=SIZE,
    mask_token_id=MASK,
    aux_hidden_state_layer_ids=list(TAPS),
    speculators_config=speculators.SpeculatorsConfig(
      algorithm='dflash',
      proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
      default_proposal_method='greedy',
      verifier=speculators.VerifierConfig(
        name_or_path=None, architectures=['LlamaForCausalLM']
      ),
    ),
    **settings,
  )
  torch.manual_seed(0)
  made = dflash.DFlashDraftModel(config)
  given = inputs()
  with torch.no_grad():
    for x in made.parameters():
      drawn = torch.randn(x.shape)
      drawn = 1 + 0.3 * drawn if x.ndim == 1 else 0.4 * drawn
      x.copy_(drawn.bfloat16())
    made.embed_tokens.weight.copy_(torch.tensor(given['embed']))
    if settings['draft_vocab_size'] == V:
      made.lm_head.weight.copy_(torch.tensor(given['head']))
    else:
      ids = np.sort(np.random.default_rng(0).choice(V, R, replace=False))
      t2d = torch.zeros(V, dtype=torch.bool)
      t2d[torch.tensor(ids)] = True
      made.load_vocab_mappings(t2d, torch.tensor(ids - np.arange(R)))
  return made.eval()


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
  for name, settings in FOLDERS.items():
    made, path = model(**settings), folder / name
    shutil.rmtree(path, ignore_errors=True)
    # Not of the model that runs: it would round the angles of RoPE too.
    copy.deepcopy(made).bfloat16().save_pretrained(path)
    (path / 'config.py').unlink()  # of code that nobody runs
    facts = json.loads((path / 'config.json').read_text())
    (path / 'config.json').write_text(json.dumps(facts, indent=1) + '\n')
    out[name] = logits(made, given['tokens'], given['features'])
  return out


if __name__ == '__main__':
  found = {name: x.astype(np.float32) for name, x in make(HERE).items()}
  np.savez(HERE / 'logits.npz', **inputs(), **found)
