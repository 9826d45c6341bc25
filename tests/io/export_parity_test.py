"""transformers reads an export, gives its logits, and drafts with it."""

import numpy as np
import pytest
import tokenizers

from specdec_jax.io import export, hf, names
from specdec_jax.io import tokenizer as tokenizer_lib
from tests.io import exporting

pytestmark = pytest.mark.parity


def transformers_lib():
  pytest.importorskip('torch', reason='needs torch (extra parity)')
  return pytest.importorskip(
    'transformers', reason='needs transformers (extra parity)'
  )


def save(tiny, folder, c, params):
  export.save(folder, c, params, exporting.tokenizer(tiny))


def small_tokenizer():
  """32 words; the golden models know 64 ids."""
  words = {f'w{i}': i for i in range(32)}
  inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, 'w0'))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return tokenizer_lib.Tokenizer('words', inner)


@pytest.mark.parametrize('family', exporting.GOLDENS)
def test_transformers_gives_the_golden_logits(family, tmp_path):
  transformers = transformers_lib()
  import torch

  opened = hf.open_folder(exporting.GOLDEN / family, family)
  params = names.read(opened.reader, opened.config)
  export.save(tmp_path / 'x', opened.config, params, small_tokenizer())
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'x', dtype=torch.float32, attn_implementation='eager'
  )
  golden = np.load(exporting.GOLDEN / family / 'logits.npz')
  with torch.no_grad():
    theirs = model(torch.as_tensor(golden['tokens'])).logits.numpy()
  np.testing.assert_allclose(theirs, golden['logits'], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('case', exporting.CASES)
def test_transformers_agrees_with_the_saved_model(tiny, tmp_path, case):
  transformers = transformers_lib()
  import torch

  c = tiny.config(**exporting.CASES[case][1])
  params = exporting.random_params(c)
  save(tiny, tmp_path / 'x', c, params)
  model, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'x', output_loading_info=True
  )
  assert not any(info.values()), info
  assert model.dtype == torch.float32
  assert model.config.eos_token_id == [259, 0]
  tokens_BT = np.random.default_rng(0).integers(0, c.vocab, (2, 80))
  with torch.no_grad():
    theirs = model(torch.as_tensor(tokens_BT)).logits.numpy()
  ours = np.asarray(exporting.logits_of(c, params, tokens_BT.astype(np.int32)))
  scale = np.abs(ours).max()
  np.testing.assert_allclose(theirs / scale, ours / scale, atol=1e-5)


@pytest.mark.parametrize('add_bos', [False, True])
@pytest.mark.parametrize('family', ['llama', 'qwen2'])
def test_transformers_tokenizes_alike(tiny, tmp_path, family, add_bos):
  transformers = transformers_lib()
  c = tiny.config(family)
  was = exporting.tokenizer(tiny, add_bos=add_bos)
  export.save(tmp_path / 'x', c, exporting.random_params(c), was)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'x')
  assert theirs(exporting.TEXT).input_ids == was.encode(exporting.TEXT)
  assert (theirs.eos_token_id, theirs.bos_token_id) == (259, 258)
  assert theirs.decode(was.encode(exporting.TEXT)) == was.decode(
    was.encode(exporting.TEXT), special=True
  )
  messages = [dict(role='user', content='hello')]
  assert theirs.apply_chat_template(messages, tokenize=False) == was.chat(
    messages
  )


@pytest.mark.parametrize('same', [False, True])
def test_a_saved_model_drafts_in_transformers(tiny, tmp_path, same):
  """Greedy text is the target's own; a draft that is the target is accepted."""
  transformers = transformers_lib()
  import torch

  wide = tiny.config(width=64, mlp=96)
  save(tiny, tmp_path / 'target', wide, exporting.random_params(wide))
  c = wide if same else tiny.config('qwen2', depth=1)
  save(tiny, tmp_path / 'draft', c, exporting.random_params(c))
  read = transformers.AutoModelForCausalLM.from_pretrained
  target, draft = read(tmp_path / 'target'), read(tmp_path / 'draft')
  # Else it stops where a random draft is unsure of itself, which is always.
  draft.generation_config.assistant_confidence_threshold = 0.0
  prompt = torch.as_tensor([[72, 101, 108, 108, 111]])
  calls = dict(target=0, draft=0)

  def count(name):
    def hook(*_):
      calls[name] += 1

    return hook

  target.register_forward_hook(count('target'))
  draft.register_forward_hook(count('draft'))
  plain = target.generate(prompt, max_new_tokens=40, do_sample=False)
  alone, calls['target'] = calls['target'], 0
  drafted = target.generate(
    prompt, max_new_tokens=40, do_sample=False, assistant_model=draft
  )
  assert drafted.tolist() == plain.tolist()
  assert alone > 20, plain  # long enough to say something
  assert calls['draft'] > 0
  if same:
    assert calls['target'] < alone / 4, calls
