"""Settings of the decoder-only model and the table of published sizes.

A family is a set of settings, never a branch.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's frequency scaling (`rope_type: llama3`).

  original_context=0 makes every wavelength a long one: that is linear scaling
  (`rope_type: linear`), which divides all frequencies by factor.
  """

  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class LMConfig:
  """One decoder-only transformer.

  Sizes. vocab counts the rows of the embedding, padding included; context is
  the length of the table of learned positions, if there is one.

  Embedding. embed_scale multiplies it, rounded to dtype. tied: the head is the
  same matrix.

  Positions. position: 'rope' or 'learned'. rope_pairs says which channels
  rotate together: 'half' (c, c + C/2) or 'interleaved' (2c, 2c + 1).

  Attention. windows: how many tokens a layer sees, itself included, 0 for all;
  layer i takes windows[i % len(windows)]. local_rope_theta: the unscaled RoPE
  base of layers with a window; None: that of the others. query_scale multiplies
  the scores (head_dim**-0.5 if None), which attn_softcap then caps.

  MLP. act: 'silu', 'gelu_tanh' (its tanh approximation) or 'gelu' (exact).
  gated: down(act(gate(x)) * up(x)), else down(act(up(x))).

  Norms. norm: 'rms', or 'layer' with a bias. post_norm: norms after attention
  and after the MLP too. wide_norm: scales are kept and applied in float32 or
  wider.

  Head. logit_softcap caps the logits. proposes: the ids that the head has a
  column for, ascending; all others have logit -inf. Of drafts only, which are
  then not tied; () is all ids.

  How it runs; none of these but dtype changes a result. dtype is that of
  weights, activations and cache; logits are float32 or wider. scan_layers:
  trace one layer and scan over the stack, which compiles faster. fused: one
  matmul for q, k and v and one for gate and up, which reads small matrices
  faster; for unscanned models on one device.
  """

  depth: int
  width: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp: int
  vocab: int
  context: int
  embed_scale: float = 1.0
  tied: bool = True
  position: str = 'rope'
  rope_theta: float = 10000.0
  rope_pairs: str = 'half'
  rope_scaling: RopeScaling | None = None
  windows: tuple[int, ...] = (0,)
  local_rope_theta: float | None = None
  query_scale: float | None = None
  attn_softcap: float | None = None
  qk_norm: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  act: str = 'silu'
  gated: bool = True
  mlp_bias: bool = False
  norm: str = 'rms'
  norm_eps: float = 1e-5
  post_norm: bool = False
  wide_norm: bool = False
  logit_softcap: float | None = None
  proposes: tuple[int, ...] = ()
  dtype: str = 'float32'
  scan_layers: bool = False
  fused: bool = False

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads={self.heads} must be a multiple of kv_heads={self.kv_heads}'
      )
    for name, allowed in ALLOWED.items():
      if getattr(self, name) not in allowed:
        raise ValueError(
          f'{name}={getattr(self, name)!r}: allowed are '
          f'{", ".join(map(repr, allowed))}'
        )
    if not self.windows or min(self.windows) < 0:
      raise ValueError(
        f'windows={self.windows!r}: needs a number of tokens for at least one '
        'layer, 0 for all tokens'
      )
    ids = self.proposes
    if ids and (
      self.tied
      or list(ids) != sorted(set(ids))
      or not 0 <= ids[0] <= ids[-1] < self.vocab
    ):
      raise ValueError(
        f'proposes={ids[:4]}...: must be ascending ids below vocab='
        f'{self.vocab}, of a model that is not tied'
      )


# What settings that are words may say.
ALLOWED = {
  'rope_pairs': ('half', 'interleaved'),
  'position': ('rope', 'learned'),
  'act': ('silu', 'gelu_tanh', 'gelu'),
  'norm': ('rms', 'layer'),
  'dtype': ('float32', 'bfloat16', 'float64'),
}

_LLAMA3 = dict(rope_theta=500000.0, vocab=128256, context=131072)
_QWEN25 = dict(rope_theta=1000000.0, qkv_bias=True, norm_eps=1e-6, head_dim=128)
_SMOL = dict(vocab=49152, context=8192, head_dim=64)
_GPT = dict(
  position='learned',
  norm='layer',
  act='gelu_tanh',
  gated=False,
  qkv_bias=True,
  o_bias=True,
  mlp_bias=True,
)
# The GPT-like pair of Leviathan et al. 2023, section 4.1; their context is not
# published.
_GPT_LM1B = _GPT | dict(head_dim=64, vocab=8192, context=256, tied=False)
_GEMMA = dict(
  head_dim=256,
  query_scale=256**-0.5,
  act='gelu_tanh',
  norm_eps=1e-6,
  post_norm=True,
  wide_norm=True,
)
_GEMMA3 = _GEMMA | dict(
  heads=4,
  kv_heads=1,
  vocab=262144,
  context=32768,
  windows=(512,) * 5 + (0,),
  rope_theta=1000000.0,
  local_rope_theta=10000.0,
  qk_norm=True,
)

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
  # A target of 3M parameters and a draft of 0.3M, at 3,072 ids.
  'small': dict(
    depth=6,
    width=192,
    heads=6,
    kv_heads=2,
    head_dim=32,
    mlp=512,
    vocab=3072,
    context=512,
  ),
  'mini': dict(
    depth=2,
    width=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    mlp=256,
    vocab=3072,
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
  'gpt2': _GPT
  | dict(
    depth=12,
    width=768,
    heads=12,
    kv_heads=12,
    head_dim=64,
    mlp=3072,
    vocab=50257,
    context=1024,
  ),
  'gpt_97m': _GPT_LM1B
  | dict(depth=12, width=768, heads=12, kv_heads=12, mlp=3072),
  'gpt_6m': _GPT_LM1B | dict(depth=2, width=256, heads=4, kv_heads=4, mlp=1024),
  'gemma2_2b': _GEMMA
  | dict(
    depth=26,
    width=2304,
    heads=8,
    kv_heads=4,
    mlp=9216,
    vocab=256000,
    context=8192,
    embed_scale=2304**0.5,
    windows=(4096, 0),
    attn_softcap=50.0,
    logit_softcap=30.0,
  ),
  'gemma3_270m': _GEMMA3
  | dict(depth=18, width=640, mlp=2048, embed_scale=640**0.5),
  'gemma3_1b': _GEMMA3
  | dict(depth=26, width=1152, mlp=6912, embed_scale=1152**0.5),
}


def sized(name: str, **changes) -> LMConfig:
  """The LMConfig of a row of SIZES, with changes.

  Raises:
    ValueError: a name that is not in the table.
  """
  if name not in SIZES:
    raise ValueError(f'size {name!r} is not one of {sorted(SIZES)}')
  return LMConfig(**(SIZES[name] | changes))
