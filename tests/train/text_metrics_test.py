"""Metrics of answers against numbers that are known."""

import sys

import numpy as np
import pytest

from specdec_jax import build, completion
from specdec_jax.train import text, text_metrics

WANTED = ('the cat sat on the mat', 'a dog')
FOUND = ['the cat sat on a mat', 'a dog']


def test_bleu_is_sacrebleus_and_adds_up_over_answers():
  sacrebleu = pytest.importorskip('sacrebleu')
  found = [*FOUND, 'Ein Hund, der im Schnee rennt.', 'x', '']
  wanted = [*WANTED, 'Ein Hund rennt im Schnee.', 'ein ganz anderer Satz', 'y']
  bleu = text_metrics.metric_of('bleu')
  theirs = sacrebleu.corpus_bleu(found, [wanted]).score
  np.testing.assert_allclose(bleu(found, wanted), theirs, 1e-9)
  parts = bleu.parts(found, wanted)
  twice = bleu.total(parts[0] * 2 + parts[2])
  again = [found[0], found[0], found[2]], [wanted[0], wanted[0], wanted[2]]
  np.testing.assert_allclose(twice, bleu(*again), 1e-9)


def test_rouge_by_hand():
  """The longest common subsequences have 5 of 6 words, and 2 of 2."""
  pytest.importorskip('rouge_score')
  rouge = text_metrics.metric_of('rouge')
  np.testing.assert_allclose(rouge(FOUND, WANTED), 100 * (5 / 6 + 1) / 2)


def test_sources_are_answered_without_their_padding(monkeypatch):
  right = lambda found, wanted: sum(map(str.__eq__, found, wanted))
  monkeypatch.setattr(text_metrics, 'metric_of', lambda name: right)
  rows = {
    'tokens': np.zeros((3, 5), np.int32),
    'source': np.array([[7, 1, 0, 0], [8, 9, 9, 1], [5, 1, 0, 0]]),
    'source_length': np.array([2, 4, 2]),
  }
  held = text.Corpus('', ('one', 'two', 'three'), '', ('', '', ''))
  model = build.load('random:t5_tiny')
  asked = {}

  def generate(target, sources, **how):
    asked.update(how, sources=sources)
    return [completion.Piece(x, [], []) for x in ('one', 'no')]

  monkeypatch.setattr(text_metrics.api, 'generate', generate)
  judge = text_metrics.Judge('rouge', 2)
  found = text_metrics.scores(judge, model, held, rows, 6)(model.params)
  assert asked == dict(
    sources=[[7, 1], [8, 9, 9, 1]], max_new_tokens=4, batch_size=6
  )
  assert found == {'rouge': 1}


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sacrebleu', None)
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  for name, package in text_metrics.METRICS.items():
    with pytest.raises(ValueError, match=f"'{name}' needs {package}: pip inst"):
      text_metrics.metric_of(name)
