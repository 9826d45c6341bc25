"""The benchmark in plain words: what to use, what wins, what loses and why."""

from typing import Any

from specdec_jax.eval import metrics


def sentences(doc: dict[str, Any]) -> list[str]:
  """Plain sentences: what to use, what wins, what loses and why."""
  out = []
  drafters = dict.fromkeys(r['drafter'] for r in doc['rows'] if r['gamma'])
  for drafter in drafters:
    rows = [r for r in doc['rows'] if r['drafter'] == drafter]
    best = max(rows, key=lambda r: r['improvement']['median'])
    out.append(_best_sentence(drafter, best))
    if best['predicted']:
      out.append(_prediction_sentence(best))
    of_best = sorted(
      (c for c in doc['categories'] if c['name'] == best['name']),
      key=lambda row: -row['improvement']['median'],
    )
    wins = [c for c in of_best if metrics.outcome(c['improvement']) == 'win']
    losses = [c for c in of_best if metrics.outcome(c['improvement']) == 'loss']
    draws = [c for c in of_best if metrics.outcome(c['improvement']) == 'draw']
    named = lambda cs: ', '.join(
      f'{c["category"]} {c["improvement"]["median"]:.2f}x' for c in cs
    )
    if wins:
      out.append(f'{best["name"]} wins on: {named(wins)}.')
    for c in losses:
      out.append(
        f'{best["name"]} loses on {c["category"]} '
        f'({c["improvement"]["median"]:.2f}x): {why(c)}.'
      )
    if draws:
      out.append(f'No clear difference on: {named(draws)}.')
  out.append(_identity_sentence(doc))
  if (doc['repeated_8grams'] or 0) > 0.2:
    out.append(
      f'{doc["repeated_8grams"]:.0%} of the 8-grams in the text are repeats: '
      'looping text flatters every draft, read the numbers with care.'
    )
  out += _crossover_sentences(doc)
  return out


def why(row: dict[str, Any]) -> str:
  """What a loss is made of: tokens that a window gained, and what it cost."""
  parts = []
  rate, accepted = row['proposal_rate'], row['draft_acceptance_rate']
  if rate is not None and rate < 0.3:
    parts.append(f'it proposes in only {rate:.0%} of windows')
  if accepted is not None and accepted < 0.5:
    parts.append(f'{accepted:.0%} of what it proposes is accepted')
  parts.append(
    f'a window emits {row["block_efficiency"]:.2f} tokens and costs '
    f'{row["window_cost"]:.2f} plain steps'
  )
  told, found = row['explained'], row['improvement']['median']
  if abs(found / told - 1) > 0.05:
    parts.append(f'which makes {told:.2f}x; the rest is not in the model')
  return ', '.join(parts)


def _best_sentence(drafter: str, best) -> str:
  x = best['improvement']
  outcome = metrics.outcome(x)
  between = f'{x["median"]:.2f}x ({x["min"]:.2f} to {x["max"]:.2f})'
  if outcome == 'win':
    return f'{drafter}: best gamma {best["gamma"]}, {between} plain decoding.'
  model = best['explained']
  reason = why(
    best
    | {'window_cost': model['window_cost'], 'explained': model['improvement']}
  )
  if outcome == 'draw':
    return (
      f'{drafter}: best gamma 0, no clear gain: gamma {best["gamma"]} gives '
      f'{between}; {reason}.'
    )
  return (
    f'{drafter}: best gamma 0, do not speculate: gamma {best["gamma"]} gives '
    f'{between}; {reason}.'
  )


def _prediction_sentence(best) -> str:
  told, is_ = best['predicted'], best['improvement']['median']
  own = best['explained']['improvement']
  gamma = told['best_gamma']
  return (
    f'  Predicted before the run {told["improvement"]:.2f}x, measured over '
    f'predicted {is_ / told["improvement"]:.2f}: other prompts explain '
    f'{own / told["improvement"]:.2f}, costs {is_ / own:.2f}. '
    + (
      f'Of 1 to {best["gamma"]}, gamma {gamma} is predicted best.'
      if gamma
      else f'No gamma from 1 to {best["gamma"]} is predicted to help.'
    )
  )


def _identity_sentence(doc) -> str:
  rows = [r for r in doc['rows'] if r['audit']]
  promised = [r['audit'] for r in rows if r['audit']['promised'] == 'tokens']
  if not promised:
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
