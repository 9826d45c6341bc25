r"""Serves a model, speculatively, over OpenAI's protocol.

python scripts/serve.py --config=configs/smollm2.py --port=8000

Uses the config's first method at its first gamma. SIGTERM and Ctrl-C end it
when all that was asked is answered.
"""

import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

from specdec_jax import program, settings
from specdec_jax.serve import app, batch, protocol

_CONFIG = program.config_flag('configs/pair.py')
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'address to listen at')
_PORT = flags.DEFINE_integer('port', 8000, '0: any that is free', 0, 65535)
_NAME = flags.DEFINE_string('name', '', 'of the model; empty: its source')
_ROWS = flags.DEFINE_integer('rows', 8, 'answers decoded together', 1)
_LENGTH = flags.DEFINE_integer('length', 1024, 'tokens with the prompt', 2)
_QUEUE = flags.DEFINE_integer('queue', 64, 'answers that may wait', 1)
_SECONDS = flags.DEFINE_float('time_limit', 600, 'seconds of a request', 0, 1e6)
_LOGPROBS = flags.DEFINE_integer(
  'logprobs',
  0,
  '1: of each token; 2 and more: of as many likeliest too',
  0,
  protocol.TOP,
)
_KEY = flags.DEFINE_string('api_key_file', '', 'file with the key of /v1')
_RECORD = flags.DEFINE_string('record', '', 'JSONL file of answers, to train')
_ORIGINS = flags.DEFINE_list(
  'allowed_origins', [], 'of pages that may ask, as in http://localhost:5173'
)


def key() -> str:
  """The API key; '' without a file."""
  if not _KEY.value:
    return ''
  found = pathlib.Path(_KEY.value).read_text('utf-8').strip()
  if not (found and found.isascii() and found.isprintable()):
    raise ValueError(f'api_key_file {_KEY.value}: must be a line of ASCII')
  return found


def run() -> bool:
  limits = dict(
    key=key(),
    seconds=_SECONDS.value,
    record=_RECORD.value,
    origins=_ORIGINS.value,
  )
  s = settings.settings(batch.one_method(_CONFIG.value))
  e = settings.load(s, tokens=_ROWS.value * _LENGTH.value)
  engine = settings.first(e, measure=False)
  options = dataclasses.replace(engine.options, logprobs=_LOGPROBS.value)
  engine = dataclasses.replace(engine, options=options)
  name = _NAME.value or e.target.source
  made = app.open_server(
    engine,
    name,
    rows=_ROWS.value,
    length=_LENGTH.value,
    waiting=_QUEUE.value,
    **limits,
  )
  app.serve(*made, _HOST.value, _PORT.value)
  return not made[1].error


if __name__ == '__main__':
  program.launch(run)
