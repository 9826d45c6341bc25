"""Says in plain words what wins, what loses and why, and what to change."""

import math
from collections.abc import Sequence

import rich.markup

from specdec_jax import printing
from specdec_jax.bench import intervals, records, tables
from specdec_jax.costs import distance

Row = records.Row

# By outcome; of a drafter is said what is said of the first of its gammas.
_ORDER = 'win', 'unclear', 'too few', 'loss'
_OF_DRAFTERS: dict[intervals.Outcome, str] = {
  'win': 'faster',
  'loss': 'slower at every gamma tried',
  'unclear': 'cannot tell',
  'too few': 'cannot tell',
}
_CHANGES = {
  'win': 'use {}{}.',
  'too few': 'measure again: more prompts (and --minutes), or a smaller '
  'bench.batch_size.',
  'loss': 'do not speculate here.',
  'unclear': 'do not speculate here, or measure more prompts.',
}
_OF_CATEGORIES = {
  'win': 'wins on',
  'loss': 'loses on',
  'unclear': 'is not told from plain decoding on',
  'too few': f'has fewer than {intervals.FEWEST} prompts, no interval, of',
}


def sentences(doc: records.Document) -> list[str]:
  """Writes sentences about a benchmark; the last say what to change."""
  out = failures(failed(doc))
  if doc.failed:
    return [*out, 'No figures, for texts are cut short.']
  changes, tried = [], by_drafter(doc.rows)
  if not tried:
    return [*out, 'Plain decoding only: nothing to compare it with.']
  for drafter, rows in tried.items():
    best = rows[0]
    mine = [c for c in doc.categories if c.name == best.name]
    mine.sort(key=lambda row: rank(row.improvement), reverse=True)
    out += _about(best, doc) + _by_category(best, mine)
    change = _change(best, mine, {x.gamma for x in rows})
    changes.append(f'  {drafter}: {change}')
  out.append(_of_texts(doc))
  s = doc.setting
  out.append(
    f'Of {s.judged_prompts} test prompts, {s.max_new_tokens} new tokens at '
    f'most, {s.repeats} times each.'
  )
  if s.categories > 1:
    over = 'over the' if _over_kinds(s) else 'for other prompts of these'
    out.append(f'Intervals are {over} {s.categories} categories.')
  if doc.left_out:
    why = '; '.join(f'{name} ({x})' for name, x in doc.left_out.items())
    out.append(
      f'Left out by the calibration, to test the others on more prompts: {why}.'
    )
  if (doc.repeated_8grams or 0) > 0.2:
    out.append(
      f'{doc.repeated_8grams:.0%} of the 8-grams in the text are repeats: '
      'looping text flatters every draft, read the numbers with care.'
    )
  if doc.crossover:
    out += [_by_batch(drafter, doc.crossover) for drafter in tried]
  if doc.distance:
    out.append(of_distance(doc.distance))
  elif s.codes:
    out.append(
      f'The target is exact as it is stored ({s.codes}): --reference=float32 '
      'measures how far that is from the same file in float32.'
    )
  if not sound(doc):
    changes = ['  Nothing before the bug or the failure is found.']
  return [*out, 'What to change:', *changes]


def of_distance(x: distance.Distance) -> str:
  return (
    f'The target is exact as it is stored. From {x.reference} in {x.dtype} it '
    f'is off by a total variation of {x.total_variation:.2g} and '
    f'{x.kl:.2g} nats a token; the likeliest token is the same for '
    f'{x.agreement:.1%}; perplexity {x.perplexity:.3f} against '
    f'{x.reference_perplexity:.3f}, over {x.tokens} tokens of the prompts.'
  )


def by_drafter(rows: Sequence[Row]) -> dict[str, list[Row]]:
  """Groups rows by drafter, the best gamma and drafter first, by these very
  numbers: the intervals have paid for the choice."""
  out: dict[str, list[Row]] = {}
  for row in sorted(rows, key=lambda x: rank(x.improvement), reverse=True):
    if row.gamma:
      out.setdefault(row.drafter, []).append(row)
  return out


def rank(x: intervals.Interval) -> tuple[int, float]:
  """Orders improvements from lost to won."""
  return -_ORDER.index(x.outcome), x.value or 0.0


# --- failures and texts ------------------------------------------------------


def failed(doc: records.Document) -> list[records.Failure]:
  """Lists failures in the main run and, with the batch, in the crossover."""
  return [*doc.failed] + [
    x._replace(method=f'{x.method} at batch {batch.batch_size}')
    for batch in doc.crossover
    for x in batch.failed
  ]


