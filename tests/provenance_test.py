"""What the pages show was made by commits that this repository holds."""

import functools
import json
import pathlib
import re
import subprocess
import warnings

import pytest

from experiments import page
from experiments.headline import table

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
  ROOT / 'README.md',
  ROOT / 'LOG.md',
  *ROOT.glob('docs/*.md'),
  *ROOT.glob('configs/*.py'),
  *ROOT.glob('experiments/**/*.md'),
]
OLD = 300  # commits after which a page is worth measuring again
# Seven digits or more, some of them letters and some not: no number, no word.
COMMIT = re.compile(r'\b(?=\w*\d)(?=\w*[a-f])([0-9a-f]{7,40})\b')


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
  command = ['git', '-C', str(ROOT), *arguments]
  return subprocess.run(command, capture_output=True, text=True)


@functools.cache
def lost(commit: str) -> bool:
  """Whether HEAD does not descend from this commit."""
  return git('merge-base', '--is-ancestor', commit, 'HEAD').returncode != 0


@pytest.fixture(scope='module', autouse=True)
def history():
  try:
    shallow = git('rev-parse', '--is-shallow-repository').stdout.strip()
  except FileNotFoundError:
    pytest.skip('needs git')
  if shallow != 'false':
    pytest.skip('needs the whole history: git fetch --unshallow')


def named(text: str) -> set[str]:
  """The commits that a page names; digests of data are no commits."""
  return set(COMMIT.findall(re.sub(r'sha256 \w+', '', text)))


def of(paths) -> list:
  """Parameters of these files."""
  return [pytest.param(p, id=str(p.relative_to(ROOT))) for p in paths]


@pytest.mark.parametrize('page', of(PAGES))
def test_a_pages_commits_are_ancestors(page):
  assert not {x for x in named(page.read_text('utf-8')) if lost(x)}


def commits(doc) -> set[str]:
  """Every value of a key `commit` in a document."""
  if isinstance(doc, list):
    return set().union(*map(commits, doc))
  if not isinstance(doc, dict):
    return set()
  mine = {doc['commit']} if isinstance(doc.get('commit'), str) else set()
  return mine.union(*map(commits, doc.values()))


@pytest.mark.parametrize(
  'path', of(sorted(ROOT.glob('experiments/*/results/*.json')))
)
def test_a_results_commits_are_ancestors(path):
  made_by = commits(json.loads(path.read_text('utf-8')))
  assert made_by and not {x for x in made_by if lost(x)}


def age(commit: str) -> int:
  """How many commits HEAD is ahead of one of its ancestors."""
  return int(git('rev-list', '--count', f'{commit}..HEAD').stdout)


@pytest.mark.parametrize('path', of(sorted(ROOT.glob('experiments/*/results'))))
def test_a_page_that_was_measured_long_ago_is_warned_of(path):
  found = [json.loads(x.read_text('utf-8')) for x in path.glob('*.json')]
  ages = [age(x) for x in commits(found) if not lost(x)]
  if ages and max(ages) > OLD:
    warnings.warn(
      f'{path.parent.name}: measured {max(ages)} commits ago', stacklevel=1
    )


def test_a_lost_commit_is_seen():
  assert lost('22b5effa4e40') and not lost('HEAD')
  text = 'Commit 22b5effa4e40, of 1234567 tokens (sha256 119565adbab8).'
  assert named(text) == {'22b5effa4e40'}


@pytest.mark.parametrize('name', table.BLOCKS)
def test_the_headlines_are_stored_results(name):
  path, lines = table.BLOCKS[name]
  shown = (ROOT / path).read_text('utf-8')
  assert shown == page.filled(shown, lines(), name)


MEASURED = [x for x in table.HEADLINES if table.path(x).exists()]


@pytest.mark.parametrize('name', MEASURED)
def test_a_headline_names_machine_commit_and_settings(name):
  doc = json.loads(table.path(name).read_text())
  assert {'cpu', 'cores', 'jax'} <= set(doc['machine'])
  assert not doc['machine']['dirty']
  assert {'command', 'setting', 'asked'} & set(doc)
