"""Writes the golden folders with torch and transformers (extra `parity`).

  python tests/io/golden/make.py [NAME ...]

Each folder is what save_pretrained writes for a tiny random model in bfloat16
of the config.json there, in which Q and O are square, to catch transposes; and
logits.npz: tokens [2, 24] and the float32 logits of those weights. Those of
encoder-decoders also have sources [2, 37], their lengths, more tokens than the
farthest relative position, and the text that greedy decoding gives; and sources
of 512 tokens and of one, with the logits of eight tokens.

The folder variants has in settings.json, which is written by hand: a folder
with the weights, and what its config.json says otherwise, with windows and
first contexts that are shorter than the 24 tokens; and the logits that
transformers gives them, all in float64. derived.json has what follows from the
defaults of the config classes, which are written into the library.

The folder spiece has a sentencepiece file as T5's, and ids.json: odd texts and
the ids that sentencepiece gives them.
"""

import dataclasses
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import transformers

HERE = pathlib.Path(__file__).parent
DEFAULTS = HERE.parents[2] / 'specdec_jax/io/config_json/defaults.json'
MODELS = (
  'llama', 'qwen2', 'qwen3', 'gpt2', 'phi3', 'olmo2', 'gemma2', 'gemma3', 't5',
  't5_gated',
)  # fmt: skip
VOCAB = 64
DERIVED = ('dense_act_fn', 'is_gated_act', 'scale_decoder_outputs')


def build(name: str, seed: int = 0):
  """(model in bfloat16 weights, arrays of logits.npz)."""
  torch.manual_seed(seed)
  config = transformers.AutoConfig.from_pretrained(
    HERE / name, attn_implementation='eager'
  )
  model = getattr(transformers, config.architectures[0])(config).eval()
  if name == 't5_gated':
    # transformers 5 ties every T5; published ones have a head of their own.
    model.config.tie_word_embeddings = False
    head = torch.empty_like(model.lm_head.weight)
    model.lm_head.weight = torch.nn.Parameter(head.normal_())
  with torch.no_grad():
    for x in model.parameters():
      # Far from the default 0.02, so that a wrong attention shows.
      noise = torch.randn(x.shape) * 0.2
      # Scales are around 1; Gemma stores their differences from it.
      x.copy_(noise + bool((x == 1).all()))
      # Not model.to(bfloat16), which would round RoPE's frequencies too.
      x.copy_(x.to(torch.bfloat16))
    arrays = (_encoder_decoder if 't5' in name else _decoder)(model)
  return model.to(torch.bfloat16), {k: x.numpy() for k, x in arrays.items()}


def _decoder(model):
  tokens = torch.randint(0, VOCAB, (2, 24))
  return dict(tokens=tokens, logits=model(tokens).logits)


def _encoder_decoder(model):
  source = torch.randint(2, VOCAB, (2, 37))
  lengths = torch.tensor([37, 20])
  read = dict(
    input_ids=source,
    attention_mask=(torch.arange(37)[None] < lengths[:, None]).long(),
  )
  tokens = torch.randint(0, VOCAB, (2, 160))
  tokens[:, 0] = 0
  greedy = torch.zeros((2, 1), dtype=torch.long)
  for _ in range(24):
    logits = model(**read, decoder_input_ids=greedy, use_cache=False).logits
    greedy = torch.cat([greedy, logits[:, -1:].argmax(-1)], 1)
  logits = model(**read, decoder_input_ids=tokens, use_cache=False).logits
  far = torch.randint(2, VOCAB, (2, 512))
  far_lengths = torch.tensor([512, 1])
  far_logits = model(
    input_ids=far,
    attention_mask=(torch.arange(512)[None] < far_lengths[:, None]).long(),
    decoder_input_ids=tokens[:, :8],
    use_cache=False,
  ).logits
  return dict(
    source=source,
    lengths=lengths,
    tokens=tokens,
    logits=logits,
    greedy=greedy,
    far=far,
    far_lengths=far_lengths,
    far_logits=far_logits,
  )


ODD = [
  'the cat',
  '',
  ' ',
  '  the   cat sat \t on\n\nthe mat.  ',
  'THE Cat, 1234567890!',
  'ﬁne coﬀee ＡＢＣ no\u00a0break zero\u200bwidth',
  'naïve café e\u0301 Übergrößenträger',
  '日本語 and 🙂🙂 are unknown',
  'theunbelievablecatsatonthemats',
  '<extra_id> < / s > __ ~~ \u2019quoted\u201d',
  'a' * 70,
  'the cat ' * 20,
]


