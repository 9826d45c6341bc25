"""Seeded bugs of block and lenient rules, early exit, n-grams, EAGLE, stops."""

from tests.mutants.mutant import Mutant

_BLOCK = 'specdec_jax/verify/block.py'
_LENIENT = 'specdec_jax/verify/lenient.py'
_EXIT = 'specdec_jax/drafters/early_exit.py'
_NGRAM = 'specdec_jax/drafters/ngram.py'
_LM = 'specdec_jax/drafters/lm.py'
_EAGLE = 'specdec_jax/drafters/eagle.py'

_of = lambda file, name: f'tests/{file}_test.py::{name}'
_LAW = _of('verify/block', 'test_law_of_a_window_is_the_targets')
_TOY = _of('verify/block', 'test_accepted_drafts_of_the_papers_toy')
_SAME = _of('verify/block', 'test_one_draft_and_temperature_zero_are_reject')
_U_ZERO = _of(
  'verify/block', 'test_accepts_no_token_of_probability_zero_at_u_zero'
)
_STATED = _of('verify/stated', 'test_a_rule_keeps_and_emits_what_it_states')
_NEAR = _of('verify/lenient', 'test_greedy_keeps_what_is_nearly_the_best')
_RESIDUAL = _of(
  'drafters/early_exit',
  'test_the_residual_is_what_the_layers_make_in_one_pass',
)
_WORK = _of(
  'drafters/early_exit', 'test_a_window_does_exactly_the_work_it_claims'
)
_TEXT = _of('drafters/early_exit', 'test_greedy_text_is_plain_decodings')
_COUNTS = _of('drafters/ngram', 'test_the_law_is_that_of_the_counts')
_CHAIN = _of(
  'drafters/eagle',
  'test_every_draft_is_what_training_makes_of_the_same_tokens',
)
_VIEW = _of(
  'drafters/eagle',
  'test_the_view_is_the_first_draft_of_a_window_at_every_index',
)
_EAGLE_STOPS = _of(
  'drafters/eagle', 'test_drafting_stops_where_the_draft_is_not_sure'
)
_STOPS = _of('drafters/lm', 'test_drafting_stops_where_the_draft_is_not_sure')

BLOCK = (
  Mutant(
    'block stops at the first failure',
    4,
    'a later success no longer saves the drafts before it',
    _BLOCK,
    'accepted_B = jnp.max(jnp.where(ok_BK, at_1K, 0), -1, initial=0)',
    'accepted_B = jnp.cumprod(ok_BK, -1).sum(-1)',
    (_LAW,),
  ),
  Mutant(
    'block ratio is not carried over',
    4,
    "w is the last token's ratio: the token rule's w in the block rule",
    _BLOCK,
    'grown_B = w_B * p_B',
    'grown_B = p_B',
    (_LAW,),
  ),
  Mutant(
    'block ratio is not clipped',
    4,
    'a likely token makes up for an unlikely one later',
    _BLOCK,
    'w_B = jnp.where(whole_B, 1, grown_B / jnp.where(q_B > 0, q_B, 1))',
    'w_B = grown_B / jnp.where(q_B > 0, q_B, 1)',
    (_LAW,),
  ),
  Mutant(
    'block accepts with w everywhere',
    4,
    "the last offset's test at every offset",
    _BLOCK,
    'ok_BK = jnp.where(at_1K < count_B1, inner_BK, last_BK)',
    'ok_BK = (u_BK < w_BN[:, 1:])',
    (_LAW,),
  ),
  Mutant(
    'block residual is the token rule',
    5,
    'max(p - q, 0) instead of max(w p - q, 0)',
    _BLOCK,
    'rest_BV = w_B1 * p_BV - chain',
    'rest_BV = p_BV - chain',
    (_LAW,),
  ),
  Mutant(
    'block mass without w',
    4,
    'A is the mass of max(p - q, 0)',
    _BLOCK,
    'wp_BXV = w_BN[:, 1:K, None] * p_BNV[:, 1:K]',
    'wp_BXV = p_BNV[:, 1:K]',
    (_LAW,),
  ),
  Mutant(
    'block mass of the row before',
    5,
    'A looks at the offset that was just judged',
    _BLOCK,
    'wp_BXV = w_BN[:, 1:K, None] * p_BNV[:, 1:K]',
    'wp_BXV = w_BN[:, 1:K, None] * p_BNV[:, : K - 1]',
    (_LAW,),
  ),
  Mutant(
    'block denominator without the rest',
    4,
    'A / A instead of A / (A + 1 - w)',
    _BLOCK,
    'below_BK = mass_BK + 1 - w_BN[:, 1:]',
    'below_BK = mass_BK',
    (_LAW,),
  ),
  Mutant(
    'block accepts with <= at the end',
    8,
    'a token of probability 0 passes at u = 0',
    _BLOCK,
    'last_BK = u_BK * q_BK < w_BN',
    'last_BK = u_BK * q_BK <= w_BN',
    (_U_ZERO,),
  ),
  Mutant(
    'block judges what was not proposed',
    10,
    'offsets past the count are accepted',
    _BLOCK,
    'inner_BK, last_BK) & (at_1K <= count_B1)',
    'inner_BK, last_BK)',
    (_SAME, _LAW),
  ),
  Mutant(
    'block ends at the window instead of the count',
    10,
    'a shorter draft is judged as if more of it followed',
    _BLOCK,
    'ok_BK = jnp.where(at_1K < count_B1,',
    'ok_BK = jnp.where(at_1K < K,',
    (_LAW,),
  ),
  Mutant(
    'block keeps a certain draft in its residual',
    5,
    'the drafted token stays in the mass where the draft has no law',
    _BLOCK,
    'left_BXV = jnp.where(index == draft.tokens_BK[:, 1:, None], 0, wp_BXV)',
    'left_BXV = wp_BXV',
    (_LAW,),
  ),
)

