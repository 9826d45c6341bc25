"""The decode loop: propose, verify in one pass, accept, commit.

Runs any drafter under any rule and knows none of them. A generation is one
XLA program. Rows advance by different amounts; plain decoding is gamma 0.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax import forward, types
from specdec_jax import sampling as sampling_lib
from specdec_jax.verify import counts, judge, tree

Array = types.Array


class Request(NamedTuple):
  """A batch of requests, all traced: other values never compile again.

  tokens_BL: prompts, then room; a step does not read them, and takes None.
  lengths_B: prompt lengths, at least 1.
  limit_B: the length at which a row stops; limit <= length: it never starts.
  request_B, seed_B: uint32, what the row's randomness is keyed by.
  sampling: temperature, top-k and top-p of every row.
  stop_BX: ids that end a row, padded with -1.
  gamma_B: the most drafts of a window, if fewer than the drafter's gamma.
  source: what encoders read, or predictions; None without both.
  """

  tokens_BL: Array
  lengths_B: Array
  limit_B: Array
  request_B: Array
  seed_B: Array
  sampling: types.Sampling
  stop_BX: Array
  gamma_B: Array
  source: types.Source | None = None


class State(NamedTuple):
  """All that the next window needs; axis 0 of every leaf is the row.

  tokens_BL, lengths_B, live_B: as in types.Context.
  cache: the target's. drafter: the drafter's own state.
  """

  tokens_BL: Array
  lengths_B: Array
  live_B: Array
  cache: Any
  drafter: Any


class Output(NamedTuple):
  """tokens_BL: prompt and output. lengths_B: of both. info: counts."""

  tokens_BL: Array
  lengths_B: Array
  info: types.Info


class Programs(NamedTuple):
  """The jitted entry points of one (target, drafter, rule).

  generate(weights, request) -> Output: one executable call.
  start(weights, request) -> (State, Info): its prefill; finish(weights,
    request, state, info) -> (State, Info): all its windows. State and info are
    donated, here and below.
  step(weights, request, state, info) -> (State, Info): one window.
  advance(weights, request, state, info, most): several steps in one call.
  opened(weights, request) -> forward.Reading; read(weights, request, reading,
    most) -> Reading; begin(weights, request, reading): start, in chunks.
  """

  generate: Any
  start: Any
  finish: Any
  step: Any
  advance: Any
  opened: Any
  read: Any
  begin: Any


@dataclasses.dataclass(frozen=True)
class Options:
  """Static choices; each value of this compiles its own programs.

  chunk: tokens a prefill pass reads.
  widths: drafts that a window may have room for, beside gamma: the least that
    holds them is run. Each is a body more; worth it where width costs time.
  logprobs: K: record log-probabilities and entropies; and the K likeliest
    tokens, if K > 1.
  """

  chunk: int = 64
  widths: tuple[int, ...] = (0,)
  logprobs: int = 0

  def bodies(self, gamma: int) -> list[int]:
    """The widths of the bodies of a program, ascending."""
    return sorted({gamma, *(w for w in self.widths if w < gamma)})


class Loop(NamedTuple):
  """The static parts of one decoding loop.

  noise: makes the randomness of a window, with the arguments of sampling.noise;
  an enumeration passes chosen outcomes.
  """

  target: types.Model
  drafter: types.Drafter
  rule: types.Rule
  options: Options = Options()
  noise: Callable[..., types.Noise] = sampling_lib.noise


def _nothing(weights, state, context, noise, cache):
  none_B = jnp.zeros_like(context.lengths_B)
  tokens_B0 = jnp.zeros((len(none_B), 0), jnp.int32)
  return types.Draft(tokens_B0, None, none_B), state, cache


# Plain decoding: a drafter that never proposes.
PLAIN = types.Drafter(
  'autoregressive', 0, lambda *_: (), _nothing, lambda state, *_: state
)


# Programs that stay compiled. Every one maps code into memory: with no bound
# a process of some 50 ends in LLVM's "cannot allocate memory".
KEPT = 32
_kept: dict[Loop, Programs] = {}  # the one used last comes last


def programs(
  target: types.Model,
  drafter: types.Drafter,
  rule: types.Rule,
  options: Options = Options(),
) -> Programs:
  """The programs of a target, a drafter and a rule.

  Equal arguments give the same compiled ones, as long as they are among the
  KEPT used last; others compile again when they are called.
  """
  loop = Loop(target, drafter, rule, options)
  _kept[loop] = found = _kept.pop(loop, None) or _programs(loop)
  if len(_kept) > KEPT:
    for program in _kept.pop(next(iter(_kept))):
      program.clear_cache()
  return found


def _programs(loop: Loop) -> Programs:
  bound = lambda part: functools.partial(part, loop)
  init, one = bound(start), bound(step)

  def finish(weights, request, state, info):
    return jax.lax.while_loop(
      lambda carry: jnp.any(carry[0].live_B),
      lambda carry: one(weights, request, *carry),
      (state, info),
    )

  def generate(weights, request):
    state, info = finish(weights, request, *init(weights, request))
    return Output(state.tokens_BL, state.lengths_B, info)

  kept = functools.partial(jax.jit, donate_argnums=(2, 3))
  return Programs(
    generate=jax.jit(generate),
    start=jax.jit(init),
    finish=kept(finish),
    step=kept(one),
    advance=kept(bound(advance)),
    opened=jax.jit(bound(opened)),
    read=jax.jit(bound(read), donate_argnums=2),
    begin=jax.jit(bound(begin)),
  )


def start(loop: Loop, weights: types.Weights, request: Request):
  """Reads the prompts but their last tokens; -> (State, Info)."""
  reading = read(loop, weights, request, opened(loop, weights, request))
  return begin(loop, weights, request, reading)


def opened(loop: Loop, weights, request: Request) -> forward.Reading:
  """The request's prompts, of which nothing is read yet."""
  B, L = request.tokens_BL.shape
  target = loop.target, weights.target
  cache = forward.open_cache(*target, B, L, request.source)
  chunk, taps = loop.options.chunk, loop.drafter.taps
  return forward.opened(*target, request.tokens_BL, cache, chunk, taps)