def _audit(doc: records.Document) -> records.Audit | None:
  """Joins all audits; None where no texts could be compared."""
  rows = [*doc.rows, *(row for batch in doc.crossover for row in batch.rows)]
  return records.together(row.audit for row in rows)


def sound(doc: records.Document) -> bool:
  """Returns whether every difference is explained and no request failed."""
  audit = _audit(doc)
  return not failed(doc) and not (audit and audit.bugs)


def failures(found: Sequence[records.Failure]) -> list[str]:
  """Writes a sentence for each failed request, five at most."""
  out = [
    f'[red]FAILED[/red]: prompt {rich.markup.escape(repr(x.id))} after '
    f'{x.tokens} new tokens ({x.method}): the logits of the target are not '
    'finite; try dtype float32.'
    for x in found[:5]
  ]
  return out + [f'And {len(found) - 5} more failed so.'] * (len(found) > 5)


def audit_sentences(
  t: records.Total, failed: Sequence[records.Failure]
) -> list[str]:
  """Writes an audit's sentences: failures, counts, and their limits."""
  bugs = f'[red]{t.bugs} BUG[/red]' if t.bugs else '0 BUG'
  counts = (
    f'{t.texts} texts, {t.tokens} tokens compared: {t.identical} identical, '
    f'{t.ties} ties, {bugs}. At {t.positions} different positions; unexplained '
    f'per 1,000 of them: at most {t.bugs_at_most:.2f} (95 %, taking positions '
    'as independent).'
  )
  return [*failures(failed), counts]


def _of_texts(doc: records.Document) -> str:
  """Says what the rule promises, and whether the texts keep it."""
  audit = _audit(doc)
  assert audit
  if audit.promised == 'nothing':
    known = {r.drafter: r.alpha.away for r in doc.rows if r.alpha}
    off = ', '.join(f'{x} ({name})' for name, x in known.items())
    return (
      'This rule is LOSSY: tokens follow another distribution than the '
      f"target's, on average by a total variation of {off or 'unknown size'}."
    )
  if audit.promised == 'distribution':
    return (
      'Tokens follow the same distribution as plain decoding but are not the '
      'same tokens: sampling under this rule promises no more (use '
      'rule=coupled to compare).'
    )
  if audit.bugs:
    return (
      f'[red]BUG[/red]: {audit.bugs} of {audit.requests} texts differ from '
      'plain decoding by more than rounding explains. Do not use these numbers.'
    )
  return (
    f'Checked {audit.requests} texts token for token against plain decoding: '
    f'{audit.ties} part at a tie within rounding noise, 0 unexplained.'
  )


# --- what was found ----------------------------------------------------------


def _about(best: Row, doc: records.Document) -> list[str]:
  """Says how a drafter's best gamma did, why, and what was predicted."""
  x, s, plain = best.improvement, doc.setting, doc.rows[0].tok_s
  assert plain and best.tok_s and x.value and best.explained
  out = [
    f'{best.drafter}: {_OF_DRAFTERS[x.outcome]}; best at gamma {best.gamma}, '
    f'{_times(x)} plain decoding ({best.tok_s:.3g} against {plain:.3g} tok/s), '
    f'whole requests {_times(best.whole)}.'
  ]
  if x.outcome == 'unclear' and not _over_kinds(s):
    out.append(f'  {_more(x, s.judged_prompts, doc.measured)}')
  if x.outcome == 'too few':
    out.append(
      f'  No interval: {s.judged_prompts} prompts ran, {s.batch_size} in a '
      f'batch; it needs {intervals.FEWEST}, in two batches or more.'
    )
  if x.outcome != 'win':
    out.append(f'  {_why([best])}')
  if off := contradiction(x.value, best.explained.improvement):
    out.append(f'  Its parts contradict this result: {off}. Run it again.')
  return out + _of_prediction(best)


def _over_kinds(s: records.Setting) -> bool:
  """Returns whether categories, not their prompts, are the sample."""
  return s.categories >= intervals.FEWEST and s.batch_size == 1


def contradiction(x: float, explained: float, what: str = 'measured') -> str:
  """Says by how much a run's parts contradict a result; '' if they do not."""
  (low, high), ratio = records.AGREE, round(x / explained, 2)
  off = f'{what} over explained is {ratio:.2f}, outside {low} to {high}'
  return '' if low <= ratio <= high else off


