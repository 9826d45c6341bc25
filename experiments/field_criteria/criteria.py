"""Acceptance criteria of other projects' tests: samples -> pass or fail.

The limits are theirs, the code is ours. counts_V: how often each token was
emitted. texts: lists of new tokens. p: the distribution to be followed.
"""

import difflib

import numpy as np
from scipy import stats

SIZES = (10, 100, 1_000, 10_000, 100_000)


def vllm_convergence(counts_SV, p_V, references_RV) -> bool:
  """vLLM, tests/v1/sample/test_rejection_sampler.py,
  test_rejection_sampling_approximates_target_distribution: V 10, 2 drafts a
  window, all tokens but the bonus one, 10 to 100,000 windows (SIZES), 100
  random references. The distance to the target must shrink more than 20
  times as much as the mean distance to the references."""
  seen_SV = counts_SV / counts_SV.sum(1, keepdims=True)
  to_target_S = np.linalg.norm(seen_SV - p_V, axis=1)
  # One norm over all references, as in vLLM's test.
  to_others_S = [np.linalg.norm(references_RV - x) for x in seen_SV]
  shrinks = lambda x: x[0] / x[-1]
  return bool(shrinks(to_target_S) > 20 * shrinks(to_others_S))


def tileops_sigmas(counts_V, p_V) -> bool:
  """TileOPs, by the notes of this project (its test was not found again):
  every token's count of 65,536 within 6 standard deviations and 5."""
  n = counts_V.sum()
  allowed_V = 6 * np.sqrt(n * p_V * (1 - p_V)) + 5
  return bool((np.abs(counts_V - n * p_V) <= allowed_V).all())


def flashinfer_cosine(counts_V, p_V) -> bool:
  """FlashInfer, tests of sampling, test_sampling_freq: 5,000,000 draws, none
  outside the support; cosine of frequencies and probabilities above 0.99."""
  if counts_V[p_V == 0].any():
    return False
  return cosine(counts_V, p_V) > 0.99


def cosine(counts_V, p_V) -> float:
  norms = np.linalg.norm(counts_V) * np.linalg.norm(p_V)
  return float(counts_V @ p_V / norms)


def chi_square(counts_V, p_V, alpha: float) -> bool:
  """Pearson's test, with sizes common in tests of samplers; no project's."""
  n = counts_V.sum()
  if counts_V[p_V == 0].any():
    return False
  kept = p_V > 0
  score = ((counts_V - n * p_V)[kept] ** 2 / (n * p_V[kept])).sum()
  return bool(stats.chi2.sf(score, kept.sum() - 1) >= alpha)


def tensorrt_kl(counts_V, regular_V, p_V) -> bool:
  """TensorRT-LLM, test_get_rejected_indices: V 500 of which 400 are zero, one
  draft, 50,000 windows. KL(p, seen) and KL(p, plain draws) differ by less than
  0.01."""

  def divergence(counts):
    with np.errstate(divide='ignore', invalid='ignore'):
      return float(stats.entropy(p_V, counts / counts.sum()))

  return abs(divergence(counts_V) - divergence(regular_V)) < 0.01


def hugging_face_equal(texts, plain) -> bool:
  """Hugging Face, tests/generation/test_utils.py,
  test_assisted_decoding_matches_greedy_search: one prompt, a few new tokens (4
  here), all equal."""
  return texts[0][:4] == plain[0][:4]


def vllm_matches(texts, plain, share: float) -> bool:
  """vLLM, tests/v1/e2e/test_spec_decode.py, test_ngram_correctness and others:
  100 prompts, 10 new tokens; more than `share` of the texts are equal. The
  share is 0.6 to 0.8, by model."""
  equal = sum(x[:10] == y[:10] for x, y in zip(texts, plain, strict=True))
  return equal > int(share * len(plain))


def tensorrt_similar(texts, plain) -> bool:
  """TensorRT-LLM, tests of drafters, `similar`: 2 prompts, 32 new tokens; each
  text resembles the plain one by at least 0.8, as difflib measures."""
  ratio = lambda x, y: difflib.SequenceMatcher(None, x, y).ratio()
  two = zip(texts[:2], plain[:2], strict=True)
  return all(ratio(x[:32], y[:32]) >= 0.8 for x, y in two)