def read(loop: Loop, weights, request: Request, reading, most=None):
  """Reads the next chunks of the prompts, `most` or all; -> Reading."""
  target = loop.target, weights.target
  prompt = request.tokens_BL, request.lengths_B - 1, reading
  chunk, taps = loop.options.chunk, loop.drafter.taps
  with jax.named_scope('prefill'):
    return forward.read_on(*target, *prompt, chunk, taps, most)


def begin(loop: Loop, weights, request: Request, reading: forward.Reading):
  """What the first window needs, once all is read; -> (State, Info)."""
  tokens_BL, lengths_B = request.tokens_BL, request.lengths_B
  committed = tokens_BL, lengths_B, lengths_B < request.limit_B
  context = context_of(loop.drafter, request, *committed)
  with jax.named_scope('draft_init'):
    own = loop.drafter.init(weights, context, reading.features_BLE(tokens_BL))
  state = State(*committed, reading.cache, own)
  B, L = tokens_BL.shape
  sizes = B, L, loop.drafter.gamma, loop.options.logprobs
  counted = request.source is not None, bool(loop.drafter.tree)
  return state, types.empty_info(*sizes, *counted)


def advance(loop: Loop, weights, request: Request, state, info, most):
  """Windows until a live row ends, or `most` have run; -> (State, Info)."""
  same = lambda now: jnp.any(now.live_B) & jnp.all(now.live_B == state.live_B)
  return jax.lax.while_loop(
    lambda turn: (turn[0] < most) & same(turn[1]),
    lambda turn: (turn[0] + 1, *step(loop, weights, request, *turn[1:])),
    (jnp.int32(0), state, info),
  )[1:]


def context_of(drafter, request: Request, tokens_BL, lengths_B, live_B):
  """The types.Context of a request's rows."""
  most_B = jnp.clip(request.gamma_B, 0, drafter.gamma)
  rest = request.sampling, most_B, request.source
  return types.Context(tokens_BL, lengths_B, live_B, *rest)


