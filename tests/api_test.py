"""The Python API on a random model: what users call, and what it refuses."""

import dataclasses
import inspect
import json
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax
from specdec_jax import api, build, completion, requests, sharding
from specdec_jax.certify import table_model
from specdec_jax.io import sources, tokenizer
from specdec_jax.models import convert
from tests.io import tiny

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


def test_samples_of_a_prompt_differ_and_begin_with_the_single_one(
  target, plain
):
  out = specdec_jax.generate(target, PROMPTS, n=3, **COMMON)
  assert [x.tokens for x in out[::3]] == [x.tokens for x in plain]
  for i in range(3):
    assert len({tuple(x.tokens) for x in out[3 * i : 3 * i + 3]}) == 3


@pytest.mark.more
def test_streaming_gives_the_tokens_and_text_of_generate(target, plain):
  for draft in (None, 'lookup'):
    how = COMMON | dict(draft=draft, gamma=3, logprobs=2)
    pieces = list(specdec_jax.stream(target, PROMPTS[0], **how))
    (whole,) = specdec_jax.generate(target, PROMPTS[:1], **how)
    assert ''.join(p.text for p in pieces) == whole.text
    for name in ('tokens', 'origins', 'logprobs', 'top_logprobs'):
      found = [x for p in pieces for x in getattr(p, name)]
      assert found == getattr(whole, name), name


def test_each_prompt_may_have_its_own_stops(target, plain):
  """A list of lists; one that is flat is all prompts'."""
  whole = [x.tokens for x in plain]
  ids = [[whole[0][6]], [], [whole[2][3]]]
  find = lambda stops: [
    x.tokens
    for x in specdec_jax.generate(target, PROMPTS, stop_ids=stops, **COMMON)
  ]
  cut = lambda tokens, stops: tokens[
    : min((tokens.index(x) + 1 for x in stops if x in tokens), default=None)
  ]
  assert find(ids) == [*map(cut, whole, ids)] != whole
  flat = [whole[0][6], whole[2][3]]
  assert find(iter(flat)) == [cut(x, flat) for x in whole]
  stop = [(plain[0].text[9:11], '~~~~'), None, '~~~~']
  out = specdec_jax.generate(target, PROMPTS, stop=stop, **COMMON)
  assert [x.finish_reason for x in out] == ['stop', 'length', 'length']


@pytest.mark.slow
def test_a_mesh_changes_no_token(target, draft):
  mesh = sharding.make_mesh(data=2, model=2)
  sharded = specdec_jax.load('random:tiny', mesh=mesh)
  small = specdec_jax.load('random:tiny:1', mesh=mesh, tensor_parallel=1)
  kwargs = dict(gamma=3, max_new_tokens=12, rule='coupled')
  for prompts in PROMPTS[:1], PROMPTS:  # any number of them
    one = specdec_jax.generate(target, prompts, draft=draft, **kwargs)
    all_ = specdec_jax.generate(sharded, prompts, draft=small, **kwargs)
    assert [x.tokens for x in all_] == [x.tokens for x in one]
  assert list(specdec_jax.stream(sharded, PROMPTS[0], max_new_tokens=2))


@pytest.mark.more
def test_prompts_with_settings_of_their_own(target):
  """In a batch or in a pool: those that all prompts have in other calls."""
  own = dict(
    max_new_tokens=[10, 3, 9],
    temperature=np.array([0.0, 0.9, 1.3]),
    top_k=(0, 0, 50),
    top_p=[1.0, 0.8, 1.0],
    seed=[7, 8, 9],
  )
  how = dict(draft='lookup', gamma=2)
  batch = specdec_jax.generate(target, PROMPTS, **how, **own)
  for i in (0, 2):
    one = {name: values[i] for name, values in own.items()}
    alike = specdec_jax.generate(target, PROMPTS, **how, **one)
    assert alike[i] == batch[i]
  pooled = specdec_jax.generate(target, PROMPTS, batch_size=2, **how, **own)
  assert pooled == batch


@pytest.fixture
def broken(target):
  """Reading token 200 makes the logits NaN, and so does proposing it."""
  untied = dataclasses.replace(target.config, tied=False)
  _, flat = convert.plain(target.config, target.params)
  params = dict(target.params, embed=flat['head'].T)
  with jax.debug_nans(False):
    params['embed'] = params['embed'].at[200].set(float('nan'))
    yield dataclasses.replace(target, lm_config=untied, params=params)


