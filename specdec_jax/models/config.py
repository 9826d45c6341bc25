"""Settings of the language model and the table of published sizes. A family
(Llama, GPT-2, Gemma) is a set of settings: no code depends on its name."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from specdec_jax import fields
from specdec_jax.models.rope import Divided, RopeScaling, Scaling


@dataclasses.dataclass(frozen=True)
class Execution:
  """How a model runs; results change by rounding alone.

  scan_layers: trace one layer and scan over the stack, which compiles faster.
    In an EAGLE draft each layer then has a cache like such a stack's.
  fused: one matmul for q, k and v and one for gate and up, faster for small
    matrices; for models on one device, not scanned.
  packed: matrices lie in weights.Panels, Quantised or Beside, for
    specdec_jax.kernels on a CPU; all else is float32. Needs fused.
  """

  scan_layers: bool = False
  fused: bool = False
  packed: bool = False

  def __post_init__(self):
    assert self.fused or not self.packed


@dataclasses.dataclass(frozen=True)
class LMConfig:
  """One transformer: a decoder, with an encoder before it or without.

  Sizes. vocab: rows of the embedding, padding included. context: positions that
  the model supports, and rows in the table of learned positions.

  Embedding. embed_scale: multiplies it, rounded to the activations' dtype.
  tied: the head is the same matrix.

  Positions. position: 'rope', 'learned' or 'relative' (T5 adds a number for
  each head and distance to the scores). buckets: how many relative positions
  are told apart, and the distance from which all are one.

  Attention. windows: how many tokens a token attends to, itself included, 0 for
  all; layer i has windows[i % len(windows)]. rotated: likewise whether a layer
  has RoPE. local_rope_theta: the unscaled RoPE base in layers with a window
  (None: as in the others). query_scale: multiplies the scores (None:
  head_dim**-0.5); attn_softcap then caps them. qk_norm: norms queries and keys,
  each head alone or, with joint_qk_norm, all heads' channels at once.

  MLP. act: 'silu', 'gelu_tanh' (its tanh approximation), 'gelu' (exact) or
  'relu'. gated: down(act(gate(x)) * up(x)), else down(act(up(x))).

  Norms. norm: 'rms', or 'layer' with a bias. pre_norm: norms before attention
  and MLP; post_norm: after them. wide_norm: keeps scales in float32 or wider.
  residual_scale: multiplies what attention and MLP add to the residual stream.

  Head. head_scale: multiplies its input. logit_softcap: caps the logits.
  proposes: the ids with a column in the head, ascending; all others have logit
  -inf; () is all ids. Only for drafts, which then must not be tied.

  Encoder. encoder: its settings; it reads a source with the decoder's
  embedding, and every decoder layer attends to the result. start: the id that
  the decoder's text then begins with. causal: false in the encoder, where a
  token also attends to later ones.

  Arithmetic. dtype: of weights and, unless they are packed, of activations and
  cache; logits are float32 or wider. run: how it runs.
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
  rope_scaling: Scaling | None = None
  buckets: tuple[int, int] = (32, 128)
  windows: tuple[int, ...] = (0,)
  rotated: tuple[bool, ...] = (True,)
  local_rope_theta: float | None = None
  query_scale: float | None = None
  attn_softcap: float | None = None
  qk_norm: bool = False
  joint_qk_norm: bool = False
  qkv_bias: bool = False
  o_bias: bool = False
  act: str = 'silu'
  gated: bool = True
  mlp_bias: bool = False
  norm: str = 'rms'
  norm_eps: float = 1e-5
  pre_norm: bool = True
  post_norm: bool = False
  wide_norm: bool = False
  residual_scale: float = 1.0
  head_scale: float = 1.0
  logit_softcap: float | None = None
  proposes: tuple[int, ...] = ()
  encoder: 'LMConfig | None' = None
  start: int | None = None
  causal: bool = True
  dtype: str = 'float32'
  run: Execution = Execution()

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads={self.heads} must be a multiple of kv_heads={self.kv_heads}'
      )
    for name, allowed in ALLOWED.items():
      assert getattr(self, name) in allowed, name
    assert not self.run.packed or self.dtype != 'float64'
    assert self.windows and min(self.windows) >= 0 and self.rotated
    table, pairs = self.rope_scaling, self.head_dim // 2
    if isinstance(table, Divided) and len(table.divisors) != pairs:
      raise ValueError(
        f'{len(table.divisors)} divisors of rotary frequencies; head_dim='
        f'{self.head_dim} needs {pairs}'
      )
    ids = self.proposes
    assert not (ids and self.tied) and [*ids] == sorted({*ids})
    assert not ids or 0 <= ids[0] <= ids[-1] < self.vocab

  @property
  def kinds(self) -> tuple[tuple[int, bool], ...]:
    """Lists the first layers' (window, rotated); layer i has i % the length."""
    w, r = self.windows, self.rotated
    count = math.lcm(len(w), len(r))
    return tuple((w[i % len(w)], r[i % len(r)]) for i in range(count))

  def of_layers(self, layers: Sequence[int]) -> 'LMConfig':
    """Returns the settings of a model with these layers only."""
    each = [self.kinds[i % len(self.kinds)] for i in layers]
    windows, rotated = map(shared, zip(*each, strict=True))
    return dataclasses.replace(
      self, depth=len(layers), windows=windows, rotated=rotated
    )

  def running(self, dtype: str = '', **changes) -> 'LMConfig':
    """Changes how model and encoder run, and their dtype ('': no change)."""
    return dataclasses.replace(
      self,
      dtype=dtype or self.dtype,
      run=dataclasses.replace(self.run, **changes),
      encoder=self.encoder and self.encoder.running(dtype, **changes),
    )

  @property
  def activations(self) -> str:
    """Names the dtype of activations and cache."""
    return 'float32' if self.run.packed else self.dtype


