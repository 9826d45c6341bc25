"""EAGLE draft models: decoder layers over the target's hidden states.

At token t they read its embedding and the target's hidden states at token t - 1
(the feature), and predict token t + 1. Embedding and head are the target's,
frozen, or their own.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

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
  """An EAGLE draft. The defaults are what scripts/distill.py trains.

  block: settings of its layers and its head.
  taps: the target's (types.Model.apply); together they are the features.
  tap_width: channels of each tap; 0: block.width.
  tap_norm: 'unit' (divide each tap by its root mean square), 'none', 'each'
    (each has a norm) or 'joined' (one norm for all).
  reads: how the first layer reads embedding e and feature g. 'joined': a
    projection of [norm(e), norm(g)] to the width. 'bare': a projection of
    [e, g], which attention reads without a norm (EAGLE-1). 'beside': attention
    reads [norm(e), norm(g)], and the residual stream is g (EAGLE-3). 'context':
    tokens have no feature; in each layer they attend to keys and values of
    earlier tokens' norm(g) (DFlash; see Eagle.remember).
  normed_residual: with 'beside', the residual stream is norm(g).
  bias: whether projections of features have one.
  last_norm: 'head' (before the head), 'fed' (the next feature, fed back, is
    normed too), 'target' (the target's, as its head is) or 'none'.
  reads_first: whether it reads token 0, beside a feature of zeros.
  """

  block: model_config.LMConfig
  taps: tuple[int, ...]
  tap_width: int = 0
  tap_norm: str = 'unit'
  reads: str = 'joined'
  normed_residual: bool = False
  bias: bool = False
  last_norm: str = 'head'
  reads_first: bool = True

  @property
  def features(self) -> int:
    """Returns E, all taps' channels together."""
    return len(self.taps) * (self.tap_width or self.block.width)


class Blocks(NamedTuple):
  """A draft that predicts a block of `size` tokens in one pass (DFlash).

  config: reads 'context'.
  mask: the id in every place but the first, the last committed token's.
  first: the place whose state predicts the first token to draft: 1 if each mask
    predicts its own place's token, 0 if all predict the next one.
  """

  config: EagleConfig
  mask: int
  size: int
  first: int = 1


def settings(
  target: model_config.LMConfig, taps: tuple[int, ...], **changes
) -> EagleConfig:
  """Returns the config of an EAGLE draft whose layer is like the target's, but
  for `changes`. Raises ValueError unless taps are layers of the target,
  ascending, the last one included."""
  depth, rising = target.depth, sorted(set(taps)) == list(taps)
  if not taps or not rising or taps[0] < 0 or taps[-1] != depth - 1:
    raise ValueError(
      f'taps={taps}: needs layers of the target in increasing order, at last '
      f'layer {depth - 1}'
    )
  same = dict(depth=1, windows=(0,), rotated=(True,))
  fused = dict(run=model_config.Execution(target.run.scan_layers, fused=True))
  block = dataclasses.replace(target, **same | fused | changes)
  return EagleConfig(block, tuple(taps))


class Eagle(nnx.Module):
  """A draft's parameters, but for its embedding and head."""

  def __init__(self, c: EagleConfig):
    H, E, count = c.block.width, c.features, len(c.taps)
    norm = functools.partial(layers.Norm, c.block)
    linear = functools.partial(layers.Linear, c.block, bias=c.bias)
    self.config = c
    parts = {'each': count, 'joined': 1}.get(c.tap_norm, 0)
    self.tap_norms = nnx.Dict({str(i): norm(E // parts) for i in range(parts)})
    bare, context = c.reads == 'bare', c.reads == 'context'
    apart = context or c.reads == 'beside'
    self.fuse = linear(E, H) if apart or E != H else None
    self.token_norm = None if bare or context else norm(H)
    self.feature_norm = None if bare else norm(H)
    self.join = None if apart else linear(2 * H, H)
    reads = {'beside': 2 * H, 'bare': H}.get(c.reads, 0)
    self.block = layers.Block(c.block, reads)
    self.more = nnx.Dict(
      {str(i): layers.Block(c.block) for i in range(1, c.block.depth)}
    )
    self.norm = None if c.last_norm in ('none', 'target') else norm(H)

  def fused(self, features_BTE: Array) -> Array:
    """Norms and projects the features for the first layer: [B, T, H]."""
    x, c = features_BTE, self.config
    if c.tap_norm == 'unit':
      x = normed(x, len(c.taps))
    x = x.astype(c.block.activations)
    if norms := list(self.tap_norms.values()):
      each = zip(norms, jnp.split(x, len(norms), -1), strict=True)
      x = jnp.concatenate([norm(part) for norm, part in each], -1)
    return x if self.fuse is None else self.fuse(x)

  def remember(self, g_BTH: Array, views, writes):
    """Writes the features' keys and values ('context'); returns the caches."""
    assert self.feature_norm is not None
    g_BTH, caches = self.feature_norm(g_BTH), []
    for block, view, write in self.layers(views, writes):
      caches.append(block.attn(g_BTH, view, write)[1])
    return tuple(caches)

  def layers(self, views, writes):
    """Yields (layer, view, write)."""
    kinds = self.config.block.kinds
    for i, write in enumerate(writes):
      block = self.more[str(i)] if i else self.block
      yield block, views[kinds[i % len(kinds)]], write

  def __call__(self, e_BTH: Array, g_BTH: Array | None, views, writes):
    """Returns (the state that the head reads and that is fed back, caches). The
    feature comes from `fused`, None for 'context'; writes has one a layer."""
    c, caches = self.config, []
    x_BTH = both = e_BTH
    if g_BTH is not None:
      x_BTH = g_BTH
      if self.token_norm is not None and self.feature_norm is not None:
        e_BTH, g_BTH = self.token_norm(e_BTH), self.feature_norm(g_BTH)
        x_BTH = g_BTH if c.normed_residual else x_BTH
      both = jnp.concatenate([e_BTH, g_BTH], -1)
    if self.join is not None:
      x_BTH = both = self.join(both)
    for block, view, write in self.layers(views, writes):
      reads = x_BTH if caches else both
      x_BTH, cache = block(x_BTH, view, write, reads)
      caches.append(cache)
    if self.norm is not None and c.last_norm == 'fed':
      x_BTH = self.norm(x_BTH)
    return x_BTH, tuple(caches)


def normed(features: Array, taps: int) -> Array:
  """Divides each tap by its root mean square, float32 or wider; 0 stays 0."""
  return scaled(features, taps)[0]


def scaled(features: Array, taps: int) -> tuple[Array, Array]:
  """Returns `normed` and each tap's factor, [..., taps]."""
  parts = jnp.stack(jnp.split(features, taps, -1), -2)
  wide = parts.astype(jnp.promote_types(parts.dtype, jnp.float32))
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
  return (wide * scale).reshape(features.shape), scale[..., 0]


@functools.cache
def split(config: EagleConfig):
  """Returns (graphdef, abstract params); allocates no memory."""
  return nnx.split(nnx.eval_shape(lambda: Eagle(config)), nnx.Param)


def shapes(config: EagleConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of every parameter, by flat name."""
  return lm.named(split(config))


def init(config: EagleConfig, seed: int) -> dict[str, Array]:
  """Draws parameters by flat name, distributed as in lm.init."""
  out, key = {}, jax.random.key(seed)
  for name, s in shapes(config).items():
    key, own = jax.random.split(key)
    out[name] = lm.drawn(config.block, own, name, s.shape, s.dtype)
  return out


def merge(config: EagleConfig, params) -> Eagle:
  """Returns the module with these parameters, nested as by lm.nest."""
  graphdef, _ = split(config)
  return nnx.merge(graphdef, nnx.State(params))


def features_of(params: Any, config: EagleConfig, features_BTE: Array) -> Array:
  """Norms and projects the target's features, [B, T, E], to [B, T, H]."""
  return merge(config, params).fused(features_BTE)


def reader(
  config: EagleConfig, target: types.Model, features: Array | None = None
) -> types.Model:
  """Returns the draft as a types.Model for one call of apply, with parameters
  from `weights`; all but apply and compact is the target's.

  features: features[:, t] belongs to the token before the call's token t: the
    target's (features_of) or, after a drafted token, the hidden state that
    apply returned for it. With 'context', the target's own, for tokens to
    remember; without features it then reads the tokens as a block, where each
    sees what the last one may see.
  """
  context = config.reads == 'context'

  def apply(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, **more):
    if context:
      mask_BTS = jnp.broadcast_to(mask_BTS[:, -1:], mask_BTS.shape)
    elif not config.reads_first:
      # A window may start with token 0, which then sees itself alone.
      slot_11S = jnp.arange(mask_BTS.shape[-1])[None, None]
      mask_BTS = mask_BTS & ((slot_11S > 0) | (positions_BT[..., None] == 0))
    at = positions_BT, mask_BTS, more.get('at_BS')
    views = attention.views(config.block, *at)
    writes = [kv.Writer(x, slots_BT) for x in cache]
    model, g_BTH = merge(config, params['layer']), None
    with jax.named_scope('eagle'):
      if context and features is not None:
        g_BTH = model.fused(features)
        return g_BTH, (), model.remember(g_BTH, views, writes)
      e_BTH = embed(target, params, tokens_BT, positions_BT)
      e_BTH = e_BTH.astype(config.block.activations)
      if features is not None:
        g_BTH = features.astype(e_BTH.dtype)
      hidden_BTH, cache = model(e_BTH, g_BTH, views, writes)
    return hidden_BTH, (), cache

  return target._replace(apply=apply, compact=kv.compact)


def embed(target: types.Model, params, tokens_BT, positions_BT) -> Array:
  """Looks up the draft's own embedding, or the target's: [B, T, H]."""
  if 'embed' in params:
    return params['embed'].at[tokens_BT].get(mode='clip')
  assert target.embed is not None, 'drafters.eagle.make refuses such a target'
  return target.embed(params['target'], tokens_BT, positions_BT)


def init_cache(config: EagleConfig, rows: int, slots: int, constrain=None):
  """Returns a cache for each layer; see models.cache.of_layers."""
  block = config.block
  if not block.run.scan_layers:
    return kv.of_layers(block, rows, slots, constrain)
  one, each = dataclasses.replace(block, depth=1), range(block.depth)
  return tuple(kv.of_layers(one, rows, slots, constrain) for _ in each)


def weights(
  layer: Any, ids: Any, target_params: Any, **own: Array
) -> dict[str, Any]:
  """Collects parameters for `reader`: 'layer', 'head', 'ids', 'target', `own`.

  layer: Eagle's parameters, nested.
  ids: the draft's vocabulary, [R], as ids of the target, whose head's columns
    are then copied; None: all, through the target's head.
  own: the draft's own 'head', [H, R], and 'embed', [V, H].
  """
  found = {'layer': layer, 'target': target_params} | own
  if ids is not None:
    found['ids'] = jnp.asarray(ids)
    if 'head' not in own:
      found['head'] = weights_lib.of(target_params['head']).take(found['ids'])
  return found


class Logits(NamedTuple):
  """Logits of a draft that may propose only some ids: `some` [..., R] for
  ids_R, or [..., V] for all (None)."""

  some: Array
  ids_R: Array | None
  vocab: int

  def whole(self) -> Array:
    """Returns logits for all ids, [..., V]: -inf where it never proposes."""
    if self.ids_R is None:
      return self.some
    shape = *self.some.shape[:-1], self.vocab
    out = jnp.full(shape, -jnp.inf, self.some.dtype)
    return out.at[..., self.ids_R].set(self.some, unique_indices=True)

  def id_of(self, place: Array) -> Array:
    """Maps places in the last axis of `some` to ids."""
    return place if self.ids_R is None else self.ids_R[place]


def every(logits: Logits | Array) -> Logits:
  """Wraps an array [..., V] as Logits for all ids."""
  if isinstance(logits, Logits):
    return logits
  return Logits(logits, None, logits.shape[-1])


def logits(
  config: EagleConfig, target: types.Model, params, hidden: Array
) -> Logits:
  """Computes the Logits after these states: some [..., R], or all [..., V]."""
  if 'ids' in params:
    few = reduced(config, params, hidden)
    return Logits(few, params['ids'], target.vocab)
  if config.last_norm == 'target':
    return every(target.head(params['target'], hidden))
  assert target.project is not None and config.last_norm != 'head'
  return every(target.project(params['target'], hidden))


def reduced(config: EagleConfig, params, hidden: Array) -> Array:
  """Computes logits for the draft's vocabulary, [..., R], float32 or wider,
  from the head and the last norm in params."""
  norm = None
  if config.last_norm == 'head':
    norm = layers.Norm(config.block, config.block.width)
    nnx.update(norm, nnx.State(params['layer']['norm']))
  return layers.head(config.block, norm, hidden, params['head'])
