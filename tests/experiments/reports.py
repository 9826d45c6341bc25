"""Experiments' documents as they are stored, to be changed by tests."""

import json

from specdec_jax.bench import records
from tests import programs


def stored(name):
  home = programs.ROOT / 'experiments' / name
  return json.loads((home / f'results/{name}.json').read_text())


def gain(value):
  """Improvements within a tenth of the value, as JSON."""
  return dict(value=value, low=0.9 * value, high=1.1 * value)


def audit(promised, *findings):
  """Of 7 requests, as JSON; findings: 'tie' or 'BUG'."""
  found = [records.Finding(x)._asdict() for x in findings]
  return records.Audit(promised, 7)._asdict() | dict(findings=found)
