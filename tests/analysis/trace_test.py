"""The file of a trace, and the figures of one that was made by hand."""

import dataclasses
import importlib.util
import json

import pytest

from configs import pair
from specdec_jax import settings
from specdec_jax.analysis import (
  trace,
  trace_figures,
  trace_program,
  trace_report,
)
from tests.analysis import answering

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

TARGET, DRAFT = answering.target(), answering.target(digest='d1')


def made(id, p, q, seed=3):
  kept = (tuple(map(min, p, q)),) * len(trace.LENIENCES)
  far = [(0.1 * i,) * len(p) for i in range(len(trace.LENIENCES))]
  n = (7,) * len(p)
  return trace.Text(id, '', 5, seed, (1, 2), n, p, q, kept, tuple(far))


def hand():
  """Two requests, three texts; a p of the last one was rounded away."""
  texts = (
    made('a', (0.5, 0.5), (0.25, 0.5)),
    made('b', (0.5, 0.5), (0.5, 0.5)),
    made('b', (0.0, 0.5), (0.5, 0.5), seed=4),
  )
  header = {
    'format': trace.FORMAT,
    'texts': len(texts),
    'labels': ['big', 'small'],
    'models': trace.models(TARGET, DRAFT),
    'sampling': {'temperature': 0.8, 'top_k': 0, 'top_p': 1.0, 'seed': 3},
    'max_new_tokens': 2,
    'samples': 1,
    'leniences': list(trace.LENIENCES),
    'machine': {'commit': 'c0ffee', 'dirty': False, 'jax': '0'},
  }
  return trace.Trace(header, texts)


def analysed(found, limit=1):
  return trace_figures.analyse(found, limit=limit, resamples=1000)


def test_figures():
  doc = analysed(hand())
  assert (doc['requests'], doc['texts'], doc['tokens']) == (2, 3, 6)
  assert doc['rounded'] == 1
  assert doc['alpha']['value'] == pytest.approx((0.75 + 1 + 0.5) / 6)
  zero, one = doc['rows']
  assert zero['block']['value'] == 1 == zero['independent']
  # Calls: 1.5, 1, 1.5. Resamples that are one request twice: 2 / 1.5, 4 / 2.5.
  assert one['reject']['value'] == pytest.approx(6 / 4)
  assert one['reject']['low'] == pytest.approx(2 / 1.5)
  assert one['reject']['high'] == pytest.approx(4 / 2.5)
  assert one['independent'] == pytest.approx(1 + 2.25 / 6)
  assert sum(doc['windows']['reject']) == pytest.approx(4)
  assert [row['lenience'] for row in doc['lenience']] == [*trace.LENIENCES]
  for i, row in enumerate(doc['lenience']):
    assert row['kept'] == doc['alpha']
    assert row['total_variation']['value'] == pytest.approx(0.1 * i)
  assert 'accepts what reject does' in trace_report.sentence(doc)
  with pytest.raises(ValueError, match='limit=-1'):
    analysed(hand(), -1)


def test_one_request_has_no_intervals():
  found = dataclasses.replace(hand(), texts=hand().texts[1:])
  doc = analysed(found)
  assert doc['alpha']['low'] is None and doc['rows'][1]['gain']['high'] is None
  assert trace_report.finish([doc], None)


def test_figures_need_matplotlib(monkeypatch):
  trace_report.check_figures()
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match='install the extra `plots`'):
    trace_program.analyse(['t'], limit=1, resamples=1000, workdir='x')


def test_file_holds_the_trace(tmp_path, capsys):
  path = trace.check_output(str(tmp_path / 'new' / 't.jsonl'))
  trace.write(path, hand())
  assert trace.read(str(path)) == hand()
  assert [p.name for p in path.parent.iterdir()] == ['t.jsonl']
  out = tmp_path / 'out'
  out.mkdir()
  docs = [analysed(trace.read(str(path)))] * 2
  assert trace_report.finish(docs, out)
  doc = json.loads((out / 'trace.json').read_text())
  assert doc == json.loads(capsys.readouterr().out.splitlines()[-1])
  assert len(doc['traces']) == 2 == len(doc['verdict'])
  page = (out / 'trace.md').read_text()
  assert page.count('|gamma |') == 2
  # The table says which rows are lossy, and how far.
  rows = page.partition('|l ')[2].splitlines()[2:]
  assert rows[0].startswith('|1 ') and 'LOSSY' not in rows[0]
  assert rows[1].startswith('|0.9 LOSSY') and '0.100 (0.100 to' in rows[1]
  for name in ('trace.png', 'trace_2.png'):
    assert (out / name).read_bytes().startswith(b'\x89PNG')


def _edit(lines, index, **changes):
  lines[index] = json.dumps(json.loads(lines[index]) | changes)
  return lines