def step(loop: Loop, weights, request: Request, state: State, info: types.Info):
  """One window for every row, after start or another; -> (State, Info).

  Worked example, gamma 3, a row of length 5: the window reads slots 4..7 (the
  last committed token and three drafts); with 2 accepted, tokens 5 and 6 are
  drafts, token 7 is recovered, and the length becomes 8. Slot 7 holds the
  rejected draft's keys until the next window overwrites it. verify/tree.py has
  the example of a tree.
  """
  drafter = loop.drafter
  context = context_of(loop.drafter, request, *state[:3])
  keys = request.seed_B, request.request_B, state.lengths_B, request.sampling
  gamma, rule = drafter.gamma, loop.rule
  noise = loop.noise(*keys, gamma=gamma, coupled=rule.coupled)
  with jax.named_scope('propose'):
    draft, draft_state, cache = drafter.propose(
      weights, state.drafter, context, noise, state.cache
    )
  # Proposals past the row's end in memory could not be verified.
  room_B = state.tokens_BL.shape[1] - state.lengths_B - 1
  most_B = jnp.minimum(context.gamma_B, jnp.maximum(room_B, 0))
  count_B = jnp.clip(draft.count_B.astype(jnp.int32), 0, most_B)
  draft = draft._replace(count_B=jnp.where(state.live_B, count_B, 0))
  attempt = functools.partial(_attempt, loop, weights, context, noise, draft)
  widths = loop.options.bodies(drafter.gamma)
  less = jnp.array(widths) < jnp.max(draft.count_B)
  width = jnp.array(widths)[jnp.sum(less)]
  with jax.named_scope('verify'):
    tried = _one_of(attempt, {each: width == each for each in widths}, cache)
    if tried.path_BK is not None:
      path = state.lengths_B, tried.accepted_B, tried.path_BK
      cache = forward.compact(loop.target, tried.cache, *path)
      tried = tried._replace(cache=cache)
  info = counts.add_width(info, draft, state.live_B, width)
  with jax.named_scope('commit'):
    return _commit(loop, request, state, info, draft, draft_state, tried)


class _Tried(NamedTuple):
  """The outcome of one verify pass; N columns whatever its width."""

  cache: Any
  accepted_B: Array
  broken_B: Array
  window_BN: Array
  path_BK: Array | None
  logprob_BN: Array | None
  top_BNX: tuple[Array, Array] | None
  entropy_BN: Array | None
  features_BNE: Array | None


def _one_of(attempt, widths: dict[int, Array], cache) -> _Tried:
  """attempt(width, cache) for the one width whose flag is true."""
  if len(widths) == 1:
    return attempt(max(widths), cache)
  blank = forward.blank(functools.partial(attempt, max(widths)), cache)
  tried = blank._replace(cache=cache)
  for width, flag in widths.items():
    run = lambda tried, width=width: attempt(width, tried.cache)
    tried = forward.once(flag, run, tried)
  return tried


