"""The EAGLE draft model: one decoder layer over the target's hidden states.

Its input at token t is the embedding of t and the target's hidden states at
token t - 1 (the feature); it predicts token t + 1. Embedding and head are the
target's, frozen; the head is cut to the columns of the draft's vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specdec_jax import types
from specdec_jax.models import attention, layers, lm
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config
from specdec_jax.models import weights as weights_lib

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class EagleConfig:
  """An EAGLE draft.

  block: the settings of its one layer, fused, of the target's width.
  taps: the target's layers whose residual streams are its features, ascending.
  """

  block: model_config.LMConfig
  taps: tuple[int, ...]


def settings(
  target: model_config.LMConfig, taps: tuple[int, ...], **changes
) -> EagleConfig:
  """The config of an EAGLE draft whose layer is like the target's.

  Args:
    target: the target's config.
    taps: layers of the target, ascending, the last one included.
    **changes: fields of LMConfig that differ in the draft's layer.

  Raises:
    ValueError: taps that are not as above.
  """
  depth, rising = target.depth, sorted(set(taps)) == list(taps)
  if not taps or not rising or taps[0] < 0 or taps[-1] != depth - 1:
    raise ValueError(
      f'taps={taps}: needs layers of the target in increasing order, at last '
      f'layer {depth - 1}'
    )
  same = dict(depth=1, windows=(0,), rotated=(True,))
  fused = dict(run=model_config.Execution(fused=True))
  block = dataclasses.replace(target, **same | fused | changes)
  return EagleConfig(block, tuple(taps))


class Eagle(nnx.Module):
  """y = block(join(norm(embedding), norm(feature))); logits = head(norm(y))."""

  def __init__(self, c: EagleConfig):
    D, taps = c.block.width, len(c.taps)
    self.config = c
    self.fuse = layers.Linear(c.block, taps * D, D) if taps > 1 else None
    self.token_norm, self.feature_norm, self.norm = (
      layers.norm(c.block, D) for _ in range(3)
    )
    self.join = layers.Linear(c.block, 2 * D, D)
    self.block = layers.Block(c.block)

  def fused(self, features_BTE: Array) -> Array:
    """The concatenated features reduced to width D: [B, T, D]."""
    x = normed(features_BTE, len(self.config.taps))
    x = x.astype(self.config.block.activations)
    return x if self.fuse is None else self.fuse(x)

  def __call__(self, tokens_BTD, feature_BTD, view, write):
    both = self.token_norm(tokens_BTD), self.feature_norm(feature_BTD)
    return self.block(self.join(jnp.concatenate(both, -1)), view, write)


def normed(features: Array, taps: int) -> Array:
  """Each tap divided by its root mean square, float32 or wider; 0 stays 0."""
  parts = jnp.stack(jnp.split(features, taps, -1), -2)
  wide = parts.astype(jnp.promote_types(parts.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
  return (wide * scale).reshape(features.shape)


@functools.cache
def split(config: EagleConfig):
  """(graphdef, abstract params); allocates no memory."""
  return nnx.split(nnx.eval_shape(lambda: Eagle(config)), nnx.Param)


def shapes(config: EagleConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype of every parameter, by flat name."""
  return lm.named(split(config))


def init(config: EagleConfig, seed: int) -> dict[str, Array]:
  """Random parameters by flat name, distributed as those of lm.init."""
  out, key = {}, jax.random.key(seed)
  for name, s in shapes(config).items():
    key, own = jax.random.split(key)
    out[name] = lm.drawn(config.block, own, name, s.shape, s.dtype)
  return out


def cast(config: EagleConfig, params):
  """Nested parameters cast to the dtypes that the draft computes in."""
  wanted = lm.nest(shapes(config))
  return jax.tree.map(lambda x, s: x.astype(s.dtype), params, wanted)


def merge(config: EagleConfig, params) -> Eagle:
  """The module with these parameters, nested as by lm.nest."""
  graphdef, _ = split(config)
  return nnx.merge(graphdef, nnx.State(params))


@functools.cache
def _norm(config: EagleConfig):
  make = lambda: layers.norm(config.block, config.block.width)
  return nnx.split(nnx.eval_shape(make), nnx.Param)[0]


def features_of(params: Any, config: EagleConfig, features_BTE: Array) -> Array:
  """The target's features, [B, T, E], as input of the draft: [B, T, D]."""
  return merge(config, params).fused(features_BTE)


def reader(
  config: EagleConfig, target: types.Model, features_BTD: Array
) -> types.Model:
  """The draft as a types.Model, for one call of apply with these features.

  Its parameters are those of `weights`; all but apply is the target's.

  Args:
    config: of the draft.
    target: the target, whose embedding is read.
    features_BTD: features_BTD[:, t] belongs to the token before the t-th token
      of the call: the target's (features_of) or, where that token was drafted,
      the hidden state that apply returned for it.
  """
  embed = target.embed
  assert embed is not None, 'drafters.eagle.make refuses such a target'

  def apply(
    params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, *, taps=()
  ):
    del taps
    (view,) = attention.views(config.block, positions_BT, mask_BTS).values()
    write = kv.Writer(cache, slots_BT)
    with jax.named_scope('eagle'):
      tokens_BTD = embed(params['target'], tokens_BT, positions_BT)
      hidden_BTD, cache = merge(config, params['layer'])(
        tokens_BTD, features_BTD.astype(tokens_BTD.dtype), view, write
      )
    return hidden_BTD, (), cache

  return target._replace(apply=apply)


def init_cache(config: EagleConfig, rows: int, slots: int):
  """Of the one layer; see models.cache.empty."""
  return kv.empty(config.block, rows, slots)


def weights(layer: Any, ids: Any, target_params: Any) -> dict[str, Any]:
  """The parameters of `reader`: 'layer', 'head', 'ids' and 'target'.

  Args:
    layer: parameters of the draft's layer, nested.
    ids: the draft's vocabulary, [R], as ids of the target.
    target_params: the target's; the head is copied from columns of its head.
  """
  ids = jnp.asarray(ids)
  head = weights_lib.of(target_params['head']).take(ids)
  return {'layer': layer, 'head': head, 'ids': ids, 'target': target_params}


def logits(config: EagleConfig, params, hidden: Array, vocab: int) -> Array:
  """Logits of all ids, [..., V]; -inf outside the draft's vocabulary."""
  few = reduced(config, params, hidden)
  out = jnp.full((*few.shape[:-1], vocab), -jnp.inf, few.dtype)
  return out.at[..., params['ids']].set(few, unique_indices=True)


def reduced(config: EagleConfig, params, hidden: Array) -> Array:
  """Logits of the draft's vocabulary, [..., R], float32 or wider.

  Uses only the head and the layer's last norm from params.
  """
  norm = nnx.merge(_norm(config), nnx.State(params['layer']['norm']))
  few = layers.head(config.block, norm, hidden, params['head'])
  if config.block.head_scale != 1:
    few *= config.block.head_scale
  return attention.softcap(few, config.block.logit_softcap)
