"""Settings of the decoder-only model and the table of published sizes.

A family is a set of settings, never a branch.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's frequency scaling (`rope_type: llama3`)."""

  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class LMConfig:
  """One decoder-only transformer.

  vocab counts the rows of the embedding, padding included. rope_pairs says
  which channels rotate together: 'half' (c, c + C/2) or 'interleaved'
  (2c, 2c + 1). dtype is that of weights, activations and cache; logits are
  float32 or wider. scan_layers: trace one layer and scan over the stack, which
  compiles faster. fused: one matmul for q, k and v and one for gate and up,
  which reads small matrices faster; for unscanned models on one device.
  Neither changes a result.
  """

  depth: int
  width: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  vocab: int
  context: int
  rope_theta: float = 10000.0
  rope_pairs: str = 'half'
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-5
  tied: bool = True
  qkv_bias: bool = False
  qk_norm: bool = False
  dtype: str = 'float32'
  scan_layers: bool = False
  fused: bool = False

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads={self.heads} must be a multiple of kv_heads={self.kv_heads}'
      )
    if self.rope_pairs not in ('half', 'interleaved'):
      raise ValueError(
        f"rope_pairs={self.rope_pairs!r}: allowed are 'half', 'interleaved'"
      )
    if self.dtype not in ('float32', 'bfloat16', 'float64'):
      raise ValueError(
        f"dtype={self.dtype!r}: allowed are 'float32', 'bfloat16', 'float64'"
      )


_LLAMA3 = dict(rope_theta=500000.0, vocab=128256, context=131072)
_QWEN25 = dict(rope_theta=1000000.0, qkv_bias=True, norm_eps=1e-6, head_dim=128)
_SMOL = dict(vocab=49152, context=8192, head_dim=64)

# Sizes as published in each checkpoint's config.json.
SIZES = {
  'tiny': dict(
    depth=2,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=128,
    vocab=512,
    context=512,
  ),
  'smollm2_135m': _SMOL
  | dict(
    depth=30,
    width=576,
    heads=9,
    kv_heads=3,
    mlp=1536,
    rope_theta=100000.0,
  ),
  'smollm2_360m': _SMOL
  | dict(
    depth=32,
    width=960,
    heads=15,
    kv_heads=5,
    mlp=2560,
    rope_theta=100000.0,
  ),
  'smollm2_1_7b': _SMOL
  | dict(
    depth=24,
    width=2048,
    heads=32,
    kv_heads=32,
    mlp=8192,
    rope_theta=130000.0,
  ),
  'tinyllama_1b': dict(
    depth=22,
    width=2048,
    heads=32,
    kv_heads=4,
    head_dim=64,
    mlp=5632,
    vocab=32000,
    context=2048,
    tied=False,
  ),
  'llama2_7b': dict(
    depth=32,
    width=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    mlp=11008,
    vocab=32000,
    context=4096,
    tied=False,
  ),
  'llama3_1b': _LLAMA3
  | dict(
    depth=16,
    width=2048,
    heads=32,
    kv_heads=8,
    head_dim=64,
    mlp=8192,
    rope_scaling=RopeScaling(factor=32.0),
  ),
  'llama3_8b': _LLAMA3
  | dict(
    depth=32,
    width=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    tied=False,
    rope_scaling=RopeScaling(factor=8.0),
  ),
  'qwen2_5_0_5b': _QWEN25
  | dict(
    depth=24,
    width=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    mlp=4864,
    vocab=151936,
    context=32768,
  ),
  'qwen2_5_1_5b': _QWEN25
  | dict(
    depth=28,
    width=1536,
    heads=12,
    kv_heads=2,
    mlp=8960,
    vocab=151936,
    context=32768,
  ),
  'qwen2_5_7b': _QWEN25
  | dict(
    depth=28,
    width=3584,
    heads=28,
    kv_heads=4,
    mlp=18944,
    vocab=152064,
    context=32768,
    tied=False,
  ),
}


def sized(name: str, **changes) -> LMConfig:
  """The LMConfig of a row of SIZES, with changes.

  Raises:
    ValueError: a name that is not in the table.
  """
  if name not in SIZES:
    raise ValueError(f'size {name!r} is not one of {sorted(SIZES)}')
  return LMConfig(**(SIZES[name] | changes))
