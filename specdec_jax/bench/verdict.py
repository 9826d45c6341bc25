"""The benchmark in plain words: what wins, what loses and why, what to do."""

from collections.abc import Sequence
from typing import Any

import rich.markup

from specdec_jax.bench import cost, metrics


def sentences(doc: dict[str, Any]) -> list[str]:
  """Plain sentences; the last ones say what to change."""
  out, changes = failures(named_rows(doc)), []
  if any(row['broken'] for row in doc['rows']):
    return [*out, 'No figures, for texts are cut short.']
  drafters = dict.fromkeys(r['drafter'] for r in doc['rows'] if r['gamma'])
  for drafter in drafters:
    rows = [r for r in doc['rows'] if r['drafter'] == drafter]
    best = max(rows, key=_rank)
    of_best = sorted(
      (c for c in doc['categories'] if c['name'] == best['name']),
      key=_rank,
      reverse=True,
    )
    out += _about(best) + _by_category(best, of_best)
    tried = {r['gamma'] for r in rows}
    changes.append(f'  {drafter}: {_change(best, of_best, tried)}')
  out.append(_identity_sentence(doc))
  if (doc['repeated_8grams'] or 0) > 0.2:
    out.append(
      f'{doc["repeated_8grams"]:.0%} of the 8-grams in the text are repeats: '
      'looping text flatters every draft, read the numbers with care.'
    )
  out += _crossover_sentences(doc)
  if not sound(named_rows(doc)):
    changes = ['  Nothing before the bug or the failure is found.']
  return out + (['What to change:', *changes] if changes else [])


