"""Writes the golden folders with torch and transformers (extra `parity`).

  python tests/io/golden/make.py

Each folder is what save_pretrained writes for a tiny random model in bfloat16,
and logits.npz: tokens [2, 24] and the float32 logits of those weights.
"""

import pathlib

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
COMMON = dict(
  vocab_size=64,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=4,
  intermediate_size=48,
  max_position_embeddings=128,
)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=10000.0,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=64,
)
LOCAL = 'sliding_attention'
# A window that is shorter than the tokens, and caps that bend.
GEMMA = dict(
  num_key_value_heads=2,
  head_dim=8,
  hidden_activation='gelu_pytorch_tanh',
  sliding_window=8,
  attn_implementation='eager',
)


def models():
  """Name -> (model class, config); Q and O are square, to catch transposes."""
  t = transformers
  return {
    'llama': (
      t.LlamaForCausalLM,
      t.LlamaConfig(
        **COMMON,
        num_key_value_heads=2,
        rope_parameters=LLAMA3,
        tie_word_embeddings=False,
      ),
    ),
    'qwen2': (
      t.Qwen2ForCausalLM,
      t.Qwen2Config(**COMMON, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    'qwen3': (
      t.Qwen3ForCausalLM,
      t.Qwen3Config(
        **COMMON,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=False,
      ),
    ),
    'gpt2': (
      t.GPT2LMHeadModel,
      t.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_inner=48,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
      ),
    ),
    'gemma2': (
      t.Gemma2ForCausalLM,
      t.Gemma2Config(
        **COMMON,
        **GEMMA,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
      ),
    ),
    'gemma3': (
      t.Gemma3ForCausalLM,
      t.Gemma3TextConfig(
        **COMMON | dict(num_hidden_layers=3),
        **GEMMA,
        query_pre_attn_scalar=8,
        layer_types=[LOCAL, 'full_attention', LOCAL],
        rope_parameters=dict(
          sliding_attention=dict(rope_type='default', rope_theta=10000.0),
          full_attention=dict(
            rope_type='linear', rope_theta=1000000.0, factor=8.0
          ),
        ),
      ),
    ),
  }


def build(name: str, seed: int = 0):
  """(model in bfloat16 weights, tokens, float32 logits)."""
  torch.manual_seed(seed)
  make, config = models()[name]
  model = make(config).eval()
  with torch.no_grad():
    for x in model.parameters():
      # Far from the default 0.02, so that a wrong attention shows.
      noise = torch.randn(x.shape) * 0.2
      # Scales are around 1; Gemma stores their differences from it.
      x.copy_(noise + bool((x == 1).all()))
      # Not model.to(bfloat16), which would round RoPE's frequencies too.
      x.copy_(x.to(torch.bfloat16))
    tokens = torch.randint(0, COMMON['vocab_size'], (2, 24))
    logits = model(tokens).logits
  return model.to(torch.bfloat16), tokens.numpy(), logits.numpy()


def main():
  for name in models():
    model, tokens, logits = build(name)
    model.save_pretrained(HERE / name)
    (HERE / name / 'generation_config.json').unlink(missing_ok=True)
    np.savez(HERE / name / 'logits.npz', tokens=tokens, logits=logits)


if __name__ == '__main__':
  main()