def spiece():
  """A small file of unigrams, with a table of characters like T5's."""
  import sentencepiece

  folder = HERE / 'spiece'
  folder.mkdir(exist_ok=True)
  replaced = {'ﬁ': 'fi', 'ﬀ': 'ff', '\u200b': '', 'e\u0301': 'é'}
  replaced |= dict.fromkeys('\t\n\u00a0', ' ')
  replaced |= {chr(0xFF21 + i): chr(0x41 + i) for i in range(26)}
  code = lambda text: ' '.join(f'{ord(x):X}' for x in text)
  rules = [f'{code(x)}\t{code(y)}\n' for x, y in replaced.items()]
  (folder / 'rules.tsv').write_text(''.join(rules))
  words = 'the cat sat on mats and ate fine coffee at no café 1 23 456 7890 .'
  words += ' naïve Übergröße The CAT able, break!'
  rng = np.random.default_rng(0)
  syllable = lambda: ''.join(
    rng.choice(list(x)) for x in ('bdgklmnrst', 'aeiou')
  )
  made = [syllable() * int(i % 3) + syllable() for i in range(300)]
  words = [*words.split() * 5, *made]
  lines = [' '.join(rng.choice(words, 9)) for _ in range(800)]
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines),
    model_prefix=str(folder / 'spiece'),
    vocab_size=200,
    pad_id=0,
    eos_id=1,
    unk_id=2,
    bos_id=-1,
    normalization_rule_tsv=str(folder / 'rules.tsv'),
  )
  for name in ('rules.tsv', 'spiece.vocab'):
    (folder / name).unlink()
  ids = sentencepiece.SentencePieceProcessor(
    model_file=str(folder / 'spiece.model')
  ).encode(ODD)
  (folder / 'ids.json').write_text(json.dumps([ODD, ids], indent=0) + '\n')


def variants():
  """Logits of all settings, as transformers reads the changed files."""
  folder = HERE / 'variants'
  given = json.loads((folder / 'settings.json').read_text())
  # Norms, softmax and frequencies in float64 too, where they ask for float32.
  torch.float = torch.float32 = torch.float64
  torch.Tensor.float = torch.Tensor.double
  tokens = torch.arange(24)[None] * 7 % VOCAB
  out = dict(tokens=tokens.numpy())
  for name, (base, changes) in given.items():
    with tempfile.TemporaryDirectory() as there:
      raw = json.loads((HERE / base / 'config.json').read_text()) | changes
      (pathlib.Path(there) / 'config.json').write_text(json.dumps(raw))
      shutil.copy(HERE / base / 'model.safetensors', there)
      model = transformers.AutoModelForCausalLM.from_pretrained(
        there, dtype=torch.float64, attn_implementation='eager'
      )
    with torch.no_grad():
      out[name] = model.eval()(tokens).logits[0].numpy().astype(np.float32)
  np.savez_compressed(folder / 'logits.npz', **out)


def defaults():
  """The config classes' own fields, and what follows from them, a line each."""
  t = transformers
  classes = [
    t.LlamaConfig, t.MistralConfig, t.Qwen2Config, t.Qwen3Config, t.GemmaConfig,
    t.Gemma2Config, t.Gemma3TextConfig, t.Phi3Config, t.Olmo2Config,
    t.SmolLM3Config, t.GraniteConfig, t.GPT2Config, t.T5Config,
  ]  # fmt: skip
  common = {x.name for x in dataclasses.fields(t.PreTrainedConfig)}
  common -= {'tie_word_embeddings', 'pad_token_id'}
  fields, derived = ([f'"transformers": "{t.__version__}"'] for _ in range(2))
  for each in classes:
    own = {x.name: x.default for x in dataclasses.fields(each)}
    own = {name: x for name, x in own.items() if name not in common}
    made = each()
    follows = {name: getattr(made, name, None) for name in (*own, *DERIVED)}
    fields.append(f'"{each.model_type}": {json.dumps(own)}')
    derived.append(f'"{each.model_type}": {json.dumps(follows)}')
  for path, lines in (DEFAULTS, fields), (HERE / 'derived.json', derived):
    path.write_text('{' + ',\n'.join(lines) + '}\n')


def main():
  others = dict(spiece=spiece, variants=variants, defaults=defaults)
  for name in sys.argv[1:] or [*MODELS, *others]:
    if name in others:
      others[name]()
      continue
    model, arrays = build(name)
    model.save_pretrained(HERE / name)
    (HERE / name / 'generation_config.json').unlink(missing_ok=True)
    np.savez_compressed(HERE / name / 'logits.npz', **arrays)


if __name__ == '__main__':
  main()
