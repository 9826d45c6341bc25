"""The benchmark in plain words: what wins, what loses and why, what to do."""

import math
from collections.abc import Sequence
from typing import Any

import rich.markup

from specdec_jax.bench import intervals

# By outcome; of a drafter is said what is said of the first of its gammas.
_ORDER = 'win', 'unclear', 'too few', 'loss', 'too short'


def sentences(doc: Any) -> list[str]:
  """Plain sentences about a benchmark.Document; the last say what to change."""
  out = failures(failed(doc))
  if doc.failed:
    return [*out, 'No figures, for texts are cut short.']
  changes, tried = [], by_drafter(doc.rows)
  for drafter, rows in tried.items():
    best = rows[0]
    of_best = [c for c in doc.categories if c.name == best.name]
    of_best.sort(key=_rank, reverse=True)
    out += _about(best, doc) + _by_category(best, of_best)
    change = _change(best, of_best, {r.gamma for r in rows})
    changes.append(f'  {drafter}: {change}')
  if not tried:
    return [*out, 'Plain decoding only: nothing to compare it with.']
  out.append(_identity_sentence(doc))
  if (doc.repeated_8grams or 0) > 0.2:
    out.append(
      f'{doc.repeated_8grams:.0%} of the 8-grams in the text are repeats: '
      'looping text flatters every draft, read the numbers with care.'
    )
  for drafter in doc.crossover[0].best_gamma if doc.crossover else ():
    out.append(_by_batch(drafter, doc))
  if not sound(doc):
    changes = ['  Nothing before the bug or the failure is found.']
  return out + (['What to change:', *changes] if changes else [])


def by_drafter(rows: Sequence[Any]) -> dict[str, list[Any]]:
  """The gammas of each drafter, the best first; the best drafter leads.

  The best by these very numbers: its interval has paid for being chosen.
  """
  out: dict[str, list[Any]] = {}
  for row in sorted(rows, key=_rank, reverse=True):
    if row.gamma:
      out.setdefault(row.drafter, []).append(row)
  return out


def failed(doc: Any) -> list[Any]:
  """identity.Failure of the main run and, with its batch, of the crossover."""
  return [*doc.failed] + [
    x._replace(method=f'{x.method} at batch {batch.batch_size}')
    for batch in doc.crossover
    for x in batch.failed
  ]


def _audits(doc: Any) -> list[Any]:
  rows = [*doc.rows, *(row for batch in doc.crossover for row in batch.rows)]
  return [row.audit for row in rows if row.audit]


def sound(doc: Any) -> bool:
  """Whether every difference is explained and no request failed."""
  return not failed(doc) and not any(x.bugs for x in _audits(doc))


def failures(found: Sequence[Any]) -> list[str]:
  """A sentence for each request that ended on broken logits, five at most."""
  out = [
    f'[red]FAILED[/red]: prompt {rich.markup.escape(repr(x.id))} after '
    f'{x.tokens} new tokens ({x.method}): the logits of the target are not '
    'finite; try dtype float32.'
    for x in found[:5]
  ]
  more = len(found) - 5
  return out + ([f'And {more} more failed so.'] if more > 0 else [])


def audit_sentences(report: Any) -> list[str]:
  """Sentences about an identity.Report: failures, counts, and their limits."""
  t = report.total
  bugs = f'[red]{t.bugs} BUG[/red]' if t.bugs else '0 BUG'
  ties = '1 tie' if t.ties == 1 else f'{t.ties} ties'
  counts = (
    f'{t.texts} texts, {t.tokens} tokens compared: {t.identical} identical, '
    f'{ties}, {bugs}. At {t.positions} different positions; unexplained per '
    f'1,000 of them: at most {t.bugs_at_most:.2f} (95 %, taking positions as '
    'independent).'
  )
  little = [
    f'{row.name} had no draft accepted: its texts test little.'
    for row in report.rows
    if not row.counts.accepted_tokens
  ]
  return [*failures(report.failed), counts, *little]


def _rank(row: Any) -> tuple[int, float]:
  """Orders rows from lost to won; those too short to measure come first."""
  x = row.improvement
  return -_ORDER.index(x.outcome), x.value or 0.0


# --- what was found ----------------------------------------------------------


