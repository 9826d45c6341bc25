"""GGUF files: the same model as the Hugging Face form, or one clear message."""

import struct

import gguf
import numpy as np
import pytest

from specdec_jax.io import sources, tokenizer
from specdec_jax.io.gguf import container
from specdec_jax.models import attention, rope
from specdec_jax.models import config as model_config
from tests.io import tiny


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize(
  'arch, changes',
  # The second is Mistral-Nemo's form: heads that are wider than width / heads.
  [('llama', {}), ('llama', dict(head_dim=12)), ('qwen2', {}), ('qwen3', {})],
)
def test_equals_the_hugging_face_form(tmp_path, arch, changes, tied):
  c = tiny.config(arch, tied=tied, **changes)
  weights = tiny.arrays(c)
  hf = tiny.read(tiny.write_folder(tmp_path / 'hf', c, arch, weights))
  gg = tiny.read(tiny.write_gguf(tmp_path / 'm.gguf', c, arch, weights))
  # Fields are float32: 1e-6 comes back as 9.99999997e-07.
  assert gg.config.norm_eps == pytest.approx(hf.config.norm_eps)
  same = {**vars(gg.config), 'norm_eps': hf.config.norm_eps}
  assert model_config.LMConfig(**same) == hf.config
  tiny.check_equal(gg.params, hf.params)
  tokenizer.check_same(gg.tokenizer, hf.tokenizer)
  ids = hf.tokenizer.encode('<|im_start|>wörld 123\n\n  日本 🙂<|im_end|>')
  assert gg.tokenizer.decode(ids) == hf.tokenizer.decode(ids)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path):
  sizes = dict(head_dim=16, rope_theta=500000.0)
  c = tiny.config(**sizes, rope_scaling=rope.RopeScaling(factor=32.0))
  plain, slow = map(attention.inverse_frequencies, (tiny.config(**sizes), c))
  divisors = np.asarray(plain / slow)
  assert {1, 32} < set(divisors.tolist())  # and others between them
  add = lambda w: w.add_tensor('rope_freqs.weight', divisors)
  assert settings_of(tmp_path, add, **sizes).rope_scaling == c.rope_scaling


def settings_of(folder, *add, arch='llama', **changes):
  """Those of a file with these fields or tensors more."""
  path, c = folder / 'm.gguf', tiny.config(**changes)
  tiny.write_gguf(path, c, arch, extra=add)
  return sources.open_source(str(path)).config


FACTOR = 'llama.rope.scaling.factor'
YARN = [
  lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
  lambda w: w.add_rope_scaling_factor(4.0),
]


@pytest.mark.parametrize(
  'add, scaling',
  [
    ([lambda w: w.add_float32(FACTOR, 4.0)], rope.RopeScaling(4.0, 1, 4, 0)),
    (
      [lambda w: w.add_float32('llama.rope.scale_linear', 2.0)],
      rope.RopeScaling(2.0, 1, 4, 0),
    ),
    ([lambda w: w.add_float32(FACTOR, 0.0)], None),
    (
      [
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
        lambda w: w.add_float32(FACTOR, 4.0),
      ],
      None,
    ),
    (YARN, rope.Yarn(4.0, 128, magnitude=1 + 0.1 * np.log(4))),
    (
      [
        *YARN,
        lambda w: w.add_rope_scaling_orig_ctx_len(16),
        lambda w: w.add_float32('llama.rope.scaling.yarn_beta_fast', 8.0),
      ],
      rope.Yarn(4.0, 16, beta_fast=8.0, magnitude=1 + 0.1 * np.log(4)),
    ),
  ],
)
def test_scalings_are_those_of_llama_cpp(tmp_path, add, scaling):
  """A factor without a type is linear; YaRN begins with the context."""
  c = settings_of(tmp_path, *add)
  assert c.rope_scaling == scaling
  longer = isinstance(scaling, rope.Yarn) and scaling.original_context == 128
  assert c.context == (512 if longer else 128)


ODD, ODD4 = (np.linspace(1, 9, n).astype(np.float32) for n in (3, 4))
GATE = 'blk.0.ffn_gate_inp.weight'


@pytest.mark.parametrize(
  'arch, add, message',
  [
    ('gemma', lambda w: None,
     r"'gemma'.*\['gemma2', 'gemma3', 'llama', 'qwen2', 'qwen3'\]"),
    ('llama', lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
     "rope.scaling.type 'longrope'"),
    ('llama', lambda w: w.add_rope_dimension_count(4), 'count=4 of 8'),
    ('llama', lambda w: w.add_uint32('general.alignment', 48), 'alignment=48'),
    ('llama', lambda w: w.add_tensor('rope_freqs.weight', ODD),
     'rope_freqs.weight has other divisors'),
    ('llama', lambda w: w.add_tensor('rope_freqs.weight', ODD4),
     'rope_freqs.weight has other divisors'),
    ('llama', lambda w: w.add_sliding_window(8), 'sliding_window=8 .*absent'),
    ('llama', lambda w: w.add_expert_count(8), 'expert_count=8'),
    ('llama', lambda w: w.add_value_length(4), 'value_length=4 of 8'),
    ('qwen2', lambda w: w.add_causal_attention(False), 'causal=False'),
    ('qwen2', lambda w: w.add_logit_scale(0.5), 'scale=0.5 .*absent, 0, 1'),
    ('llama', lambda w: w.add_rope_scaling_attn_factors(1.5), 'factor=1.5'),
    ('gemma2', lambda w: w.add_uint32('gemma2.of_later', 3), 'of_later=3'),
    ('llama', lambda w: w.add_tensor(GATE, ODD[None]),
     r'no place for \[blk.0.ffn_gate_inp.weight\]'),
    ('gemma3', lambda w: w.add_attn_logit_softcapping(50.0),
     'attn_logit_softcapping=50.0 is not supported; allowed: absent, 0'),
    # Allocates nothing.
    ('gemma2', lambda w: w.add_block_count(1 << 31),
     'block_count=2147483648.*tensors'),
    ('gemma2', lambda w: w.add_float32('gemma2.attention.sliding_window', 4.0),
     'sliding_window=4.0 .*a positive integer'),
  ],
)  # fmt: skip
def test_unsupported_files_are_named(tmp_path, arch, add, message):
  path = tiny.write_gguf(tmp_path / 'a.gguf', tiny.config(), arch, extra=[add])
  with pytest.raises(ValueError, match=message):
    tiny.read(path)


