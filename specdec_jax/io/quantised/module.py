"""What a checkpoint stores of one quantised matrix, checked when asked for."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from specdec_jax.io.quantised.form import Form

FLOATS = ('F32', 'F16', 'BF16', 'F64')


class Tensor(NamedTuple):
  """A stored array: its type, as safetensors calls it, and its shape."""

  dtype: str
  shape: tuple[int, ...]


class Plan(NamedTuple):
  """How a matrix will be read.

  kind: what it is stored as, 'GPTQ 4-bit'.
  shape: [out, in].
  parts: those that are read; others of the module have no place.
  form: reads it.
  """

  kind: str
  shape: tuple[int, int]
  parts: tuple[str, ...]
  form: Callable[[], Form]


@dataclasses.dataclass(frozen=True)
class Module:
  """A matrix in a checkpoint.

  source: of the checkpoint, for error messages.
  name: 'model.layers.0.mlp.up_proj'.
  parts: its arrays, by the ends of their names: 'qweight', 'weight.absmax'.
  get(part) -> array.
  settings: the checkpoint's quantization_config.
  """

  source: str
  name: str
  parts: Mapping[str, Tensor]
  get: Callable[[str], np.ndarray]
  settings: Mapping[str, Any]

  def refuse(self, why: str) -> NoReturn:
    raise ValueError(f'{self.source}: {self.name}: {why}')

  def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
    """The shape of a part, which must be a matrix of one of these types."""
    tensor = self.parts.get(part)
    if tensor is None:
      self.refuse(f'no {part} beside {", ".join(sorted(self.parts))}')
    if tensor.dtype not in dtypes or len(tensor.shape) != 2:
      what = f'{tensor.dtype} {list(tensor.shape)}'
      self.refuse(f'{part} is {what}, not a matrix of {" or ".join(dtypes)}')
    return tensor.shape[0], tensor.shape[1]

  def misfit(self, why: str) -> NoReturn:
    """Refuses parts that do not fit together; lists their shapes."""
    each = (f'{k} {list(x.shape)}' for k, x in sorted(self.parts.items()))
    self.refuse(f'{why}: {", ".join(each)}')

  def floats(self, part: str) -> np.ndarray:
    """A part in float32, which must be finite."""
    x = self.get(part).astype(np.float32)
    if bad := int(np.count_nonzero(~np.isfinite(x))):
      self.refuse(f'{part} has {bad} values that are not finite')
    return x
