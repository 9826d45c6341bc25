"""EAGLE, MTP and DFlash as students, computing in their teacher's dtype."""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import build, hosts, types
from specdec_jax.distill import eagle_loss, lm_student, sections, students
from specdec_jax.drafters import dflash
from specdec_jax.drafters import eagle as eagle_drafter
from specdec_jax.io import export, hf, sources
from specdec_jax.io.published import draft_file, eagle_export
from specdec_jax.models import config as model_config
from specdec_jax.models import convert, eagle, lm
from specdec_jax.train import step as step_lib


class Kind(NamedTuple):
  reads: str  # of models.eagle.EagleConfig, as is
  tap_norm: str
  drafter: Any  # a module with `make`
  loss: Callable[..., step_lib.Loss]  # of eagle_loss
  layer: dict[str, Any] = {}  # settings unlike the teacher's


_CHAIN = eagle_drafter, eagle_loss.unrolled
KINDS = {
  'eagle': Kind('joined', 'unit', *_CHAIN),
  # The taps are recorded divided by their root mean square: a norm of each
  # undoes nothing.
  'eagle3': Kind('beside', 'each', *_CHAIN),
  # MiMo's module. FastMTP (Cai et al. 2025, https://arxiv.org/abs/2509.18362)
  # has one for all steps, whose own states it feeds back.
  'mtp': Kind('joined', 'none', *_CHAIN),
  # Layers of Qwen3, whatever the teacher has.
  'dflash': Kind(
    *('context', 'none', dflash, eagle_loss.masked),
    dict(qk_norm=True, qkv_bias=False, o_bias=False),
  ),
}


def check(s: sections.Settings, teacher: sources.Source) -> tuple[int, ...]:
  """Returns the teacher's layers to record; refuses what does not fit."""
  student, c = s.student, teacher.config
  config, last = config_of(student, c), c.depth - 1
  if student.kind != 'eagle':
    export.settings(config.block)  # raises for what cannot be saved at the end
  if student.source:
    _read(student, teacher)
  return (*(i for i in config.taps if i < last), last)


