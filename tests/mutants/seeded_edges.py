"""Seeded bugs around the loop: models, caches, requests, meshes, tokenizers."""

from tests.mutants.mutant import Mutant

_CACHE = 'specdec_jax/models/cache.py'
_ATTENTION = 'specdec_jax/models/attention.py'
_MODEL = 'specdec_jax/models/lm.py'
_REQUESTS = 'specdec_jax/requests.py'

_BACK = 'tests/models/cache_test.py::test_keys_and_values_come_back'
_SLOTS = (
  'tests/models/lm_test.py::'
  'test_slots_past_the_end_and_masked_tokens_write_nowhere'
)
_STALE = 'tests/models/lm_test.py::test_what_stale_slots_hold_changes_nothing'
_BLIND = (
  'tests/models/attention_test.py::test_a_row_that_sees_nothing_is_finite'
)
_TURNS = (
  'tests/models/attention_test.py::'
  'test_positions_past_256_keep_their_angle_in_bfloat16'
)
_WINDOW = (
  'tests/models/attention_test.py::'
  'test_a_window_sees_the_last_tokens_and_turns_by_its_own_base'
)
_REJECTED = (
  'tests/models/sliding_test.py::'
  'test_rejection_at_every_phase_equals_a_full_recompute'
)
_GROUPS = (
  'tests/models/attention_test.py::'
  'test_grouped_heads_equal_repeated_keys_and_values'
)
_PADDING = (
  'tests/models/params_test.py::'
  'test_padded_ids_have_logit_minus_infinity_and_no_probability'
)
_ASKED = 'tests/requests_test.py::test_a_batch_is_what_was_asked'
_ROOM = 'tests/requests_test.py::test_the_buffer_has_room_for_the_last_window'
_REFUSED = 'tests/requests_test.py::test_what_cannot_be_decoded_is_refused'

