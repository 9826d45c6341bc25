"""Reads questions in Spec-Bench's format, grouped into its tables' columns."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts
from specdec_jax.io import files

FIELDS = ('question_id', 'category', 'turns')
# Spec-Bench counts MT-Bench's categories as one task.
MT_BENCH = (
  *('writing', 'roleplay', 'reasoning', 'math'),
  *('coding', 'extraction', 'stem', 'humanities'),
)
MULTI_TURN = 'multi-turn'


def read(path: str, limit: int = 0) -> list[prompts.Prompt]:
  """Reads the first `limit` questions a category, 0: all; or ValueError."""
  if not path:
    raise ValueError(
      '--questions is missing: name a question.jsonl in the format of '
      'Spec-Bench or MT-Bench'
    )
  found = prompts.read(path)
  for where, row in files.read_jsonl(path):
    if missing := [name for name in FIELDS if name not in row]:
      raise ValueError(
        f'{where}: has no {" and no ".join(missing)}: every line needs '
        f'{", ".join(FIELDS)}'
      )
  return prompts.first_of_each(found, limit or len(found))


def grouped(questions: Sequence[prompts.Prompt]) -> list[prompts.Prompt]:
  """Groups MT-Bench's categories into one, unless the file has no others."""
  if all(q.category in MT_BENCH for q in questions):
    return list(questions)
  return [
    dataclasses.replace(q, category=MULTI_TURN) if q.category in MT_BENCH else q
    for q in questions
  ]


def judged(e, path: str, chosen: Sequence[prompts.Prompt]):
  """Returns (a plan that judges all questions and predicts none, its names)."""
  plan = plan_lib.make(e, chosen)
  test = plan.test + plan.calibration
  ids = {item.id for item in test}
  about = describe(path, [q for q in chosen if q.id in ids])
  return plan._replace(test=test, calibration=()), about


def describe(path: str, questions: Sequence[prompts.Prompt]) -> dict[str, Any]:
  """Names the questions, without their text."""
  data = pathlib.Path(path).read_bytes()
  return {
    'file': pathlib.Path(path).name,
    'sha256': hashlib.sha256(data).hexdigest(),
    'questions': len(questions),
    'turns_left_out': sum(len(q.turns) - 1 for q in questions),
  }
