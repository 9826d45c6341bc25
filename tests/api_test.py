"""The Python API on a random model: what users call, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import specdec_jax
from specdec_jax import api, sharding
from specdec_jax.io import tokenizer
from specdec_jax.models import config, lm

pytestmark = pytest.mark.usefixtures('all_compile_in_less_time')

COMMON = dict(max_new_tokens=20, temperature=0.9, seed=3)
PROMPTS = [[5, 6, 7, 5, 6], [1], [9, 8, 7, 9, 8, 7, 9]]


@pytest.fixture(scope='module')
def target():
  return specdec_jax.load('random:tiny')


@pytest.fixture(scope='module')
def draft():
  return specdec_jax.load('random:tiny:1')


@pytest.fixture(scope='module')
def plain(target):
  return specdec_jax.generate(target, PROMPTS, **COMMON)


def test_coupled_output_is_plain_output(target, draft, plain):
  for d in (draft, 'lookup'):
    out = specdec_jax.generate(
      target, PROMPTS, draft=d, rule='coupled', gamma=3, **COMMON
    )
    assert [x.tokens for x in out] == [x.tokens for x in plain]


def test_batches_do_not_change_tokens(target, plain):
  apart = specdec_jax.generate(target, PROMPTS, batch_size=2, **COMMON)
  assert [x.tokens for x in apart] == [x.tokens for x in plain]


def test_samples_of_a_prompt_differ_and_begin_with_the_single_one(
  target, plain
):
  out = specdec_jax.generate(target, PROMPTS, n=3, **COMMON)
  assert [x.tokens for x in out[::3]] == [x.tokens for x in plain]
  for i in range(3):
    assert len({tuple(x.tokens) for x in out[3 * i : 3 * i + 3]}) == 3


def test_streaming_gives_the_tokens_and_text_of_generate(target, plain):
  for draft in (None, 'lookup'):
    pieces = list(
      specdec_jax.stream(target, PROMPTS[0], draft=draft, gamma=3, **COMMON)
    )
    whole = specdec_jax.generate(
      target, PROMPTS[:1], draft=draft, gamma=3, **COMMON
    )[0]
    assert [t for p in pieces for t in p.tokens] == whole.tokens
    assert ''.join(p.text for p in pieces) == whole.text
    assert [o for p in pieces for o in p.origins] == whole.origins


def test_a_stop_string_ends_text_and_tokens(target, plain):
  text = plain[0].text
  stop = text[len(text) // 2 :][:2]
  at = text.find(stop)
  out = specdec_jax.generate(target, PROMPTS[:1], stop=stop, **COMMON)[0]
  assert out.text == text[:at] and out.finish_reason == 'stop'
  assert out.tokens == plain[0].tokens[: len(out.tokens)]
  assert stop in target.tokenizer.decode(out.tokens)
  assert stop not in target.tokenizer.decode(out.tokens[:-1])
  pieces = list(specdec_jax.stream(target, PROMPTS[0], stop=stop, **COMMON))
  assert ''.join(p.text for p in pieces) == out.text
  assert [t for p in pieces for t in p.tokens] == out.tokens


def test_a_stop_id_ends_the_row(target, plain):
  tokens = plain[0].tokens
  stop = tokens[6]
  out = specdec_jax.generate(target, PROMPTS[:1], stop_ids=stop, **COMMON)[0]
  assert out.tokens == tokens[: tokens.index(stop) + 1]
  assert out.finish_reason == 'stop'
  assert plain[0].finish_reason == 'length'


def test_metrics_count_what_came_out(target, draft):
  out = specdec_jax.generate(target, PROMPTS, draft=draft, gamma=3, **COMMON)
  for x in out:
    assert x.metrics['emitted_tokens'] == len(x.tokens) == len(x.origins)
    assert sum(x.metrics['accepted_histogram']) == x.metrics['target_calls']


def test_a_mesh_changes_no_token(target, draft):
  mesh = sharding.make_mesh(data=2, model=2)
  sharded = specdec_jax.load('random:tiny', mesh=mesh)
  small = specdec_jax.load('random:tiny:1', mesh=mesh, replicated=True)
  kwargs = dict(gamma=3, max_new_tokens=12, rule='coupled')
  one = specdec_jax.generate(target, PROMPTS + [[4]], draft=draft, **kwargs)
  all_ = specdec_jax.generate(sharded, PROMPTS + [[4]], draft=small, **kwargs)
  assert [x.tokens for x in all_] == [x.tokens for x in one]


def test_any_number_of_prompts_fits_a_mesh(target):
  sharded = specdec_jax.load(
    'random:tiny', mesh=sharding.make_mesh(data=2, model=1)
  )
  for count in (1, 3):
    kwargs = dict(max_new_tokens=4, rule='coupled')
    out = specdec_jax.generate(sharded, PROMPTS[:count], **kwargs)
    one = specdec_jax.generate(target, PROMPTS[:count], **kwargs)
    assert [x.tokens for x in out] == [x.tokens for x in one]
  assert list(specdec_jax.stream(sharded, PROMPTS[0], max_new_tokens=2))


def test_logits_that_are_not_finite_are_an_error_not_a_token(target):
  with jax.debug_nans(False):
    params = dict(target.params)
    params['head'] = params['head'].at[:, 7].set(float('nan'))
    broken = dataclasses.replace(target, params=params)
    for draft in (None, 'lookup'):
      with pytest.raises(FloatingPointError, match='not finite after 5'):
        specdec_jax.generate(broken, PROMPTS[:1], draft=draft)


def test_scanned_random_models_are_the_same_models(target):
  scanned = specdec_jax.load('random:tiny', scan_layers=True)
  kwargs = dict(max_new_tokens=8, rule='coupled')
  out = specdec_jax.generate(scanned, PROMPTS, **kwargs)
  one = specdec_jax.generate(target, PROMPTS, **kwargs)
  assert [x.tokens for x in out] == [x.tokens for x in one]


def test_a_bfloat16_model_has_float32_logits():
  model = lm.make(config.sized('tiny', dtype='bfloat16'))
  params = lm.init(config.sized('tiny', dtype='bfloat16'), 0)
  logits = model.head(params, jnp.ones((1, 64), jnp.bfloat16))
  assert logits.dtype == jnp.float32
  assert (logits != logits.astype(jnp.bfloat16).astype(jnp.float32)).any()


@pytest.mark.parametrize('name', api.REFUSED)
def test_what_would_change_the_law_is_refused_by_name(target, name):
  with pytest.raises(ValueError, match=name):
    specdec_jax.generate(target, PROMPTS, **{name: 0.5})


@pytest.mark.parametrize(
  'kwargs,message',
  [
    (dict(gamma=-1), 'gamma=-1'),
    (dict(temperature=-0.1), 'temperature'),
    (dict(temperature=float('nan')), 'temperature'),
    (dict(top_p=0.0), 'top_p'),
    (dict(top_p=1.1), 'top_p'),
    (dict(top_k=-1), 'top_k'),
    (dict(max_new_tokens=0), 'max_new_tokens'),
    (dict(max_new_tokens=600), 'no room'),
    (dict(rule='rejekt'), 'rejekt'),
    (dict(draft='lockup'), 'lockup'),
    (dict(n=0), 'n=0'),
    (dict(stop=''), 'stop'),
    (dict(temperatur=1.0), 'temperatur'),
    (dict(draft='lookup', min_match=0), 'min_match'),
    (dict(draft='lookup', draft_options=dict(min_match=0)), 'min_match'),
    (dict(gamma=2.0), 'gamma=2.0'),
    (dict(draft=[1]), 'draft'),
    (dict(temperature=1e300), 'temperature'),
    (dict(top_p=1e-50), 'top_p'),
    (dict(seed=-1), 'seed'),
    (dict(max_new_tokens=2.5), 'max_new_tokens'),
  ],
)
def test_bad_settings_are_one_clear_error(target, kwargs, message):
  with pytest.raises(ValueError, match=message):
    specdec_jax.generate(target, PROMPTS, **kwargs)


def test_a_draft_of_another_tokenizer_is_refused(target, draft):
  other = dataclasses.replace(draft, tokenizer=tokenizer.from_bytes(256, 'x'))
  with pytest.raises(ValueError, match='different tokenizers'):
    specdec_jax.generate(target, PROMPTS, draft=other)


@pytest.mark.parametrize('prompt', ['', [], [512], [-1], [1] * 512])
def test_bad_prompts_are_refused(target, prompt):
  with pytest.raises(ValueError):
    specdec_jax.generate(target, [prompt])