@pytest.mark.parametrize(
  'change, match',
  [
    (lambda x: [], 'no trace'),
    (lambda x: x[1:], 'no trace'),
    (lambda x: ['[1]', *x[1:]], 'no trace'),
    (lambda x: x[:-1], 'has 2 of its 3 texts'),
    (lambda x: x + x[-1:], 'has 4 of its 3 texts'),
    (lambda x: _edit(x[:1], 0, texts=0), 'holds no text'),
    (lambda x: [*x[:2], x[2][:40], x[3]], 't.jsonl:3: no text'),
    (lambda x: _edit(x, 0, leniences=[0.5]), 't.jsonl:1: no header'),
    (lambda x: _edit(x, 0, sampling=None), 't.jsonl:1: no header'),
    (lambda x: _edit(x, 0, sampling={}), 't.jsonl:1: no header'),
    (lambda x: _edit(x, 0, labels=['big']), 't.jsonl:1: no header'),
    (lambda x: _edit(x, 1, p=[0.5]), 't.jsonl:2: no text'),
    (lambda x: _edit(x, 1, p=[0.5, 1.5]), 't.jsonl:2: no text'),
    (lambda x: _edit(x, 1, kept=[[0.5, 0.5]]), 't.jsonl:2: no text'),
    (lambda x: _edit(x, 1, distance=None), 't.jsonl:2: no text'),
    (
      lambda x: _edit(x, 0, format='specdec_jax trace 1'),
      "is a 'specdec_jax trace 1', and .* record it again",
    ),
    (lambda x: _edit(x, 3, tokens=[], p=[], q=[]), 't.jsonl:4: no text'),
    (lambda x: _edit(x, 3, more=1), 't.jsonl:4: no text'),
  ],
)
def test_damaged_files_are_refused(tmp_path, change, match):
  path = tmp_path / 't.jsonl'
  trace.write(path, hand())
  path.write_text('\n'.join(change(path.read_text().splitlines())))
  with pytest.raises(ValueError, match=match) as error:
    trace.read(str(path))
  assert '\n' not in str(error.value)


def test_other_files_are_refused(tmp_path):
  for path in (tmp_path / 'none', tmp_path):
    with pytest.raises(ValueError, match='cannot be read'):
      trace.read(str(path))
  (tmp_path / 'bytes').write_bytes(b'\xff\xfe')
  with pytest.raises(ValueError, match='not text'):
    trace.read(str(tmp_path / 'bytes'))
  for bad in ('', str(tmp_path), '/dev/null/x'):
    with pytest.raises(ValueError, match='--output|cannot be written'):
      trace.check_output(bad)
  with pytest.raises(ValueError, match='samples=0'):
    trace.seeds(0, 0)
  with pytest.raises(ValueError, match='seed='):
    trace.seeds(2**32 - 1, 2)


def test_a_trace_is_written_over_nothing(tmp_path):
  file = tmp_path / 'p.jsonl'
  file.write_text('{"prompt": "a"}')
  (tmp_path / 'link').symlink_to(file)
  for path in (file, tmp_path / 'link'):
    with pytest.raises(ValueError, match='is the prompts: name another'):
      trace.check_output(str(path), str(file))
    for prompts in ('', str(tmp_path / 'none')):
      with pytest.raises(ValueError, match='is there already: name another'):
        trace.check_output(str(path), prompts)
  assert file.read_text() == '{"prompt": "a"}'
  with pytest.raises(ValueError, match='cannot be written .No such file') as e:
    trace.write(tmp_path / 'none' / 't', hand())
  assert '\n' not in str(e.value)


def test_rules_that_a_trace_says_nothing_of(monkeypatch):
  trace_figures.check_rules(['block', 'reject'])
  for rules, match in (
    ([], 'no rule to check: allowed are reject, block'),
    (['reject', 'coupled'], "rule='coupled': has no counterfactual; allowed"),
  ):
    # Before anything is read or loaded.
    with pytest.raises(ValueError, match=match):
      trace_program.check(['none'], None, rules=rules, workdir='')


def test_other_models_and_settings_are_refused():
  found = hand()
  trace_figures.check_models(found, TARGET, DRAFT)
  with pytest.raises(ValueError, match='another draft: sha256 d1, now d9:'):
    trace_figures.check_models(found, TARGET, answering.target(digest='d9'))
  with pytest.raises(ValueError, match='another target settings and tokenizer'):
    trace_figures.check_models(found, answering.target(context=64), DRAFT)
  tiny = settings.settings(pair.get_config('tiny'))
  sampling = settings.Sampling(**found.header['sampling'])
  d = dataclasses.replace(tiny.decode, max_new_tokens=2)
  same = dataclasses.replace(tiny, sampling=sampling, decode=d)
  trace_figures.check_settings(found, same)
  for changes, match in (
    (dict(sampling=tiny.sampling), 'with temperature=0.8, the config says 0.0'),
    (dict(decode=tiny.decode), 'with max_new_tokens=2, the config says 16'),
  ):
    with pytest.raises(ValueError, match=match):
      trace_figures.check_settings(found, dataclasses.replace(same, **changes))
