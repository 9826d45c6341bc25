"""What a config.json means where it says nothing, and what may not be in it.

DEFAULTS are those of the config classes of transformers 5.24; a test compares
them all. None stands for what is derived from other settings.
"""

from typing import Any

_SIZES = (
  'vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
  'num_attention_heads', 'num_key_value_heads', 'head_dim',
  'max_position_embeddings',
)  # fmt: skip
_COMMON: dict[str, Any] = dict(
  hidden_act='silu', rms_norm_eps=1e-6, rope_theta=10000.0,
  tie_word_embeddings=False, attention_bias=False,
)  # fmt: skip
_QWEN: dict[str, Any] = dict(
  use_sliding_window=False, sliding_window=4096, max_window_layers=28
)
_GEMMA: dict[str, Any] = dict(
  tie_word_embeddings=True, use_bidirectional_attention=False
)
_GEMMA2: dict[str, Any] = _GEMMA | dict(
  hidden_activation='gelu_pytorch_tanh',
  query_pre_attn_scalar=256,
  sliding_window=4096,
)


def _row(*sizes: int | None, **more: Any) -> dict[str, Any]:
  """A family's defaults: its _SIZES, and what is not as in _COMMON."""
  return dict(zip(_SIZES, sizes, strict=True)) | _COMMON | more


DEFAULTS: dict[str, dict[str, Any]] = {
  'llama': _row(32000, 4096, 11008, 32, 32, None, None, 2048, mlp_bias=False),
  'mistral': _row(
    32000, 4096, 14336, 32, 32, 8, None, 131072, sliding_window=4096
  ),
  'qwen2': _row(
    151936, 4096, 22016, 32, 32, 32, None, 32768, **_QWEN, attention_bias=True
  ),
  'qwen3': _row(151936, 4096, 22016, 32, 32, 32, 128, 32768, **_QWEN),
  'gemma': _row(
    256000, 3072, 24576, 28, 16, 16, 256, 8192, **_GEMMA,
    hidden_act='gelu_pytorch_tanh',
  ),
  'gemma2': _row(
    256000, 2304, 9216, 26, 8, 4, 256, 8192, **_GEMMA2,
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
  ),
  'gemma3_text': _row(
    262208, 2304, 9216, 26, 8, 4, 256, 131072, **_GEMMA2,
    rope_theta=1000000.0, rope_local_base_freq=10000.0,
    sliding_window_pattern=6,
  ),
  'phi3': _row(
    32064, 3072, 8192, 32, 32, None, None, 4096,
    original_max_position_embeddings=4096, rms_norm_eps=1e-5,
  ),
  'olmo2': _row(
    50304, 4096, 11008, 32, 32, None, None, 2048, rms_norm_eps=1e-5
  ),
  'smollm3': _row(
    128256, 2048, 11008, 36, 16, 4, None, 32768, mlp_bias=False,
    tie_word_embeddings=True, rope_theta=2000000.0, no_rope_layer_interval=4,
    use_sliding_window=False,
  ),
  'granite': _row(
    32000, 4096, 11008, 32, 32, None, None, 2048, mlp_bias=False,
    embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0,
    attention_multiplier=1.0,
  ),
  'gpt2': dict(
    vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12,
    activation_function='gelu_new', layer_norm_epsilon=1e-5,
    scale_attn_weights=True, tie_word_embeddings=True,
  ),
  't5': dict(
    vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6,
    num_heads=8, relative_attention_num_buckets=32,
    relative_attention_max_distance=128, layer_norm_epsilon=1e-6,
    feed_forward_proj='relu', is_encoder_decoder=True, pad_token_id=0,
    n_positions=512,  # no field of transformers': the length of training
  ),
}  # fmt: skip


def _all(keys: str, *values: Any) -> dict[str, tuple]:
  return dict.fromkeys(keys.split(), values)


# Keys that change a model, of any family, and the values under which they do
# not. Others are refused by a family that does not read the key.
NEUTRAL: dict[str, tuple] = {
  **_all(
    'add_cross_attention alibi attention_bias attn_temperature_tuning mlp_bias '
    'parallel_attn qk_layernorm qkv_bias rope_interleaved use_alibi use_bias '
    'scale_attn_by_inverse_layer_idx tie_encoder_decoder use_cross_attention '
    'use_bidirectional_attention use_parallel_residual use_qk_norm '
    'use_sliding_window',
    False,
  ),
  **_all(
    'embedding_multiplier logit_scale logits_scaling partial_rotary_factor '
    'residual_multiplier rotary_pct scale_emb',
    1,
  ),
  **_all(
    'attn_logit_softcapping n_routed_experts num_experts num_local_experts', 0
  ),
  **_all(
    'attention_chunk_size attention_multiplier clip_qkv compression_config '
    'final_logit_softcapping hidden_activation no_rope_layers '
    'per_layer_config query_pre_attn_scalar quantization_config '
    'rope_local_base_freq rope_parameters rope_scaling scale_depth '
    'sliding_window text_config'
  ),
  **_all('is_causal scale_attn_weights', True),
  'pruned_heads': ({},),
}
# Both for an object of rope settings.
ROPE: dict[str, Any] = dict(beta_fast=32, beta_slow=1, truncate=True)
ROPE_NEUTRAL: dict[str, tuple] = {
  **_all(
    'beta_fast beta_slow high_freq_factor long_factor low_freq_factor '
    'mrope_section mscale mscale_all_dim short_factor'
  ),
  **_all('factor attention_factor partial_rotary_factor', 1),
}
