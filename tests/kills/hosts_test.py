"""Kills in jobs of several processes: what is wrong with them is seen."""

import pytest

from tests import programs
from tests.kills import hosts

DIED = 'process 1 was ended by SIGKILL, process 0 was stopped'


class Job:
  """Ends in a given way when it is killed, and then comes to its end."""

  spent = 1.0

  def __init__(self, made=b'good', end=0, **killed):
    self._killed = hosts.Ended(137, 20.0, False, DIED)._replace(**killed)
    self._made, self._end = {'file': made}, end

  def start(self, name='', process=0, after=0.0):
    if name:
      return self._killed
    return hosts.Ended(self._end, None, False, 'no')

  def take(self):
    return self._made


def killed(**how):
  """The summary of a kill of each kind."""
  jobs = {'decoding': Job(), 'training': Job(**how)}
  wanted = dict.fromkeys(jobs, {'file': b'good'})
  found = hosts.kill(jobs, wanted, len(hosts.CASES), 0)
  return hosts.summary(found, 1.0)


def test_every_case_is_counted():
  doc = killed()
  assert (doc['good'], doc['kills'], doc['hangs']) == (True, 8, 0)
  assert doc['longest'] == 20
  assert all(kills == 1 for *_, kills, _ in doc['cases'])


@pytest.mark.parametrize(
  'how, words',
  [
    (dict(seconds=31.0), 'all gone only after 31.0 s'),
    (dict(seconds=61.0, hung=True), 'HANGS'),
    (dict(seconds=None), 'before it, 137'),
    (dict(words='gone'), 'nothing says so: gone'),
    (dict(made=b'else'), "differs in ['file']"),
    (dict(end=1), 'in the end 1: no'),
  ],
)
def test_what_is_wrong_is_said(how, words):
  doc = killed(**how)
  assert not doc['good']
  assert all(words in x and 'training' in x for x in doc['wrong'])
  assert doc['hangs'] == (4 if 'hung' in how else 0)


@pytest.mark.slow
def test_jobs_survive_a_few_kills():
  done = programs.run(
    'scripts/kill_matrix.py', '--processes=2', '--kills=4', '--seed=1'
  ).check()
  assert (done.document['kills'], done.document['hangs']) == (4, 0)
