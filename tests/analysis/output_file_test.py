"""What a rerun may go on with and what it refuses; what cannot be written."""

import dataclasses
import fcntl
import json
import os

import pytest

from specdec_jax.analysis import output_file
from tests.analysis import answering


@pytest.fixture
def world(tmp_path):
  return answering.World(tmp_path)


def cut(world):
  """A run that was stopped inside its second line."""
  world.run()
  data = world.output.read_bytes()
  world.output.write_bytes(data[: data.index(b'\n') + 20])


def test_refuses_another_config(world):
  cut(world)
  answering.set_settings(world, 'sampling', temperature=0.5)
  text = world.refused()
  assert 'other config: sampling.temperature was 0.0, now 0.5' in text
  assert 'delete out.jsonl' in text


def test_refuses_other_prompts(world):
  cut(world)
  rows = [*answering.ROWS[:4], {'turns': ['first', 'changed']}]
  world.input.write_text('\n'.join(map(json.dumps, rows)))
  assert 'begun with other prompts: sha256' in world.refused()


def test_refuses_the_same_text_in_another_form(world):
  cut(world)
  rows = [{'turns': ['Hello']}, *answering.ROWS[1:]]
  world.input.write_text('\n'.join(map(json.dumps, rows)))
  assert 'begun with other prompts: sha256' in world.refused()


def test_refuses_other_weights(world):
  cut(world)
  world.target = answering.target(digest='d1')
  assert 'other weights: target was "d0", now "d1"' in world.refused()
  world.target = answering.target(template=answering.TEMPLATE)
  assert 'target settings and tokenizer was' in world.refused()


@pytest.mark.parametrize(
  'method, what', [('ngram', 'n-grams'), ('eagle', 'EAGLE draft')]
)
def test_a_drafters_file_is_known_by_its_content(world, method, what):
  one, moved = (world.output.with_name(name) for name in ('a', 'b'))
  one.write_bytes(b'counts')
  moved.write_bytes(b'counts')
  answering.set_settings(world, method, path=str(one))
  answering.set_settings(world, 'decode', methods=(method,))
  cut(world)
  one.write_bytes(b'other counts')
  assert f'begun with other weights: {what} was "' in world.refused()
  answering.set_settings(world, method, path=str(moved))
  assert world.run()['lines'] == 5


def test_goes_on_where_the_sidecar_has_the_path_of_the_n_grams(world):
  """As sidecars had it before the content was told apart."""
  cut(world)
  meta = json.loads(output_file.sidecar(world.output).read_text())
  meta['config']['ngram.path'] = ''
  output_file.sidecar(world.output).write_text(json.dumps(meta))
  assert world.run()['lines'] == 5


def test_what_changes_no_answer_may_change(world):
  cut(world)
  answering.set_settings(world, 'bench', batch_size=7)
  answering.set_settings(world, 'decode', chunk=16)
  world.target.source = 'moved'
  other = dataclasses.replace(world.target.config, scan_layers=True)
  world.target.config = other
  assert world.run()['lines'] == 5


def test_refuses_files_of_others(world):
  world.output.write_text('mine\n')
  assert 'is there without out.jsonl.meta.json' in world.refused()
  output_file.sidecar(world.output).write_text('{"config": 3}')
  assert 'meta.json: cannot be read' in world.refused()


@pytest.mark.parametrize(
  'change, expected',
  [
    (
      lambda x: [x[1], x[0], *x[2:]],
      "out.jsonl:1: answers 'a/b', and prompt 1",
    ),
    (lambda x: [x[0], b'\0\0', *x[2:]], 'out.jsonl:2: no answer'),
    (lambda x: [x[0], b'{"id":"a/b"}'], 'out.jsonl:2: no answer'),
    (lambda x: [*x, x[0]], 'more lines than the 5 prompts'),
  ],
)
def test_checks_the_lines_that_are_there(world, change, expected):
  world.run()
  lines = change(world.output.read_bytes().splitlines())
  world.output.write_bytes(b'\n'.join(lines) + b'\n')
  assert expected in world.refused()


def test_an_empty_output_starts_anew(world):
  world.run()
  world.output.write_bytes(b'')
  answering.set_settings(world, 'sampling', seed=5)
  world.run()
  meta = json.loads(output_file.sidecar(world.output).read_text())
  assert meta['config']['sampling.seed'] == 5


def test_one_writer_at_a_time(world):
  with open(world.output, 'ab') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    assert 'another run is writing it' in world.refused()


def test_a_full_disk(world, monkeypatch):
  def full(_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(ValueError, match='No space left.*run the same command'):
    world.run()


def test_outputs_that_cannot_be(tmp_path):
  source = tmp_path / 'in.jsonl'
  source.write_text('{"prompt": "a"}\n')
  for path, expected in (
    (tmp_path, 'not a file'),
    (tmp_path / 'no' / 'out.jsonl', f'no folder {tmp_path}/no: make it first'),
    ('/proc/out.jsonl', 'cannot be written'),
    (source, 'is the prompts'),
    ('', '--output is missing'),
  ):
    with pytest.raises(ValueError, match=expected):
      output_file.check_output(str(path), str(source))
  assert [p.name for p in tmp_path.iterdir()] == ['in.jsonl']


@pytest.mark.parametrize(
  'name, lines, message',
  [
    ('.', 0, 'not a file'),
    ('none/page.html', 0, 'there is no folder'),
    ('in.jsonl', 0, 'is another file of this run'),
    ('out.jsonl.meta.json', 0, 'is another file of this run'),
    ('page.html', 2, 'has 2 already: name another --output, or delete'),
  ],
)
def test_a_page_is_refused_before_the_run(world, name, lines, message):
  page = str(world.output.parent / name)
  with pytest.raises(ValueError, match=message):
    output_file.check_page(page, world.output, str(world.input), lines)


def test_a_page_beside_the_answers_is_fine(world):
  page = str(world.output.parent / 'page.html')
  output_file.check_page(page, world.output, str(world.input), 0)
  output_file.check_page('', world.output, str(world.input), 2)