def named_rows(doc: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
  """(name, row) of the main table and of the crossover."""
  return [(row['name'], row) for row in doc['rows']] + [
    (f'{name} at batch {x["batch_size"]}', row)
    for x in doc['crossover']
    for name, row in x['rows'].items()
  ]


def sound(rows: Sequence[tuple[str, dict[str, Any]]]) -> bool:
  """No unexplained difference, no request that failed."""
  return not any(
    row['broken'] or (row['audit'] or {}).get('bugs') for _, row in rows
  )


def failures(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
  """A sentence for each request that ended on broken logits, five at most."""
  found: dict[tuple[str, int], list[str]] = {}
  for name, row in rows:
    for x in row['broken']:
      names = found.setdefault((x['id'], x['tokens']), [])
      names += [] if name in names else [name]
  out = [
    f'[red]FAILED[/red]: prompt {rich.markup.escape(repr(id))} after {tokens} '
    f'new tokens ({", ".join(names)}): the logits of the target are not '
    'finite; try dtype float32.'
    for (id, tokens), names in found.items()
  ]
  more = len(out) - 5
  return out[:5] + ([f'And {more} more failed so.'] if more > 0 else [])


def _rank(row: dict[str, Any]) -> tuple[bool, float]:
  """Orders rows from lost to won; those too short to measure come first."""
  x = row['improvement']
  return metrics.outcome(x) == 'win', x['median'] or 0.0


# --- what was found ----------------------------------------------------------


def _about(best: dict[str, Any]) -> list[str]:
  """The best gamma of a drafter, why it does not win, what was predicted."""
  drafter, gamma, x = best['drafter'], best['gamma'], best['improvement']
  outcome = metrics.outcome(x)
  if outcome == 'too short':
    return [f'{drafter}: too short to measure at every gamma tried.']
  found = (
    f'gamma {gamma}, {x["median"]:.2f}x plain decoding '
    f'({x["min"]:.2f} to {x["max"]:.2f})'
  )
  out = [
    {
      'win': f'{drafter}: faster; best at {found}.',
      'draw': f'{drafter}: no clear gain at any gamma tried; best at {found}.',
      'loss': f'{drafter}: slower at every gamma tried; best at {found}.',
    }[outcome]
  ]
  if outcome != 'win':
    model = best['explained']
    row = best | {'window_cost': model['window_cost']}
    out.append(f'  {why([row | {"explained": model["improvement"]}])}')
  if best['predicted']:
    out.append(f'  {_prediction_sentence(best)}')
  return out


def _by_category(best: dict[str, Any], rows) -> list[str]:
  groups: dict[str, list[dict[str, Any]]] = {}
  for row in rows:
    groups.setdefault(metrics.outcome(row['improvement']), []).append(row)
  out = []
  for outcome, words in (
    ('win', 'wins on'),
    ('loss', 'loses on'),
    ('draw', 'makes no clear difference on'),
  ):
    if outcome in groups:
      out.append(f'{best["name"]} {words}: {_named(groups[outcome])}.')
    if outcome == 'loss' and outcome in groups:
      out.append(f'  {why(groups[outcome])}')
  if 'too short' in groups:
    names = ', '.join(row['category'] for row in groups['too short'])
    out.append(f'{best["name"]} is too short to measure on: {names}.')
  return out


def _named(rows) -> str:
  return ', '.join(
    f'{row["category"]} {row["improvement"]["median"]:.2f}x' for row in rows
  )


def why(rows: Sequence[dict[str, Any]]) -> str:
  """What losses are made of: tokens that a window gained, and what it cost."""
  column = lambda name: [r[name] for r in rows if r[name] is not None]
  text = (
    f'Why: a window emits {_span(column("block_efficiency"))} tokens in the '
    f'time of {_span(column("window_cost"))} plain steps'
  )
  rate, accepted = column('proposal_rate'), column('draft_acceptance_rate')
  if rate and min(rate) < 0.3:
    text += f'; something is proposed in {_span(rate, ".0%")} of windows'
  if accepted and min(accepted) < 0.5:
    text += f'; {_span(accepted, ".0%")} of the proposed tokens are accepted'
  told = column('explained')
  found = [r['improvement']['median'] for r in rows]
  if any(abs(f / t - 1) > 0.05 for f, t in zip(found, told, strict=True)):
    slower = all(f < t for f, t in zip(found, told, strict=True))
    text += (
      f'. That makes {_span(told, unit="x")} and measured is '
      f'{_span(found, unit="x")}: together the parts '
      f'{"cost more than" if slower else "do not cost what they do"} alone'
    )
  return text + '.'


def _span(values: Sequence[float], form: str = '.2f', unit: str = '') -> str:
  low, high = (format(f(values), form) + unit for f in (min, max))
  return low if low == high else f'{low} to {high}'


def _prediction_sentence(best: dict[str, Any]) -> str:
  told, is_ = best['predicted'], best['improvement']['median']
  own = best['explained']['improvement']
  gamma = told['best_gamma']
  return (
    f'Predicted before the run: {told["improvement"]:.2f}x. Measured over '
    f'predicted is {is_ / told["improvement"]:.2f}: a factor '
    f'{own / told["improvement"]:.2f} from acceptance (predicted from other '
    f'prompts) and {is_ / own:.2f} from time (parts timed alone). '
    + (
      f'Of gamma 1 to {best["gamma"]}, {gamma} was predicted best.'
      if gamma
      else f'No gamma from 1 to {best["gamma"]} was predicted to help.'
    )
  )


def _identity_sentence(doc) -> str:
  audits = [row['audit'] for _, row in named_rows(doc) if row['audit']]
  promised = [a for a in audits if a['promised'] == 'tokens']
  if not promised:
    if any(a['promised'] == 'nothing' for a in audits):
      off = {
        r['drafter']: f'{r["alpha"]["total_variation"]:.2g} ({r["drafter"]})'
        for r in doc['rows']
        if r['alpha']
      }
      return (
        'This rule is LOSSY: a token follows another law than the target says, '
        f'on average {", ".join(off.values())} away in total variation.'
      )
    return (
      'Output follows the same law as plain decoding, not the same tokens: '
      'sampling under this rule promises no more (use rule=coupled to compare).'
    )
  bugs, ties = (sum(a[k] for a in promised) for k in ('bugs', 'ties'))
  checked = sum(a['requests'] for a in promised)
  if bugs:
    return (
      f'[red]BUG[/red]: {bugs} of {checked} texts differ from plain decoding '
      'by more than rounding explains. Do not use these numbers.'
    )
  return (
    f'Checked {checked} texts token for token against plain decoding: '
    f'{ties} part at a tie within rounding noise, 0 unexplained.'
  )


def _crossover_sentences(doc) -> list[str]:
  if not doc['crossover']:
    return []
  return [
    f'{drafter}: of the batch sizes tried, {size} is the largest at which '
    'speculation helps.'
    if size
    else f'{drafter}: speculation helps at none of the batch sizes tried.'
    for drafter, size in doc['largest_batch'].items()
  ]


# --- what to change ----------------------------------------------------------


def _change(best: dict[str, Any], categories, tried: set[int]) -> str:
  outcome = metrics.outcome(best['improvement'])
  if outcome == 'too short':
    return 'generate more tokens, with a larger decode.max_new_tokens.'
  if outcome == 'win':
    text = f'use gamma {best["gamma"]}'
    losses = [
      c['category']
      for c in categories
      if metrics.outcome(c['improvement']) == 'loss'
    ]
    text += f', but not for {", ".join(losses)}.' if losses else '.'
    return text + _other_gamma(best, tried)
  text = {
    'loss': 'do not speculate here.',
    'draw': 'do not speculate here, or measure with more repeats.',
  }[outcome]
  return text + _other_gamma(best, tried) + _break_even(best)


def _other_gamma(best: dict[str, Any], tried: set[int]) -> str:
  """A gamma below the best one that was not tried and may do better."""
  model = best['explained']
  gamma = model['best_gamma']
  if gamma in tried or gamma == 0:
    return ''
  return (
    f' Try gamma {gamma}: by the cost model {model["by_gamma"][gamma]:.2f}x, '
    f'gamma {best["gamma"]} {model["improvement"]:.2f}x.'
  )


def _break_even(best: dict[str, Any]) -> str:
  """The acceptance, or the cost of a drafted token, at which nothing is lost.

  Acceptance as the alpha of equation 1, whose tokens a window this run's are.
  """
  model, gamma, c = best['explained'], best['gamma'], best['cost_coefficient']
  tokens, window = model['tokens'], model['window_cost']
  if tokens >= window:
    return ' Tokens outweigh the cost of the parts: time is lost elsewhere.'
  rate = best['proposal_rate'] or 0.0
  need, now = (cost.alpha_of(x, gamma, rate) for x in (window, tokens))
  proposing = (
    f' while proposing in {rate:.0%} of windows' if rate < 0.95 else ''
  )
  if need is None:
    text = f' Even alpha 1 would not break even at this cost{proposing}'
  else:
    text = f' To break even at this cost it needs an alpha of {need:.2f}'
    text += proposing + (f' (here {now:.2f})' if now is not None else '')
  cheap = cost.break_even_c(tokens, window - c * gamma, gamma)
  if cheap > 0:
    text += (
      f'; or, at this acceptance, drafts of {cheap:.3f} plain steps a token '
      f'(here {c:.3f})'
    )
  elif c * gamma > 0.01:
    text += '; no draft is cheap enough at this acceptance'
  return text + '.'