@pytest.mark.more
@pytest.mark.parametrize('draft, rows', [(None, 1), ('lookup', 8)])
def test_logits_that_are_not_finite_are_an_error(broken, draft, rows):
  prompts, how = [[1], [5, 200]], dict(draft=draft, batch_size=rows)
  with pytest.raises(ValueError, match='request 1: .* after 0 new tokens'):
    specdec_jax.generate(broken, prompts, **how)
  with pytest.raises(
    specdec_jax.NonFiniteLogits, match='request 0: .* after 0 new'
  ):
    list(specdec_jax.stream(broken, [5, 200], draft=draft))


@pytest.mark.more
def test_a_row_that_breaks_leaves_the_others_of_its_batch(broken, target):
  wanted = completion.Settings(**COMMON)
  items = requests.items([[1], [5, 200], [9]])

  def of(model, items):
    asked = [api.ask(model, x, wanted) for x in items]
    return [x for _, x in api.answers(build.engine(model), asked, rows=8)]

  one, bad, two = of(broken, items)
  assert (bad.finish_reason, bad.tokens, bad.text) == ('non-finite', [], '')
  whole = of(target, items)
  assert [one.tokens, two.tokens] == [whole[0].tokens, whole[2].tokens]
  assert {one.finish_reason, two.finish_reason} == {'length'}


MODEL = table_model.make(8)
CHAT = [{'role': 'user', 'content': 'Hi'}]
GENERATE = [
  (dict(gamma=512), 'gamma=512: .* less than the context of 512'),
  (dict(temperature=1e300), r'temperature=.*1.?e\+300'),
  (dict(temperature=[0.0, 1.0]), 'temperature: a list of 2 for 3 prompts'),
  (dict(temperature=[0.0, 1.0, -1]), 'temperature=-1: must be a number'),
  (dict(seed=[1, 2, 0.5]), 'seed=0.5: must be a whole number'),
  (dict(top_k=[]), 'top_k: a list of 0 for 3 prompts'),
  (dict(max_new_tokens=[1, None, 600]), 'max_new_tokens=600: no room'),
  (dict(stop=[['a'], 'b', 'c', None]), 'stop: a list of 4 for 3 prompts'),
  (dict(stop=[['a'], 'b', ['']]), 'stop=.*: must be texts'),
  (dict(stop_ids=[[1], [2]]), 'stop_ids: a list of 2 for 3 prompts'),
  (dict(stop_ids=[[1], 2, [2.5]]), 'stop_ids: 2.5 is no whole number'),
  (dict(top_p=1e-50), r'top_p=.*1.?e-50'),
  (dict(top_p=1.01), 'top_p=1.01: must be a number'),
  (dict(top_k=-1), 'top_k=-1: must be a whole number'),
  (dict(max_new_tokens=0), 'max_new_tokens=0: must be a whole number or None'),
  (dict(seed=12345678901234567890), 'seed=12345678901234567890: must be'),
  (dict(logprobs=300), 'logprobs=300: the vocabulary has 258 tokens'),
  (dict(stop=''), "stop='': must be texts"),
  (dict(stop=[13]), r'stop=\[13\]: .* token ids go to stop_ids'),
  (dict(stop_ids=[258]), 'token id 258 .* allowed are 0 to 257'),
  (dict(stop_ids=[1, 1.5]), 'stop_ids: 1.5 is no whole number'),
  (dict(n=4097), 'n=4097: .*at most 4096 .*other seeds'),
  (dict(chat=True), 'has no chat template: leave chat=True out'),
  (dict(prediction='a'), 'autoregressive searches none; lookup and hybrid do'),
  (
    dict(prediction='a' * 513, draft='lookup'),
    'the prediction has 513 tokens, the context holds 512: shorten it',
  ),
  (dict(request=1), "unknown setting 'request'"),
  (
    dict(temperatur=1.0),
    "unknown setting 'temperatur': did you mean temperature. ",
  ),
  (dict(min_p=0.5), "unknown setting 'min_p': allowed are"),
  (dict(top_n=5), "unknown setting 'top_n': did you mean top_"),
  (dict(max_tokens=5), "unknown setting 'max_tokens': here it is max_new_toke"),
  (dict(do_sample=True), 'here it is temperature'),
  (dict(assistant_model=1), "unknown setting 'assistant_model': here it is dr"),
  (dict(draft='eagel'), "draft='eagel': did you mean eagle. allowed are lm, "),
  (dict(rule='typicall:1'), 'rule=typicall:1: did you mean typical. allowed'),
  (
    dict(draft='lookup', draft_options=dict(minmatch=2)),
    'lookup.minmatch=2: no such setting; did you mean min_match. allowed are',
  ),
  (dict(draft='lookup', min_match=0), 'give draft_options=dict.min_match='),
  (dict(draft=MODEL), r'draft=Model\(vocab=8, context=512\): allowed are'),
  (
    dict(draft=sources.open_source('random:tiny')),
    r"draft=Source\('random:tiny'\): allowed are .*, a loaded model",
  ),
  (dict(target='random:tiny'), "target='random:tiny': must be a loaded model"),
  (dict(prompts=[1, 2.5]), r'prompt 1: must be a text, a list .*\[\[1, 2'),
  (dict(prompts=[b'Hello']), "prompt b'Hello': must be a text, a list"),
  (dict(prompts={'a', 'b'}), 'prompt {.*}: must be a text'),
  (dict(prompts=CHAT), 'has no chat template: .* or messages'),
  (dict(prompts=[[1, 1.9]]), 'token 1.9 of a prompt: must be a whole number'),
  (dict(prompts=[[True]]), 'token True of a prompt: must be a whole number'),
  (dict(prompts=[]), '0 prompts'),
  (dict(prompts=[[]]), 'empty prompt'),
]
STREAM = [
  (dict(request=-1), 'request=-1: must be a whole number, at least 0'),
  (dict(n=2), 'a stream is one, of no record; use generate'),
  (dict(record=True), 'a stream is one, of no record; use generate'),
  (dict(prompt=[[1, 2]]), r'token \[1, 2\] of a prompt: must be a whole'),
]
LOAD = [
  (dict(source=None), 'source=None: must be a text or a path, as in hf:org'),
  (dict(dtype='float16'), "dtype='float16': .*allowed are float32, bfloa"),
  (
    dict(source='tests.your_own_model_test:make', dtype='int8'),
    "a model of your own has no mesh, no integers .* give dtype='float32'",
  ),
  (dict(mesh=(2, 1)), r'mesh=\(2, 1\): give sharding.make_mesh'),
  (dict(scan_layers='auto'), "scan_layers='auto': give True, False or None"),
  (dict(kernels=None), 'kernels=None: allowed are auto, int8, xla'),
]
TABLE = [
  (name, *row)
  for name, rows in (('generate', GENERATE), ('stream', STREAM), ('load', LOAD))
  for row in rows
]


