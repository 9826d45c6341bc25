"""Contracts between models, drafters and verification rules; dimension key.

    B  rows (requests)              V  vocabulary
    L  token buffer length          D  model width
    I  tokens of a source           1  a broadcast axis
    T  tokens in this call          F  mlp width
    S  cache slots (= L in decode)  H  query heads
    K  draft tokens of a window     G  key/value heads
    N  positions verified (K + 1)   C  channels per head
    E  feature width

`p` is always the target's distribution and `q` the draft's.

Axis 0 of every leaf of a cache or of a drafter's state is the row, so that rows
can be split over devices and compared leaf by leaf.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

# jax.Array inside a program, numpy.ndarray around it.
Array = Any
Params = Any  # a pytree of arrays


class Model(NamedTuple):
  """A language model as pure functions; hashable, so jit takes it as static.

  apply(params, tokens_BT, slots_BT, positions_BT, mask_BTS, cache, *, taps=())
    -> (hidden_BTD, taps, cache): a forward pass over T tokens of each row. It
    writes their keys and values to the cache at `slots_BT` (a slot >= S is
    dropped) and attends to the slots where the mask is true; a layer with a
    sliding window no further back than the window. In a chain a slot's index
    is its position; for a tree there is also `at_BS`, the position of each
    slot. The taps returned are the residual streams [B, T, D] listed in `taps`:
    i is that after layer i, -1 the input of layer 0, and the number of layers
    what the final norm returns. A model that supports early exit also takes
    `layers`, a range (first, stop) of layers to run, where stop=None runs to
    the last; and, where first is not 0, `residual_BTD`, the residual stream
    after the layers before it.
  head(params, hidden) -> logits: float32 (or wider), last axis V. Ids that are
    padding have logit -inf.
  init_cache(rows, slots) -> cache: a pytree of zeros, rows first.
  vocab: V, the last axis of the logits.
  context: the most tokens that a row may have.
  embed(params, tokens_BT, positions_BT) -> [B, T, D]: the input of the first
    layer, for drafters that read the target's embedding; None if there is none.
  encode(params, source, cache) -> cache: reads a Source, and puts the keys and
    values that the decoder's layers attend to into the cache, where nothing
    changes them again; None without an encoder.
  norm, project: of (params, hidden), the two halves of `head`: the final norm,
    and the logits of what is normed; None where they cannot be told apart.
  compact(cache, from_BK, to_BK) -> cache: moves slots, all reads before all
    writes; to >= S is dropped; for trees.
  """

  apply: Callable[..., tuple[Array, tuple[Array, ...], Any]]
  head: Callable[[Params, Array], Array]
  init_cache: Callable[[int, int], Any]
  vocab: int
  context: int
  embed: Callable[..., Array] | None = None
  encode: Callable[..., Any] | None = None
  norm: Callable[[Params, Array], Array] | None = None
  project: Callable[[Params, Array], Array] | None = None
  compact: Callable[..., Any] | None = None

  def __repr__(self) -> str:
    return f'Model(vocab={self.vocab}, context={self.context})'


class Source(NamedTuple):
  """The texts that encoders read, or predictions of texts without an encoder.

  lookup searches both. No model reads a prediction: the output distribution
  stays the same.

  tokens_BI: ids, padded behind.
  lengths_B: how many of them are real.
  """

  tokens_BI: Array
  lengths_B: Array


class Weights(NamedTuple):
  """Parameters of both models; a drafter may read either.

  target: the target's parameters.
  draft: the drafter's parameters, () if it has none.
  """

  target: Params
  draft: Params = ()


class Sampling(NamedTuple):
  """Sampling settings of each row, applied in this order to target and draft.

  All are traced: a change of value does not compile again.

  temperature_B: float, 0 is greedy. None: all rows are, and always will be;
    nothing that samples is compiled.
  top_k_B: int, 0 is off.
  top_p_B: float in (0, 1], 1 is off.
  """

  temperature_B: Array | None
  top_k_B: Array
  top_p_B: Array


class Context(NamedTuple):
  """The committed tokens of every row, as a drafter sees them.

  tokens_BL: prompt and output; undefined from index lengths_B on.
  lengths_B: how many tokens are committed.
  live_B: false for rows that have finished; their drafts are ignored.
  sampling: the rows' settings.
  gamma_B: the most drafts of each row's window, at most the drafter's gamma.
    What a row proposes beyond it is dropped, so a drafter need not look; one
    that stops drafting where every row has enough saves the time.
  source: a Source, for a target with an encoder or a prediction; else None.
  """

  tokens_BL: Array
  lengths_B: Array
  live_B: Array
  sampling: Sampling
  gamma_B: Array
  source: Any = None


class Draft(NamedTuple):
  """The draft tokens of one window: a chain, or a tree of K nodes.

  tokens_BK: proposed ids.
  q_BKV: the distribution each token was drawn from. It must be the array that
    was sampled, not one computed again. None means deterministic proposals. In
    a tree it is that of a node given its elder siblings, those with a smaller
    index: zero on them and normalised again.
  count_B: how many of the K tokens are proposed; 0 is allowed. Whether a token
    is proposed may depend on the tokens before it, never on the token itself:
    leaving out unlikely tokens would change q.
  parents_BK: of a tree, the node before each node, which has a smaller index;
    -1 the last committed token. Rows may differ. None is a chain.
  proposed_BK: of a tree, which of its first count_B nodes are proposed, with
    all before them on their paths; None: all. How many children a node has may
    depend on all that was drawn before them, never on themselves; and nothing
    that was drawn is left out, but for what is past the count.
  marks: arrays that only some drafters add, by name:
    residual_BND: of early_exit, the residual stream after the target's first
      layers, which it ran over the window's N tokens (Drafter.exit).
    sourced_B: of lookup, rows whose drafts were found in Context.source.
    second_B: of hybrid, rows drafted by its second drafter.
    worth_BK: of a tree of the likeliest nodes, the draft's probability of each
      one's path, descending.
  """

  tokens_BK: Array
  q_BKV: Array | None
  count_B: Array
  parents_BK: Array | None = None
  proposed_BK: Array | None = None
  marks: dict[str, Array] = {}


class Verdict(NamedTuple):
  """A rule's decision about one window.

  accepted_B: how many drafts are accepted, 0 to count_B.
  weights_BV: the unnormalised distribution of the token after those drafts.
  path_BK: of a tree, the nodes that are accepted, in order; undefined past
    accepted_B.
  """

  accepted_B: Array
  weights_BV: Array
  path_BK: Array | None = None


class Outcome(NamedTuple):
  """The result of one window, for a drafter that learns from acceptance.

  verified_B: drafts that the rule could test: count_B, fewer at the buffer's
    end; of a tree, along the path that it took.
  accepted_B: drafts that the rule accepted.
  emitted_B: tokens committed: accepted_B + 1, or fewer where a stop id or the
    limit cut the window; 0 for a row that had finished or whose logits were
    not finite.
  path_BK: as Verdict's.
  """

  verified_B: Array
  accepted_B: Array
  emitted_B: Array
  path_BK: Array | None = None


class Noise(NamedTuple):
  """All randomness of one window, keyed by request (see sampling.noise).

  accept_BK: uniforms in [0, 1) for the accept tests.
  draft(offset, q_BV) -> tokens_B: draws the draft token at an offset.
  children(parents_BM, depth, q_BMV, count) -> (tokens_BMX, ok_BMX): draws
    X = count children of each of these nodes, -1 the root, which are `depth`
    deep: one after another from q, without those drawn. Where ok is false q has
    no other. In a greedy row both mean nothing.
  next(offset_B, weights_BV) -> tokens_B: draws the token emitted at index
    lengths_B + offset_B from unnormalised weights, with the same noise that
    plain decoding uses at that index.
  """

  accept_BK: Array
  draft: Callable[[int, Array], Array]
  next: Callable[[Array, Array], Array]
  children: Any = None  # where windows are chains


class Scores(NamedTuple):
  """The target's logits, for rules that need more than p.

  logits_BNV: before temperature, top-k and top-p.
  sampling: the settings that turned them into p.
  """

  logits_BNV: Array
  sampling: Sampling


class Rule(NamedTuple):
  """A verification rule.

  name: shown in tables.
  verify(noise, draft, p_BNV) -> Verdict.
  coupled: sampled drafters must draw with plain decoding's noise (Noise.next).
  lossless: emitted tokens are distributed exactly as the target's; a rule with
    False is labelled lossy in every table.
  scored: verify takes a fourth argument, Scores.
  certain: where p is one-hot, verify keeps the drafts that are plain decoding's
    tokens, up to the first that is not; then decode does so itself.
  trees: whether verify takes trees; else drafters of trees are refused.
  on_chains: of a rule of trees, the rule that it is on a chain; '' for none.
  kept(p_BTV, q_BTV, scores) -> [B, T, V]: the probability with which each
    token is drafted from q and accepted, in a window of one draft; its sum is
    the acceptance alpha. None stands, for a lossless rule, for min(p, q), the
    most that one can accept; a coupled rule reaches it only where p and q
    agree. Of a lossy rule alpha is not known then.
  emitted(p_BTV, q_BTV, scores) -> [B, T, V]: for a lossy rule, the distribution
    of the emitted token where one token is drafted from q. Its total variation
    from p is printed beside every number; None: it is not known, and printed
    as that.
  """

  name: str
  verify: Callable[..., Verdict]
  coupled: bool = False
  lossless: bool = True
  scored: bool = False
  certain: bool = False
  trees: bool = False
  on_chains: str = ''
  kept: Callable[[Array, Array, Scores], Array] | None = None
  emitted: Callable[[Array, Array, Scores], Array] | None = None

  def __repr__(self) -> str:
    return f'Rule({self.name!r})'


class Drafter(NamedTuple):
  """A source of proposals, as pure functions over an explicit state.

  name: shown in tables.
  gamma: K, the most draft tokens in a window.
  init(weights, context, features) -> state: called after the target has read
    all of the prompt but its last token. features: the taps [B, L, E], of these
    tokens; None without taps, and never with them. Axis 0 of every leaf of the
    state is the row.
  propose(weights, state, context, noise, target_cache)
    -> (Draft, state, target_cache); of a row that is not live it writes nothing
    in the target's cache.
  commit(state, context, outcome, features_BNE) -> state: context is the one
    after the commit, outcome an Outcome; features_BNE[:, j] belongs to the j-th
    token of the window just verified (the last committed token, then the
    drafts; of a tree, those of the path).
  taps: the residual streams of the target (Model.apply) that, concatenated
    along the last axis, are the features.
  exit: how many of the target's layers propose has run over the window, in the
    target's own cache; verification starts after them, from residual_BND of
    Draft.marks.
  tree: of windows that are trees, the nodes that are drafted of each level,
    gamma in all; or more, of which the likeliest are proposed.
  """

  name: str
  gamma: int
  init: Callable[..., Any]
  propose: Callable[..., tuple[Draft, Any, Any]]
  commit: Callable[..., Any]
  taps: tuple[int, ...] = ()
  exit: int = 0
  tree: tuple[int, ...] = ()

  def __repr__(self) -> str:
    return f'Drafter({self.name!r}, gamma={self.gamma})'


class Info(NamedTuple):
  """Counts of every row, of fixed size; read once, on the host.

  Of a tree, draft k is any node of depth k + 1.
  """

  hist_BN: Array  # windows by accepted and emitted drafts
  proposed_BK: Array  # windows in which draft k was proposed
  tried_BK: Array  # ... proposed, with all drafts before it accepted
  accepted_BK: Array  # ... accepted and emitted
  calls_B: Array  # target calls while the row was live
  widths_BN: Array  # ... by the drafts that the batch's window had room for
  second_BN: Array  # those of them that the second of two drafters drafted for
  origin_BL: Array  # origin of each token, an index of ORIGINS
  window_BL: Array  # the row's window that emitted each token, or -1
  broken_B: Array  # the row ended because the target's logits were not finite
  # Drafts of the row's last window that were refused or came after one that
  # was, each in its place; else -1, and in a window that was cut.
  # Of a tree the first that was refused alone.
  refused_BK: Array
  logprob_BL: Array | None  # log-probability at temperature 1, if recorded
  # The likeliest ids in each token's place, and their log-probabilities.
  top_BLX: tuple[Array, Array] | None = None
  # Entropies, in nats, of the distributions that logprob_BL is of.
  entropy_BL: Array | None = None
  # Drafts found in a source, and those of them that were accepted and emitted.
  sourced_B2: Array | None = None
  # Of trees: accepted_BK, by the largest place in its level, or among the
  # likeliest nodes, that a node has on the path to draft k.
  places_BKK: Array | None = None

  @property
  def of_tokens(self) -> tuple[Any, ...]:
    """Arrays of each token, [B, L, ...], in the order of Reader.piece."""
    return self.origin_BL, self.logprob_BL, self.top_BLX, self.entropy_BL


ORIGINS = ('prompt', 'drafted', 'recovered', 'bonus', 'plain')
PROMPT, DRAFTED, RECOVERED, BONUS, PLAIN = range(5)


def empty_info(
  B: int,
  L: int,
  K: int,
  logprobs: int,
  sourced: bool = False,
  trees: bool = False,
) -> Info:
  """Counts of no windows, for B rows of L tokens and gamma K.

  sourced: of the drafts that a source gave, too. trees: of windows that are.
  """
  count = lambda *shape: jnp.zeros(shape, jnp.int32)
  top = count(B, L, logprobs), jnp.zeros((B, L, logprobs))
  return Info(
    hist_BN=count(B, K + 1),
    proposed_BK=count(B, K),
    tried_BK=count(B, K),
    accepted_BK=count(B, K),
    calls_B=count(B),
    widths_BN=count(B, K + 1),
    second_BN=count(B, K + 1),
    origin_BL=jnp.zeros((B, L), jnp.int8),
    window_BL=jnp.full((B, L), -1, jnp.int32),
    broken_B=jnp.zeros((B,), bool),
    refused_BK=jnp.full((B, K), -1, jnp.int32),
    logprob_BL=jnp.zeros((B, L)) if logprobs else None,
    top_BLX=top if logprobs > 1 else None,
    entropy_BL=jnp.zeros((B, L)) if logprobs else None,
    sourced_B2=count(B, 2) if sourced else None,
    places_BKK=count(B, K, K) if trees else None,
  )
