"""What a checkpoint stores of one quantised matrix, checked when asked for."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np

from specdec_jax.io.arrays.stored import Stored
from specdec_jax.io.quantised.form import Form

FLOATS = ('F32', 'F16', 'BF16', 'F64')
# Of activations, which are not quantised here.
INPUTS = ('input_scale', 'input_zero_point')


class Plan(NamedTuple):
  """How a matrix will be read.

  kind: what it is stored as, 'GPTQ 4-bit'.
  shape: [out, in].
  parts: those that may be there; others of the module have no place.
  form: reads it.
  bits: of its integers; 0: codes of a table.
  group: inputs that share a scale.
  order: of its inputs, as Form's.
  panels: the kind that keeps codes of a table, if there is one.
  """

  kind: str
  shape: tuple[int, int]
  parts: tuple[str, ...]
  form: Callable[[], Form]
  bits: int = 0
  group: int = 0
  order: np.ndarray | None = None
  panels: str = ''

  @property
  def stored(self) -> str:
    """The kind of panels that keeps it, or what there is no such kind for."""
    depth = math.gcd(self.group, self.shape[1], 128)
    if not self.bits:
      return self.panels or self.kind
    if depth < 32:
      return f'{self.kind} in groups of {self.group}'
    return f'U{4 if self.bits <= 4 else 8}_{depth}'


@dataclasses.dataclass(frozen=True)
class Module:
  """A matrix in a checkpoint.

  source, name: of the checkpoint and its own, 'model.layers.0.mlp.up_proj'.
  parts: its arrays, by the ends of their names: 'qweight', 'weight.absmax'.
  settings: the checkpoint's quantization_config.
  """

  source: str
  name: str
  parts: Mapping[str, Stored]
  settings: Mapping[str, Any]

  def get(self, part: str) -> np.ndarray:
    return self.parts[part].read()

  def kind(self, part: str) -> tuple[str, tuple[int, ...]] | None:
    """(dtype, shape) of a part, None if there is none."""
    return self.parts[part][:2] if part in self.parts else None

  def refuse(self, why: str) -> NoReturn:
    raise ValueError(f'{self.source}: {self.name}: {why}')

  def misfit(self, why: str) -> NoReturn:
    """Refuses parts that do not fit together; lists them."""
    parts = sorted(self.parts.items())
    each = (f'{k} {x.dtype} {list(x.shape)}' for k, x in parts)
    self.refuse(f'{why}: {", ".join(each)}')

  def matrix(self, part: str, *dtypes: str) -> tuple[int, int]:
    """The shape of a part, which must be a matrix of one of these types."""
    tensor = self.parts.get(part)
    if tensor is None:
      self.refuse(f'no {part} beside {", ".join(sorted(self.parts))}')
    good = tensor.dtype in dtypes and len(tensor.shape) == 2
    if not good or 0 in tensor.shape:
      what = f'{tensor.dtype} {list(tensor.shape)}'
      self.refuse(f'{part} is {what}, not a matrix of {" or ".join(dtypes)}')
    return tensor.shape[0], tensor.shape[1]

  def floats(self, part: str) -> np.ndarray:
    return self.get(part).astype(np.float32)

  def stated(self, *keys: str) -> list[Any]:
    """What settings say of weights, in each group of compressed-tensors too."""
    groups = self.settings.get('config_groups')
    groups = groups.values() if isinstance(groups, dict) else ()
    inner = [x.get('weights') for x in groups if isinstance(x, dict)]
    places = [self.settings, *(x for x in inner if isinstance(x, dict))]
    return [x[key] for x in places for key in keys if x.get(key) is not None]

  def block(
    self, part: str, shape: tuple[int, int], stated: list[Any]
  ) -> tuple[int, int]:
    """The rows and columns that share a scale, told by the scales' shape."""
    tensor = self.parts.get(part)
    if tensor is None or tensor.dtype not in FLOATS:
      self.misfit(f'no {part} of {" or ".join(FLOATS)}')
    (O, I), scales = shape, tensor.shape
    if math.prod(scales) == 1:
      return O, I
    if scales in ((O,), (O, 1)):
      return 1, I
    for tall, wide in (*filter(_is_pair, stated), (128, 128)):
      if scales == (-(-O // tall), -(-I // wide)):
        return tall, wide
    if len(scales) != 2 or not all(scales) or O % scales[0] or I % scales[1]:
      self.misfit(f'{part} fits no blocks of a matrix {[O, I]}')
    return O // scales[0], I // scales[1]

  def scales(self, part: str, shape, block) -> np.ndarray:
    """The scales of these blocks, as a matrix in float32."""
    return self.floats(part).reshape(-(-shape[0] // block[0]), -1)

  def order(self, part: str, I: int, group: int) -> np.ndarray | None:
    """The order of inputs that sorts them by their groups; None: they are.

    part: the group of each input; negative ones stand for none.
    """
    if part not in self.parts:
      return None
    groups, want = self.get(part).reshape(-1), np.arange(I) // group
    if (groups < 0).any() or np.array_equal(groups, want):
      return None
    order = np.argsort(groups, kind='stable')
    if not np.array_equal(groups[order], want):
      self.refuse(f'{part} does not give {group} inputs to each group')
    return order


def _is_pair(x: Any) -> bool:
  listed = isinstance(x, list) and len(x) == 2
  return listed and all(type(i) is int and i > 0 for i in x)