# By number: an object's repr holds its address, which no two workers share.
@pytest.mark.parametrize(
  'function, changes, message', TABLE, ids=range(len(TABLE))
)
def test_a_slip_is_one_clear_error(target, function, changes, message):
  """When it is called: a stream's not when its first piece is asked for."""
  arguments = dict(
    generate=dict(target=target, prompts=PROMPTS),
    stream=dict(target=target, prompt=[1]),
    load=dict(source='random:tiny'),
  )[function]
  with pytest.raises(ValueError, match=message) as error:
    getattr(specdec_jax, function)(**arguments | changes)
  assert len(str(error.value)) < 500


@pytest.mark.parametrize('listed', [list, tuple, np.array, jnp.array, iter])
def test_ids_of_one_prompt_may_stand_alone(target, plain, listed):
  out = specdec_jax.generate(target, listed(PROMPTS[0]), **COMMON)
  assert [x.tokens for x in out] == [plain[0].tokens]


@pytest.mark.parametrize('name', ['generate', 'stream', 'check_cache'])
def test_a_notebook_shows_every_option_with_its_default(name):
  function = getattr(specdec_jax, name)
  shown = inspect.signature(function).parameters
  own = {x.name: x.default for x in dataclasses.fields(completion.Settings)}
  first = dict(draft=None, rule='reject', gamma=None, draft_options=None)
  assert {n: shown[n].default for n in first | own} == first | own
  assert not [x for x in shown.values() if x.kind is x.VAR_KEYWORD]
  assert 'max_new_tokens: int | None = 128' in pydoc.render_doc(function)


def test_words_of_other_libraries_name_ours():
  ours = {*inspect.signature(specdec_jax.generate).parameters}
  theirs = ' '.join(completion._WORDS.values()).split()
  assert {*completion._WORDS} <= ours and not {*theirs} & ours
  assert len({*theirs}) == len(theirs)


def test_numbers_of_numpy_and_jax_are_numbers(target, plain):
  """As are JAX's names of dtypes; ids may come from an iterator."""
  common = {k: np.asarray(x)[()] for k, x in COMMON.items()}
  out = specdec_jax.generate(
    target,
    (iter(np.array(x)) for x in PROMPTS),
    stop=None,
    n=np.int64(1),
    gamma=jnp.int32(0),
    batch_size=np.uint8(8),
    stop_ids=np.array([256]),
    logprobs=np.False_,
    record=np.False_,
    **common,
  )
  assert [x.tokens for x in out] == [x.tokens for x in plain]
  assert specdec_jax.load('random:tiny', dtype=jnp.bfloat16).dtype == 'bfloat16'


