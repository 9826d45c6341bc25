"""Drafts on the teacher's hidden states as students: EAGLE, MTP and DFlash.

They compute in the dtype of their teacher.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, hosts, types
from specdec_jax.distill import eagle_loss, lm_student, sections, students
from specdec_jax.drafters import dflash, draft_file
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io import export, hf
from specdec_jax.io.published import eagle_export
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, eagle, lm
from specdec_jax.train import text_loss


def begin(s: sections.Settings, target: build.LanguageModel) -> students.Start:
  """Reads the draft at student.source, or draws random weights.

  Refuses a teacher and a draft that do not match, or not these settings.
  """
  student, c, last = s.student, target.config, target.config.depth - 1
  layout, ids = students.layout_of(target, c, s.mesh.fsdp), None
  taps = student.taps or (last,)
  if student.kind == 'eagle':
    config = eagle.settings(c, taps)
  else:
    config = published(student, c)
    export.settings(config.block)  # raises for what cannot be saved at the end
    taps = (*(i for i in config.taps if i < last), last)
  if not student.source:
    wide = dataclasses.replace(config.block, dtype=students.wide(c))
    params = eagle.init(dataclasses.replace(config, block=wide), s.run.seed)
    if student.layers:
      params |= _picked(student, target, params.keys())
  else:
    draft = draft_file.read_eagle(student.source)
    file = draft_file.EAGLE, student.source
    draft_file.check_tokenizer(*file, draft.about, target)
    draft_file.fit_eagle(draft, student.source, target)
    if (taps, student.vocabulary) != (draft.taps, len(draft.ids)):
      raise ValueError(
        f'student.source={student.source}: reads layers {draft.taps} and '
        f'proposes {len(draft.ids)} ids; set student.taps and '
        'student.vocabulary'
      )
    params, ids = draft.layer, draft.ids
  return students.Start(config, params, ids, taps, layout)


# What others publish: settings of EagleConfig, by student.kind.
_PUBLISHED: dict[str, dict[str, Any]] = {
  # The taps are recorded divided by their root mean square: a norm of each
  # undoes nothing.
  'eagle3': dict(reads='beside', tap_norm='each'),
  # MiMo's module. FastMTP (Cai et al. 2025, https://arxiv.org/abs/2509.18362)
  # has one for all steps, whose own states it feeds back.
  'mtp': dict(reads='joined', tap_norm='none'),
  'dflash': dict(reads='context', tap_norm='none'),
}


def published(
  student: sections.Student, c: model_config.LMConfig
) -> eagle.EagleConfig:
  """The settings of a draft, as io.published reads it, for a teacher's.

  Raises:
    ValueError: taps that are no layers of the teacher, in increasing order.
  """
  few, own = tuple(range(c.depth)[-3:]), {}  # below 7 layers EAGLE-3's repeat
  taps = (1, c.depth // 2 - 1, c.depth - 4) if c.depth > 6 else few
  taps = student.taps or taps
  if student.kind == 'mtp':  # what the teacher's head reads
    taps = (c.depth,)
  elif sorted({*taps} & {*range(c.depth)}) != list(taps):
    raise ValueError(
      f'student.taps={taps}: needs layers of the teacher, 0 to {c.depth - 1}, '
      'in increasing order'
    )
  if student.kind == 'dflash':  # layers of Qwen3, whatever the teacher has
    own = dict(qk_norm=True, qkv_bias=False, o_bias=False)
  block = dataclasses.replace(
    c,
    depth=max(1, len(student.layers)),
    windows=(0,),
    rotated=(True,),
    tied=False,
    run=model_config.Execution(),
    **own,
  )
  return eagle.EagleConfig(
    block,
    taps,
    tap_width=c.width,
    last_norm='fed',
    reads_first=False,
    **_PUBLISHED[student.kind],
  )


def _picked(student: sections.Student, target: build.LanguageModel, known):
  """Parameters of the teacher's layers that the draft's begin as, by name."""
  picked = lm_student.pruned(target.config, target.params, student.layers)
  out = {}
  for name, x in convert.plain(*picked)[1].items():
    group, *rest = name.split('/', 2)
    if group == 'layers':
      number, name = rest
      out[f'more/{number}/{name}' if int(number) else f'block/{name}'] = x
  return {name: x for name, x in out.items() if name in known}


def mask_id(target: build.LanguageModel) -> int:
  """An id for masks, which few texts have."""
  named = dict(target.tokenizer.specials)
  id_of = lambda name: target.tokenizer.inner.token_to_id(named.get(name, ''))
  found: Any = map(id_of, ('mask_token', 'pad_token'))
  known = range(target.config.vocab)
  return next((i for i in (*found, target.ids) if i in known), target.ids - 1)


def make(
  s: sections.Settings,
  start: students.Start,
  target: build.LanguageModel,
  ids: np.ndarray,
) -> students.Student:
  """Makes the student that proposes `ids`."""
  config, layout, model = start.config, start.layout, target.model
  student, gather = s.student, text_loss.gatherer(layout)
  given = eagle.weights({}, ids, target.params)
  if layout is not None:
    whole = layout.sharding()
    given |= {n: hosts.put(given[n], whole) for n in ('head', 'ids')}
  wide = students.wide(target.config)
  trained = lm.nest(students.copied(start.params, wide))
  if student.kind == 'eagle3':
    trained['head'] = jnp.array(given['head'], wide)
  draft: Any = config
  module, loss_of = eagle_drafter, eagle_loss.unrolled
  if student.kind == 'dflash':
    draft = eagle.Blocks(config, mask_id(target), s.loss.unroll + 1)
    module, loss_of = dflash, eagle_loss.masked
  constrain = layout and layout.constrain

  def write(folder: pathlib.Path, params: types.Params, about: dict[str, Any]):
    half = students.halved(params)
    half |= students.halved(_beside(student, target, given))
    path, there = folder / 'draft', hf.find(target.source)
    facts = ids, about, str(there.resolve()) if there else target.label
    save = lambda: eagle_export.save(path, draft, lm.nest(half), *facts)
    if student.kind == 'eagle':
      path = folder / 'draft.safetensors'
      saved = draft_file.Eagle(config.taps, half, ids, about)
      save = lambda: draft_file.write_eagle(path, saved)
    hosts.from_first(save)
    return path

  return students.Student(
    params=students.put(layout, trained),
    loss=loss_of(draft, model, s.loss, gather),
    frozen={n: given[n] for n in ('target', 'head')},
    weights=lambda params: given | eagle_loss.drafting(config, params, gather),
    drafter=lambda gamma: module.make(
      draft, model, gamma=gamma, constrain=constrain
    ),
    model=module.view(draft, model),
    write=write,
  )


def _beside(student: sections.Student, target, given) -> dict[str, jax.Array]:
  """What a file has of the target."""
  V = target.config.vocab
  if student.kind == 'eagle3':  # speculators may not read the target's
    every_1V = jnp.arange(V)[None]
    own = eagle.embed(target.model, given, every_1V, jnp.zeros_like(every_1V))
    return {'embed': own[0]}
  some = student.kind == 'dflash' and len(given['ids']) < V
  return {'head': given['head']} if some else {}
