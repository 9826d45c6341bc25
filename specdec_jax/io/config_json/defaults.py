"""What keys absent from a config.json mean, and what it may not have."""

import json
import pathlib
from typing import Any

# The fields of the config classes of transformers 5.24, as tests/io/golden/make
# writes them. null stands for what is derived from other settings.
_FIELDS = json.loads(
  pathlib.Path(__file__).with_name('defaults.json').read_text('utf-8')
)
# What transformers has in a class's code instead.
_MORE: dict[str, dict[str, Any]] = {
  'qwen2': dict(attention_bias=True),
  'gemma3_text': dict(
    rope_theta=1000000.0, rope_local_base_freq=10000.0, sliding_window_pattern=6
  ),
  'smollm3': dict(rope_theta=2000000.0),
  # Positions: the length it was trained on; transformers has no such field.
  't5': dict(is_encoder_decoder=True, n_positions=512),
}


def of(kind: str) -> dict[str, Any]:
  """Returns a model_type's values for absent keys."""
  return dict(rope_theta=10000.0) | _FIELDS[kind] | _MORE.get(kind, {})


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
# Both for a rope settings object.
ROPE: dict[str, Any] = dict(beta_fast=32, beta_slow=1, truncate=True)
ROPE_NEUTRAL: dict[str, tuple] = {
  **_all(
    'beta_fast beta_slow high_freq_factor long_factor low_freq_factor '
    'mrope_section mscale mscale_all_dim short_factor'
  ),
  **_all('factor attention_factor partial_rotary_factor', 1),
}
