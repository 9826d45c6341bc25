"""Distilling an EAGLE draft: its vocabulary, its batches, its loss."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.distill import divergences, teacher, unrolled
from specdec_jax.models import eagle
from specdec_jax.train import step as step_lib

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Loss:
  """divergence: a name of losses. temperature: of both laws, the serving one
  (0 has no slope: 1 then). unroll: draft steps in a chain. decay: what a step
  weighs, of the one before. noise: uniform on the features, up to this much of
  their root mean square.
  """

  divergence: str
  temperature: float
  unroll: int
  decay: float
  noise: float

  def __post_init__(self):
    divergences.divergence_of(self.divergence)
    if self.unroll < 1:
      raise ValueError(f'unroll={self.unroll}: must be 1 or more')
    if not 0 < self.decay <= 1:
      raise ValueError(f'decay={self.decay}: must be in (0, 1]')
    for name in ('temperature', 'noise'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name}={getattr(self, name)}: must be 0 or more')


def vocabulary(rows: dict[str, np.ndarray], size: int, ids: int) -> np.ndarray:
  """The `size` ids that what counts in rows has most often, ascending.

  Ties go to the smaller id; ids that were never said fill up what is left.
  rows: 'tokens' and 'counted', [n, L]. ids: how many there are.

  Raises:
    ValueError: size < 1, or more than there are.
  """
  if not 1 <= size <= ids:
    raise ValueError(f"vocabulary={size}: allowed are 1 to the teacher's {ids}")
  counts = np.bincount(rows['tokens'][rows['counted']], minlength=ids)[:ids]
  most = np.argsort(-counts, kind='stable')[:size]
  return np.sort(most).astype(np.int32)


def rows(
  answers: teacher.Answers, kept: tuple[int, ...], taps: tuple[int, ...]
) -> dict[str, np.ndarray]:
  """Aligned arrays of what training reads, still on the disk.

  kept: the layers whose features the answers have; taps: those that are read.
  counted: where the teacher's next token is part of its answer.

  Raises:
    ValueError: taps that were not kept.
  """
  if answers.features is None or answers.mass is None:
    raise ValueError('these answers were kept without features')
  if not set(taps) <= set(kept):
    raise ValueError(f'taps={taps}: these answers have features of {kept}')
  index_1L = np.arange(answers.tokens.shape[1])[None]
  start, end = answers.spans[:, :1], answers.spans[:, 1:]
  return {
    'tokens': answers.tokens,
    'features': answers.features,
    'mass': answers.mass,
    'counted': (index_1L >= start - 1) & (index_1L < end - 1),
  }


def columns(kept: tuple[int, ...], taps: tuple[int, ...], width: int):
  """Where the features of some taps lie among those that were kept."""
  return np.concatenate(
    [np.arange(width) + width * kept.index(tap) for tap in taps]
  )


def loss(
  config: eagle.EagleConfig,
  target: types.Model,
  settings: Loss,
  kept: tuple[int, ...],
) -> step_lib.Loss:
  """What an EAGLE draft's training minimises (see unrolled).

  frozen: {'target': its parameters, 'head': the columns of the draft's
  vocabulary}. batch: see rows. Figures: 'train_alpha' and 'train_top', of every
  step of the chain.
  """
  divergence = divergences.divergence_of(settings.divergence)
  at = columns(kept, config.taps, config.block.width)
  embed = target.embed
  if embed is None:
    raise ValueError('eagle: a target without embed has nothing to read')

  def one(params: types.Params, frozen: Any, batch: dict[str, Array], key):
    params = eagle.cast(config, params)
    tokens_BT = batch['tokens']
    features_BTE = batch['features'][..., at].astype(jnp.float32)
    positions_BT = jnp.broadcast_to(
      jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape
    )
    tokens_BTD = embed(frozen['target'], tokens_BT, positions_BT)
    temperature = settings.temperature or 1.0
    log_p_BTR = unrolled.teacher_law(
      config,
      {'layer': {'norm': frozen['target']['norm']}, 'head': frozen['head']},
      features_BTE,
      batch['mass'],
      temperature,
    )
    if settings.noise:
      noise = jax.random.uniform(key, features_BTE.shape, minval=-1, maxval=1)
      features_BTE += settings.noise * noise
    chain = unrolled.steps(
      config, params, tokens_BTD, features_BTE, settings.unroll
    )
    value, alpha, top = unrolled.loss(
      config,
      divergence,
      {'layer': params, 'head': frozen['head']},
      log_p_BTR,
      chain,
      batch['counted'],
      temperature=temperature,
      decay=settings.decay,
    )
    return value, {'train_alpha': alpha, 'train_top': top}

  return one
