"""Every key of every family's config.json: what it means where it is absent,
and that none which changes the model is passed over."""

import json
import pathlib

import pytest

from specdec_jax.io.config_json import defaults, families, json_object
from tests.io import tiny

DERIVED = json.loads((tiny.GOLDEN / 'derived.json').read_text())
FAMILIES = sorted(families.FAMILIES)
# Fields of transformers' classes that do not change a pass without dropout.
HARMLESS = frozenset(
  'attention_dropout attn_pdrop bos_token_id classifier_dropout dropout_rate '
  'embd_pdrop eos_token_id initializer_factor initializer_range is_decoder '
  'pad_token_id pretraining_tp reorder_and_upcast_attn resid_pdrop '
  'summary_activation summary_first_dropout summary_proj_to_labels '
  'summary_type summary_use_proj use_cache'.split()
)


def read(raw):
  return families.from_json(raw, pathlib.Path('config.json'))[0]


@pytest.mark.parametrize('kind', FAMILIES)
def test_a_field_of_the_config_class_is_read_or_changes_nothing(kind):
  fields = defaults.of(kind)
  s = json_object.Json(pathlib.Path('config.json'), {}, fields)
  families.FAMILIES[kind][0](s)
  for key in fields.keys() - s.seen - HARMLESS - {'rope_theta'}:
    assert key in defaults.NEUTRAL, key
    assert fields[key] in (None, *defaults.NEUTRAL[key]), key
  assert not HARMLESS & defaults.NEUTRAL.keys()
  assert not HARMLESS & s.seen - {'pad_token_id'}  # with which a T5 begins


