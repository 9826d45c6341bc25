"""Seeded bugs of the loop: laws, ends, rows and counters."""

from tests.mutants.mutant import Mutant

_DECODE = 'specdec_jax/decode.py'
_LM = 'specdec_jax/drafters/lm.py'

_STOPS = (
  'tests/decode_windows_test.py::test_stop_ids_at_every_offset_of_the_window'
)
_LIMITS = (
  'tests/decode_windows_test.py::'
  'test_limits_at_every_offset_and_buffers_without_room'
)
_FINISHED = 'tests/decode_windows_test.py::test_finished_rows_change_no_more'
_NAN = (
  'tests/decode_windows_test.py::test_a_nan_ends_its_row_and_touches_no_other'
)
_LATE_NAN = (
  'tests/decode_windows_test.py::test_a_nan_past_a_refused_draft_does_not_count'
)
_TRACES = 'tests/decode_info_test.py::test_counters_of_a_trace'
_PREFIX = 'tests/decode_programs_test.py::test_fewer_new_tokens_are_a_prefix'
_EMPTY = (
  'tests/decode_programs_test.py::'
  'test_an_empty_residual_falls_back_to_the_target'
)
_JOINT = 'tests/joint_law_test.py::test_three_windows_of_reject_enumerated'
_DRAFT_LAW = (
  'tests/drafters/lm_test.py::test_q_is_the_law_after_everything_said_so_far'
)
_TARGET_P = 'p_BNV = sampling_lib.probabilities(logits_BNV, context.sampling)'
_WEIGHTS = 'weights_BV = jnp.where(empty_B1, p_BV, verdict.weights_BV)'
_Q = 'q_BV = sampling_lib.probabilities(logits_B1V, context.sampling)[:, 0]'

LAWS = (
  Mutant(
    'top-p on the draft only',
    10,
    'the target is not cut as was asked',
    _DECODE,
    _TARGET_P,
    'p_BNV = sampling_lib.probabilities(logits_BNV, context.sampling._replace('
    'top_p_B=jnp.ones_like(context.sampling.top_p_B)))',
    ('tests/joint_law_test.py::test_joint_law_of_plain_decoding',),
  ),
  Mutant(
    'temperature on the draft only',
    10,
    'the target is read at temperature 1',
    _DECODE,
    _TARGET_P,
    'p_BNV = sampling_lib.probabilities(logits_BNV, context.sampling._replace('
    'temperature_B=jnp.ones_like(context.sampling.temperature_B)))',
    (_JOINT,),
  ),
  Mutant(
    'top-p on the target only',
    10,
    'the law stays exact, but a draft equal to the target is refused',
    _LM,
    _Q,
    'q_BV = sampling_lib.probabilities(logits_B1V, context.sampling._replace('
    'top_p_B=jnp.ones_like(context.sampling.top_p_B)))[:, 0]',
    (_DRAFT_LAW,),
  ),
  Mutant(
    'bonus token unwarped',
    10,
    'after a whole draft the next token ignores the sampling settings',
    _DECODE,
    _WEIGHTS,
    _WEIGHTS + '\n  weights_BV = jnp.where('
    '(verdict.accepted_B == width)[:, None], '
    'jax.nn.softmax(logits_BNV[:, -1]), weights_BV)',
    (_JOINT,),
  ),
  Mutant(
    'no fallback for an empty residual',
    6,
    'weights of zeros: token 0 is said',
    _DECODE,
    _WEIGHTS,
    'weights_BV = verdict.weights_BV',
    (_EMPTY,),
  ),
  Mutant(
    'noise counted from the end',
    27,
    "a row's tokens depend on how many more were asked for",
    _DECODE,
    'state.lengths_B,\n    request.sampling,\n    gamma',
    'request.limit_B - state.lengths_B,\n    request.sampling,\n    gamma',
    (_PREFIX,),
  ),
)