def _about(best: Any, doc: Any) -> list[str]:
  """The best gamma of a drafter, why it does not win, what was predicted."""
  x, outcome = best.improvement, best.improvement.outcome
  if outcome == 'too short':
    return [f'{best.drafter}: too short to measure at every gamma tried.']
  words = {
    'win': 'faster',
    'loss': 'slower at every gamma tried',
    'unclear': 'cannot tell',
    'too few': 'cannot tell',
  }[outcome]
  out = [
    f'{best.drafter}: {words}; best at gamma {best.gamma}, '
    f'{_times(x)} plain decoding, whole requests {_times(best.whole)}.'
  ]
  if outcome == 'unclear':
    out.append(f'  {_more(x, doc)}')
  if outcome == 'too few':
    few = _few(doc.setting.judged_prompts, doc.setting.batch_size)
    out.append(f'  There is no interval: {few}.')
  if outcome != 'win':
    out.append(f'  {_why([best])}')
  if best.predicted:
    out.append(f'  {_prediction_sentence(best)}')
  return out


def _times(x: Any) -> str:
  """'1.35x (95 %: 1.20 to 1.50, +-11 %)'."""
  if x.value is None:
    return x.outcome
  if x.low is None:
    return f'{x.value:.2f}x'
  ends = f'{x.low:.2f} to {x.high:.2f}, +-{x.width:.0%}'
  return f'{x.value:.2f}x (95 %: {ends})'


def _more(x: Any, doc: Any) -> str:
  """How many prompts to judge before the interval would exclude 1."""
  judged = doc.setting.judged_prompts
  enough = x.enough(judged)
  if enough > 100 * judged:
    return f'Whichever is faster, {100 * judged} prompts would not tell.'
  return (
    f'Some {math.ceil(enough)} prompts would, if the value stays ({judged} '
    f'took {doc.measured / 60:.0f} minutes).'
  )


def _few(prompts: int, batch: int) -> str:
  """Why this many prompts in batches of this size give no interval."""
  if prompts < intervals.FEWEST:
    judged = '1 prompt is' if prompts == 1 else f'{prompts} prompts are'
    return f'{judged} judged, and at least {intervals.FEWEST} are needed'
  assert prompts <= batch, (prompts, batch)
  return (
    f'one batch of {batch} holds all {prompts} prompts, and at least two '
    'batches are needed'
  )


def _by_batch(drafter: str, doc: Any) -> str:
  """Of a drafter, the batch sizes at which it is faster, slower or neither."""
  told, few = {}, []
  for batch in doc.crossover:
    outcome = by_drafter(batch.rows)[drafter][0].improvement.outcome
    words = {'win': 'faster at', 'loss': 'slower at'}
    word = words.get(outcome, 'cannot tell at')
    told.setdefault(word, []).append(str(batch.batch_size))
    if outcome == 'too few':
      few = [_few(batch.prompts, batch.batch_size)]
  found = '; '.join(f'{word} {", ".join(x)}' for word, x in told.items())
  why = f' ({few[0]})' if few else ''
  return f'{drafter}, by batch size: {found}{why}.'


def _by_category(best: Any, rows: Sequence[Any]) -> list[str]:
  out = []
  for outcome, words in (
    ('win', 'wins on'),
    ('loss', 'loses on'),
    ('plain', "is plain decoding here (the program's choice) on"),
    ('unclear', 'is not told from plain decoding on'),
    ('too few', f'has fewer than {intervals.FEWEST} prompts, no interval, of'),
    ('too short', 'is too short to measure on'),
  ):
    found = [row for row in rows if _of_category(row) == outcome]
    if found:
      gain = lambda x: '' if x.value is None else f' {x.value:.2f}x'
      names = ', '.join(row.category + gain(row.improvement) for row in found)
      out.append(f'{best.name} {words}: {rich.markup.escape(names)}.')
      out += [f'  {_why(found)}'] if outcome == 'loss' else []
  return out


def _of_category(row: Any) -> str:
  """The outcome, or 'plain' where an adaptive method chose not to draft."""
  outcome = row.improvement.outcome
  off = row.drafter == 'adaptive' and (row.counts.proposal_rate or 0) < 0.1
  return 'plain' if off and outcome != 'win' else outcome


