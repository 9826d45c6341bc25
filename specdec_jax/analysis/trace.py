"""A trace: one plain run of the target, with p and q of each token it emitted.

A JSON Lines file, a header and then a line for each text. What may be computed
from it is in counterfactual; this module records, writes and reads.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specdec_jax import runtime
from specdec_jax.analysis import output_file
from specdec_jax.bench import (
  acceptance,
  identity,
  machine,
)
from specdec_jax.bench import plan as plan_lib
from specdec_jax.io import files

_ANY_FORMAT = 'specdec_jax trace '
FORMAT = _ANY_FORMAT + '2'
# The first is no lenience: what it keeps is alpha.
LENIENCES = (1.0, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1, 0.05)
_HEADER = {
  'format': str,
  'texts': int,
  'labels': list,
  'models': dict,
  'sampling': dict,
  'max_new_tokens': int,
  'samples': int,
  'leniences': list,
  'machine': dict,
}


@dataclasses.dataclass(frozen=True)
class Text:
  """One emitted text and what the models say of each of its tokens.

  id, category, number: of the prompt; number and seed key the randomness.
  p, q: of each token, under the sampling settings. kept, distance: for each
  lenience, at each token, the mass of the drafts that it keeps and the total
  variation between p and what it emits.
  """

  id: str
  category: str
  number: int
  seed: int
  prompt: tuple[int, ...]
  tokens: tuple[int, ...]
  p: tuple[float, ...]
  q: tuple[float, ...]
  kept: tuple[tuple[float, ...], ...]
  distance: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Trace:
  """header: the models (digests), settings and version it was recorded with."""

  header: dict[str, Any]
  texts: tuple[Text, ...]


def only_lm(settings):
  """experiment.Settings with the draft model as the only method, at gamma 1.

  Raises:
    ValueError: no draft model among the methods, or one that stops early.
  """
  d = settings.decode
  if 'lm' not in d.methods:
    raise ValueError(
      f'decode.methods={tuple(d.methods)}: a trace needs a draft model (lm): '
      'what other drafters propose depends on where a window starts; add lm'
    )
  least = settings.drafters['lm'].min_confidence
  if least:
    raise ValueError(
      f'draft.min_confidence={least}: a trace is of '
      'windows that propose all of gamma; set it to 0'
    )
  d = dataclasses.replace(d, methods=('lm',), gammas=(1,), rule='reject')
  return dataclasses.replace(settings, decode=d)


def record(
  arms: Sequence[plan_lib.Arm],
  plan: plan_lib.Plan,
  samples: int,
  track: plan_lib.Track,
) -> Trace:
  """Decodes every prompt plainly, `samples` times, and scores the texts.

  arms: plain decoding, then the draft model at any gamma. The seeds are
  plan.sampling.seed and those after it.

  Raises:
    ValueError: samples < 1, or a request whose logits are not finite.
  """
  plain, lm = arms[:2]
  texts = []
  for seed in seeds(plan.sampling.seed, samples):
    groups = groups_of(arms, plan, seed)
    for group in track(groups, f'texts of seed {seed}'):
      out = decoded(plain, group)
      texts += _scored(plain, lm, group, out, seed)
  header = {
    'format': FORMAT,
    'texts': len(texts),
    'labels': [lm.engine.target.label, lm.engine.draft.label],
    'models': models(lm.engine.target, lm.engine.draft),
    'sampling': dataclasses.asdict(plan.sampling),
    'max_new_tokens': plan.max_new_tokens,
    'samples': samples,
    'leniences': LENIENCES,
    'machine': machine.describe(),
  }
  return Trace(json.loads(json.dumps(header)), tuple(texts))


def models(target, draft) -> dict[str, str]:
  """What both models are, by content: weights, settings, tokenizer."""
  return output_file.identify('target', target) | output_file.identify(
    'draft', draft
  )


def seeds(first: int, count: int) -> range:
  """Raises ValueError for a count below 1, or seeds that do not fit."""
  if count < 1:
    raise ValueError(f'samples={count}: must be 1 or more texts a prompt')
  if first + count > 2**32:
    raise ValueError(f'seed={first}: with {count} samples it leaves 0..2**32-1')
  return range(first, first + count)


def groups_of(arms, plan: plan_lib.Plan, seed: int) -> list[plan_lib.Group]:
  sampling = dataclasses.replace(plan.sampling, seed=seed)
  plan = plan._replace(sampling=sampling)
  return plan_lib.groups(arms, plan, plan.judged + plan.others)


def decoded(arm: plan_lib.Arm, group: plan_lib.Group):
  """The Output, on the host.

  Raises:
    ValueError: a request ended on logits that are not finite.
  """
  out = jax.device_get(
    arm.engine.programs.generate(arm.engine.weights, group.full)
  )
  for failed in identity.broken(arm.name, [group], [out]):
    raise ValueError(
      f'prompt {failed.id!r}: logits of {arm.name} are not finite after '
      f'{failed.tokens} tokens: try another dtype, or leave the prompt out'
    )
  return out


def _scored(plain, lm, group: plan_lib.Group, out, seed: int) -> list[Text]:
  scores_BLX = np.asarray(
    acceptance.scores(
      lm.engine.weights,
      group.full._replace(tokens_BL=out.tokens_BL, limit_B=out.lengths_B),
      target=plain.model,
      draft=lm.draft,
      chunk=lm.engine.options.chunk,
      leniences=LENIENCES,
    )
  )
  texts = []
  for row, item in enumerate(group.items):
    new = slice(int(group.host.lengths_B[row]), int(out.lengths_B[row]))
    # Nine digits hold a float32.
    p, q, *rest = (
      tuple(float(f'{x:.9g}') for x in column)
      for column in scores_BLX[row, new].T
    )
    for model, said in ((lm.engine.target, p), (lm.engine.draft, q)):
      if not all(map(math.isfinite, said)):
        raise ValueError(
          f'prompt {item.id!r}: logits of {model.label} are not finite when '
          'they are scored: try another dtype, or leave the prompt out'
        )
    tokens = tuple(out.tokens_BL[row, new].tolist())
    texts.append(
      Text(
        item.id,
        item.category,
        item.number,
        seed,
        tuple(map(int, item.tokens)),
        tokens,
        p,
        q,
        tuple(rest[: len(LENIENCES)]),
        tuple(rest[len(LENIENCES) :]),
      )
    )
  return texts


# --- the file ----------------------------------------------------------------


def check_output(path: str, prompts_path: str = '') -> pathlib.Path:
  """The path of a new trace, before any work.

  Raises:
    ValueError: no path, a folder, a file that is there, the prompts above all,
      or no folder to write it in.
  """
  out = pathlib.Path(path)
  if not path or out.is_dir():
    raise ValueError(f'--output={path!r}: name a file for the trace')
  if out.exists():
    if os.path.exists(prompts_path) and os.path.samefile(out, prompts_path):
      raise ValueError(f'output {path} is the prompts: name another file')
    raise ValueError(f'output {path}: is there already: name another')
  runtime.open_workdir(str(out.parent))
  return out


def write(path: pathlib.Path, trace: Trace) -> None:
  """The file, whole or not at all.

  Raises:
    ValueError: it cannot be written.
  """
  lines = [trace.header, *map(dataclasses.asdict, trace.texts)]
  try:
    files.write(path, '\n'.join(json.dumps(line) for line in lines))
  except OSError as error:
    raise ValueError(
      f'output {path}: cannot be written ({error.strerror}): name another'
    ) from error


def read(path: str) -> Trace:
  """A trace, checked.

  Raises:
    ValueError: a file that is not there, is no trace, or is cut off.
  """
  try:
    lines = pathlib.Path(path).read_text('utf-8').splitlines()
  except OSError as error:
    raise ValueError(f'{path}: cannot be read ({error.strerror})') from error
  except UnicodeDecodeError as error:
    raise ValueError(f'{path}: no trace: it is not text') from error
  header = _object(lines[0] if lines else '') or {}
  said = header.get('format')
  if said != FORMAT and str(said).startswith(_ANY_FORMAT):
    raise ValueError(
      f'{path}: is a {said!r}, and this reads {FORMAT!r}: record it again'
    )
  if said != FORMAT:
    raise ValueError(f'{path}: no trace: its first line has no {FORMAT!r}')
  if not _whole(header):
    raise ValueError(f'{path}:1: no header of a trace: record it again')
  if len(lines) - 1 != header['texts']:
    raise ValueError(
      f'{path}: has {len(lines) - 1} of its {header["texts"]} texts: it was '
      'cut off or changed: record it again'
    )
  size = len(header['leniences'])
  texts = []
  for index, line in enumerate(lines[1:]):
    text = _text(line, size)
    if text is None:
      raise ValueError(
        f'{path}:{index + 2}: no text of a trace: record it again'
      )
    texts.append(text)
  if not texts:
    raise ValueError(f'{path}: holds no text: record it with prompts')
  return Trace(header, tuple(texts))


def _whole(header: dict[str, Any]) -> bool:
  """Whether everything is there that is read of a header."""
  if {k: type(v) for k, v in header.items()} != _HEADER:
    return False
  l = header['leniences']
  return (
    {'temperature', 'top_k', 'top_p', 'seed'} <= set(header['sampling'])
    and {'commit', 'dirty', 'jax'} <= set(header['machine'])
    and len(header['labels']) == 2
    and l[:1] == [1.0]
    and _list(l, int | float)
  )


def _object(line: str) -> dict[str, Any] | None:
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _text(line: str, leniences: int) -> Text | None:
  """None for anything but a whole text."""
  row = _object(line)
  if row is None or set(row) != {f.name for f in dataclasses.fields(Text)}:
    return None
  n = len(row['tokens']) if isinstance(row['tokens'], list) else 0
  tables = row['kept'], row['distance']
  whole = (
    isinstance(row['id'], str)
    and all(isinstance(row[k], int) for k in ('number', 'seed'))
    and all(_list(row[k], int) for k in ('prompt', 'tokens'))
    and all(isinstance(x, list) and len(x) == leniences for x in tables)
    and all(_shares(x, n) for x in (row['p'], row['q'], *sum(tables, [])))
  )
  if not whole or not n or not row['prompt']:
    return None
  row |= {k: tuple(row[k]) for k in ('prompt', 'tokens', 'p', 'q')}
  row |= {k: tuple(map(tuple, row[k])) for k in ('kept', 'distance')}
  return Text(**row)


def _list(x, kind) -> bool:
  return isinstance(x, list) and all(
    isinstance(y, kind) and not isinstance(y, bool) for y in x
  )


def _shares(x, n: int) -> bool:
  """Whether x is n probabilities, up to float32's rounding of sums."""
  return (
    _list(x, int | float)
    and len(x) == n
    and all(math.isfinite(y) and 0 <= y <= 1.001 for y in x)
  )