@pytest.mark.parametrize(
  'arch, depth, scaled_by',
  [('gemma2', 46, 'heads'), ('gemma2', 42, 'head'), ('gemma3', 62, 'heads'),
   ('gemma3', 46, 'head')],
)  # fmt: skip
def test_the_largest_gemma_scales_its_queries_otherwise(
  tmp_path, arch, depth, scaled_by
):
  """By width / heads, where the others have the size of a head (llama.cpp)."""
  found = settings_of(tmp_path, arch=arch, head_dim=16, depth=depth)
  assert found.query_scale == {'heads': 8, 'head': 16}[scaled_by] ** -0.5


@pytest.mark.parametrize(
  'arch, caps', [('gemma2', (50.0, 30.0)), ('gemma3', (None, None))]
)
def test_absent_soft_caps_are_those_of_the_family(tmp_path, arch, caps):
  """llama.cpp reads both as optional; Gemma 2 never goes without."""
  c = settings_of(tmp_path, arch=arch)
  assert (c.attn_softcap, c.logit_softcap) == caps


def test_fields_that_change_nothing_are_passed_over(tmp_path):
  plain = settings_of(tmp_path)
  assert plain == settings_of(
    tmp_path,
    lambda w: w.add_vocab_size(320),
    lambda w: w.add_causal_attention(True),
    lambda w: w.add_expert_count(0),
    lambda w: w.add_value_length(8),
    lambda w: w.add_sliding_window(0),
    lambda w: w.add_logit_scale(1.0),
    lambda w: w.add_uint32('other.sliding_window', 3),
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """The bytes of a file."""
  path = tmp_path_factory.mktemp('whole') / 'm.gguf'
  return tiny.write_gguf(path, tiny.config()).read_bytes()


def refused(path, data):
  path.write_bytes(data)
  with pytest.raises(ValueError) as e:
    tiny.read(path)
  assert path.name in str(e.value)
  return str(e.value)


def test_other_files_are_recognised(tmp_path, whole):
  path = tmp_path / 'm.gguf'
  assert 'not a GGUF' in refused(path, b'')
  assert 'cut' in refused(path, b'GGUF')
  assert 'not a GGUF' in refused(path, b'PK\3\4' + whole[4:])
  assert 'git lfs pull' in refused(path, b'version https://git-lfs.github.com/')
  version = lambda raw: whole[:4] + raw + whole[8:]
  assert 'version 9' in refused(path, version(struct.pack('<I', 9)))
  assert 'little-endian' in refused(path, version(struct.pack('>I', 3)))
  assert 'version 1' in refused(path, version(struct.pack('<I', 1)))
  two = whole.replace(b'blk.0.attn_k.weight', b'blk.0.attn_q.weight')
  assert 'two tensors are called blk.0.attn_q' in refused(path, two)
  none = whole.replace(b'llama.block_count', b'llama.block_kount')
  assert 'block_count=None is not supp' in refused(path, none)


@pytest.mark.parametrize('at', [8, 16])
@pytest.mark.parametrize('count', [1 << 20, 1 << 40, (1 << 64) - 1])
def test_huge_counts_allocate_nothing(tmp_path, whole, at, count):
  data = whole[:at] + struct.pack('<Q', count) + whole[at + 8 :]
  assert 'cut or damaged' in refused(tmp_path / 'm.gguf', data)


def test_every_cut_is_refused(tmp_path, whole):
  for keep in [*range(0, 200, 7), *range(200, len(whole), len(whole) // 40)]:
    refused(tmp_path / 'm.gguf', whole[:keep])


def test_damaged_headers_give_one_message_or_load(tmp_path):
  # Every ninth byte set to 0xFF: a ValueError, or still a model.
  c = tiny.config(depth=1, vocab=260, width=8, heads=1, kv_heads=1, mlp=8)
  path = tiny.write_gguf(tmp_path / 'm.gguf', c)
  whole = path.read_bytes()
  tensors = container.parse(path).tensors.values()
  start = min(whole.index(t.raw.tobytes()) for t in tensors)
  messages = 0
  for at in range(0, start, 9):
    path.write_bytes(whole[:at] + b'\xff' + whole[at + 1 :])
    try:
      opened = sources.open_source(str(path))
    except ValueError as e:
      messages += str(path.name) in str(e)
  assert messages > start // 300
  assert opened is not None


def test_integer_tensors_are_refused_by_name(tmp_path):
  c = tiny.config()
  weights = tiny.arrays(c) | {'model.norm.weight': np.ones(c.width, np.int32)}
  path = tiny.write_gguf(tmp_path / 'm.gguf', c, weights=weights)
  with pytest.raises(ValueError, match='output_norm.weight is stored as I32'):
    tiny.read(path)
