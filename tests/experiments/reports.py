"""Made-up parts of a benchmark's document."""

from specdec_jax import metrics
from specdec_jax.bench import intervals

MACHINE = dict(
  commit='c' * 40, dirty=True, cores=2, cpu='A CPU', device='cpu', jax='9'
)


def setting(**changes):
  """A plan.Setting of 7 prompts under reject, as JSON."""
  fields = dict(
    target='a model',
    draft=None,
    dtype='float32',
    rule='reject',
    lossless=True,
    sampling=dict(temperature=0.0),
    batch_size=1,
    max_new_tokens=48,
    repeats=2,
    judged_prompts=7,
  )
  return fields | changes


def counts(efficiency):
  empty = metrics.Summary(**dict.fromkeys(metrics.Summary._fields))
  return empty._replace(block_efficiency=efficiency)


def gain(value):
  """Improvements within a tenth of the value."""
  return intervals.Interval(value, 0.9 * value, 1.1 * value)
