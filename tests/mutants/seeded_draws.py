"""Seeded bugs of sampling: the transform of logits, and every draw's key."""

from tests.mutants.mutant import Mutant

_SAMPLING = 'specdec_jax/sampling.py'
_LM = 'specdec_jax/drafters/lm.py'

_ORACLE = 'tests/sampling_test.py::test_probabilities_equal_the_sorting_oracle'
_EXACT = 'tests/sampling_test.py::test_a_mass_of_exactly_top_p_is_enough'
_GREEDY = 'tests/sampling_test.py::test_greedy_is_the_first_maximum'
_ROWS = 'tests/sampling_test.py::test_a_row_does_not_depend_on_the_others'
_LAW = 'tests/draws_test.py::test_law_of_a_draw'
_BITS = 'tests/draws_test.py::test_bits_are_jaxs_own'
_SMALL = (
  'tests/draws_test.py::'
  'test_exponentials_follow_their_law_and_resolve_small_values'
)
_ENDS = 'tests/draws_test.py::test_no_bits_give_an_infinite_or_zero_arrival'
_KEYS = 'tests/draws_test.py::test_no_two_draws_share_a_key'
_PLACE = 'tests/draws_test.py::test_next_draw_belongs_to_its_position'
_BATCH = 'tests/draws_test.py::test_a_rows_noise_does_not_depend_on_the_batch'
_MIXED = (
  'tests/decode_identity_test.py::'
  'test_plain_decoding_is_a_loop_over_single_draws'
)

_DRAFT_KEYS = 'draft_keys_B = fold(role(_DRAFT), lengths_B)'
_ACCEPT_KEYS = 'accept_keys_B = fold(role(_ACCEPT), lengths_B)'
_DRAFT_DRAW = 'return pick(at(draft_keys_B, offset), q_BV)'

TRANSFORM = (
  Mutant(
    'temperature multiplies',
    10,
    'hot becomes cold',
    _SAMPLING,
    'z = (x - best) / t_B11',
    'z = (x - best) * t_B11',
    (_ORACLE,),
  ),
  Mutant(
    'temperature off by 2 %',
    10,
    'a bias too small for tests of few samples',
    _SAMPLING,
    'z = (x - best) / t_B11',
    'z = (x - best) / 1.02 / t_B11',
    (_ORACLE,),
  ),
  Mutant(
    'temperature after the cut',
    10,
    'top-p sees the law at temperature 1',
    _SAMPLING,
    'p /= jnp.sum(p, -1, keepdims=True)\n    p = jax.lax.cond(',
    'p /= jnp.sum(p, -1, keepdims=True)\n    p = p ** t_B11.astype(wide)'
    '\n    p /= jnp.sum(p, -1, keepdims=True)\n    p = jax.lax.cond(',
    (_ORACLE,),
  ),
  Mutant(
    'top-k keeps one more',
    10,
    'tokens outside the support are said',
    _SAMPLING,
    'jnp.sum(bits <= t, -1, keepdims=True) >= k',
    'jnp.sum(bits <= t, -1, keepdims=True) > k',
    (_ORACLE,),
  ),
  Mutant(
    'top-p needs more than its mass',
    10,
    'a mass of exactly top_p takes one token more',
    _SAMPLING,
    'mass(t) >= top',
    'mass(t) > top',
    (_EXACT,),
  ),
  Mutant(
    'top-p drops the last token',
    10,
    'what is kept has less than top_p',
    _SAMPLING,
    'kept = jnp.where(bits >= t, p, 0)',
    'kept = jnp.where((bits > t) | (p == p.max()), p, 0)',
    (_ORACLE,),
  ),
  Mutant(
    'top-p is not normalised',
    10,
    'target and draft keep different masses',
    _SAMPLING,
    'p, kept / total)',
    'p, kept)',
    (_ORACLE,),
  ),
  Mutant(
    'top-p renormalises every row',
    26,
    "a row's bits depend on its neighbours' settings",
    _SAMPLING,
    'jnp.where(off_B11, p, kept',
    'jnp.where(top_p_B11 > 1, p, kept',
    (_ROWS,),
  ),
  Mutant(
    'greedy takes the last maximum',
    13,
    'ties go another way than in plain decoding',
    _SAMPLING,
    'first = jnp.min(jnp.where(x == best, index, V), -1, keepdims=True)',
    'first = jnp.max(jnp.where(x == best, index, -1), -1, keepdims=True)',
    (_GREEDY,),
  ),
  Mutant(
    'greedy at temperature 0 only',
    13,
    'temperature 1e-8 shares the mass among ties',
    _SAMPLING,
    'sampling.temperature_B < GREEDY_BELOW',
    'sampling.temperature_B <= 0',
    (_ORACLE,),
  ),
  Mutant(
    'greedy rows sample among sampled ones',
    26,
    "a row depends on its neighbours' temperature",
    _SAMPLING,
    'return jnp.where(greedy_B11, one_hot, p)',
    'return p',
    (_ORACLE,),
  ),
  Mutant(
    'one greedy row makes the batch greedy',
    26,
    'the others take their likeliest token without noise',
    _SAMPLING,
    'any_sampled = ~jnp.all(is_greedy(sampling))',
    'any_sampled = ~jnp.any(is_greedy(sampling))',
    ('tests/draws_test.py::test_rows_are_drawn_beside_greedy_ones',),
  ),
)

