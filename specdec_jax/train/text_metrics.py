"""Scores greedy answers to held-out sources by BLEU and ROUGE-L."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from specdec_jax import api, build, fields, types
from specdec_jax.train import text, text_loss

# Metric -> the package that computes it.
METRICS = {'bleu': 'sacrebleu', 'rouge': 'rouge-score'}


@dataclasses.dataclass(frozen=True)
class Judge(fields.Checked):
  metric: str = fields.setting(
    allowed=('', *METRICS), help='of greedy answers to held-out sources'
  )
  pairs: int = fields.setting(low=1, help='held-out pairs to answer, at most')


def scores(
  judge: Judge,
  model: build.LanguageModel,
  held: text.Corpus,
  rows: dict[str, np.ndarray],
  batch: int,
) -> Callable[[types.Params], dict[str, float]]:
  """Makes a function from params to {the metric's name: its value}.

  model: an encoder-decoder; its params are not read.
  held: pairs; the answers are compared with their documents.
  rows: text.pair_rows of the same pairs; a source is read as cut there.
  batch: rows decoded together.
  """
  metric, tokens_NT = metric_of(judge.metric), rows['tokens'][: judge.pairs]
  (count, T), ends = tokens_NT.shape, rows['source_length']
  sources = [rows['source'][i, : ends[i]].tolist() for i in range(count)]

  def found(params: types.Params) -> dict[str, float]:
    params = text_loss.in_dtype(params, model.dtype)
    now = dataclasses.replace(model, params=params)
    out = api.generate(now, sources, max_new_tokens=T - 1, batch_size=batch)
    return {judge.metric: metric([x.text for x in out], held.documents[:count])}

  return found


class Metric(NamedTuple):
  """A function from (answers, references) to 0 ... 100."""

  # (answers, references) -> [N, K], of each answer what adds up.
  parts: Callable[[Sequence[str], Sequence[str]], np.ndarray]
  total: Callable[[np.ndarray], float]  # of the sums [K]

  def __call__(self, found: Sequence[str], wanted: Sequence[str]) -> float:
    return self.total(self.parts(found, wanted).sum(0))


def metric_of(name: str) -> Metric:
  """Returns a metric; refuses one whose package is not installed.

  'bleu': over the whole corpus (sacrebleu: Post 2018,
  https://arxiv.org/abs/1804.08771). 'rouge': the mean F1 of ROUGE-L, by stems
  (Lin 2004, https://aclanthology.org/W04-1013).
  """
  try:
    return {'bleu': _bleu, 'rouge': _rouge}[name]()
  except ImportError as error:
    package = METRICS[name]
    raise ValueError(
      f'judge.metric={name!r} needs {package}: pip install {package}'
    ) from error


def _bleu() -> Metric:
  import sacrebleu

  score = sacrebleu.BLEU(effective_order=True).sentence_score

  def parts(found: Sequence[str], wanted: Sequence[str]) -> np.ndarray:
    """Returns lengths of answer and reference, and n-grams found and made."""
    each = [score(x, [y]) for x, y in zip(found, wanted, strict=True)]
    return np.array(
      [[x.sys_len, x.ref_len, *x.counts, *x.totals] for x in each]
    )

  def total(sums_K: np.ndarray) -> float:
    length, reference, *ngrams = map(int, sums_K)
    return sacrebleu.BLEU.compute_bleu(
      ngrams[:4], ngrams[4:], length, reference, smooth_method='exp'
    ).score

  return Metric(parts, total)


def _rouge() -> Metric:
  from rouge_score import rouge_scorer  # pyright: ignore

  score = rouge_scorer.RougeScorer(['rougeL'], use_stemmer=True).score
  one = lambda answer, wanted: [1, score(wanted, answer)['rougeL'].fmeasure]
  return Metric(
    lambda found, wanted: np.array([*map(one, found, wanted)], float),
    lambda sums_K: 100 * float(sums_K[1] / sums_K[0]),
  )