def test_what_a_notebook_shows_is_a_line(target, plain):
  assert repr(target) == "LanguageModel('random:tiny', float32)"
  lookups = build.engine(target, 'lookup')
  pieces = specdec_jax.stream(target, [5], max_new_tokens=2)
  many = [plain[0], next(pieces), lookups, lookups.rule, lookups.drafter]
  for x in (
    *many,
    target.model,
    completion.Piece('a\n' * 90, [1], []),
  ):
    assert len(repr(x)) < 100 and '\n' not in repr(x), x
  assert len(repr(target.tokenizer)) < 300


@pytest.fixture(scope='module')
def chatty(target):
  """With a template that writes each turn as <role>content."""
  template = (
    '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>'
  )
  own = dataclasses.replace(target.tokenizer, chat_template=template)
  return dataclasses.replace(target, tokenizer=own)


def test_a_conversation_is_a_prompt(chatty):
  system, user = {'role': 'system', 'content': 'S'}, CHAT[0]
  ask = lambda prompts, **more: [
    x.tokens
    for x in specdec_jax.generate(chatty, prompts, max_new_tokens=4, **more)
  ]
  texts = ['<system>S<user>Hi<a>', '<user>Hi<a>']
  want = ask(texts)
  assert ask([[system, user], 'Hi'], chat=True) == want
  assert ask([(system, user), texts[1]]) == want
  assert ask([system, user]) == want[:1]  # one alone
  pieces = specdec_jax.stream(chatty, [system, user], max_new_tokens=4)
  assert [t for x in pieces for t in x.tokens] == want[0]
  for wrong, message in (
    ([system, 'Hi'], "message 'Hi': must be a dict"),
    ([{'role': 'user'}], "needs strings 'role' and 'content'"),
  ):
    with pytest.raises(ValueError, match=message):
      specdec_jax.generate(chatty, wrong)


def test_the_likeliest_tokens_and_their_log_probabilities(target, plain):
  (out,) = specdec_jax.generate(target, PROMPTS[:1], logprobs=3, **COMMON)
  (own,) = specdec_jax.generate(target, PROMPTS[:1], logprobs=True, **COMMON)
  assert out.tokens == own.tokens == plain[0].tokens
  assert out.logprobs == own.logprobs
  assert own.top_logprobs is plain[0].top_logprobs is plain[0].logprobs is None
  for token, logprob, top in zip(
    out.tokens, out.logprobs, out.top_logprobs, strict=True
  ):
    ids, chances = zip(*top, strict=True)
    assert len(set(ids)) == 3 and sorted(chances, reverse=True) == [*chances]
    assert logprob <= chances[0]
    assert dict(top).get(token, logprob) == logprob


@pytest.mark.more
def test_a_base_model_drafts_for_an_instruct_model(tmp_path):
  """With other ends, padding and added tokens, and without what chats need."""
  folders = [tmp_path / x for x in ('target', 'draft')]
  for folder, vocab in zip(folders, (320, 384), strict=True):
    tiny.write_folder(folder, tiny.config(vocab=vocab))
  both = dict(eos_token_id=[259, 258], pad_token_id=0)
  (folders[0] / 'generation_config.json').write_text(json.dumps(both))
  (folders[1] / 'tokenizer_config.json').unlink()
  specials = ('<base>', '<pad>', '<end>')
  tiny.byte_tokenizer(specials).save(str(folders[1] / 'tokenizer.json'))
  path = folders[1] / 'config.json'
  raw = json.loads(path.read_text()) | dict(eos_token_id=260)
  path.write_text(json.dumps(raw))
  target, draft = map(specdec_jax.load, folders)
  ends = [x.tokenizer.eos_ids for x in (target, draft)]
  assert ends == [(259, 258), (260,)]
  write = lambda **how: [
    x.tokens
    for x in specdec_jax.generate(target, PROMPTS, max_new_tokens=16, **how)
  ]
  assert write(draft=draft, gamma=2) == write(draft=None)


def test_a_draft_of_another_tokenizer_is_refused(target, draft):
  other = dataclasses.replace(draft, tokenizer=tokenizer.from_bytes(256, 'x'))
  with pytest.raises(ValueError, match='different tokenizers'):
    specdec_jax.generate(target, PROMPTS, draft=other)
