"""Seeded bugs of what is read: masks, positions, slots, holes, lookup."""

from tests.mutants.mutant import Mutant

_DECODE = 'specdec_jax/decode.py'
_WINDOWS = 'specdec_jax/forward.py'
_LM = 'specdec_jax/drafters/lm.py'
_LOOKUP = 'specdec_jax/drafters/lookup.py'

_JOINT = 'tests/joint_law_test.py::test_three_windows_of_reject_enumerated'
_FEATURES = 'tests/drafters/features_test.py::test_features_of_a_table'
_DRAFT_LAW = (
  'tests/drafters/lm_test.py::test_q_is_the_law_after_everything_said_so_far'
)
_SLOTS = (
  'tests/models/lm_test.py::'
  'test_slots_past_the_end_and_masked_tokens_write_nowhere'
)
_FIVE = 'tests/models/lm_test.py::test_five_tokens_at_once_equal_one_at_a_time'
_STALE = 'tests/models/lm_test.py::test_what_stale_slots_hold_changes_nothing'
_SEARCH = 'tests/drafters/lookup_test.py::test_lookup_equals_a_search'
_READ_TWO = """start_B = context.lengths_B - 2
  last_BT = jnp.take_along_axis(
    context.tokens_BL,
    jnp.maximum(start_B[:, None] + jnp.arange(2)[None], 0),"""
_READ_ONE = """start_B = context.lengths_B - 1
  last_BT = jnp.take_along_axis(
    context.tokens_BL,
    jnp.maximum(start_B[:, None] + jnp.arange(1)[None], 0),"""

CACHES = (
  Mutant(
    'the mask sees one slot less',
    1,
    'a token does not see itself',
    _WINDOWS,
    '[None, None] <= positions_BT[..., None]',
    '[None, None] < positions_BT[..., None]',
    (_STALE, _JOINT),
  ),
  Mutant(
    'stale slots are read',
    1,
    'the mask sees a slot that a refused draft has left behind',
    _WINDOWS,
    '[None, None] <= positions_BT[..., None]',
    '[None, None] <= positions_BT[..., None] + 1',
    (_STALE,),
  ),
  Mutant(
    'positions restart in every window',
    19,
    'rotations do not fit those of the cached keys',
    _WINDOWS,
    '    positions_BT,\n    mask_BTS,',
    '    at_BT - at_BT[:, :1],\n    mask_BTS,',
    (_FEATURES, _FIVE),
  ),
  Mutant(
    'positions off by one',
    19,
    'invisible to rotations, not to learned positions',
    _WINDOWS,
    '    positions_BT,\n    mask_BTS,',
    '    positions_BT + 1,\n    mask_BTS,',
    (_FEATURES,),
  ),
  Mutant(
    'slot -1 wraps',
    42,
    'the token before the first one is written at the end of memory',
    _WINDOWS,
    'ok_BT = (at_BT >= 0) & (at_BT < slots)',
    'ok_BT = at_BT < slots',
    (_SLOTS,),
  ),
  Mutant(
    'slots past the end are the last one',
    16,
    'the key of the last token is overwritten',
    _WINDOWS,
    'slots_BT = jnp.where(ok_BT, at_BT, slots)',
    'slots_BT = jnp.where(ok_BT, at_BT, slots - 1)',
    (_SLOTS,),
  ),
  Mutant(
    'the target never reads a token of the prompt',
    2,
    'a hole in the cache, one token before the end of the prompt',
    _DECODE,
    'request.lengths_B - 1,\n      target.init_cache',
    'request.lengths_B - 2,\n      target.init_cache',
    (_FEATURES,),
  ),
  Mutant(
    'the draft reads one token at a start',
    2,
    "after a whole draft its last token is a hole in the draft's cache",
    _LM,
    _READ_TWO,
    _READ_ONE,
    (_DRAFT_LAW,),
  ),
  Mutant(
    'the draft writes one slot further',
    1,
    'its proposals leave a hole and stale keys',
    _LM,
    'at_B = lengths_B + offset - 1',
    'at_B = lengths_B + offset',
    (_DRAFT_LAW,),
  ),
  Mutant(
    'the draft never reads a token of the prompt',
    2,
    'acceptance falls; the law does not show it',
    _LM,
    'unread_B = jnp.maximum(context.lengths_B - 2, 0)',
    'unread_B = jnp.maximum(context.lengths_B - 3, 0)',
    (_DRAFT_LAW,),
  ),
  Mutant(
    'lookup finds what is behind the text',
    42,
    'garbage after the end is matched',
    _LOOKUP,
    '(end_1L >= 1) & (end_1L < lengths_B[:, None])',
    'jnp.broadcast_to(end_1L >= 1, tokens_BL.shape)',
    (_SEARCH,),
  ),
  Mutant(
    'lookup proposes what is behind the text',
    42,
    'a match near the end is continued with garbage',
    _LOOKUP,
    'jnp.minimum(gamma, lengths_B - start_B)',
    'gamma',
    (_SEARCH,),
  ),
)
