"""Counts a window's drafts, proposed, tried and accepted, and their origin."""

import jax
import jax.numpy as jnp

from specdec_jax import types
from specdec_jax.verify import tree


def add_width(info, draft, live_B, width) -> types.Info:
  """Adds one window by the number of drafts that it had room for."""
  one = lambda old_BN, rows_B: old_BN.at[:, width].add(rows_B)
  info = info._replace(widths_BN=one(info.widths_BN, live_B))
  if 'second_B' not in draft.marks:
    return info
  second_B = live_B & jnp.any(live_B & draft.marks['second_B'])
  return info._replace(second_BN=one(info.second_BN, second_B))


def add(info, state, draft, tried, levels, emitted_B, put) -> types.Info:
  """Adds one window, with decode's numbers, to `info`; only live rows count.

  levels: (most_B, reach_B) from verify.tree.levels.
  put: (old_BL, new_BN) -> old_BL with what was emitted at its places.
  """
  (most_B, reach_B), live_B = levels, state.live_B.astype(jnp.int32)
  kept_B = jnp.minimum(tried.accepted_B, emitted_B)
  whole_B = live_B * (emitted_B == tried.accepted_B + 1)
  # The draft after the kept ones was tried too, unless the cut came before it.
  reached_B = kept_B + whole_B
  index_1N = jnp.arange(tried.window_BN.shape[1])[None]
  one = lambda count_B: index_1N == count_B[:, None]
  below = lambda count_B: index_1N[:, :-1] < count_B[:, None]
  add = lambda old, flags: old + live_B[:, None] * flags
  missed_B = tried.accepted_B < reach_B
  last = jnp.where(missed_B, types.RECOVERED, types.BONUS)
  last = jnp.where(most_B == 0, types.PLAIN, last)
  drafted_BN = index_1N < tried.accepted_B[:, None]
  origin_BN = jnp.where(drafted_BN, types.DRAFTED, last[:, None])
  if 'sourced_B' in draft.marks:
    counts_B2 = jnp.stack([most_B, kept_B], 1, dtype=jnp.int32)
    found_B2 = add(
      info.sourced_B2, draft.marks['sourced_B'][:, None] * counts_B2
    )
    info = info._replace(sourced_B2=found_B2)
  if info.places_BKK is not None and tree.is_one(draft):
    # Nothing is kept of a row that is not live.
    places_BK = tree.places(draft, tried.path_BK)
    of_BKK = places_BK[..., None] == index_1N[:, None, :-1]
    of_BKK &= below(kept_B)[..., None]
    info = info._replace(places_BKK=info.places_BKK + of_BKK)
  refused_BK = tree.refused(draft, tried.accepted_B, tried.path_BK)
  refused_BK = jnp.where(whole_B[:, None] > 0, refused_BK, -1)
  return info._replace(
    hist_BN=add(info.hist_BN, one(kept_B)),
    proposed_BK=add(info.proposed_BK, below(most_B)),
    tried_BK=add(info.tried_BK, below(jnp.minimum(reached_B, reach_B))),
    accepted_BK=add(info.accepted_BK, below(kept_B)),
    calls_B=info.calls_B + live_B,
    origin_BL=put(info.origin_BL, origin_BN.astype(jnp.int8)),
    window_BL=put(info.window_BL, info.calls_B[:, None]),
    broken_B=info.broken_B | (state.live_B & tried.broken_B),
    refused_BK=jnp.where(state.live_B[:, None], refused_BK, info.refused_BK),
    logprob_BL=jax.tree.map(put, info.logprob_BL, tried.logprob_BN),
    top_BLX=jax.tree.map(put, info.top_BLX, tried.top_BNX),
    entropy_BL=jax.tree.map(put, info.entropy_BL, tried.entropy_BN),
  )
