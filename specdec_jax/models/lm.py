"""The language model: a decoder, with an encoder before it or without.

Training, prefill, decoding (T = 1) and verification (T = gamma + 1) run the
same `apply`. Parameters are a plain nested dict; io and sharding use their flat
names ('layers/0/attn/q/kernel').
"""

import functools
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.ad_checkpoint import checkpoint_name

from specdec_jax import types
from specdec_jax.models import alone, attention, encoder, layers, weights
from specdec_jax.models import cache as kv
from specdec_jax.models import config as model_config

Array = jax.Array


class Ends(nnx.Module):
  """Embedding, tables of positions, final norm and output head [D, V]. Tied
  models look up embeddings in the head's columns: one array for both, in the
  layout that the head needs. An encoder has only norm and relative positions.
  """

  def __init__(self, c: model_config.LMConfig):
    table = lambda *shape, dtype=c.dtype: nnx.Param(jnp.zeros(shape, dtype))
    self.config = c
    self.norm = layers.Norm(c, c.width)
    if c.position == 'relative':
      self.relative = table(c.buckets[0], c.heads, dtype=c.activations)
    if not c.causal:
      return
    head = jnp.zeros((c.width, len(c.proposes) or c.vocab), c.dtype)
    self.head = nnx.Param(weights.pack(head) if c.run.packed else head)
    self.embed = None if c.tied else table(c.vocab, c.width)
    learned = c.position == 'learned'
    self.positions = table(c.context, c.width) if learned else None

  def lookup(self, tokens_BT: Array, positions_BT: Array) -> Array:
    c = self.config
    if self.embed is not None:
      table = self.embed.get_value()
    else:
      table = weights.Table(self.head.get_value())
    x_BTD = weights.rows(table, tokens_BT).astype(c.activations)
    if c.embed_scale != 1:
      x_BTD = x_BTD * jnp.asarray(c.embed_scale, c.activations)
    if self.positions is not None:
      # A window may reach past the context; tokens there are never committed.
      inside_BT = jnp.minimum(positions_BT, c.context - 1)
      added_BTD = self.positions[...].at[inside_BT].get(mode='clip')
      x_BTD = x_BTD + added_BTD.astype(x_BTD.dtype)
    return x_BTD


def _modules(config: model_config.LMConfig):
  """Splits a block and Ends: (graphdef, abstract params) each, no memory."""
  if config.dtype == 'float64' and not jax.config.read('jax_enable_x64'):
    raise ValueError("dtype='float64' needs 64 bits: set JAX_ENABLE_X64=1")
  return _split(config)


@functools.cache
def _split(config: model_config.LMConfig):
  split = lambda make: nnx.split(nnx.eval_shape(make), nnx.Param)
  return split(lambda: layers.Block(config)), split(lambda: Ends(config))


