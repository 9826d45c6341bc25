"""Chen et al.'s table 1: its scores, prompts and page."""

import json

import pytest

from experiments import claims
from experiments import rows as rows_lib
from experiments.chen_table1 import render, texts


def test_rouge_2():
  assert render.rouge2('The cat sat.', 'the cat ran') == 0.5
  assert render.rouge2('a b a b', 'a b') == pytest.approx(2 * 1 / 4)
  assert render.rouge2('', 'one') == 0


def test_a_column_that_is_not_there_is_named(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_text(json.dumps({'document': 'long', 'highlights': 'short'}))
  with pytest.raises(ValueError, match="not every row has a text 'summary'"):
    texts._columns('xsum', str(path), 'document', 'summary')
  with pytest.raises(ValueError, match='/nowhere: cannot be read'):
    texts._columns('xsum', '/nowhere', 'document', 'summary')


def cell(draft, k, speed, **more):
  found = {
    'draft': draft,
    'sampling': 'nucleus',
    'k': k,
    'texts': 2,
    'ms': [20.0, 20.0 / speed],
    'speed': dict(value=speed, low=speed - 0.1, high=speed + 0.1),
    'rouge': [[0.1, 0.2] * 3, [0.1, 0.3] * 3],
    'efficiency': 1 + 0.3 * k,
  }
  return found | more


def test_claims_are_of_speed_and_quality():
  drafts = ('lookup', 'eagle')
  cells = {'xsum': [cell(x, k, 1.5) for x in drafts for k in (2, 4)]}
  every = {'xsum': rows_lib.Row('xsum', '', (), '', theirs=texts.XSUM)}
  found = render.claims(cells, every)
  wanted = ['same direction', 'cannot tell'] * 2
  assert [claims.outcome(x) for x in found] == wanted
  assert [x.of for x in found] == ['speed', 'quality'] * 2
  assert found[1].ours.value == pytest.approx(0.05)


def test_a_change_of_equal_texts_is_no_claim_and_a_wide_one_tells_nothing():
  every = {'xsum': rows_lib.Row('xsum', '', (), '', theirs=texts.XSUM)}
  same = {'sampling': 'greedy', 'rouge': [[0.1] * 6] * 2}
  found = render.claims({'xsum': [cell('lookup', 4, 1.5, **same)]}, every)
  assert [x.of for x in found] == ['speed']
  # 0.009 of texts that have 0.02 at most.
  wide = [[0.0, 0.02] * 3, [0.02, 0.0, 0.02, 0.0, 0.0, 0.02]]
  cells = {'xsum': [cell('lookup', 4, 1.5, rouge=wide)]}
  _, change = render.claims(cells, every)
  assert change.ours.low < 0.002 < change.ours.high
  assert claims.outcome(change) == 'cannot tell'