def shared(each: Sequence) -> tuple:
  """Shortens a per-layer setting to one value where all are equal."""
  return tuple(each[:1] if len(set(each)) == 1 else each)


# The values of settings that are words.
ALLOWED = {
  'position': ('rope', 'learned', 'relative'),
  'act': ('silu', 'gelu_tanh', 'gelu', 'relu'),
  'norm': ('rms', 'layer'),
  'dtype': ('float32', 'bfloat16', 'float64'),
}

_SMOL = dict(rope_theta=100000.0)
_SMOL_LARGE = dict(rope_theta=130000.0)
_UNTIED = dict(tied=False)
_LLAMA3_1B = dict(rope_theta=500000.0, rope_scaling=RopeScaling(factor=32.0))
_LLAMA3_8B = dict(rope_theta=500000.0, rope_scaling=RopeScaling(8.0)) | _UNTIED
_QWEN = dict(rope_theta=1000000.0, qkv_bias=True, norm_eps=1e-6)
_QWEN_LARGE = _QWEN | _UNTIED
_QWEN3_LARGE = _QWEN_LARGE | dict(qkv_bias=False, qk_norm=True)
# What all models of a family share.
GPT = dict(
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
_LM1B = GPT | _UNTIED


def gemma(width: int, **more) -> dict[str, Any]:
  """Returns the settings that Gemma 2 and 3 share, and `more`."""
  return more | dict(
    embed_scale=width**0.5,
    query_scale=256**-0.5,
    act='gelu_tanh',
    norm_eps=1e-6,
    post_norm=True,
    wide_norm=True,
  )


def _gemma3(width: int) -> dict[str, Any]:
  return gemma(
    width,
    windows=(512,) * 5 + (0,),
    rope_theta=1000000.0,
    local_rope_theta=10000.0,
    qk_norm=True,
  )


_GEMMA2 = gemma(2304, windows=(4096, 0), attn_softcap=50.0, logit_softcap=30.0)


def t5(depth: int, encoder_depth: int = 0, **sizes: Any) -> dict[str, Any]:
  """Returns the settings of a T5 whose encoder has its decoder's sizes and
  `encoder_depth` layers (0: as many). T5 1.0 (Raffel et al. 2020) has
  act='relu', gated=False, is tied and scales the head's input by width**-0.5;
  T5 1.1 and Flan have a gated GELU."""
  every = dict(position='relative', query_scale=1.0, norm_eps=1e-6)
  shared = {'depth': depth, 'kv_heads': sizes['heads'], **every, **sizes}
  encoder: dict[str, Any] = shared | {'depth': encoder_depth or depth}
  return shared | dict(start=0, encoder=LMConfig(**encoder, causal=False))


_COLUMNS = (
  'depth', 'width', 'heads', 'kv_heads', 'head_dim', 'mlp', 'vocab', 'context'
)  # fmt: skip
# Sizes as published in each checkpoint's config.json; small and mini, a target
# and a draft of 3M and 0.3M parameters, are for training with this library.
_ROWS: dict[str, tuple] = {
  'tiny': (2, 64, 4, 2, 16, 128, 512, 512, {}),
  'small': (6, 192, 6, 2, 32, 512, 3072, 512, {}),
  'mini': (2, 64, 2, 1, 32, 256, 3072, 512, {}),
  'smollm2_135m': (30, 576, 9, 3, 64, 1536, 49152, 8192, _SMOL),
  'smollm2_360m': (32, 960, 15, 5, 64, 2560, 49152, 8192, _SMOL),
  'smollm2_1_7b': (24, 2048, 32, 32, 64, 8192, 49152, 8192, _SMOL_LARGE),
  'tinyllama_1b': (22, 2048, 32, 4, 64, 5632, 32000, 2048, _UNTIED),
  'llama2_7b': (32, 4096, 32, 32, 128, 11008, 32000, 4096, _UNTIED),
  'llama3_1b': (16, 2048, 32, 8, 64, 8192, 128256, 131072, _LLAMA3_1B),
  'llama3_8b': (32, 4096, 32, 8, 128, 14336, 128256, 131072, _LLAMA3_8B),
  'qwen2_5_0_5b': (24, 896, 14, 2, 64, 4864, 151936, 32768, _QWEN),
  'qwen2_5_1_5b': (28, 1536, 12, 2, 128, 8960, 151936, 32768, _QWEN),
  'qwen2_5_7b': (28, 3584, 28, 4, 128, 18944, 152064, 32768, _QWEN_LARGE),
  'qwen3_8b': (36, 4096, 32, 8, 128, 12288, 151936, 40960, _QWEN3_LARGE),
  'gpt2': (12, 768, 12, 12, 64, 3072, 50257, 1024, GPT),
  'gpt_97m': (12, 768, 12, 12, 64, 3072, 8192, 256, _LM1B),
  'gpt_6m': (2, 256, 4, 4, 64, 1024, 8192, 256, _LM1B),
  'gemma2_2b': (26, 2304, 8, 4, 256, 9216, 256000, 8192, _GEMMA2),
  'gemma3_270m': (18, 640, 4, 1, 256, 2048, 262144, 32768, _gemma3(640)),
  'gemma3_1b': (26, 1152, 4, 1, 256, 6912, 262144, 32768, _gemma3(1152)),
}

# depth, width, heads, mlp of T5 1.1, whose halves have equal sizes; Flan-T5 is
# trained from it. w128 and w256 are drafts for the small one: their encoder of
# four layers runs once a request, their decoder's one for every draft token.
_T5 = {
  'w128': (1, 128, 2, 512, 4),
  'w256': (1, 256, 4, 1024, 4),
  'small': (8, 512, 6, 1024),
  'base': (12, 768, 12, 2048),
  'large': (24, 1024, 16, 2816),
  'xl': (24, 2048, 32, 5120),
  'xxl': (24, 4096, 64, 10240),
}


def _t5_1_1(
  depth, width, heads, mlp, encoder_depth=0, *, head_dim=64, vocab=32128
):
  """Returns the settings of a T5 1.1, with its training's context."""
  sizes = dict(
    width=width, heads=heads, head_dim=head_dim, mlp=mlp, vocab=vocab
  )
  more = dict(context=512, act='gelu_tanh', tied=False)
  return t5(depth, encoder_depth, **sizes, **more)


SIZES: dict[str, dict[str, Any]] = {
  name: dict(zip(_COLUMNS, row, strict=False)) | row[-1]
  for name, row in _ROWS.items()
} | {f't5_{name}': _t5_1_1(*row) for name, row in _T5.items()}
SIZES['t5_tiny'] = _t5_1_1(2, 64, 4, 128, head_dim=16, vocab=512)


def sized(name: str, **changes) -> LMConfig:
  """Returns an entry of SIZES with changes, which also apply to its encoder."""
  if name not in SIZES:
    raise ValueError(f'size {name!r}: {fields.choices(name, sorted(SIZES))}')
  found = LMConfig(**(SIZES[name] | changes))
  encoder = found.encoder and dataclasses.replace(found.encoder, **changes)
  return dataclasses.replace(found, encoder=encoder)
