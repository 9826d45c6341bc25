"""The promise that the CPU kernels make greedy text the same in every bit."""

import itertools

import jax

from specdec_jax import types
from specdec_jax.certify import base
from specdec_jax.io import files
from specdec_jax.kernels import library
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, lm

GAMMAS, BATCHES, NEW = (4, 1, 8, 2), (1, 3, 8), 40
LENGTH = base.LONGEST + NEW + max(GAMMAS) + 2


def kernel_identity(subject: base.Subject, amount: int) -> base.Figure:
  """Greedy text on the CPU kernels equals plain decoding's; no tie differs."""
  if subject.model is not None:
    raise base.NotChecked('a model of your own does not run on them')
  if jax.default_backend() != 'cpu':
    raise base.NotChecked(f'they are for CPU, not {jax.default_backend()}')
  if why := library.load(files.cache_folder()):
    raise base.NotChecked(why)
  compared, distinct, made = 0, 0, []
  shapes = itertools.cycle(zip(GAMMAS * 3, BATCHES * 4, strict=True))
  # A rule does not see the models: the first one will do.
  names, rule = list(subject.drafters), subject.rules[0]
  for dtype, some in (('float32', names), ('bfloat16', names[:1])):
    world = _world(dtype, subject.encoder)
    for name in some:
      gamma, batch = next(shapes)
      drafter, weights = subject.drafters[name](world, gamma)
      what = f'{dtype} {drafter.name}, gamma {gamma}, batch {batch}'
      made.append((world, dtype, drafter, weights, batch, what))
  for turn in itertools.count():
    seed = 1000 * subject.seed + turn
    prompts = base.ragged_prompts(max(BATCHES), 512, seed, base.LONGEST)
    plain: dict[str, list[list[int]]] = {}
    for world, dtype, drafter, weights, batch, what in made:
      request = base.make_request(world, prompts, NEW, length=LENGTH)
      if dtype not in plain:
        plain[dtype] = _alone(world, request)
        distinct += NEW * len(prompts)
      request = jax.tree.map(lambda x, n=batch: x[:n], request)
      text = base.texts(base.run(world, drafter, rule, weights, request))
      base.same_texts(text, plain[dtype][:batch], what)
      compared += NEW * batch
    if compared >= amount:
      break
  return base.Figure(
    base.none_of(compared, 'tokens differ', distinct, 'positions'),
    '0',
    f'{len(made)} programs, float32 and bfloat16 weights, batch 1, 3 and 8',
  )


def _alone(world: base.World, request) -> list[list[int]]:
  """Texts of plain decoding, request by request."""
  rows = range(len(request.lengths_B))
  one = lambda b: jax.tree.map(lambda x: x[b : b + 1], request)
  return [text for b in rows for text in base.plain(world, one(b))]


def _world(dtype: str, encoder: bool) -> base.World:
  """A target and a draft of two packed layers."""
  name, kv_heads = ('t5_tiny', 4) if encoder else ('tiny', 2)
  sizes = dict(width=48, heads=4, kv_heads=kv_heads, head_dim=8, mlp=80)
  config = model_config.sized(name, **sizes, dtype=dtype)

  def packed(params):
    return convert.pack(*convert.fuse(config, params))

  scaled = jax.tree.map(lambda x: (1.5 * x).astype(x.dtype), lm.init(config, 0))
  near = base.blurred(scaled)
  (config_packed, target), (_, draft) = packed(scaled), packed(near)
  model = lm.make(config_packed)
  return base.World(model, model, types.Weights(target, draft), config.vocab)
