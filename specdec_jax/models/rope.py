"""Scales rotary frequencies, for texts longer than those in training:
scale(frequencies, theta) -> frequencies, and `magnitude`, which multiplies
rotated queries and keys. None depends on a text's length."""

import dataclasses
import math

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's scaling (`rope_type: llama3`): divides low frequencies by factor,
  keeps high ones and interpolates those between. original_context=0 gives
  linear scaling (`rope_type: linear`): divides all by factor."""

  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context: int = 8192
  magnitude = 1.0

  def scale(self, freq: Array, theta: float) -> Array:
    del theta
    wavelength = 2 * jnp.pi / freq
    turns = self.original_context / wavelength
    low, high = self.low_freq_factor, self.high_freq_factor
    smooth = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * freq / self.factor + smooth * freq


@dataclasses.dataclass(frozen=True)
class Yarn:
  """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.4).

  Channels with fewer than beta_slow turns in original_context tokens are
  divided by factor, those with more than beta_fast are kept. In between the
  share is linear in the channel's number, between whole numbers if truncate.
  """

  factor: float
  original_context: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  magnitude: float = 1.0
  truncate: bool = True

  @property
  def context(self) -> int:
    """Allows texts `factor` times as long as in training."""
    return int(self.factor * self.original_context)

  def scale(self, freq: Array, theta: float) -> Array:
    channels = 2 * len(freq)

    def channel(turns: float) -> float:
      """Returns the channel pair that turns so often."""
      length = self.original_context / (2 * math.pi * turns)
      return channels * math.log(length) / (2 * math.log(theta))

    low, high = channel(self.beta_fast), channel(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    high += 0.001 * (low == high)
    share = (jnp.arange(len(freq), dtype=freq.dtype) - low) / (high - low)
    share = jnp.clip(share, 0.0, 1.0)
    return freq / self.factor * share + freq * (1 - share)


@dataclasses.dataclass(frozen=True)
class Divided:
  """Divides each frequency, [C/2], as LongRoPE's and GGUF's tables do."""

  divisors: tuple[float, ...]
  magnitude: float = 1.0

  def scale(self, freq: Array, theta: float) -> Array:
    del theta
    return freq / jnp.asarray(self.divisors, freq.dtype)


Scaling = RopeScaling | Yarn | Divided