ENDS = (
  Mutant(
    'end of sequence dropped',
    15,
    'off by one: the stop id itself is not emitted',
    _DECODE,
    'jnp.where(stopped_B, first_B + 1, whole_B)',
    'jnp.where(stopped_B, first_B, whole_B)',
    (_STOPS,),
  ),
  Mutant(
    'one token after the end of sequence',
    15,
    'off by one: what follows the stop id is emitted',
    _DECODE,
    'jnp.where(stopped_B, first_B + 1, whole_B)',
    'jnp.where(stopped_B, first_B + 2, whole_B)',
    (_STOPS,),
  ),
  Mutant(
    'stop ids of refused drafts count',
    15,
    'a row ends at a token that it does not say',
    _DECODE,
    'stops_BN = inside_BN & jnp.any(',
    'stops_BN = jnp.any(',
    (_STOPS,),
  ),
  Mutant(
    'stop ids among accepted drafts are missed',
    15,
    'only the last token of a window is looked at',
    _DECODE,
    'inside_BN = index_1N < whole_B[:, None]',
    'inside_BN = index_1N == tried.accepted_B[:, None]',
    (_STOPS,),
  ),
  Mutant(
    'the last stop id of a window ends it',
    15,
    'tokens after the first one are emitted',
    _DECODE,
    'first_B = jnp.argmax(stops_BN, 1)',
    'first_B = (N - 1 - jnp.argmax(stops_BN[:, ::-1], 1))',
    (_STOPS,),
  ),
  Mutant(
    'the limit does not cut a window',
    16,
    'up to gamma tokens too many',
    _DECODE,
    'emitted_B = jnp.minimum(emitted_B, request.limit_B - state.lengths_B)',
    'emitted_B = jnp.minimum(emitted_B, N)',
    (_LIMITS,),
  ),
  Mutant(
    'the limit does not end a row',
    16,
    'a full row stays alive: the loop never ends',
    _DECODE,
    '(lengths_B < request.limit_B)\n  live_B &=',
    '(lengths_B <= request.limit_B)\n  live_B &=',
    (_FINISHED,),
  ),
  Mutant(
    'proposals past the end of memory',
    16,
    'they are verified in slots that do not exist',
    _DECODE,
    'jnp.clip(draft.count_B, 0, jnp.maximum(room_B, 0))',
    'draft.count_B',
    (_LIMITS,),
  ),
  Mutant(
    'tokens past the end are clamped',
    16,
    'what is not emitted overwrites the last token of the buffer',
    _DECODE,
    "set(new, mode='drop')",
    "set(new, mode='clip')",
    (_LIMITS,),
  ),
  Mutant(
    'a NaN becomes a token',
    43,
    'logits that are not finite are drawn from',
    _DECODE,
    'jnp.where(state.live_B & ~tried.broken_B, emitted_B, 0)',
    'jnp.where(state.live_B, emitted_B, 0)',
    (_NAN,),
  ),
  Mutant(
    'a NaN does not end its row',
    43,
    'the row is judged again and again: the loop never ends',
    _DECODE,
    '  live_B &= ~tried.broken_B\n',
    '',
    (_NAN,),
  ),
  Mutant(
    'a NaN after the accepted tokens counts',
    43,
    'a refused draft that the target cannot read ends the row',
    _DECODE,
    'broken_B = jnp.any(lost_BN & seen_BN, 1)',
    'broken_B = jnp.any(lost_BN, 1)',
    (_LATE_NAN,),
  ),
)

ROWS = (
  Mutant(
    'finished rows keep writing',
    18,
    'the cache of a row changes after its end',
    _DECODE,
    'keep_BT=context.live_B[:, None]',
    'keep_BT=None',
    (_FINISHED,),
  ),
  Mutant(
    'finished rows keep counting',
    18,
    'calls and proposals of the slowest row, for all',
    _DECODE,
    'live_B = state.live_B.astype(jnp.int32)\n  kept_B',
    'live_B = jnp.ones_like(state.lengths_B)\n  kept_B',
    (_FINISHED,),
  ),
  Mutant(
    'finished rows keep proposing',
    18,
    'a window that nobody needs wide is verified wide',
    _DECODE,
    'count_B=jnp.where(state.live_B, count_B, 0)',
    'count_B=count_B',
    ('tests/decode_windows_test.py::test_finished_rows_widen_no_window',),
  ),
  Mutant(
    'cut drafts count as accepted',
    44,
    'acceptance of tokens that were never emitted',
    _DECODE,
    'kept_B = jnp.minimum(tried.accepted_B, emitted_B)',
    'kept_B = tried.accepted_B',
    (_TRACES,),
  ),
  Mutant(
    'cut windows count as whole',
    44,
    'block efficiency is biased by the last window',
    _DECODE,
    'whole_B = live_B * (emitted_B == tried.accepted_B + 1)',
    'whole_B = live_B',
    (_TRACES,),
  ),
  Mutant(
    'refused drafts were not tried',
    44,
    'conditional acceptance is always 1',
    _DECODE,
    'reached_B = kept_B + whole_B',
    'reached_B = kept_B',
    (_TRACES,),
  ),
  Mutant(
    'bonus and recovered swapped',
    44,
    'who made a token is told wrongly',
    _DECODE,
    'types.RECOVERED, types.BONUS)',
    'types.BONUS, types.RECOVERED)',
    (_TRACES,),
  ),
  Mutant(
    'narrow and wide swapped',
    28,
    'proposals are verified at width 1',
    _DECODE,
    'widths = {drafter.gamma: wide, 0: ~wide}',
    'widths = {drafter.gamma: ~wide, 0: wide}',
    (_TRACES,),
  ),
  Mutant(
    'the state is not donated',
    33,
    'two caches are held where one is meant',
    _DECODE,
    'donate_argnums=(2, 3)',
    'donate_argnums=(3,)',
    ('tests/decode_programs_test.py::test_the_state_is_donated',),
  ),
  Mutant(
    'programs are built anew',
    41,
    'every call compiles',
    _DECODE,
    '_kept.pop(loop, None) or _programs(loop)',
    '_programs(loop)',
    ('tests/decode_programs_test.py::test_equal_arguments_share_programs',),
  ),
)