def config_of(
  student: sections.Student, c: model_config.LMConfig
) -> eagle.EagleConfig:
  """Makes a draft's config for a teacher's, as io.published reads it.

  Raises ValueError for taps or layers it has not, or taps out of order.
  """
  if student.kind == 'eagle':
    return eagle.settings(c, student.taps or (c.depth - 1,))
  kind, few = KINDS[student.kind], tuple(range(c.depth)[-3:])
  # Below 7 layers EAGLE-3's repeat.
  taps = (1, c.depth // 2 - 1, c.depth - 4) if c.depth > 6 else few
  taps = student.taps or taps
  if student.kind == 'mtp':  # what the teacher's head reads
    taps = (c.depth,)
  elif sorted({*taps} & {*range(c.depth)}) != list(taps):
    raise ValueError(
      f'student.taps={taps}: needs layers of the teacher, 0 to {c.depth - 1}, '
      'in increasing order'
    )
  students.check_layers(student, c)
  block = dataclasses.replace(
    c,
    depth=max(1, len(student.layers)),
    windows=(0,),
    rotated=(True,),
    tied=False,
    run=model_config.Execution(),
    **kind.layer,
  )
  return eagle.EagleConfig(
    block,
    taps,
    tap_width=c.width,
    tap_norm=kind.tap_norm,
    reads=kind.reads,
    last_norm='fed',
    reads_first=False,
  )


def _read(student: sections.Student, teacher) -> draft_file.Eagle:
  """Reads the draft at student.source; refuses one of another teacher."""
  source, taps = student.source, config_of(student, teacher.config).taps
  draft = draft_file.read_eagle(source)
  draft_file.check_tokenizer(draft_file.EAGLE, source, draft.about, teacher)
  draft_file.check_eagle(draft, source, teacher)
  if (taps, student.vocabulary) != (draft.taps, len(draft.ids)):
    raise ValueError(
      f'student.source={source}: reads layers {draft.taps} and proposes '
      f'{len(draft.ids)} ids; set student.taps and student.vocabulary'
    )
  return draft


def mask_id(target: build.LanguageModel) -> int:
  """Picks an id for masks that few texts have."""
  named = dict(target.tokenizer.specials)
  id_of = lambda name: target.tokenizer.inner.token_to_id(named.get(name, ''))
  found: Any = map(id_of, ('mask_token', 'pad_token'))
  known = range(target.config.vocab)
  return next((i for i in (*found, target.ids) if i in known), target.ids - 1)


def make(
  s: sections.Settings, target: build.LanguageModel, ids: np.ndarray
) -> students.Student:
  """Makes the student that proposes `ids`, or those of student.source."""
  student, model = s.student, target.model
  c, kind = target.config, KINDS[student.kind]
  config, wide = config_of(student, c), students.wide(c)
  if student.source:
    _, params, ids, _ = _read(student, target)
  else:
    block = dataclasses.replace(config.block, dtype=wide)
    params = eagle.init(dataclasses.replace(config, block=block), s.run.seed)
    if student.layers:
      picked = lm_student.pruned(target.config, target.params, student.layers)
      for name, x in convert.plain(*picked)[1].items():
        ours = re.sub('^layers/0/', 'block/', name)
        ours = re.sub('^layers/', 'more/', ours)
        if ours != name and ours in params:
          params[ours] = x
  layout, gather = students.laid_out(target, c, s.mesh.fsdp)
  given = eagle.weights({}, ids, target.params)
  if layout is not None:
    whole = layout.sharding()
    given |= {n: hosts.put(given[n], whole) for n in ('head', 'ids')}
  trained = lm.nest(params)
  if student.kind == 'eagle3':
    trained['head'] = given['head']
  draft: Any = config
  if student.kind == 'dflash':
    draft = eagle.Blocks(config, mask_id(target), s.loss.unroll + 1)
  constrain = layout and layout.constrain
  return students.Student(
    params=students.placed(layout, trained, wide),
    loss=kind.loss(draft, model, s.loss, gather),
    frozen={n: given[n] for n in ('target', 'head')},
    weights=lambda params: given | eagle_loss.drafting(config, params, gather),
    drafter=lambda gamma: kind.drafter.make(
      draft, model, gamma=gamma, constrain=constrain
    ),
    write=functools.partial(_write, student, target, draft, given),
  )


def _write(
  student: sections.Student,
  target: build.LanguageModel,
  draft: Any,
  given: types.Params,
  folder: pathlib.Path,
  params: types.Params,
  about: dict[str, Any],
) -> pathlib.Path:
  """Writes a file of ours (eagle), or a folder as others publish them."""
  params = params | _beside(student, target, given)
  half = students.halved(params)
  path, ids = folder / 'draft', np.asarray(hosts.fetch(given['ids']))
  if student.kind == 'eagle':
    path = folder / 'draft.safetensors'
    saved = draft_file.Eagle(draft.taps, half, ids, about)
    hosts.from_first(lambda: draft_file.write_eagle(path, saved))
    return path
  there = hf.find(target.source)
  facts = ids, about, str(there.resolve()) if there else target.label
  hosts.from_first(
    lambda: eagle_export.save(path, draft, lm.nest(half), *facts)
  )
  return path


def _beside(student: sections.Student, target, given) -> dict[str, jax.Array]:
  """Returns the target's parameters that a file has beside the draft's."""
  V = target.config.vocab
  if student.kind == 'eagle3':  # speculators may not read the target's
    every_1V = jnp.arange(V)[None]
    own = eagle.embed(target.model, given, every_1V, jnp.zeros_like(every_1V))
    return {'embed': own[0]}
  some = student.kind == 'dflash' and len(given['ids']) < V
  return {'head': given['head']} if some else {}