DRAWS = (
  Mutant(
    'exponentials of 23 bits',
    45,
    'small arrival times are missing: flat tails starve',
    _SAMPLING,
    'u = (bits.astype(dtype) + 0.5) * 2.0**-32',
    'u = ((bits >> 9).astype(dtype) + 0.5) * 2.0**-23',
    (_SMALL,),
  ),
  Mutant(
    'an arrival at infinity',
    45,
    'the largest bits round to u = 1',
    _SAMPLING,
    'jnp.minimum(u, 1 - 2.0**-24)',
    'jnp.minimum(u, 1)',
    (_ENDS,),
  ),
  Mutant(
    'noise of another generator',
    26,
    'one turn of the cipher is wrong: bits that nobody has tested',
    _SAMPLING,
    '(17, 29, 16, 24)',
    '(17, 29, 16, 23)',
    (_BITS,),
  ),
  Mutant(
    'the last arrival wins',
    4,
    'draws from the wrong law',
    _SAMPLING,
    'weights_BV\n    / jax.vmap',
    'weights_BV\n    * jax.vmap',
    (_LAW,),
  ),
  Mutant(
    'draft and accept share a key',
    24,
    'whether a token passes depends on which it is',
    _SAMPLING,
    '_DRAFT, _ACCEPT, _NEXT = range(3)',
    '_DRAFT, _ACCEPT, _NEXT = 0, 0, 1',
    (_KEYS,),
  ),
  Mutant(
    'accept and next share a key',
    24,
    "the recovered token depends on the refusal's noise",
    _SAMPLING,
    'functools.partial(at, accept_keys_B)',
    'lambda k: next_keys(seed_B, request_B, lengths_B + k)',
    (_KEYS,),
  ),
  Mutant(
    "the draft draws with the next token's key",
    24,
    'rejection with noise that is already used for the recovered token',
    _SAMPLING,
    _DRAFT_DRAW,
    'return next_token(jnp.full_like(lengths_B, offset), q_BV)',
    (_PLACE,),
  ),
  Mutant(
    'draft noise keyed by position',
    46,
    'a position met by two windows is drafted with the same noise twice',
    _SAMPLING,
    _DRAFT_DRAW,
    'return pick(fold(role(_DRAFT), lengths_B + offset), q_BV)',
    (_PLACE,),
  ),
  Mutant(
    'accept noise keyed by position',
    46,
    'a position met by two windows is judged with the same noise twice',
    _SAMPLING,
    'functools.partial(at, accept_keys_B)',
    'lambda k: fold(role(_ACCEPT), lengths_B + k)',
    (_PLACE,),
  ),
  Mutant(
    'draft noise of every window alike',
    25,
    'windows are not independent',
    _SAMPLING,
    _DRAFT_KEYS,
    'draft_keys_B = role(_DRAFT)',
    (_KEYS,),
  ),
  Mutant(
    'accept noise of every window alike',
    25,
    'windows are not independent',
    _SAMPLING,
    _ACCEPT_KEYS,
    'accept_keys_B = role(_ACCEPT)',
    (_KEYS,),
  ),
  Mutant(
    'accept noise of every offset alike',
    24,
    'one uniform judges the whole window',
    _SAMPLING,
    'functools.partial(at, accept_keys_B)',
    'lambda k: at(accept_keys_B, 0)',
    (_KEYS,),
  ),
  Mutant(
    'next draw keyed by its window',
    24,
    "the emitted token's noise is not plain decoding's",
    _SAMPLING,
    'next_keys(seed_B, request_B, lengths_B + offset_B)',
    'next_keys(seed_B, request_B, lengths_B)',
    (_PLACE,),
  ),
  Mutant(
    'requests share their noise',
    25,
    'rows with the same prompt say the same',
    _SAMPLING,
    "jax.random.fold_in(jax.random.key(seed, impl='threefry2x32'), request)",
    "jax.random.key(seed, impl='threefry2x32')",
    (_KEYS,),
  ),
  Mutant(
    'noise keyed by the row',
    26,
    "a request's tokens depend on its place in the batch",
    _SAMPLING,
    'return jax.vmap(key)(seed_B, request_B)',
    'return jax.vmap(key)('
    'seed_B, jnp.arange(len(request_B), dtype=jnp.uint32))',
    (_BATCH,),
  ),
  Mutant(
    'the draft samples a rounded q',
    11,
    'sampled in bfloat16, judged in float32: a bias of 1e-3',
    _LM,
    'noise.draft(offset, q_BV), q_BV',
    'noise.draft(offset, q_BV.astype(jnp.bfloat16).astype(q_BV.dtype)), q_BV',
    ('tests/drafters/lm_test.py::test_what_is_sampled_is_what_is_told',),
  ),
  Mutant(
    'the draft takes its likeliest token',
    12,
    'a certain token told as if it had been sampled from q',
    _LM,
    'noise.draft(offset, q_BV), q_BV',
    'jnp.argmax(q_BV, -1).astype(jnp.int32), q_BV',
    ('tests/drafters/lm_test.py::test_what_is_sampled_is_what_is_told',),
  ),
)
