"""Settings of a request and the answer to it: Completion, Piece, Reader."""

import dataclasses
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec_jax import build, fields, requests, sampling, types
from specdec_jax.drafters import table
from specdec_jax.io import files
from specdec_jax.io.tokens import stream as stream_lib

# Settings that may differ from prompt to prompt of a call. A list of stops is
# all prompts'; a list of lists has those of each.
_STOPS = 'stop', 'stop_ids'
EACH = (
  *('max_new_tokens', 'temperature', 'top_k', 'top_p', 'seed', 'prediction'),
  *_STOPS,
)

# Samples of a prompt, at most.
SAMPLES = 1 << 12

# Our words for what other libraries ask for.
_WORDS = {
  'max_new_tokens': 'max_tokens max_completion_tokens n_predict',
  'temperature': 'do_sample',
  'n': 'num_return_sequences num_samples',
  'stop_ids': 'eos_token_id stop_token_ids',
  'draft': 'assistant_model draft_model speculative_model',
  'gamma': 'num_assistant_tokens num_speculative_tokens',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(sampling.Sampling):
  """How to answer, and when to stop; checked when it is made.

  stop: strings that end the text and are left out of it; a special token's
    text, such as '<|im_end|>', also ends it. One text, several, or None.
  stop_ids: token ids that end it; None: the model's own end-of-sequence ids.
  logprobs: K: the log-probability of each token under the target at temperature
    1, and if K > 1 the K likeliest tokens in its place.
  record: decode from Python, which is slower, and return every window.
  n: samples of each prompt, which follow each other.
  chat: put a text through the model's chat template, as a user's turn.
  batch_size: requests decoded together; changes no request's tokens.
  prediction: a text that the answer may repeat in part, such as the file that
    it edits: lookup drafts from it too. The output distribution stays the same.

  Raises:
    ValueError: a value of the wrong kind or out of range.
  """

  max_new_tokens: int | None = fields.setting(
    128, low=1, help='after the prompt; None: as many as the context holds'
  )
  stop: Any = ()
  stop_ids: Any = None
  logprobs: int = fields.setting(0, low=0, help='0 is off')
  record: bool = fields.setting(False, help='every window; slower')
  n: int = fields.setting(
    1, low=1, high=SAMPLES, help='for more samples, use other seeds'
  )
  chat: bool = fields.setting(False)
  batch_size: int = fields.setting(8, low=1)
  prediction: str = fields.setting('')

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    if isinstance(fields.plain(self.logprobs), bool):
      put('logprobs', int(self.logprobs))
    super().__post_init__()
    stop, ids = self.stop, fields.plain(self.stop_ids)
    stop = () if stop is None else (stop,) if isinstance(stop, str) else stop
    texts = requests.listed(stop)
    if texts is None or not all(isinstance(x, str) and x for x in texts):
      raise ValueError(
        f'stop={fields.short(self.stop)}: must be texts, none of them empty; '
        'token ids go to stop_ids'
      )
    files.check_unicode(texts, 'stop')
    files.check_unicode(self.prediction, 'prediction')
    put('stop', tuple(texts))
    if ids is not None:
      given = requests.listed(ids)
      given = (ids,) if given is None else given
      if bad := [x for x in given if not requests.is_id(x)]:
        raise ValueError(f'stop_ids: {fields.short(bad[0])} is no whole number')
      put('stop_ids', tuple(map(operator.index, given)))

  def all_stop_ids(self, target: build.LanguageModel) -> list[int]:
    """Finds every id that ends a row; ValueError: the vocabulary lacks one."""
    requests.check_ids(self.stop_ids or (), target.ids)
    special, named = target.tokenizer.inner.get_added_tokens_decoder, []
    if self.stop:  # no text has special tokens: no search would find them
      pairs = special().items()
      named = [i for i, x in pairs if x.special and x.content in self.stop]
    own = target.tokenizer.eos_ids if self.stop_ids is None else self.stop_ids
    return [*map(int, own), *named]


def settings(options: dict[str, Any]) -> Settings:
  """Makes Settings; raises ValueError for an unknown name or a bad value."""
  allowed = [field.name for field in dataclasses.fields(Settings)]
  for name in (x for x in options if x not in allowed):
    for ours, theirs in _WORDS.items():
      if name in theirs.split():
        raise ValueError(f'unknown setting {name!r}: here it is {ours}')
    rows = table.DRAFTERS.items()
    if owners := [x for x, row in rows if hasattr(row.Settings, name)]:
      raise ValueError(
        f'{name} is a setting of the drafter {" or ".join(owners)}: give '
        f'draft_options=dict({name}=...)'
      )
  check_names(options, allowed)
  return Settings(**options)


def show(*functions: Callable[..., Any]) -> None:
  """Lets help() show **options, and what the first takes by name of all."""
  every, named = inspect.signature(Settings).parameters.values(), []
  every = [x.replace(kind=x.KEYWORD_ONLY) for x in every]
  for function in functions:
    found = inspect.signature(function)
    *own, _ = found.parameters.values()
    named = named or [x for x in own if x.kind == x.KEYWORD_ONLY]
    whole = [*own, *(x for x in named if x not in own), *every]
    vars(function)['__signature__'] = found.replace(parameters=whole)


def check_names(given: Iterable[str], allowed: Sequence[str], of: str = ''):
  """Raises ValueError for the first name, after prefix `of`, not allowed."""
  for name in given:
    if name not in allowed:
      said = fields.short(of + name), fields.choices(name, sorted(allowed))
      raise ValueError(f'unknown setting {said[0]}: {said[1]}')


def each(options: dict[str, Any], prompts: int) -> list[Settings]:
  """Makes every prompt's Settings; options in EACH may be lists of as many.

  Raises ValueError as settings, and for a list of another length.
  """
  lists = {name: requests.listed(options.get(name)) for name in EACH}
  lists = {name: x for name, x in lists.items() if x is not None}
  for name in lists.keys() & _STOPS:
    if all(requests.listed(x) is None for x in lists[name]):
      options = options | {name: lists.pop(name)}
  for name, values in lists.items():
    if len(values) != prompts:
      raise ValueError(
        f'{name}: a list of {len(values)} for {prompts} prompts: give one '
        'value for all, or one for each prompt'
      )
  if not lists:
    return [settings(options)] * prompts
  row = lambda i: {name: values[i] for name, values in lists.items()}
  return [settings(options | row(i)) for i in range(prompts)]


@dataclasses.dataclass(frozen=True)
class Piece:
  """The tokens that one window emitted; text may lag behind them.

  origins: who made each token, a name in types.ORIGINS.
  texts: what each token adds to the text; joined they are `text`.
  logprobs: one a token, with logprobs=True, or record=True; top_logprobs: the K
    likeliest (token id, log-probability) in its place, the likeliest first,
    with logprobs=K; entropies: in nats, of the same distributions.
  refused: (token id, text) for the window's drafts that were refused or came
    after one that was, where it was not cut; in a tree the first alone.
  q: in a record, the probability with which each draft was drawn: the accepted
    ones, then the refused; None for certain drafts, and trees.
  """

  text: str
  tokens: list[int]
  origins: list[str]
  texts: list[str] = dataclasses.field(default_factory=list)
  logprobs: list[float] | None = None
  top_logprobs: list[list[tuple[int, float]]] | None = None
  entropies: list[float] | None = None
  refused: list[tuple[int, str]] = dataclasses.field(default_factory=list)
  q: list[float] | None = None

  def __repr__(self) -> str:
    text = self.text if len(self.text) <= 40 else f'{self.text[:37]}...'
    return f'{type(self).__name__}({text!r}, {len(self.tokens)} tokens)'


class Record(NamedTuple):
  """How an answer was made; `windows` are the target calls, in order."""

  prompt: str
  windows: list[Piece]
  setting: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Completion(Piece):
  """One answer: a Piece with all its tokens, without the prompt.

  A stop string is not in the text. No drafts are named as refused.

  finish_reason: 'stop' (end of sequence, stop id or stop string), 'length', or
    'non-finite' (run only: the logits after these tokens were not finite).
  metrics: metrics.summary of the request as it was decoded, with what a stop
    string cuts off; and the costs that `adaptive` chose by.
  record: every window, with record=True.
  """

  finish_reason: str
  metrics: dict[str, Any]
  record: Record | None = dataclasses.field(default=None, compare=False)


class Reader:
  """Reads the pieces of one answer from its tokens as they come.

  stopped: a stop string was completed; no piece has what follows it.
  """

  def __init__(self, tokenizer: Any, stop: Sequence[str]):
    """tokenizer: an io.tokenizer.Tokenizer. stop: as in Settings."""
    self.stopped, self.pieces = False, []
    self._tokenizer, self._before = tokenizer, []
    self._stream = tokenizer.stream(stop)

  def piece(
    self,
    tokens_T: Sequence[int] | types.Array,
    origin_T: types.Array,
    logprob_T: types.Array | None = None,
    top_TX: tuple[types.Array, types.Array] | None = None,
    entropy_T: types.Array | None = None,
    refused_K: types.Array | Sequence[int] = (),
    q_K: types.Array | None = None,
    *,
    last: bool,
  ) -> Piece:
    """Reads tokens up to the one that completes a stop string.

    origin_T, logprob_T, top_TX, entropy_T, refused_K: for these tokens and the
      window that they came by, as in types.Info.
    q_K: with which the window's drafts were drawn.
    last: no more will come. Until then text waits that a later token may
      change, such as half a character or the beginning of a stop string.
    """
    stream, texts, rest = self._stream, [], ''
    for token in np.asarray(tokens_T).tolist():
      texts.append(stream.push(token))
      if stream.stopped:
        break
    self.stopped, n = stream.stopped, len(texts)
    if last:
      rest = stream.text[stream.ready :]
    if texts:
      texts[-1] += rest

    def listed(x_T: Any) -> Any:
      return None if x_T is None else np.asarray(x_T)[:n].tolist()

    top = None
    if top_TX is not None:
      pairs = zip(*map(listed, top_TX), strict=True)
      top = [list(zip(*x, strict=True)) for x in pairs]
    tokens, origins = listed(tokens_T), listed(origin_T)
    accepted = origins.count(types.DRAFTED)
    whole = n == len(tokens_T)
    refused = self._refused(tokens[:accepted], refused_K) if whole else []
    self._before += tokens
    drafts = accepted + len(refused)
    piece = Piece(
      text=''.join(texts) or rest,
      tokens=tokens,
      origins=[types.ORIGINS[x] for x in origins],
      texts=texts,
      logprobs=listed(logprob_T),
      top_logprobs=top,
      entropies=listed(entropy_T),
      refused=refused,
      q=None if q_K is None else np.asarray(q_K)[:drafts].tolist(),
    )
    self.pieces.append(piece)
    return piece

  def whole(self) -> dict[str, Any]:
    """Returns the fields of one Piece with all that was read, but refused."""
    found: dict[str, Any] = dict(text=''.join(x.text for x in self.pieces))
    for name in (
      *('tokens', 'origins', 'texts'),
      *('logprobs', 'top_logprobs', 'entropies'),
    ):
      parts = [getattr(x, name) for x in self.pieces]
      found[name] = None if None in parts else [*itertools.chain(*parts)]
    return found

  def _refused(self, accepted: list[int], refused_K) -> list[tuple[int, str]]:
    """Finds Piece.refused, whose texts follow the accepted drafts."""
    ids = [x for x in np.asarray(refused_K).tolist() if x >= 0]
    if not ids:
      return []
    before = [*self._before, *accepted]
    texts = stream_lib.texts_of(self._tokenizer, before, ids)
    return list(zip(ids, texts, strict=True))