EDGES = (
  Mutant(
    'the cache adds',
    1,
    'what a refused draft has written stays in the sum',
    _CACHE,
    'old.at[index].set(',
    'old.at[index].add(',
    (_STALE, _SLOTS),
  ),
  Mutant(
    'the cache clamps',
    16,
    'writes past the end land in the last slot',
    _CACHE,
    "old.at[index].set(jnp.swapaxes(new_BTGC, 1, 2), mode='drop')",
    "old.at[index].set(jnp.swapaxes(new_BTGC, 1, 2), mode='clip')",
    (_SLOTS,),
  ),
  Mutant(
    'the stacked cache clamps',
    16,
    'the same where layers are scanned',
    _CACHE,
    "set(new_BTF, mode='drop')",
    "set(new_BTF, mode='clip')",
    (_SLOTS,),
  ),
  Mutant(
    'values are stored as keys',
    1,
    'the cache returns the wrong array',
    _CACHE,
    'put(cache.v_BGSC, v_BTGC)',
    'put(cache.v_BGSC, k_BTGC)',
    (_BACK,),
  ),
  Mutant(
    'heads read another group',
    30,
    'query heads are dealt to key/value heads in turn',
    _ATTENTION,
    'q_BTHC.reshape(B, T, G, H // G, C), 1, 3)',
    'q_BTHC.reshape(B, T, H // G, G, C).swapaxes(2, 3), 1, 3)',
    (_GROUPS,),
  ),
  Mutant(
    'a row that sees nothing is NaN',
    30,
    'softmax over minus infinities',
    _ATTENTION,
    'scores, -1e30)',
    'scores, -jnp.inf)',
    (_BLIND,),
  ),
  Mutant(
    'angles in bfloat16',
    19,
    'positions 256 and 257 are one',
    _ATTENTION,
    'positions_BT[:, :, None, None].astype(freq.dtype)',
    'positions_BT[:, :, None, None].astype(jnp.bfloat16).astype(freq.dtype)',
    (_TURNS,),
  ),
  Mutant(
    'a window moves with the call',
    20,
    'draft tokens see what plain decoding has left behind',
    _ATTENTION,
    'positions_BT[..., None] - window',
    'positions_BT[:, :1, None] - window',
    (_WINDOW, _REJECTED),
  ),
  Mutant(
    'a window one token too wide',
    20,
    'a sliding layer sees a token that it was not trained to see',
    _ATTENTION,
    'slot_11S > positions_BT',
    'slot_11S >= positions_BT',
    (_WINDOW,),
  ),
  Mutant(
    'padding ids have logit 0',
    22,
    'an id that no token has may be said',
    _MODEL,
    'jnp.where(real, logits, -jnp.inf)',
    'jnp.where(real, logits, 0)',
    (_PADDING,),
  ),
  Mutant(
    'one padding id is real',
    22,
    'off by one in the number of ids',
    _MODEL,
    '(1,) * (logits.ndim - 1) + (-1,)) < ids',
    '(1,) * (logits.ndim - 1) + (-1,)) <= ids',
    (_PADDING,),
  ),
  Mutant(
    'an id past the vocabulary is read',
    22,
    'the embedding clamps it to another token',
    _REQUESTS,
    'if not 0 <= t < ids',
    'if not 0 <= t <= ids',
    (_REFUSED,),
  ),
  Mutant(
    'an empty prompt is decoded',
    29,
    'slot -1 is read as the last token',
    _REQUESTS,
    'if not len(tokens):',
    'if tokens is None:',
    (_REFUSED,),
  ),
  Mutant(
    'the prompt may leave no room',
    16,
    'off by one: the last token has no place in the context',
    _REQUESTS,
    'if len(tokens) + max_new_tokens > context:',
    'if len(tokens) + max_new_tokens > context + 1:',
    (_REFUSED,),
  ),
  Mutant(
    'no room for the last window',
    16,
    'gamma is forgotten in the length of the buffer',
    _REQUESTS,
    'need = int(limit.max()) + gamma',
    'need = int(limit.max())',
    (_ROOM,),
  ),
  Mutant(
    'rows that fill the batch are decoded',
    18,
    'they start, and everyone waits for them',
    _REQUESTS,
    'np.pad(new, (0, rows - n))',
    "np.pad(new, (0, rows - n), mode='edge')",
    (_ASKED,),
  ),
  Mutant(
    'requests are numbered by row',
    26,
    'the second batch repeats the noise of the first',
    _REQUESTS,
    "_uint32('request number', [x.number for x in items])",
    'np.arange(n, dtype=np.uint32)',
    (_ASKED,),
  ),
  Mutant(
    'heads are split without their keys',
    26,
    'a mesh that does not divide both puts them on different devices',
    'specdec_jax/sharding.py',
    "if whole & {'heads', 'kv_heads'}:",
    "if 'heads' in whole:",
    (
      'tests/sharding_test.py::'
      'test_axes_that_do_not_divide_stay_whole_and_are_named',
    ),
  ),
  Mutant(
    'a longer vocabulary is the same tokenizer',
    23,
    'tokens that only one of two tokenizers has are not compared',
    'specdec_jax/io/tokenizer.py',
    'for i in range(max(len(a), len(b))):',
    'for i in range(min(len(a), len(b))):',
    ('tests/io/tokenizer_test.py::test_check_same_names_the_first_difference',),
  ),
  Mutant(
    'another tokenizer is accepted',
    23,
    'draft and target mean different text by an id',
    'specdec_jax/drafters/lm.py',
    '  tokenizer_lib.check_same(target.tokenizer, draft.tokenizer)\n',
    '',
    ('tests/api_test.py::test_a_draft_of_another_tokenizer_is_refused',),
  ),
  Mutant(
    'counts are summed in float32',
    35,
    'past 2**24 they stand still',
    'specdec_jax/bench/metrics.py',
    'int(np.asarray(info.calls_B, np.int64).sum())',
    'int(np.asarray(info.calls_B, np.float32).sum())',
    ('tests/decode_info_test.py::test_counts_survive_two_to_the_24',),
  ),
)
