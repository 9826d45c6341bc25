"""An EAGLE draft as a student; it computes in the dtype of its teacher."""

import pathlib
from typing import Any

import numpy as np

from specdec_jax import build, hosts, types
from specdec_jax.distill import eagle_loss, sections, students
from specdec_jax.drafters import draft_file
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io import files
from specdec_jax.models import eagle, lm
from specdec_jax.train import text_loss


def digest(source: str) -> str:
  """SHA-256 of the draft at student.source."""
  return files.sha256(draft_file.find(draft_file.EAGLE, source))


def begin(
  student: sections.Student,
  target: build.LanguageModel,
  *,
  seed: int,
  fsdp: bool,
) -> students.Start:
  """Reads the draft at student.source, or draws random weights.

  Refuses a teacher and a draft that do not match, or not these settings.
  """
  if target.start is not None:
    raise ValueError(
      f"student.kind='eagle': reads no source, but {target.label} has an "
      'encoder; give lm'
    )
  taps = student.taps or (target.config.depth - 1,)
  config = eagle.settings(target.config, taps)
  layout, ids = students.layout_of(target, target.config, fsdp), None
  if not student.source:
    params = eagle.init(_masters(target, taps), seed)
  else:
    draft = draft_file.read_eagle(student.source)
    draft_file.fit_eagle(draft, student.source, target)
    if (taps, student.vocabulary) != (draft.taps, len(draft.ids)):
      raise ValueError(
        f'student.source={student.source}: reads layers {draft.taps} and '
        f'proposes {len(draft.ids)} ids; set student.taps and '
        'student.vocabulary'
      )
    params, ids = draft.layer, draft.ids
  return students.Start(config, params, ids, taps, layout)


def make(
  student: sections.Student,
  start: students.Start,
  target: build.LanguageModel,
  ids: np.ndarray,
  loss: sections.Loss,
  data: sections.Data,
) -> students.Student:
  """Makes the student that proposes `ids`."""
  config, taps, layout = start.config, start.taps, start.layout
  model = target.model
  gather = text_loss.gatherer(layout)
  given = eagle.weights({}, ids, target.params)
  if layout is not None:
    whole = layout.sharding()
    given |= {n: hosts.put(given[n], whole) for n in ('head', 'ids')}
  layer = students.copied(start.params, eagle.shapes(_masters(target, taps)))
  size = sum(x.size for x in layer.values())
  constrain = layout and layout.constrain

  def write(folder: pathlib.Path, params: types.Params, about: dict[str, Any]):
    # float16 halves the file; bfloat16 has fewer digits, and no parameter needs
    # its range.
    flat = hosts.fetch(lm.flatten(params))
    layer = {n: np.asarray(x, np.float16) for n, x in flat.items()}
    path = folder / 'draft.safetensors'
    saved = draft_file.Eagle(taps, layer, ids, about)
    hosts.from_first(lambda: draft_file.write_eagle(path, saved))
    return path

  return students.Student(
    params=students.put(layout, lm.nest(layer)),
    loss=eagle_loss.loss(config, model, loss, gather),
    frozen={n: given[n] for n in ('target', 'head')},
    weights=lambda params: (
      given | {'layer': eagle.cast(config, gather(params))}
    ),
    drafter=lambda gamma: eagle_drafter.make(
      config, model, gamma=gamma, constrain=constrain
    ),
    model=eagle_drafter.view(config, model),
    # Every step of the chain; the frozen head has no gradient of its own.
    flops=data.length * loss.unroll * (6.0 * size + 4.0 * given['head'].size),
    write=write,
  )


def _masters(
  target: build.LanguageModel, taps: tuple[int, ...]
) -> eagle.EagleConfig:
  """The config of trained parameters, float32 or wider."""
  dtype = students.wide(target.config)
  return eagle.settings(target.config, taps, dtype=dtype)
