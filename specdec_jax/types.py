"""The contracts every part of the library meets, and the dimension key.

    B  rows (requests)              V  vocabulary
    L  token buffer length          D  model width
    T  tokens in this call          F  mlp width
    S  cache slots (= L in decode)  H  query heads
    K  draft tokens in a chain      G  key/value heads
    N  positions verified (K + 1)   C  channels per head
    E  feature width                1  a broadcast axis

`p` is always the target's distribution and `q` the draft's.

Rows: axis 0 of every leaf of a cache or of a drafter's state is the row, so
that rows can be split over devices, compared and picked without guessing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# jax.Array inside a program, numpy.ndarray around it.
Array = Any
Params = Any  # a pytree of arrays


class Model(NamedTuple):
  """A language model as pure functions; hashable, so it can be a static.

  apply(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, *, taps=())
    -> (hidden_BTD, taps, cache): reads T tokens a row, writes their keys and
    values at `slots_BT` (a slot >= S writes nowhere) and attends where the
    mask is true; a layer with a window also takes a slot's index for its
    position, and sees no further back than its window. What it returns as taps
    are the residual streams after those layers, each [B, T, D]. A model that
    can be left early also takes `layers`, the first and the one after the last
    (None: all that follow), and, where the first is not 0, `residual_BTD`, what
    the layers before it made.
  head(params, hidden) -> logits: float32 (or wider), last axis V. Ids that are
    padding have logit -inf.
  init_cache(rows, slots) -> cache: a pytree of zeros, rows first.
  embed(params, tokens_BT, positions_BT) -> [B, T, D]: what apply starts from;
    for drafters that read the target's embedding. None: they cannot.
  """

  apply: Callable[..., tuple[Array, tuple[Array, ...], Any]]
  head: Callable[[Params, Array], Array]
  init_cache: Callable[[int, int], Any]
  vocab: int
  context: int
  embed: Callable[..., Array] | None = None


class Weights(NamedTuple):
  """Parameters of both models; a drafter reads what it needs of them.

  target: the target's parameters.
  draft: what the drafter reads, () for one without parameters.
  """

  target: Params
  draft: Params = ()


class Sampling(NamedTuple):
  """Per-row sampling settings; all traced, so changing them is free.

  Applied in this order, to target and draft alike.

  temperature_B: float, 0 is greedy.
  top_k_B: int, 0 is off.
  top_p_B: float in (0, 1], 1 is off.
  """

  temperature_B: Array
  top_k_B: Array
  top_p_B: Array


class Context(NamedTuple):
  """The committed tokens of every row, as a drafter sees them.

  tokens_BL: prompt and output; garbage from lengths_B on.
  lengths_B: how many tokens are committed.
  live_B: false for rows that have finished: what is done for them is dropped.
  sampling: the rows' settings.
  source: an encoder's input, or None.
  """

  tokens_BL: Array
  lengths_B: Array
  live_B: Array
  sampling: Sampling
  source: Any = None


class Draft(NamedTuple):
  """A window of proposals.

  tokens_BK: proposed ids.
  q_BKV: the distribution each was drawn from, the very array that was sampled;
    None means deterministic proposals.
  count_B: how many of the K are proposed; 0 is allowed. It may depend on what
    came before a token, never on the token itself: leaving out unlikely ones
    would change q.
  residual_BND: the residual stream after the target's first layers, of a
    drafter that ran them over the window's N tokens (Drafter.exit).
  """

  tokens_BK: Array
  q_BKV: Array | None
  count_B: Array
  residual_BND: Array | None = None


class Verdict(NamedTuple):
  """A rule's decision about one window.

  accepted_B: how many drafts are kept, 0 to count_B.
  weights_BV: the unnormalised distribution of the token that follows them.
  """

  accepted_B: Array
  weights_BV: Array


class Outcome(NamedTuple):
  """What became of one window, for a drafter that learns from it.

  verified_B: drafts that the rule judged: count_B, cut at the end of memory.
  accepted_B: drafts that the rule kept.
  emitted_B: tokens committed: accepted_B + 1, or fewer where a stop id or the
    limit cut the window; 0 for a row that had finished or whose logits broke.
  weights_BV: the unnormalised distribution the last token was drawn from.
  """

  verified_B: Array
  accepted_B: Array
  emitted_B: Array
  weights_BV: Array


class Noise(NamedTuple):
  """All randomness of one window, keyed by request (see sampling.noise).

  accept_BK: uniforms in [0, 1) for the accept tests.
  draft(offset, q_BV) -> tokens_B: draws the draft token at an offset.
  next(offset_B, weights_BV) -> tokens_B: draws the token emitted at position
    lengths_B + offset_B from unnormalised weights, with plain decoding's own
    noise for that position.
  """

  accept_BK: Array
  draft: Callable[[int, Array], Array]
  next: Callable[[Array, Array], Array]


class Scores(NamedTuple):
  """The target's scores before they became p.

  logits_BNV: its logits. sampling: how they were turned into p.
  """

  logits_BNV: Array
  sampling: Sampling


class Rule(NamedTuple):
  """A verification rule.

  verify(noise, draft, p_BNV) -> Verdict. With `scored` it gets a fourth
    argument, Scores.
  coupled: sampled drafters must draw with plain decoding's noise (Noise.next).
  lossless: the emitted law is exactly the target's; False is labelled lossy in
    every table.
  kept(p_BTV, q_BTV, scores) -> [B, T, V]: the probability with which each
    token is drafted from q and accepted, in a window of one draft; its sum is
    the acceptance alpha. None is min(p, q), the most that a lossless rule can
    accept; a coupled rule reaches it only where p and q agree.
  emitted(p_BTV, q_BTV, scores) -> [B, T, V], of a lossy rule: the distribution
    that it emits where one token is drafted from q. Its total variation from p
    is printed beside every number. None is p.
  """

  name: str
  verify: Callable[..., Verdict]
  coupled: bool = False
  lossless: bool = True
  scored: bool = False
  kept: Callable[[Array, Array, Scores], Array] | None = None
  emitted: Callable[[Array, Array, Scores], Array] | None = None


class Drafter(NamedTuple):
  """A source of proposals, as pure functions over an explicit state.

  init(weights, context, features) -> state: after the target has read the
    prompt but its last token. features: taps [B, L, E], or None without taps.
    Axis 0 of every leaf of the state is the row.
  propose(weights, state, context, noise, target_cache)
    -> (Draft, state, target_cache)
  commit(state, context, outcome, features_BNE) -> state: context is the one
    after the commit, outcome an Outcome; features_BNE[:, j] belongs to the j-th
    token of the window just verified (the last committed token, then the
    drafts).
  taps: layers of the target whose residual stream it wants, concatenated to E.
  exit: how many of the target's layers propose has run over the window, in the
    target's own cache; verification starts after them, from Draft.residual_BND.
  stops: whether a window may end before gamma where the draft is not sure.
  """

  name: str
  gamma: int
  init: Callable[..., Any]
  propose: Callable[..., tuple[Draft, Any, Any]]
  commit: Callable[..., Any]
  taps: tuple[int, ...] = ()
  exit: int = 0
  stops: bool = False


class Info(NamedTuple):
  """Counts of a run, of fixed size; read once, on the host."""

  hist_BN: Array  # windows by accepted and emitted drafts
  proposed_BK: Array  # windows in which draft k was proposed
  tried_BK: Array  # ... proposed, with all drafts before it accepted
  accepted_BK: Array  # ... accepted and emitted
  whole_BN: Array  # windows that neither EOS nor length cut, by accepted drafts
  calls_B: Array  # target calls while the row was live
  wide: Array  # windows of the batch that were verified at full width
  calls: Array  # windows of the batch
  origin_BL: Array  # who made each token, an index of ORIGINS
  window_BL: Array  # the window that emitted each token, -1 for the prompt
  broken_B: Array  # the row ended because the target's logits were not finite
  logprob_BL: Array | None  # log-probability at temperature 1, if asked for


ORIGINS = ('prompt', 'drafted', 'recovered', 'bonus', 'plain')
PROMPT, DRAFTED, RECOVERED, BONUS, PLAIN = range(5)