def _why(rows: Sequence[Any]) -> str:
  """Why rows or categories lose: tokens of a window against its cost."""
  counts = lambda name: [
    x for x in (getattr(r.counts, name) for r in rows) if x is not None
  ]
  text = (
    f'Why: a window emits {_span(counts("block_efficiency"))} tokens in the '
    f'time of {_span([r.explained.window_cost for r in rows])} plain steps'
  )
  rate, accepted = counts('proposal_rate'), counts('draft_acceptance_rate')
  if rate and min(rate) < 0.3:
    text += f'; something is proposed in {_span(rate, ".0%")} of windows'
  if accepted and min(accepted) < 0.5:
    text += f'; {_span(accepted, ".0%")} of the proposed tokens are accepted'
  return text + '.'


def _span(values: Sequence[float], form: str = '.2f') -> str:
  low, high = (format(f(values), form) for f in (min, max))
  return low if low == high else f'{low} to {high}'


def _prediction_sentence(best: Any) -> str:
  told, measured = best.predicted.improvement, best.improvement.value
  own, x = best.explained.improvement, best.predicted
  ends = '' if x.low is None else f' (90 %: {x.low:.2f} to {x.high:.2f})'
  return (
    f'Predicted before the run: {told:.2f}x{ends}. Measured over predicted is '
    f'{measured / told:.2f}: a factor {own / told:.2f} from acceptance '
    f'(predicted from other prompts) and {measured / own:.2f} from time (parts '
    'timed alone).'
  )


def _identity_sentence(doc: Any) -> str:
  audits = _audits(doc)
  compared = [x for x in audits if x.promised == 'tokens']
  if any(x.promised == 'nothing' for x in audits):
    off = {
      r.drafter: f'{r.alpha.total_variation:.2g} ({r.drafter})'
      for r in doc.rows
      if r.alpha and r.alpha.total_variation is not None
    }
    away = f', on average {", ".join(off.values())} away in total variation'
    away = away if off else ''
    if any(r.alpha and r.alpha.total_variation is None for r in doc.rows):
      away = ' by an unknown distance: the rule does not say what it emits'
    return (
      'This rule is LOSSY: tokens follow another distribution than the '
      f"target's{away}."
    )
  if not compared:
    return (
      'Tokens follow the same distribution as plain decoding but are not the '
      'same tokens: sampling under this rule promises no more (use '
      'rule=coupled to compare).'
    )
  checked = sum(x.requests for x in compared)
  if bugs := sum(x.bugs for x in compared):
    return (
      f'[red]BUG[/red]: {bugs} of {checked} texts differ from plain decoding '
      'by more than rounding explains. Do not use these numbers.'
    )
  return (
    f'Checked {checked} texts token for token against plain decoding: '
    f'{sum(x.ties for x in compared)} part at a tie within rounding noise, 0 '
    'unexplained.'
  )


# --- what to change ----------------------------------------------------------


def _change(best: Any, categories: Sequence[Any], tried: set[int]) -> str:
  outcome, model = best.improvement.outcome, best.explained
  if outcome == 'too short':
    return 'generate more tokens, with a larger decode.max_new_tokens.'
  if outcome == 'win':
    losses = [c.category for c in categories if _of_category(c) == 'loss']
    but = f', but not for {", ".join(losses)}' if losses else ''
    text = f'use gamma {best.gamma}{rich.markup.escape(but)}.'
  elif outcome == 'too few':
    text = (
      'measure again: more prompts (and --minutes), or a smaller '
      'bench.batch_size.'
    )
  else:
    more = '' if outcome == 'loss' else ', or measure more prompts'
    text = f'do not speculate here{more}.'
  if model.best_gamma and model.best_gamma not in tried:
    text += (
      f' Try gamma {model.best_gamma}: by the cost model '
      f'{model.by_gamma[model.best_gamma]:.2f}x, gamma {best.gamma} '
      f'{model.improvement:.2f}x.'
    )
  if outcome != 'win' and model.tokens < model.window_cost:
    text += (
      f' To break even a window must emit {model.window_cost:.2f} tokens '
      f'(here {model.tokens:.2f}) or cost {model.tokens:.2f} plain steps.'
    )
  return text
