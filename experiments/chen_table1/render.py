"""Table 1, and ours at every K that was timed (figure 1)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import claims as claims_lib
from experiments import empirical, papers, resampled
from experiments.chen_table1 import measure, texts
from experiments.page import Part
from experiments.rows import Cells, Rows
from specdec_jax.bench import intervals

OURS = (
  'text=target, draft, sampling, K=k, plain ms a token=ms.0:.2f, '
  'speculated=ms.1:.2f, speed:.2fx, tokens a window=efficiency:.2f, '
  'plain ROUGE-2=mean.0:.3f, speculated=mean.1:.3f'
)
THEIRS = (
  'text, sampling, plain ms a token=plain_ms:.1f, speculated=ms:.2f, '
  'speed:.2fx, plain result=plain:.3f, speculated:.3f'
)


def parts(cells: Cells, every: Rows) -> list[Part]:
  ours = [
    x | {'mean': [float(np.mean(y)) if y else None for y in x['rouge']]}
    for x in empirical.lines(cells, every)
  ]
  return [
    Part('Ours, decoding at batch 1, with 95 % intervals.', OURS, ours),
    Part(
      f'Theirs, a draft of 4B for 70B, K = {papers.CHEN_K}. The result of '
      'HumanEval is the share of functions that pass, which is not measured '
      'here.',
      THEIRS,
      papers.CHEN,
    ),
  ]


def claims(cells: Cells, every: Rows) -> list[claims_lib.Claim]:
  """Speed at the paper's K, and what speculation changes in ROUGE-2."""
  return [
    claim
    for theirs in papers.CHEN
    for name, found in cells.items()
    if every[name].theirs == theirs.text
    for x in found
    if (x['sampling'], x['k']) == (theirs.sampling, papers.CHEN_K)
    for claim in _claims(theirs, every[name].name, x)
  ]


def _claims(theirs: papers.Chen, name: str, x: Mapping[str, Any]):
  speed = intervals.Interval(**x['speed'])
  cell, place = f'{theirs.text}, {theirs.sampling}', f'{name}, {x["draft"]}'
  yield claims_lib.Claim(
    f'{cell}: speed',
    f'{theirs.speed:.2f}x',
    place,
    *papers.printed(theirs.speed, 2),
    ours=speed,
    form='{:.2f}x',
    against='1x',
    sign=1,
    apart=claims_lib.minus(speed, 1.0),
    why=f'{x["efficiency"]:.2f} tokens a window',
  )
  plain, mine = (np.asarray(y) for y in x['rouge'])
  if len(plain):
    change = theirs.speculated - theirs.plain
    ends = (round(change + x, 4) for x in (-1e-3, 1e-3))
    ours_R = resampled.draws(len(plain)) @ (mine - plain) / len(plain)
    yield claims_lib.Claim(
      f'{cell}: change of ROUGE-2',
      f'{change:+.3f}',
      place,
      *ends,  # of two numbers that round
      resampled.interval(ours_R, len(plain)),
      form='{:+.3f}',
    )


TABLE = empirical.Table(
  'chen_table1',
  measure.measure,
  parts,
  claims,
  why='an EAGLE and lookup for a target of 135M, in place of a draft of 4B; at '
  'K = 4 few drafts are kept',
  theirs="The paper's target, Chinchilla of 70B: not run, its weights are not "
  'published; your own: `{run} --target=SOURCE --draft=SOURCE`.',
  rows=texts.rows,
)