def _attempt(loop: Loop, weights, context, noise, draft, width: int, cache):
  """Scores `width` proposals and one position more, and applies the rule."""
  target, drafter, rule, options, _ = loop
  cut = lambda x, size: None if x is None else x[:, :size]
  draft = draft._replace(
    tokens_BK=draft.tokens_BK[:, :width],
    q_BKV=cut(draft.q_BKV, width),
    parents_BK=cut(draft.parents_BK, width),
    proposed_BK=cut(draft.proposed_BK, width),
  )
  shape = tree.shape(draft.parents_BK) if tree.is_one(draft) else None
  part = None
  if drafter.exit:
    residual_BND = draft.marks['residual_BND'][:, : width + 1]
    part = dict(layers=(drafter.exit, None), residual_BTD=residual_BND)
  start_B = context.lengths_B - 1
  last_B1 = jnp.take_along_axis(context.tokens_BL, start_B[:, None], 1)
  hidden_BND, tapped, cache = forward.read(
    target,
    weights.target,
    jnp.concatenate([last_B1, draft.tokens_BK], 1),
    start_B,
    cache,
    slots=context.tokens_BL.shape[1],
    keep_BT=context.live_B[:, None],
    taps=drafter.taps,
    tree=shape,
    part=part,
  )
  logits_BNV = target.head(weights.target, hidden_BND)
  noise = noise._replace(accept_BK=noise.accept_BK[:, :width])
  accepted_B, path_BK, next_B, lost_BN = judge.judge(
    rule, context.sampling, noise, draft, logits_BNV
  )
  drafts_BN = jnp.pad(draft.tokens_BK, ((0, 0), (0, 1)))
  features_BNE = forward.concat(tapped) if drafter.taps else None
  columns: Any = drafts_BN, lost_BN, features_BNE, logits_BNV
  if path_BK is not None:
    columns = tree.along(path_BK, *columns)
  drafts_BN, lost_BN, features_BNE, logits_BNV = columns
  index_1N = jnp.arange(width + 1)[None]
  is_next_BN = index_1N == accepted_B[:, None]
  window_BN = jnp.where(is_next_BN, next_B[:, None], drafts_BN)
  # A NaN must end the row, not become a token. Rows after it do not count.
  seen_BN = index_1N <= accepted_B[:, None]
  broken_B = jnp.any(lost_BN & seen_BN, 1)
  likely = sampling_lib.logprobs(logits_BNV, window_BN, options.logprobs)
  spare = drafter.gamma - width
  widen = lambda x: jnp.pad(x, [(0, 0), (0, spare)] + [(0, 0)] * (x.ndim - 2))
  columns = window_BN, path_BK, *likely, features_BNE
  columns = jax.tree.map(widen, columns)
  return _Tried(cache, accepted_B, broken_B, *columns)


def _commit(loop, request, state, info, draft, draft_state, tried):
  """Cuts the window at stop ids and the limit, and appends what is left."""
  B, N = tried.window_BN.shape
  L = state.tokens_BL.shape[1]
  index_1N = jnp.arange(N)[None]
  whole_B = tried.accepted_B + 1
  inside_BN = index_1N < whole_B[:, None]
  stops_BN = inside_BN & jnp.any(
    tried.window_BN[..., None] == request.stop_BX[:, None], -1
  )
  stopped_B = jnp.any(stops_BN, 1)
  # int32 by name: under x64 argmax gives int64, which the loop cannot carry.
  first_B = jnp.argmax(stops_BN, 1).astype(jnp.int32)
  emitted_B = jnp.where(stopped_B, first_B + 1, whole_B)
  emitted_B = jnp.minimum(emitted_B, request.limit_B - state.lengths_B)
  emitted_B = jnp.where(state.live_B & ~tried.broken_B, emitted_B, 0)
  lengths_B = state.lengths_B + emitted_B
  live_B = state.live_B & ~stopped_B & (lengths_B < request.limit_B)
  live_B &= ~tried.broken_B

  # What is not emitted goes to slot L, where writes are dropped.
  slots_BN = jnp.where(
    index_1N < emitted_B[:, None], state.lengths_B[:, None] + index_1N, L
  )
  row_B1 = jnp.arange(B)[:, None]
  put = lambda old, new: old.at[row_B1, slots_BN].set(new, mode='drop')
  tokens_BL = put(state.tokens_BL, tried.window_BN)
  context = context_of(loop.drafter, request, tokens_BL, lengths_B, live_B)
  accepted_B, path_BK = tried.accepted_B, tried.path_BK
  most_B, reach_B = tree.levels(draft, accepted_B, path_BK)
  drafts = reach_B, accepted_B, emitted_B
  outcome = types.Outcome(*drafts, path_BK)
  draft_state = loop.drafter.commit(
    draft_state, context, outcome, tried.features_BNE
  )
  new = State(tokens_BL, lengths_B, live_B, tried.cache, draft_state)
  levels = most_B, reach_B
  return new, counts.add(info, state, draft, tried, levels, emitted_B, put)
