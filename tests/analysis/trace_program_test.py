"""scripts/trace.py on table models: laws are known, programs compile fast."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import pair
from specdec_jax import build, decode, settings
from specdec_jax.analysis import trace, trace_figures, trace_program
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts
from specdec_jax.certify import table_model
from specdec_jax.io import tokenizer
from specdec_jax.models import config as model_config

pytestmark = pytest.mark.usefixtures('tables', 'compile_in_less_time')

ROOT = pathlib.Path(__file__).parents[1]
V, EOS, NEW, ROWS, GAMMA = 5, 4, 9, 1024, 3
MODEL = table_model.make(V)
TARGET = table_model.table(0, V)
# A draft that is like the target.
TABLES = {
  'target': TARGET,
  'draft': TARGET + 0.6 * table_model.table(1, V),
  'other': table_model.table(1, V),
}


@functools.cache
def load(source, **_):
  return build.LanguageModel(
    source=source,
    label=source,
    hashed=lambda: source,
    lm_config=model_config.sized('tiny', vocab=V, context=64),
    params=TABLES[source],
    tokenizer=dataclasses.replace(
      tokenizer.from_bytes(512, 'bytes'), eos_ids=(EOS,)
    ),
    layout=None,
  )


@pytest.fixture(name='tables')
def _tables(monkeypatch):
  """Tables in place of checkpoints."""
  monkeypatch.setattr(build, 'load', load)
  monkeypatch.setattr(build, 'target_model', lambda target: MODEL)
  monkeypatch.setattr(build, 'draft_model', lambda target, draft: MODEL)
  # One body in the program instead of two.
  options = lambda chunk: decode.Options(chunk=chunk, narrow=False)
  monkeypatch.setattr(build, 'default_options', options)


def config(temperature=0.8, **changes):
  c = pair.get_config('tiny')
  c.target.source, c.draft.source = 'target', 'draft'
  c.decode.gammas = (GAMMA,)
  c.decode.max_new_tokens, c.decode.chunk = NEW, 8
  c.sampling.temperature, c.sampling.seed = temperature, 7
  c.bench.batch_size, c.bench.prompts_per_category = ROWS, 0
  c.update(changes)
  return c


@pytest.fixture(name='recorded')
def _recorded(tmp_path):
  """recorded(...) -> the file of a trace; its prompts are 1 to 3 tokens."""

  def record(temperature=0.8, samples=1):
    rng = np.random.default_rng(0)
    rows = [
      {'tokens': rng.integers(0, EOS, 1 + i % 3).tolist()} for i in range(ROWS)
    ]
    (tmp_path / 'in.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    output = str(tmp_path / 't.jsonl')
    assert trace_program.record(
      config(temperature),
      prompts_path=str(tmp_path / 'in.jsonl'),
      output=output,
      samples=samples,
    )
    return output

  return record


def check(file, capsys, c=None, rules=('reject', 'block'), workdir=''):
  """(exit, cells) of the verb."""
  c = config() if c is None else c
  good = trace_program.check([file], c, rules=rules, workdir=workdir)
  return good, json.loads(capsys.readouterr().out.splitlines()[-1])['cells']


def test_p_and_q_are_those_of_the_tables(recorded):
  found = trace.read(recorded(samples=2))
  assert len(found.texts) == 2 * ROWS
  assert {text.seed for text in found.texts} == {7, 8}
  p_RVV, q_RVV = (
    table_model.warped(TABLES[name], temperature=0.8)
    for name in ('target', 'draft')
  )
  ends = set()
  for text in found.texts[::97]:
    assert text.number == prompts.request_number(text.id)
    ends.add(text.tokens[-1] == EOS)
    assert EOS not in text.tokens[:-1] and len(text.tokens) <= NEW
    for t, token in enumerate(text.tokens):
      prefix = [*text.prompt, *text.tokens[:t]]
      p_V = table_model.row_of(p_RVV, prefix)
      q_V = table_model.row_of(q_RVV, prefix)
      assert text.p[t] == pytest.approx(p_V[token], rel=1e-5)
      assert text.q[t] == pytest.approx(q_V[token], rel=1e-5)
      for x, l in enumerate(trace.LENIENCES):
        kept_V = np.minimum(p_V / l, q_V)
        rest_V = np.maximum(p_V - q_V, 0)
        off_V = kept_V + (1 - kept_V.sum()) * rest_V / rest_V.sum() - p_V
        far = np.abs(off_V).sum() / 2
        assert text.kept[x][t] == pytest.approx(kept_V.sum(), rel=1e-5)
        assert text.distance[x][t] == pytest.approx(far, abs=1e-6)
  assert ends == {True, False}


def test_real_decoding_agrees_and_a_wrong_trace_does_not(
  recorded, capsys, monkeypatch
):
  file = recorded(samples=2)
  seeds, groups_of = [], trace.groups_of
  spy = lambda *args: seeds.append(args[-1]) or groups_of(*args)
  monkeypatch.setattr(trace, 'groups_of', spy)
  good, cells = check(file, capsys)
  assert set(seeds) == {9, 10}  # not the trace's, 7 and 8
  assert good and [cell['rule'] for cell in cells] == ['reject', 'block']
  found = trace.read(file)
  doc = trace_figures.analyse(found, limit=GAMMA, resamples=1000)
  known = doc['rows'][GAMMA]
  for cell in cells:
    assert cell['covers'] and cell['gamma'] == GAMMA
    assert known[cell['rule']]['value'] == pytest.approx(
      cell['counterfactual'], rel=1e-5
    )
    assert 0 < cell['difference']['high'] - cell['difference']['low'] < 0.2
  assert known['gain']['low'] > 0
  texts = [
    dataclasses.replace(text, q=tuple(0.8 * q for q in text.q))
    for text in found.texts
  ]
  found = dataclasses.replace(found, texts=tuple(texts))
  trace.write(pathlib.Path(file), found)
  good, cells = check(file, capsys)
  assert not good and not any(cell['covers'] for cell in cells)


def test_greedy_is_exact(recorded, capsys):
  file = recorded(0.0)
  good, cells = check(file, capsys, config(0.0))
  assert good
  for cell in cells:
    assert abs(cell['difference']['value']) < 1e-9
  found = trace.read(file)
  doc = trace_figures.analyse(found, limit=GAMMA, resamples=1000)
  gains = [row['gain']['value'] for row in doc['rows']]
  np.testing.assert_allclose(gains, 0, atol=1e-12)
  # Window by window, what decoding counts.
  e = settings.from_config(config(0.0, decode={'methods': ('lm',)}))
  plain, lm = plan_lib.arms(e)
  plan = plan_lib.make(e, prompts.read(pathlib.Path(file).parent / 'in.jsonl'))
  (group,) = trace.groups_of([plain, lm], plan, 7)
  hist_N = trace.decoded(lm, group).info.hist_BN.sum(0)
  assert min(hist_N) > 0
  np.testing.assert_allclose(doc['windows']['reject'], hist_N)


def test_refusals(tmp_path, recorded, capsys):
  file = recorded()
  with pytest.raises(
    ValueError, match='another draft: sha256 draft, now other'
  ):
    check(file, capsys, config(draft={'source': 'other'}))
  with pytest.raises(ValueError, match='with temperature=0.8, the config says'):
    check(file, capsys, config(0.5))
  with pytest.raises(ValueError, match="rule='coupled': has no counterfactual"):
    check(file, capsys, rules=['coupled'])
  with pytest.raises(ValueError, match="rule='rejct'"):
    check(file, capsys, rules=['rejct'])
  with pytest.raises(ValueError, match='nothing to check'):
    check(file, capsys, config(decode={'gammas': (0,)}))
  header, line, *_ = pathlib.Path(file).read_text().splitlines()
  one = tmp_path / 'one.jsonl'
  one.write_text(f'{json.dumps(json.loads(header) | {"texts": 1})}\n{line}')
  with pytest.raises(ValueError, match='is of 1 request'):
    check(str(one), capsys)
  text = (tmp_path / 'in.jsonl').read_text()
  prompts_path = str(tmp_path / 'in.jsonl')
  with pytest.raises(ValueError, match='is the prompts: name another'):
    trace_program.record(
      config(), prompts_path=prompts_path, output=prompts_path, samples=1
    )
  assert (tmp_path / 'in.jsonl').read_text() == text
  for c, output, samples, match in (
    (config(), file, 0, 'samples=0'),
    (config(), '', 1, '--output='),
    (config(), file, 1, 'is there already: name another'),
    (config(decode={'methods': ('lookup',)}), file, 1, 'needs a draft model'),
    (config(draft={'min_confidence': 0.3}), file, 1, 'windows that propose'),
  ):
    with pytest.raises(ValueError, match=match):
      trace_program.record(c, prompts_path='', output=output, samples=samples)


def test_a_draft_that_is_not_finite_is_refused(recorded, monkeypatch, tmp_path):
  """A greedy q is a one-hot whatever the logits are."""
  broken = TABLES['draft'].copy()
  broken[:, 2] = np.nan
  monkeypatch.setitem(TABLES, 'draft', broken)
  load.cache_clear()
  for temperature in (0.0, 0.8):
    with (
      jax.debug_nans(False),
      pytest.raises(ValueError, match="prompt '.*': logits of draft are not"),
    ):
      recorded(temperature)
    assert not (tmp_path / 't.jsonl').exists()
  load.cache_clear()


def test_the_script(tmp_path, recorded):
  file = recorded()
  out = tmp_path / 'out'
  status, printed, err = script(
    'analyse', file, '--limit=2', f'--workdir={out}'
  )
  assert status == 0, err
  assert max(map(len, printed.splitlines()[:-1])) <= 120
  doc = json.loads(printed.splitlines()[-1])
  assert len(doc['traces'][0]['rows']) == 3
  assert doc == json.loads((out / 'trace.json').read_text())
  path = pathlib.Path(file)
  path.write_text(path.read_text()[:-40])
  status, printed, err = script('analyse', file)
  assert (status, printed) == (2, '') and len(err.splitlines()) == 1
  assert err.startswith(f'trace.py: {file}:{ROWS + 1}: no text of a trace')


def script(*arguments):
  done = subprocess.run(
    [sys.executable, 'scripts/trace.py', *arguments],
    cwd=ROOT,
    env=dict(os.environ, JAX_PLATFORMS='cpu'),
    capture_output=True,
    text=True,
  )
  return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
  'arguments, match',
  [
    ([], 'name a verb: record, analyse FILE... or check FILE'),
    (['replay', 'a'], "'replay' is no verb: want record, analyse FILE"),
    (['analyse'], 'analyse: name one or more files'),
    (['check', 'a', 'b'], 'check: 2 files given, want 1'),
    (['record', 'a'], 'record: 1 files given, want 0: name the trace with'),
  ],
)
def test_verbs_that_are_refused(arguments, match):
  with pytest.raises(ValueError, match=match):
    trace_program.verb(arguments)