def _times(x: intervals.Interval) -> str:
  """Writes '1.35x (95 %: 1.20 to 1.50, +-11 %)'."""
  known = tables.ends(x, to=' to ')
  return f'{x.value:.2f}x' + (
    f' (95 %: {known}, +-{x.width:.0%})' if known else ''
  )


def _more(x: intervals.Interval, prompts: int, seconds: float) -> str:
  """Says how many prompts would exclude 1: widths fall with their root."""
  assert x.value and x.high
  away = abs(x.value - 1)
  enough = prompts * ((x.high - x.value) / away) ** 2 if away else math.inf
  if enough > 100 * prompts:
    return f'Whichever is faster, {100 * prompts} prompts would not tell.'
  return (
    f'Some {math.ceil(enough)} prompts would, if the value stays ({prompts} '
    f'took {printing.time_text(seconds)}).'
  )


def _by_batch(drafter: str, crossover: Sequence[records.Batch]) -> str:
  """Lists the batch sizes at which a drafter is faster, slower or neither."""
  told, words = {}, {'win': 'faster at', 'loss': 'slower at'}
  for batch in crossover:
    outcome = by_drafter(batch.rows)[drafter][0].improvement.outcome
    word = words.get(outcome, 'cannot tell at')
    told.setdefault(word, []).append(str(batch.batch_size))
  found = '; '.join(f'{word} {", ".join(x)}' for word, x in told.items())
  return f'{drafter}, by batch size: {found}.'


def _by_category(best: Row, categories: Sequence[Row]) -> list[str]:
  out = []
  for outcome, words in _OF_CATEGORIES.items():
    found = [x for x in categories if x.improvement.outcome == outcome]
    if found:
      gain = lambda x: f' {x.improvement.value:.2f}x'
      names = ', '.join(x.category + gain(x) for x in found)
      out.append(f'{best.name} {words}: {rich.markup.escape(names)}.')
      out += [f'  {_why(found)}'] if outcome == 'loss' else []
  return out


def _why(rows: Sequence[Row]) -> str:
  """Says why rows lose: a window's tokens against its cost."""
  tokens = [r.counts.block_efficiency or 0.0 for r in rows]
  costs = [r.explained.window_cost for r in rows if r.explained]
  return (
    f'Why: a window emits {_span(tokens)} tokens in the time of '
    f'{_span(costs)} plain steps.'
  )


def _span(values: Sequence[float]) -> str:
  low, high = (f'{end(values):.2f}' for end in (min, max))
  return low if low == high else f'{low} to {high}'


def _of_prediction(best: Row) -> list[str]:
  x, own, measured = best.predicted, best.explained, best.improvement.value
  if not x:
    return []
  if x.vague:
    return [f'  {x.vague.capitalize()}.']
  assert own and measured
  told, known = x.improvement, tables.ends(x, to=' to ')
  within = f' (90 %: {known})' if known else ''
  return [
    f'  Predicted before the run: {told:.2f}x{within}. Measured over predicted '
    f'is {measured / told:.2f}: a factor {own.improvement / told:.2f} from '
    'acceptance (predicted from other prompts) and '
    f'{measured / own.improvement:.2f} from time (parts timed alone).'
  ]


# --- what to change ----------------------------------------------------------


def _change(best: Row, categories: Sequence[Row], tried: set[int]) -> str:
  outcome, model = best.improvement.outcome, best.explained
  assert model
  lost = [x.category for x in categories if x.improvement.outcome == 'loss']
  but = f', but not for {", ".join(lost)}' if lost else ''
  used = f'gamma {best.gamma}'
  if best.counts.accepted_by_width:  # decode.gammas says nothing of trees
    used = f'it as it is, with its tree of {best.gamma} nodes'
  text = _CHANGES[outcome].format(used, rich.markup.escape(but))
  sizes, tree = model.by_size, best.counts.accepted_by_width
  name = max(sizes, key=sizes.__getitem__, default='')
  if name and name not in [*sizes][-1:] and (tree or int(name) not in tried):
    what = f"the tree '{name}'" if tree else f'gamma {name}'
    again = 'a repeat of the calibration'
    ends = [(x, again) for x in (model.low, model.high)]
    for value, told in [(best.improvement.value, 'measured'), *ends]:
      if value and (off := contradiction(value, model.improvement, told)):
        return f'{text} No other size is named: {off}.'
    text += (
      f' Try {what}: by the cost model {sizes[name]:.2f}x, this one '
      f'{model.improvement:.2f}x.'
    )
  return text
