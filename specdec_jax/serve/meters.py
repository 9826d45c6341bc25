"""Measures an answer, for its client, and all answers, for Prometheus, by
vLLM's names and meanings: what reads its metrics reads these."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client

from specdec_jax import completion, metrics
from specdec_jax.serve import worker as worker_lib

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_COUNTERS = {
  'generation_tokens': 'tokens of answers',
  'spec_decode_num_drafts': 'windows with drafts',
  'spec_decode_num_draft_tokens': 'draft tokens',
  'spec_decode_num_accepted_tokens': 'draft tokens that were accepted',
}
_PER_PLACE = 'spec_decode_num_accepted_tokens_per_pos'
_TIMES = {
  'time_to_first_token': 'from the arrival of a choice',
  'inter_token_latency': 'between two windows of a choice',
}


def of_answer(
  jobs: Sequence[worker_lib.Job],
  done: Sequence[completion.Completion],
  gamma: int,
) -> dict[str, Any]:
  """Returns an answer's metrics, once its choices have ended as `done`."""
  arrived = jobs[0].arrived
  first = min(job.times[0] for job in jobs)
  spent = sum(job.times[-1] - job.times[0] for job in jobs)
  itl = metrics.ratio(spent, sum(job.tokens - 1 for job in jobs))
  # A rate is of what came after its clock began: the first window did not.
  before = sum(job.first for job in jobs if job.times[0] == first)
  later = sum(job.tokens for job in jobs) - before
  took = max(job.times[-1] for job in jobs) - first
  return {
    'time_to_first_token_ms': 1e3 * (first - arrived),
    'mean_itl_ms': itl and 1e3 * itl,
    'queue_time_ms': 1e3 * (min(job.began for job in jobs) - arrived),
    'tokens_per_second': metrics.ratio(later, took),
    'alone': all(job.alone for job in jobs),
    'speculative_decoding': _speculative([x.metrics for x in done], gamma),
  }


def _speculative(
  counts: Sequence[Mapping[str, Any]], gamma: int
) -> dict[str, Any] | None:
  """Sums up what was drafted; None where nothing was."""
  add = lambda name: sum(x[name] for x in counts)
  drafted, accepted = add('drafted_tokens'), add('accepted_tokens')
  if not drafted:
    return None
  each = lambda name: map(sum, zip(*(x[name] for x in counts), strict=True))
  steps = next(each('proposed_per_position'))
  # Steps by what they accepted. A window that drafted nothing is none.
  by_count = dict(enumerate(each('accepted_histogram')))
  by_count[0] -= add('target_calls') - steps
  return {
    'mean_acceptance_length': 1 + accepted / steps,
    'draft_acceptance_rate': accepted / drafted,
    'acceptance_histogram': {str(k): n for k, n in by_count.items() if n},
    'num_spec_steps': steps,
    'num_accepted_draft_tokens': accepted,
    'num_draft_tokens': drafted,
    'num_spec_tokens': gamma,
  }


class Meters:
  """A server's counters, in a registry of their own."""

  def __init__(self, model: str, worker: worker_lib.Worker):
    """Registers all under a model's name; worker: whose jobs wait and run."""
    self._registry = prometheus_client.CollectorRegistry()

    def make(kind, name, text, *labels, **more):
      names = ['model_name', *labels]
      made = kind(f'vllm:{name}', text, names, registry=self._registry, **more)
      return functools.partial(made.labels, model)

    counter, gauge = prometheus_client.Counter, prometheus_client.Gauge
    histogram = prometheus_client.Histogram
    self._counters = [make(counter, *pair)() for pair in _COUNTERS.items()]
    self._by_place = make(counter, _PER_PLACE, _PER_PLACE, 'position')
    self._times = [
      make(histogram, f'{name}_seconds', text, buckets=_SECONDS)()
      for name, text in _TIMES.items()
    ]
    for name, jobs in ('running', worker.running), ('waiting', worker.waiting):
      row = make(gauge, f'num_requests_{name}', f'choices that are {name}')
      row().set_function(functools.partial(len, jobs))

  def add(self, job: worker_lib.Job, counts: Mapping[str, Any]) -> None:
    """Counts a choice that has ended or is cancelled in mid-answer."""
    drafts = (counts['proposed_per_position'] or [0])[0]
    numbers = counts['drafted_tokens'], counts['accepted_tokens']
    found = job.tokens, drafts, *numbers
    for counter, n in zip(self._counters, found, strict=True):
      counter.inc(n)
    for place, n in enumerate(counts['accepted_per_position']):
      self._by_place(str(place)).inc(n)
    first, between = self._times
    for time in job.times[:1]:  # none where no logits were finite
      first.observe(time - job.arrived)
    gaps = [after - before for before, after in itertools.pairwise(job.times)]
    # Of an answer that nobody follows, a call decodes several.
    if 0 < len(gaps) < (windows := counts['target_calls'] - 1):
      gaps = [sum(gaps) / windows] * windows
    for gap in gaps:
      between.observe(gap)

  def text(self) -> bytes:
    """Writes them all, as prometheus_client.CONTENT_TYPE_LATEST."""
    return prometheus_client.generate_latest(self._registry)