def shapes(config: model_config.LMConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of every parameter's arrays, by flat name."""
  block, ends = _modules(config)
  out = named(ends)
  for name, x in named(block).items():
    if config.run.scan_layers:
      shape = lambda x: jax.ShapeDtypeStruct((config.depth, *x.shape), x.dtype)
      out[f'layers/{name}'] = jax.tree.map(shape, x)
    else:
      out |= {f'layers/{i}/{name}': x for i in range(config.depth)}
  if config.encoder is not None:
    out |= {f'encoder/{n}': x for n, x in shapes(config.encoder).items()}
  return out


def named(module) -> dict[str, jax.ShapeDtypeStruct]:
  """Lists a module's parameters after nnx.split, by flat name."""
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
  return {
    '/'.join(map(str, path)): jax.tree.map(shape, leaf.get_value())
    for path, leaf in nnx.to_flat_state(module[1])
  }


def nest(flat: dict[str, Any]) -> dict[str, Any]:
  """Turns {'layers/0/norm': x} into {'layers': {'0': {'norm': x}}}."""
  return traverse_util.unflatten_dict(flat, sep='/')


def flatten(params: types.Params) -> dict[str, Any]:
  """Inverts nest; a matrix in weights.STORED is one parameter."""
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
  leaves = jax.tree_util.tree_leaves_with_path(params, weights.is_stored)
  return {name(path): leaf for path, leaf in leaves}


def every_pass(name: str) -> bool:
  """Tells by flat name whether each decoder pass reads a parameter whole: it
  reads a few rows from a table, and a source is read once."""
  seldom = r'(embed|positions|encoder)\b|layers/.*cross_attn/[kv]/'
  return not re.match(seldom, name)


def init(config: model_config.LMConfig, seed: int, put=None) -> types.Params:
  """Draws parameters: kernels N(0, 1/fan_in), norm scales 1, biases 0, rows of
  the token and position tables N(0, 1/width), relative positions N(0, 1).

  Where scores are not scaled (query_scale 1), q kernels' variance is smaller by
  head_dim. Values depend on the seed and the parameter's unscanned name: a seed
  gives the same model, sharded, scanned or neither. put(name, array) -> array
  places each parameter as it is made.
  """
  assert not config.run.packed, 'convert.pack packs what is made'
  out = {}
  for name, s in shapes(config).items():
    x = draw(config, seed, unscanned(config, name, s), s.shape, s.dtype)
    out[name] = put(name, x) if put else x
  return nest(out)


def unscanned(config: model_config.LMConfig, name: str, stack) -> list[str]:
  """Names each layer's parameter in a stack, else the parameter itself."""
  if not config.run.scan_layers or 'layers/' not in name:
    return [name]
  return [
    name.replace('layers/', f'layers/{i}/') for i in range(stack.shape[0])
  ]


def draw(config, seed: int, names: Sequence[str], shape, dtype) -> Array:
  """Draws this name's parameter, or a stack for several, as in `init`."""
  root = jax.random.key(seed)
  key = lambda name: jax.random.fold_in(root, zlib.crc32(name.encode()))
  one = shape[1:] if names[1:] else shape
  each = [drawn(config, key(n), n, one, dtype) for n in names]
  return jnp.stack(each) if names[1:] else each[0]


def drawn(config: model_config.LMConfig, key, name: str, shape, dtype) -> Array:
  """Draws the parameter with this name, as in `init`."""
  if name.endswith('scale'):
    return jnp.ones(shape, dtype)
  if name.endswith('bias'):
    return jnp.zeros(shape, dtype)
  fan_in = shape[-1 if name in ('embed', 'positions') else -2]
  fan_in = 1 if name.endswith('relative') else fan_in
  if name.endswith('attn/q/kernel') and config.query_scale == 1:
    fan_in *= config.head_dim
  # In bfloat16 the values are those of float32, rounded: it is the same model.
  wide = jnp.promote_types(dtype, jnp.float32)
  return (jax.random.normal(key, shape, wide) * fan_in**-0.5).astype(dtype)


@functools.cache
def make(
  config: model_config.LMConfig,
  *,
  ids: int | None = None,
  vocab: int | None = None,
  constrain: Callable[..., Any] | None = None,
) -> types.Model:
  """Returns the model as pure functions, the same object for equal arguments.

  ids: number of ids that are tokens (None: all); padding has logit -inf.
  vocab: size of the logits' last axis; None: config.vocab. Draft and target
    need the same, though their embeddings may be padded differently. With
    config.proposes, as many: logits for these ids alone, for losses.
  constrain: constrain(array, *logical axes) -> array; fixes the sharding of
    caches and logits (sharding.Layout.constrain).
  """
  V = vocab or config.vocab
  ids = min(ids or V, config.vocab, V)
  constrain = constrain or (lambda x, *axes: x)
  _modules(config)  # refuses float64 without x64
  own = lambda rows, slots: kv.of_layers(config, rows, slots, constrain)
  return types.Model(
    alone.padded(functools.partial(_apply, config)),
    functools.partial(_head, config, ids, V, constrain),
    own if config.encoder is None else lambda *x: encoder.Cache(own(*x)),
    V,
    config.context,
    functools.partial(_embed, config),
    config.encoder and functools.partial(_encode, config, constrain),
    norm=lambda params, hidden: _ends(config, params).norm(hidden),
    project=functools.partial(_head, config, ids, V, constrain, normed=True),
    compact=kv.compact if config.encoder is None else encoder.compact,
  )


def _ends(config, params) -> Ends:
  _, (graphdef, _) = _modules(config)
  others = 'layers', 'encoder', 'dropout'
  leaves = {name: x for name, x in params.items() if name not in others}
  return nnx.merge(graphdef, nnx.State(leaves))


def _embed(config, params, tokens_BT, positions_BT, dropout=None):
  x_BTD = _ends(config, params).lookup(tokens_BT, positions_BT)
  return layers.drop(dropout, config.depth, x_BTD)


def _dropout(params, stack: int) -> layers.Dropout | None:
  """Returns training's dropout, for the decoder (0) or the encoder (1)."""
  return params['dropout'].at(stack) if 'dropout' in params else None


def token_logits(config, params, hidden_BTD: Array, tokens_BT: Array) -> Array:
  """Computes one id's logit at each position, [B, T], and no others."""
  ends = _ends(config, params)
  column_DBT = weights.of(ends.head.get_value()).columns(tokens_BT)
  wide = jnp.promote_types(hidden_BTD.dtype, jnp.float32)
  x_BTD = ends.norm(hidden_BTD).astype(wide) * config.head_scale
  logits_BT = jnp.einsum('BTD,DBT->BT', x_BTD, column_DBT.astype(wide))
  return attention.softcap(logits_BT, config.logit_softcap)


def _encode(config, constrain, params, source: types.Source, cache):
  """Encodes a source, as types.Model.encode."""
  (graphdef, _), _ = _modules(config)
  tokens_BI, lengths_B = source
  slots, dropout = tokens_BI.shape[1], _dropout(params, 1)
  mask_B1I = (jnp.arange(slots)[None] < lengths_B[:, None])[:, None]
  inner = config.encoder, _modules(config.encoder), params['encoder']
  encode = functools.partial(encoder.hidden, *inner)

  def hidden(width: int):
    x_BID = _embed(config, params, tokens_BI[:, :width], None, dropout)
    return encode(x_BID, mask_B1I, dropout)

  def store(width: int):
    cross = lambda layer: nnx.merge(graphdef, nnx.State(layer)).cross_attn
    keep = lambda layer: cross(layer).store(hidden_BID[:, :width], slots)
    if config.run.scan_layers:
      found = jax.lax.map(keep, params['layers'])
      return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
    return tuple(keep(params['layers'][str(i)]) for i in range(config.depth))

  at_width = encoder.narrowest(config, lengths_B, slots)
  axes = ('batch', *[None] * config.run.scan_layers, 'kv_heads', None, None)
  with jax.named_scope('encode'):
    hidden_BID = at_width(hidden)
    found = jax.tree.map(lambda x: constrain(x, *axes), at_width(store))
  return cache._replace(store=found, mask_B1I=mask_B1I)


def _apply(
  config,
  params,
  tokens_BT,
  slots_BT,
  positions_BT,
  mask_BTS,
  cache,
  *,
  taps=(),
  layers=(0, None),
  residual_BTD=None,
  at_BS=None,
):
  part = range(config.depth)[slice(*layers)]
  scan, inside = config.run.scan_layers, tuple(i for i in taps if i in part)
  dropout = _dropout(params, 0)
  with jax.named_scope('embed'):
    x_BTD = residual_BTD
    if x_BTD is None:
      x_BTD = _embed(config, params, tokens_BT, positions_BT, dropout)
  (graphdef, _), _ = _modules(config)
  block = lambda layer: nnx.merge(graphdef, nnx.State(layer))
  table_XH = params.get('relative')
  views = attention.views(config, positions_BT, mask_BTS, at_BS, table_XH)

  def of_layer(view, i):
    """Adds layer i's own source and dropout to its view."""
    if config.encoder is not None:
      store = _pick(cache.store, i, 1) if scan else cache.store[i]
      view = view._replace(source=(store, cache.mask_B1I))
    return view._replace(dropout=dropout and dropout.at(i))

  own = cache if config.encoder is None else cache.own
  args, streams = (views, slots_BT, of_layer), {}
  if part.start == 0:
    streams[-1] = x_BTD
  run = _scan if scan else _unroll
  with jax.named_scope('blocks'):
    x_BTD, tapped, own = run(
      config, block, params['layers'], x_BTD, args, own, inside, part
    )
  streams |= zip(inside, tapped, strict=True)
  if config.depth in taps and part.stop == config.depth:
    streams[config.depth] = _ends(config, params).norm(x_BTD)
  assert set(taps) <= streams.keys(), (taps, part)
  if config.encoder is not None:
    own = cache._replace(own=own)
  return x_BTD, tuple(streams[i] for i in taps), own


def _head(config, ids, V: int, constrain, params, hidden, *, normed=False):
  with jax.named_scope('head'):
    ends = _ends(config, params)
    norm, head = None if normed else ends.norm, ends.head.get_value()
    logits = layers.head(config, norm, hidden, head)
    if config.proposes and V > logits.shape[-1]:
      none = jnp.full((*logits.shape[:-1], V), -jnp.inf, logits.dtype)
      at = none.at[..., jnp.asarray(config.proposes, jnp.int32)]
      logits = at.set(logits, mode='drop', unique_indices=True)
    elif V != config.vocab:
      extra = [(0, 0)] * (logits.ndim - 1) + [(0, max(0, V - config.vocab))]
      logits = jnp.pad(logits[..., :V], extra)
    if ids < V:
      real = jnp.arange(V).reshape((1,) * (logits.ndim - 1) + (-1,)) < ids
      logits = jnp.where(real, logits, -jnp.inf)
    return constrain(logits, 'batch', *([None] * (logits.ndim - 2)), 'vocab')


def _unroll(config, block, layers_params, x_BTD, args, cache, taps, part):
  """Runs layers one by one, each with its own cache: fastest on CPU, GPU."""
  views, slots_BT, of_layer = args
  new, tapped = list(cache), {}
  for i in part:
    write = kv.Writer(cache[i], slots_BT)
    view = of_layer(views[config.kinds[i % len(config.kinds)]], i)
    x_BTD, new[i] = block(layers_params[str(i)])(x_BTD, view, write)
    x_BTD = tapped[i] = checkpoint_name(x_BTD, 'residual')
  return x_BTD, tuple(tapped[i] for i in taps), tuple(new)


def _scan(config, block, layers_params, x_BTD, args, cache, taps, part):
  """Scans over the layers: traces one and compiles `depth` times faster. The
  cache is in the carry: as scanned input and output it would be copied."""
  views, slots_BT, of_layer = args
  view_of = _by_number(config, views)

  def body(carry, _):
    i, x_BTD, cache = carry
    layer_params = _pick(layers_params, i)

    view, write = of_layer(view_of(i), i), kv.Writer(cache, slots_BT, i)
    x_BTD, cache = block(layer_params)(x_BTD, view, write)
    x_BTD = checkpoint_name(x_BTD, 'residual')
    return (i + 1, x_BTD, cache), x_BTD if taps else ()

  (_, x_BTD, cache), every = jax.lax.scan(
    body, (jnp.int32(part.start), x_BTD, cache), length=len(part)
  )
  return x_BTD, tuple(every[i - part.start] for i in taps), cache


def _by_number(config, views):
  """Returns a function from a layer's number, maybe traced, to its View."""
  if len(views) == 1:
    (only,) = views.values()
    return lambda i: only
  kinds = jnp.array([list(views).index(k) for k in config.kinds], jnp.int32)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *views.values())
  return lambda i: _pick(stacked, _pick(kinds, i % len(config.kinds)))


def _pick(tree, i, axis: int = 0):
  pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return jax.tree.map(lambda x: pick(x, i, axis), tree)
