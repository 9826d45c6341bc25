"""Seeded bugs of the rules: acceptance, residuals, certain drafts."""

from tests.mutants.mutant import Mutant

_REJECT = 'specdec_jax/verify/reject.py'
_COUPLED = 'specdec_jax/verify/coupled.py'
_CHAIN = 'specdec_jax/verify/chain.py'

_LAW = 'tests/verify/window_law_test.py::test_law_of_a_window_is_the_targets'
_FLIP = 'tests/verify/window_law_test.py::test_accept_test_flips_at_the_ratio'
_U_ZERO = (
  'tests/verify/window_law_test.py::'
  'test_u_zero_rejects_what_the_target_excludes'
)
_CERTAIN = (
  'tests/verify/window_law_test.py::test_certain_draft_equals_its_one_hot'
)
_ALL_EQUAL = (
  'tests/decode_windows_test.py::'
  'test_every_ragged_pattern_of_two_windows_equals_rows_alone'
)
_DRAWN = (
  'tests/verify/coupled_test.py::'
  'test_accepts_the_proposed_tokens_that_are_the_targets_draws'
)

_ACCEPT = 'ok_BK = noise.accept_BK * q_BK < p_BK'
_P_ROW = 'p_BV = chain.row(p_BNV, accepted_B)'
_RESIDUAL = 'jnp.maximum(p_BV - chain.q_row(draft, accepted_B, p_BV), 0)'
_PREFIX = 'accepted_B = chain.prefix(ok_BK & chain.proposed(draft))'

RULES = (
  Mutant(
    'accept with <=',
    8,
    'a token of probability 0 passes at u = 0',
    _REJECT,
    _ACCEPT,
    'ok_BK = noise.accept_BK * q_BK <= p_BK',
    (_U_ZERO,),
  ),
  Mutant(
    'accept everything',
    4,
    "the emitted law is the draft's",
    _REJECT,
    _ACCEPT,
    'ok_BK = noise.accept_BK >= 0 * p_BK',
    (_LAW,),
  ),
  Mutant(
    'ratio upside down',
    4,
    'accepts with q / p',
    _REJECT,
    _ACCEPT,
    'ok_BK = noise.accept_BK * p_BK < q_BK',
    (_FLIP,),
  ),
  Mutant(
    'accept where q = 0',
    9,
    'a proposal that both laws exclude passes',
    _REJECT,
    _ACCEPT,
    'ok_BK = (noise.accept_BK * q_BK < p_BK) | (q_BK == 0)',
    (_U_ZERO,),
  ),
  Mutant(
    'accept by the next row',
    5,
    'a draft token is judged by the law of the position after it',
    _CHAIN,
    'p_BNV[:, :K], tokens_BK[..., None]',
    'p_BNV[:, -K:], tokens_BK[..., None]',
    (_LAW,),
  ),
  Mutant(
    'residual is p',
    4,
    'the recovered token follows p: q is not subtracted',
    _REJECT,
    _RESIDUAL,
    'p_BV',
    (_LAW,),
  ),
  Mutant(
    'residual is not clipped',
    4,
    'negative weights where q > p',
    _REJECT,
    _RESIDUAL,
    'p_BV - chain.q_row(draft, accepted_B, p_BV)',
    (_LAW,),
  ),
  Mutant(
    'residual is flat',
    4,
    'the recovered token is uniform over p > q',
    _REJECT,
    _RESIDUAL,
    '(p_BV > chain.q_row(draft, accepted_B, p_BV)).astype(p_BV.dtype)',
    (_LAW,),
  ),
  Mutant(
    'residual in bfloat16',
    7,
    'what is left of nearly equal laws is rounding error',
    _REJECT,
    _RESIDUAL,
    'jnp.maximum(p_BV.astype(jnp.bfloat16)'
    ' - chain.q_row(draft, accepted_B, p_BV).astype(jnp.bfloat16), 0)',
    (_LAW,),
  ),
  Mutant(
    'residual from the next row of p',
    5,
    "off by one in the target's rows",
    _REJECT,
    _P_ROW,
    'p_BV = chain.row(p_BNV, jnp.minimum(accepted_B + 1, p_BNV.shape[1] - 1))',
    (_LAW,),
  ),
  Mutant(
    'residual from the first row of p',
    5,
    'right only while nothing is accepted',
    _REJECT,
    _P_ROW,
    'p_BV = chain.row(p_BNV, 0 * accepted_B)',
    (_LAW,),
  ),
  Mutant(
    'residual from the next row of q',
    5,
    "off by one in the draft's rows",
    _CHAIN,
    'at_B = jnp.minimum(index_B, K - 1)',
    'at_B = jnp.minimum(index_B + 1, K - 1)',
    (_LAW,),
  ),
  Mutant(
    'q at the end of a short draft',
    5,
    'the bonus token of a short draft loses the mass of a q never drawn from',
    _CHAIN,
    'jnp.where((index_B < draft.count_B)[:, None], q_BV, 0)',
    'jnp.where((index_B < K)[:, None], q_BV, 0)',
    (_LAW,),
  ),
  Mutant(
    'certain drafts with q = 1/2',
    12,
    'a certain proposal judged as if it had been sampled',
    _CHAIN,
    'jnp.ones(draft.tokens_BK.shape)',
    'jnp.full(draft.tokens_BK.shape, 0.5)',
    (_CERTAIN,),
  ),
  Mutant(
    'certain drafts leave q = 0',
    12,
    'a refused certain token may be said after all',
    _CHAIN,
    'q_BV = jnp.arange(like_BV.shape[-1])[None] == token_B',
    'q_BV = 0 * like_BV',
    (_CERTAIN,),
  ),
  Mutant(
    'tokens never proposed are accepted',
    28,
    'a draft shorter than gamma is read to its end',
    _REJECT,
    _PREFIX,
    'accepted_B = chain.prefix(ok_BK)',
    (_LAW,),
  ),
  Mutant(
    'accepted tokens after a refused one',
    3,
    'counts all agreements, not the leading ones',
    _CHAIN,
    'jnp.cumprod(ok_BK.astype(jnp.int32), -1)',
    'ok_BK.astype(jnp.int32)',
    (_LAW,),
  ),
  Mutant(
    'least acceptance of the batch',
    17,
    'every row advances by what the worst row accepts',
    _REJECT,
    _PREFIX,
    _PREFIX + '\n  accepted_B = jnp.full_like(accepted_B, accepted_B.min())',
    (_LAW, _ALL_EQUAL),
  ),
  Mutant(
    'coupled draws of the next position',
    46,
    "the target's draw is not the one that plain decoding makes there",
    _COUPLED,
    'jnp.full((B,), k, jnp.int32)',
    'jnp.full((B,), k + 1, jnp.int32)',
    (_DRAWN,),
  ),
  Mutant(
    'coupled accepts what was not proposed',
    28,
    'a short draft is credited with tokens that are not its own',
    _COUPLED,
    _PREFIX,
    'accepted_B = chain.prefix(ok_BK)',
    (_DRAWN,),
  ),
)
