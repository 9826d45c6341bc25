"""What all kinds of drafts share in a distillation.

Their modules, such as eagle_student.py, have the same two functions. `check`
refuses what does not fit, before any weights are read; `make` makes a Student
once the teacher has answered. Losses share the rest.
"""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, forward, hosts, sharding, types
from specdec_jax.distill import divergences, sections
from specdec_jax.models import config as model_config
from specdec_jax.models import lm
from specdec_jax.train import step as step_lib
from specdec_jax.train import text_loss

Array = jax.Array


class Student(NamedTuple):
  """A draft to train."""

  params: types.Params  # trained, float32 or wider
  loss: step_lib.Loss
  frozen: Any  # further parameters of the loss
  weights: Callable[[types.Params], types.Params]  # -> weights.draft
  drafter: Callable[[int], types.Drafter]  # by gamma
  # (folder, params, about) -> the path of the finished draft.
  write: Callable[[pathlib.Path, types.Params, dict[str, Any]], pathlib.Path]
  model: types.Model | None = None  # of a language model; reads weights.draft


def vocabulary(
  size: int, ids: int, rows: dict[str, np.ndarray] | None
) -> np.ndarray:
  """Picks the ids that a student can propose, ascending.

  The completions' `size` most frequent ones, of equally frequent ones the
  smaller; all of the teacher's `ids` where size is 0, or nothing is counted.
  """
  if not size or rows is None:
    return np.arange(ids)
  counts = np.bincount(rows['tokens'][rows['counted']], minlength=ids)[:ids]
  most = np.argsort(-counts, kind='stable')[:size]
  return np.sort(most).astype(np.int32)


def laid_out(
  target: build.LanguageModel, config: model_config.LMConfig, fsdp: bool
) -> tuple[sharding.Layout | None, Callable[[Any], Any]]:
  """Lays a student out on its teacher's mesh; each device computes with all.
  Returns (layout, what gathers its parameters)."""
  mesh = target.layout and target.layout.mesh
  layout = mesh and sharding.lay_out(mesh, config, tensor_parallel=1, fsdp=fsdp)
  return layout, text_loss.gatherer(layout)


def placed(
  layout: sharding.Layout | None, params: types.Params, dtype: str
) -> types.Params:
  """Copies parameters to a layout's devices: training donates its own."""
  params = jax.tree.map(lambda x: jnp.array(x, dtype), params)
  if layout is None:
    return params
  flat = lm.flatten(params)
  return lm.nest({name: layout.put(name, x) for name, x in flat.items()})


def halved(params: types.Params) -> dict[str, np.ndarray]:
  """Converts trained parameters to a draft file's: flat, float16, on all hosts.

  float16 halves the file; bfloat16 has fewer digits, and no parameter needs its
  range. All processes have to call it.
  """
  flat = hosts.fetch(lm.flatten(params))
  return {name: np.asarray(x, np.float16) for name, x in flat.items()}


def wide(config: model_config.LMConfig) -> str:
  """Returns the dtype for trained parameters."""
  return 'float64' if config.dtype == 'float64' else 'float32'


def check_layers(
  student: sections.Student, teacher: model_config.LMConfig
) -> None:
  """Refuses student.layers that the teacher has not."""
  if not set(student.layers) <= set(range(teacher.depth)):
    raise ValueError(
      f'student.layers={student.layers}: allowed are those of the teacher, '
      f'0 to {teacher.depth - 1}'
    )


def check_length(
  data: sections.Data, who: str, config: model_config.LMConfig
) -> None:
  """Raises ValueError for rows that a context does not hold."""
  lengths = {'length': data.length}
  if config.encoder is not None:
    lengths['source_length'] = data.source_length
  for name, length in lengths.items():
    if length > config.context:
      raise ValueError(
        f'data.{name}={length}: the context of the {who} holds '
        f'{config.context} tokens; give at most those'
      )


# --- losses -------------------------------------------------------------------


def teacher_log_p(
  teacher: types.Model, params: types.Params, batch, temperature: float
) -> Array:
  """Computes all next tokens' log p, [B, T - 1, V], by a pass or a record."""
  if 'features' not in batch:
    source = text_loss.source_of(batch)
    hidden_BTD = forward.hidden(teacher, params, batch['tokens'], source)
  else:
    # Features are float16, finer than bfloat16; mass was computed in float32.
    wide = jnp.promote_types(params['head'].dtype, jnp.float32)
    hidden_BTD = batch['features'].astype(wide)
  return log_p(teacher.head(params, hidden_BTD[:, :-1]), batch, temperature)


def log_p(logits: Array, batch, temperature: float) -> Array:
  """Computes the teacher's log p from its logits for some ids, [B, T - 1, R].

  The recorded mass belongs to temperature 1 (and 0, which counts as 1). At
  others p is normalised over these ids instead.
  """
  if 'mass' in batch and temperature in (0, 1):
    return logits - batch['mass'][:, :-1, None]
  return jax.nn.log_softmax(logits / (temperature or 1), -1)


def features(batch, noise: float, key: Array) -> Array:
  """Adds noise to a batch's features: [B, T, E] float32."""
  x_BTE = batch['features'].astype(jnp.float32)
  if not noise:
    return x_BTE
  return x_BTE + noise * jax.random.uniform(key, x_BTE.shape, minval=-1)


def over_steps(
  settings: sections.Loss, each: Iterable[tuple[Array, Array, Array]]
) -> tuple[Array, dict[str, Array]]:
  """Computes the mean divergence from the teacher over a draft's steps.

  Its figure 'train_alpha' is sum min(p, q) for each step.

  each: by step (the draft's logits [B, t, R], the teacher's log p for the same
    tokens, which of them count [B, t]).
  """
  divergence = divergences.divergence_of(settings.divergence)
  total, norm, alphas = jnp.zeros(()), 0.0, []
  for step, (logits_BtR, log_p, counted_Bt) in enumerate(each):
    log_q = jax.nn.log_softmax(logits_BtR / (settings.temperature or 1), -1)
    value = text_loss.mean(divergence(log_p, log_q), counted_Bt)
    total += settings.decay**step * value
    norm += settings.decay**step
    alphas.append(text_loss.mean(divergences.alpha(log_p, log_q), counted_Bt))
  return total / norm, {'train_alpha': jnp.stack(alphas)}