METHODS = (
  Mutant(
    'lenience on the wrong side',
    0,
    'trusts the draft less instead of more',
    _LENIENT,
    'noise.accept_BK * (lenience * q_BK)',
    'noise.accept_BK * (q_BK / lenience)',
    (
      _of(
        'verify/lenient', 'test_accepts_at_the_ratio_divided_by_the_lenience'
      ),
    ),
  ),
  Mutant(
    'greedy lenience as printed',
    0,
    'keeps what is far from the best: at most l times the largest',
    _LENIENT,
    'logits >= best + math.log(lenience)',
    'logits <= best + math.log(lenience)',
    (_NEAR,),
  ),
  Mutant(
    'the stated law forgets the residual',
    0,
    'the distance that is printed is not that of what is emitted',
    _LENIENT,
    'rest_BTV = jnp.maximum(p_BTV - q_BTV, 0)',
    'rest_BTV = p_BTV',
    (_STATED,),
  ),
  Mutant(
    'an early exit starts one token late',
    17,
    'the last committed token is never read by the first layers',
    _EXIT,
    'context.lengths_B - 1 + offset',
    'context.lengths_B + offset',
    (_RESIDUAL, _TEXT),
  ),
  Mutant(
    'the last draft is not read',
    17,
    'verification starts from the residual of the draft before it',
    _EXIT,
    'hidden_B1D, cache = read(cache, token_B, gamma)',
    'hidden_B1D, _ = read(cache, token_B, gamma - 1)',
    (_RESIDUAL,),
  ),
  Mutant(
    'all layers run twice',
    0,
    'verification starts from the tokens again',
    'specdec_jax/decode.py',
    'layers=(drafter.exit, None)',
    'layers=(0, None)',
    (_WORK, _RESIDUAL),
  ),
  Mutant(
    'a part of the layers starts at the first',
    0,
    'the layers after the exit are the first ones again',
    'specdec_jax/models/lm.py',
    'part = range(config.depth)[slice(*layers)]',
    'part = range(config.depth - layers[0])',
    (_TEXT,),
  ),
  Mutant(
    'bigrams follow another token',
    0,
    'the counts of a token are found under the one that follows it',
    _NGRAM,
    'first, then = keys // vocab, keys % vocab',
    'then, first = keys // vocab, keys % vocab',
    (_COUNTS,),
  ),
  Mutant(
    'bigrams go across two texts',
    0,
    'the first token of a text is counted after the last one of another',
    _NGRAM,
    'pairs += [np.asarray(x[:-1]) * vocab + np.asarray(x[1:]) for x in texts]',
    'pairs += [tokens_I[:-1] * vocab + tokens_I[1:]]',
    (_COUNTS,),
  ),
  Mutant(
    'bigrams do not make room',
    0,
    'the unigrams keep all of their mass',
    _NGRAM,
    'left_R1 = 1 - jnp.sum(weight_RM, -1, keepdims=True)',
    'left_R1 = 1 + 0 * jnp.sum(weight_RM, -1, keepdims=True)',
    (_COUNTS,),
  ),
  Mutant(
    'EAGLE reads the feature of the token itself',
    0,
    "the prompt's features are not moved one token on",
    _EAGLE,
    'return jnp.pad(features_BLE, ((0, 0), (1, 0), (0, 0)))[:, :L]',
    'return features_BLE',
    (_CHAIN, _VIEW),
  ),
  Mutant(
    'EAGLE hears the features one token late',
    0,
    'a window starts beside the feature of the last token but one',
    _EAGLE,
    'features_BNE=features_BNE)',
    'features_BNE=jnp.roll(features_BNE, 1, 1))',
    (_CHAIN,),
  ),
  Mutant(
    'EAGLE does not hear what the target made of accepted drafts',
    1,
    'its own hidden states stay in the cache for what is committed',
    _EAGLE,
    'context.live_B[:, None] & (index_BN < context.lengths_B[:, None])',
    'context.live_B[:, None] & (index_BN < state.start_B[:, None])',
    (_CHAIN,),
  ),
  Mutant(
    'EAGLE starts from the last draft of the window before',
    0,
    'the first draft follows what was refused, not what was committed',
    _EAGLE,
    'last_B = jnp.clip(context.lengths_B - 1 - state.start_B, 0, N - 1)',
    'last_B = jnp.full_like(state.start_B, N - 1)',
    (_CHAIN,),
  ),
  Mutant(
    'EAGLE drafts a whole chain from one feature',
    0,
    "each draft is read beside the target's feature, not the draft before it",
    _EAGLE,
    'return drawn(cache, hidden_B1D[:, 0], offset, going_B)',
    'return drawn(cache, hidden_BD, offset, going_B)',
    (_CHAIN,),
  ),
  Mutant(
    'an EAGLE chain leaves no keys',
    2,
    'a draft does not see those before it in its window',
    _EAGLE,
    'hidden_B1D, _, cache = forward.read(',
    'hidden_B1D, _, _ = forward.read(',
    (_CHAIN,),
  ),
  Mutant(
    'an unlikely token stops the draft',
    6,
    'likely tokens are proposed more often than q says',
    _LM,
    'going_B &= _confidence(logits_B1V[:, 0]) >= min_confidence',
    'token_B = noise.draft(offset, q_BV)\n'
    '    going_B &= q_BV[jnp.arange(len(q_BV)), token_B] >= min_confidence',
    (_STOPS, _EAGLE_STOPS),
  ),
  Mutant(
    'a row that has stopped goes on',
    0,
    'the count skips the offset that was not sure',
    _LM,
    'count_B + going_B',
    'count_B + 1',
    (_STOPS,),
  ),
)
