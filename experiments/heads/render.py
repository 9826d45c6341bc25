"""Renders the drafts' document as a table, a figure and a choice."""

import pathlib
from collections.abc import Mapping
from typing import Any

import safetensors.numpy

from experiments import page, plots

SHIPPED = 'shipped eagle'
# By specdec_jax/zoo/smollm2-135m-instruct/README.md; see the page.
_SHIPPED = {'kind': SHIPPED, 'parameters': 4.9, 'steps': 1680, 'tokens': None}
# What a folder has of the target's, by kind.
_FROZEN = {'dflash': 'lm_head.weight', 'eagle3': 'embed_tokens.weight'}


def markdown(doc: Mapping[str, Any]) -> str:
  """Writes a row a draft, best first, and a choice; doc: with 'trained'."""
  rows, s, q = _rows(doc), doc['setting'], doc['questions']
  about, plain = doc['trained'][0], doc['rows'][0]['tok_s'] or 0
  caption = (
    f'{page.made_on(doc["machine"])} {s["target"]}, {s["dtype"]}; greedy, '
    f'{page.asked(q | {"questions": s["judged_prompts"]})}, '
    f'{s["max_new_tokens"]} new tokens at most, '
    f'{s["repeats"]} repeats; plain decoding {plain:.1f} tok/s. **Each kind '
    f'had {about["minutes"]:g} minutes of steps on both cores**, by the median '
    f'time of a few (the default is 60), and the same {about["answers"]:,} '
    f'answers of {about["answered"]:,} tokens. parameters, tokens: trained, in '
    'millions; answer tokens read. alpha 2: accepted at the second position, '
    'of the drafts tried there. c: a drafted token, in plain steps.'
  )
  alphas = (f'alpha {k + 1}=alphas.{k}:.2f' for k in range(_gamma(doc)))
  columns = (
    'draft=drafter, parameters=of.parameters:.1f, steps=of.steps:,, '
    f'tokens=of.tokens:.2f, {", ".join(alphas)}, '
    'tokens/window=counts.block_efficiency:.2f, c:.3f, improvement:.2fx, '
    'differs'
  )
  own = [x for x in rows if x['drafter'] != SHIPPED]
  most, fastest = own[0], max(own, key=lambda x: x['improvement']['value'] or 0)
  return (
    f'{page.text(page.Part(caption, columns, rows))}\n\n'
    f'Trained for this long, `{most["drafter"]}` emits the most, '
    f'{most["counts"]["block_efficiency"]:.2f} tokens a window, and '
    f'`{fastest["drafter"]}` is the fastest, '
    f'{fastest["improvement"]["value"] or 0:.2f} times plain decoding.'
  )


def figure(doc: Mapping[str, Any]) -> bytes:
  """Draws acceptance at each window position as a PNG, a line by draft."""

  def paint(axes: plots.Axes) -> None:
    # The shipped one first, whose look is its own.
    rows = sorted(_rows(doc), key=lambda x: x['drafter'] != SHIPPED)
    for i, row in enumerate(rows):
      known = [x for x in row['alphas'] if x is not None]
      axes.plot(
        range(1, len(known) + 1),
        known,
        linestyle=plots.DASHES[i % 5],
        marker=plots.MARKS[i % 5],
        color='0.4' if row['drafter'] == SHIPPED else plots.COLOURS[i % 5],
        label=row['drafter'],
      )
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, _gamma(doc) + 1))
    axes.legend(frameon=False, fontsize=8)
    plots.label(
      axes,
      'position in the window',
      'accepted, of the drafts tried there',
      'Which draft is still right further into a window?',
    )

  return plots.png(paint, size=(6.4, 3.6))


def _gamma(doc: Mapping[str, Any]) -> int:
  return doc['rows'][1]['gamma']


def _rows(doc: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the benchmark's rows for drafts, with the table's other columns."""
  gamma, costs = _gamma(doc), doc['calibration']['propose']
  of = {x['kind']: x for x in [_SHIPPED, *doc['trained']]}
  rows = [
    row
    | {
      'of': of[row['drafter']],
      'alphas': row['counts']['conditional_acceptance_per_position'],
      'c': costs[row['drafter']][str(gamma)] / gamma,
      'differs': page.differing(row['audit'], len(doc['failed'])),
    }
    for row in doc['rows'][1:]
  ]
  return sorted(rows, key=lambda x: -(x['counts']['block_efficiency'] or 0))


def parameters(kind: str, draft: pathlib.Path) -> float:
  """Counts the trained parameters in a draft's file or folder, in millions."""
  (path,) = draft.glob('*.safetensors') if draft.is_dir() else [draft]
  frozen = _FROZEN.get(kind, '')
  arrays = safetensors.numpy.load_file(path)
  own = [x for n, x in arrays.items() if x.dtype == 'float16' and n != frozen]
  return sum(x.size for x in own) / 1e6
