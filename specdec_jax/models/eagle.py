"""EAGLE draft models: a decoder layer or more over the target's hidden states.

Their input at token t is the embedding of t and the target's hidden states at
token t - 1 (the feature); they predict token t + 1. Embedding and head are the
target's, frozen, or their own.
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
  """An EAGLE draft. By default it is as scripts/distill.py trains one.

  block: the settings of its layers, and of its head.
  taps: of the target (types.Model.apply); together they are the features.
  tap_width: channels of each tap; 0: block.width.
  tap_norm: what becomes of the taps: 'unit' (each is divided by its root mean
    square), 'none', 'each' (each has a norm) or 'joined' (one norm for all).
  reads: how the first layer reads the embedding e and the feature g. 'joined':
    a projection of [norm(e), norm(g)] to the width. 'bare': a projection of
    [e, g], and attention reads it without a norm (EAGLE-1). 'beside': attention
    reads [norm(e), norm(g)], and the residual stream is g (EAGLE-3). 'context':
    tokens have no feature; in each layer they attend to keys and values of
    norm(g) of earlier tokens (DFlash; see Eagle.remember).
  normed_residual: of 'beside': the residual stream is norm(g).
  bias: whether projections of features have one.
  last_norm: 'head' (before the head), 'fed' (what is fed back as the next
    feature is normed too), 'target' (the target's, as its head is) or 'none'.
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
    """E, the channels of the taps together."""
    return len(self.taps) * (self.tap_width or self.block.width)


class Blocks(NamedTuple):
  """A draft that predicts a block of tokens in one pass (DFlash).

  config: of the draft, which reads 'context'.
  mask: the id that stands for each token of a block after the first, which is
    the last committed token.
  size: tokens of a block.
  first: the one whose state predicts the first token to draft: 1 if each mask
    predicts the token in its own place, 0 if all predict the next one.
  """

  config: EagleConfig
  mask: int
  size: int
  first: int = 1


def settings(
  target: model_config.LMConfig, taps: tuple[int, ...], **changes
) -> EagleConfig:
  """Returns the config of an EAGLE draft whose layer is like the target's.

  taps: layers of the target, ascending, the last one included; else ValueError.
  changes: fields of LMConfig that differ in the draft's layer.
  """
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
  """The parameters of a draft, but for its embedding and head."""

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
    """Returns the features as the first layer reads them: [B, T, H]."""
    x, c = features_BTE, self.config
    if c.tap_norm == 'unit':
      x = normed(x, len(c.taps))
    x = x.astype(c.block.activations)
    if norms := list(self.tap_norms.values()):
      each = zip(norms, jnp.split(x, len(norms), -1), strict=True)
      x = jnp.concatenate([norm(part) for norm, part in each], -1)
    return x if self.fuse is None else self.fuse(x)

  def remember(self, g_BTH: Array, views, writes):
    """Writes keys and values of features, of 'context'; returns the caches."""
    assert self.feature_norm is not None
    g_BTH, caches = self.feature_norm(g_BTH), []
    for block, view, write in self.layers(views, writes):
      caches.append(block.attn(g_BTH, view, write)[1])
    return tuple(caches)

  def layers(self, views, writes):
    """Yields (a layer, its view, its write)."""
    kinds = self.config.block.kinds
    for i, write in enumerate(writes):
      block = self.more[str(i)] if i else self.block
      yield block, views[kinds[i % len(kinds)]], write

  def __call__(self, e_BTH: Array, g_BTH: Array | None, views, writes):
    """Returns (the state that the head reads and that is fed back, caches).

    e_BTH, g_BTH: embeddings, and features as `fused` returns them, None of
      'context'.
    writes: of each layer, see layers.Block.
    """
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
  """Returns `normed` and the factor of each tap, [..., taps]."""
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
  """Draws parameters by flat name, distributed as those of lm.init."""
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
  """Turns the target's features, [B, T, E], into an input, [B, T, H]."""
  return merge(config, params).fused(features_BTE)


def reader(
  config: EagleConfig, target: types.Model, features: Array | None = None
) -> types.Model:
  """Returns the draft as a types.Model, for one call of apply.

  Its parameters are those of `weights`; all but apply and compact is the
  target's.

  features: features[:, t] belongs to the token before the t-th token of the
    call: the target's (features_of) or, where that token was drafted, the
    hidden state that apply returned for it. Of 'context' the target's own, of
    tokens that are remembered only; without features it reads the tokens as a
    block, of which each sees what the last one may see.
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
  """Returns parameters of `reader`: 'layer', 'head', 'ids', 'target', `own`.

  layer: parameters of Eagle, nested.
  ids: the draft's vocabulary, [R], as ids of the target; None: all of them,
    through the target's head.
  target_params: the target's; columns of its head are copied.
  own: the draft's own 'head', [H, R], and 'embed', [V, H].
  """
  found = {'layer': layer, 'target': target_params} | own
  if ids is not None:
    found['ids'] = jnp.asarray(ids)
    if 'head' not in own:
      found['head'] = weights_lib.of(target_params['head']).take(found['ids'])
  return found


class Logits(NamedTuple):
  """The logits of a draft that proposes some ids alone.

  some: [..., R], of these ids; or of all, [..., V].
  ids_R: None: all.
  vocab: V.
  """

  some: Array
  ids_R: Array | None
  vocab: int

  def whole(self) -> Array:
    """Returns logits of all ids, [..., V]: -inf where it never proposes."""
    if self.ids_R is None:
      return self.some
    shape = *self.some.shape[:-1], self.vocab
    out = jnp.full(shape, -jnp.inf, self.some.dtype)
    return out.at[..., self.ids_R].set(self.some, unique_indices=True)

  def id_of(self, place: Array) -> Array:
    """Returns the ids in these places of the last axis of `some`."""
    return place if self.ids_R is None else self.ids_R[place]


def every(logits: Logits | Array) -> Logits:
  """Wraps an array [..., V] as the Logits of all ids."""
  if isinstance(logits, Logits):
    return logits
  return Logits(logits, None, logits.shape[-1])


def logits(
  config: EagleConfig, target: types.Model, params, hidden: Array
) -> Logits:
  """Returns the Logits after these states: some [..., R], or all [..., V]."""
  if 'ids' in params:
    few = reduced(config, params, hidden)
    return Logits(few, params['ids'], target.vocab)
  if config.last_norm == 'target':
    return every(target.head(params['target'], hidden))
  assert target.project is not None and config.last_norm != 'head'
  return every(target.project(params['target'], hidden))


def reduced(config: EagleConfig, params, hidden: Array) -> Array:
  """Computes logits of the draft's vocabulary, [..., R], float32 or wider.

  Uses only the head and the last norm from params.
  """
  norm = None
  if config.last_norm == 'head':
    norm = layers.Norm(config.block, config.block.width)
    nnx.update(norm, nnx.State(params['layer']['norm']))
  return layers.head(config.block, norm, hidden, params['head'])
