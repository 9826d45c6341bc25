"""Every criterion on the specdec_jax that is imported.

python -m experiments.field_criteria.measure OUT: a line of JSON a criterion,
{criterion, passed, digest, why}, written as soon as it is known. digest: of the
samples that it read.
"""

import hashlib
import json
import pathlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from experiments.field_criteria import criteria, samples


class Seen(NamedTuple):
  """One criterion's verdict. digest: of the samples that it read."""

  criterion: str
  passed: bool
  digest: str = ''
  why: str = ''


VLLM, TILEOPS, COSINE = 'vLLM ratio 20', 'TileOPs 6 sigma + 5', 'FlashInfer cos'
SMALL, LARGE = 'chi-square 1e4, 0.01', 'chi-square 2e6, 1e-6'
KL = 'TensorRT-LLM KL 0.01'
EQUAL, MATCHES, SIMILAR = 'HF equal', 'vLLM 60 % equal', 'TensorRT-LLM 0.8'
STRICT = 'vLLM 80 % equal'
WINDOW = (VLLM, TILEOPS, COSINE, SMALL, LARGE, KL)
GREEDY = (EQUAL, MATCHES, STRICT, SIMILAR)
THEIRS = (*WINDOW, *GREEDY)
OURS = 'our tests'  # those that scripts/mutants.py runs for the bug
EVERY = (*THEIRS, OURS)


def _digest(looked_at) -> str:
  return hashlib.sha256(pickle.dumps(looked_at)).hexdigest()[:16]


def vllm() -> Iterator[Seen]:
  pair = samples.flat()
  world, at, counts = samples.same_everywhere(pair), 0, []
  for size in criteria.SIZES:
    counts.append(samples.counted(samples.tokens(world, size, 2, at)))
    at += size
  rng = np.random.default_rng(3)
  others = samples.softmax(rng.random((100, samples.V)))
  passed = criteria.vllm_convergence(np.array(counts), pair.p_V, others)
  yield Seen(VLLM, passed, _digest(counts))


def first_tokens() -> Iterator[Seen]:
  pair = samples.peaked()
  world, p_V, most = samples.same_everywhere(pair), pair.p_V, 2_000_000
  said = samples.tokens(world, most, 1)[:, 0]
  counts = lambda n: samples.counted(said[:n])
  see = lambda name, n, passed: Seen(name, passed, _digest(said[:n].tolist()))
  n = 65_536
  yield see(TILEOPS, n, criteria.tileops_sigmas(counts(n), p_V))
  n = 10_000
  yield see(SMALL, n, criteria.chi_square(counts(n), p_V, 0.01))
  yield see(LARGE, most, criteria.chi_square(counts(most), p_V, 1e-6))
  # The other 3,000,000 only near the limit, where they could matter.
  if abs(criteria.cosine(counts(most), p_V) - 0.99) < 1e-3:
    more = samples.tokens(world, 3_000_000, 1, most)[:, 0]
    said = np.append(said, more)
  passed = criteria.flashinfer_cosine(samples.counted(said), p_V)
  yield see(COSINE, len(said), passed)


def wide() -> Iterator[Seen]:
  p_V = samples.truncated().p_V
  rng = np.random.default_rng(4)
  regular = rng.multinomial(samples.WINDOWS, p_V)
  said = samples.first_of_wide()
  counts = samples.counted(said, samples.WIDE)
  passed = criteria.tensorrt_kl(counts, regular, p_V)
  yield Seen(KL, passed, _digest(said.tolist()))


def greedy() -> Iterator[Seen]:
  """Verdicts on greedy text, with Hugging Face's two drafts; both must pass."""
  plain = samples.greedy_texts('none')
  arms = [samples.greedy_texts(draft) for draft in ('random', 'same')]

  def see(name: str, holds: Callable, rows: int, new: int) -> Seen:
    cut = [[text[:new] for text in arm[:rows]] for arm in (plain, *arms)]
    return Seen(name, all(holds(arm, plain) for arm in arms), _digest(cut))

  share = lambda x: lambda arm, plain: criteria.vllm_matches(arm, plain, x)
  yield see(EQUAL, criteria.hugging_face_equal, 1, 4)
  yield see(MATCHES, share(0.6), 100, 10)
  yield see(STRICT, share(0.8), 100, 10)
  yield see(SIMILAR, criteria.tensorrt_similar, 2, 32)


# Criteria that share a compiled program fail together.
GROUPS = {
  greedy: GREEDY,
  vllm: (VLLM,),
  first_tokens: (TILEOPS, COSINE, SMALL, LARGE),
  wide: (KL,),
}


def measure() -> Iterator[Seen]:
  """Every criterion's verdict; an error fails all criteria of its group."""
  for group, names in GROUPS.items():
    left = set(names)
    try:
      for seen in group():
        left.remove(seen.criterion)
        yield seen
    except Exception as error:
      for name in left:
        yield Seen(name, False, 'raised', f'{type(error).__name__}: {error}')


def main(out: str) -> None:
  for seen in measure():
    line = seen._asdict() | dict(why=seen.why[:200])
    with pathlib.Path(out).open('a') as f:
      f.write(json.dumps(line) + '\n')


if __name__ == '__main__':
  main(sys.argv[1])