@pytest.mark.parametrize('kind', FAMILIES)
def test_what_follows_from_the_defaults(kind):
  """A file that says no more than its family."""
  c, theirs = read({'model_type': kind}), DERIVED[kind]
  get = theirs.get
  assert c.tied == (get('tie_word_embeddings', c.tied))
  if kind in ('gpt2', 't5'):
    return
  assert c.kv_heads == theirs['num_key_value_heads']
  width = theirs['hidden_size']
  assert c.head_dim == get('head_dim', width // theirs['num_attention_heads'])
  kinds = get('layer_types', ['sliding_attention'] * c.depth)
  wide = [(get('sliding_window') or 0) * (x[0] == 's') for x in kinds]
  assert [c.windows[i % len(c.windows)] for i in range(c.depth)] == wide
  has = get('no_rope_layers', [1] * c.depth)
  assert [c.rotated[i % len(c.rotated)] for i in range(c.depth)] == has
  rope = theirs['rope_parameters']
  if kind == 'gemma3_text':
    assert c.local_rope_theta == rope['sliding_attention']['rope_theta']
    rope = rope['full_attention']
  assert c.rope_theta == rope['rope_theta'] and c.rope_scaling is None
  act = theirs[
    {'gemma2', 'gemma3_text'} & {kind} and 'hidden_activation' or 'hidden_act'
  ]
  assert c.act == families._ACTS[act]


def test_null_is_no_cap():
  """An absent key is the family's; null is what the file says."""
  caps = ('attn_logit_softcapping', 'final_logit_softcapping')
  of = lambda c: (c.attn_softcap, c.logit_softcap)
  for given, want in (
    ({}, (50.0, 30.0)),
    ({caps[0]: None}, (None, 30.0)),
    (dict.fromkeys(caps), (None, None)),
    (dict.fromkeys(caps, 7), (7.0, 7.0)),
  ):
    assert of(read({'model_type': 'gemma2'} | given)) == want


def test_what_follows_for_a_t5_and_a_gpt2():
  c, theirs = read({'model_type': 't5'}), DERIVED['t5']
  assert (c.depth, c.encoder.depth) == (theirs['num_decoder_layers'], 6)
  assert c.gated == theirs['is_gated_act'] and c.act == theirs['dense_act_fn']
  assert (c.head_scale != 1) == theirs['scale_decoder_outputs']
  assert c.start == theirs['pad_token_id'] and c.norm_eps == 1e-6
  gated = read({'model_type': 't5', 'feed_forward_proj': 'gated-gelu'})
  assert gated.gated and gated.act == 'gelu_tanh'
  c = read({'model_type': 'gpt2'})
  assert (c.mlp, c.head_dim, c.norm_eps) == (4 * 768, 64, 1e-5)


LONG = dict(type='longrope', long_factor=[2] * 48, short_factor=[1] * 48)
DOUBLE = dict(rope_type='linear', factor=2.0)
# Other settings for layers with a window.
TWO = dict(full_attention={}, sliding_attention=DOUBLE)


@pytest.mark.parametrize(
  'kind, changes, message',
  [
    ('llama', dict(sliding_window=4096), 'sliding_window=4096 .*absent'),
    ('llama', dict(embedding_multiplier=12), 'multiplier=12 .*absent, 1'),
    ('llama', dict(partial_rotary_factor=0.5), 'rotary_factor=0.5'),
    ('mistral', dict(layer_types=['full_attention'] * 32), 'layer_types'),
    ('qwen2', dict(qk_layernorm=True), 'qk_layernorm=True .*absent, False'),
    ('qwen3', dict(max_window_layers=-1, use_sliding_window=True), 'layers=-1'),
    ('gemma', dict(use_bidirectional_attention=True), 'bidirectional'),
    ('olmo2', dict(clip_qkv=8.0), 'clip_qkv=8.0'),
    ('phi3', dict(rope_scaling=dict(type='yarn')), "'yarn' of a Phi-3"),
    ('phi3', dict(rope_scaling=dict(rope_type='yarn', factor=2)), 'a Phi-3'),
    ('phi3', dict(rope_scaling='yarn'), "rope_scaling='yarn' .* an object"),
    ('llama', dict(rope_scaling=dict(rope_type=['linear'])), 'rope_type'),
    ('phi3', dict(rope_scaling=dict(type='su')), 'short_factor=None'),
    ('phi3', dict(rope_scaling=LONG | dict(short_factor=[1])), '1 divisors'),
    ('smollm3', dict(no_rope_layers=[1] * 3), 'each of 36 layers'),
    ('granite', dict(attention_multiplier=0), 'attention_multiplier=0'),
    ('granite', dict(tie_word_embeddings='no'), "'no' .*true, false"),
    ('t5', dict(rope_scaling=DOUBLE), 'rope_scaling'),
    ('llama', dict(rope_parameters=dict(factor=4.0)), 'factor=4.0 .*absent, 1'),
    ('llama', dict(rope_scaling=DOUBLE | dict(low_freq_factor=1)), 'low_freq'),
    (
      'llama',
      dict(rope_scaling=DOUBLE, rope_parameters=dict(rope_theta=1e6)),
      'rope_theta=1000000.0 of rope_parameters.* allowed: rope_theta in rope_s',
    ),
    ('gemma3_text', dict(rope_parameters=DOUBLE), 'an object for full_attent'),
    ('opt', {}, "'opt' is not .*'llama', 'mistral', "),
    (['llama'], {}, 'model_type'),
    ('gemma3', {}, "'gemma3' .*'gemma3_text'"),
    ('llama', dict(rope_parameters={'rope_type': 'axial'}), "axial'.*'llama3'"),
    ('llama', dict(rope_scaling={'type': 'dynamic'}), 'factor=None'),
    ('llama', dict(rope_parameters=TWO), 'per layer type'),
    ('llama', dict(rope_parameters=[3]), 'an object'),
    ('llama', dict(hidden_act='mish'), "hidden_act='mish'"),
    ('llama', dict(quantization_config={'bits': 4}), 'quantization_config'),
    ('llama', dict(hidden_size=-1), 'hidden_size=-1 .*a positive integer'),
    ('llama', dict(rms_norm_eps=float('nan')), 'rms_norm_eps=nan'),
    ('llama', dict(num_key_value_heads=3), 'multiple of kv_heads=3'),
    ('gpt2', dict(activation_function='tanh'), "='tanh'.*'gelu_new'"),
    ('gemma3_text', dict(attn_logit_softcapping=50.0), 'softcapping=50.0 is n'),
    ('gemma3_text', dict(layer_types=['x'] * 26), 'types=.*sliding_attention'),
    ('gemma3_text', dict(rope_parameters=TWO), 'scaled .* sliding_attention'),
  ],
)  # fmt: skip
def test_a_key_that_changes_the_model_is_obeyed_or_refused(
  kind, changes, message
):
  with pytest.raises(ValueError, match=message):
    read({'model_type': kind} | changes)


@pytest.mark.parametrize(
  'kind, rope, context',
  [
    ('phi3', LONG, 4096),
    ('llama', dict(type='dynamic', factor=2.0), 32768),
    ('llama', dict(type='linear', factor=2.0), 32768),
    (
      'llama',
      dict(type='yarn', factor=2.0, original_max_position_embeddings=32768),
      65536,
    ),
  ],
)
def test_contexts_end_where_the_rotation_would_change(kind, rope, context):
  """YaRN is for texts that are `factor` times as long."""
  sizes = dict(model_type=kind, max_position_embeddings=32768)
  c = read(sizes | dict(rope_scaling=rope))
  assert c.context == context
  dynamic = rope['type'] == 'dynamic'
  assert (c.rope_scaling is None) == dynamic


@pytest.mark.parametrize(
  'kind, changes',
  [
    ('llama', dict(sliding_window=None, embedding_multiplier=1.0)),
    ('llama', dict(use_sliding_window=False, sliding_window=4096)),
    ('llama', dict(num_local_experts=0, pruned_heads={}, my_own_key=3)),
    ('llama', dict(rope_parameters=dict(full_attention={'rope_theta': 1e4}))),
    ('qwen2', dict(sliding_window=7, max_window_layers=3)),
    ('qwen3', dict(use_sliding_window=True, sliding_window=None)),
    ('gemma', dict(hidden_activation='gelu_pytorch_tanh')),
    ('smollm3', dict(no_rope_layers=None, use_sliding_window=True)),
  ],
)
def test_a_key_that_changes_nothing_is_passed_over(kind, changes):
  assert read({'model_type': kind} | changes) == read({'model_type': kind})
