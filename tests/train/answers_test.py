"""Metrics of answers against numbers that are known."""

import sys

import numpy as np
import pytest

from specdec_jax.train import answers

WANTED = ('the cat sat on the mat', 'a dog')
FOUND = ['the cat sat on a mat', 'a dog']


def test_bleu_by_hand():
  """Of 1 to 4 tokens in a row: 7 of 8, 4 of 6, 2 of 4, 1 of 3 are right."""
  pytest.importorskip('sacrebleu')
  bleu = answers.metric_of('bleu')
  want = 100 * (7 / 8 * 4 / 6 * 2 / 4 * 1 / 3) ** 0.25
  np.testing.assert_allclose(bleu(FOUND, WANTED), want, 1e-6)
  np.testing.assert_allclose(bleu(list(WANTED), WANTED), 100)


def test_rouge_by_hand():
  """The longest common subsequences have 5 of 6 words, and 2 of 2."""
  pytest.importorskip('rouge_score')
  rouge = answers.metric_of('rouge')
  np.testing.assert_allclose(rouge(FOUND, WANTED), 100 * (5 / 6 + 1) / 2)


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sacrebleu', None)
  monkeypatch.setitem(sys.modules, 'rouge_score', None)
  for name, package in answers.METRICS.items():
    with pytest.raises(ValueError, match=f"'{name}' needs {package}: pip inst"):
      answers.metric_of(name)
