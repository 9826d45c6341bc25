"""Multi30k's English and German captions as pairs for scripts/train.py.

python experiments/multi30k.py --multi30k=DIR --output=DIR

DIR has train.en.gz, train.de.gz and test_2016_flickr's, as in
https://github.com/multi30k/dataset (data/task1/raw). Line i of both is a pair.
"""

import gzip
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags  # noqa: E402

from specdec_jax import runtime  # noqa: E402
from specdec_jax.io import files  # noqa: E402

_FOLDER = flags.DEFINE_string('multi30k', '', 'folder of the captions')
_OUTPUT = flags.DEFINE_string('output', '', 'folder of train.jsonl and others')
TRAIN, TEST = 'train', 'test_2016_flickr'


def pairs(folder: str, name: str) -> list[dict[str, str]]:
  """The captions {'en', 'de'} of a part.

  Raises:
    ValueError: a file that is not there, or numbers of lines that differ.
  """
  texts = {}
  for language in ('en', 'de'):
    path = pathlib.Path(folder) / f'{name}.{language}.gz'
    try:
      read = gzip.decompress(path.read_bytes()).decode('utf-8')
    except (OSError, EOFError, UnicodeDecodeError) as error:
      raise ValueError(f'--multi30k={folder}: {path.name}: {error}') from error
    texts[language] = read.strip().split('\n')
  counts = {language: len(x) for language, x in texts.items()}
  if len(set(counts.values())) > 1:
    raise ValueError(
      f'--multi30k={folder}: {name} has {counts["en"]} lines of English and '
      f'{counts["de"]} of German; line i of both must be a pair'
    )
  lines = zip(*texts.values(), strict=True)
  return [{'en': en.strip(), 'de': de.strip()} for en, de in lines]


def apart(train, test) -> list[dict[str, str]]:
  """The pairs of train that share no caption with test."""
  seen = {x for pair in test for x in pair.values()}
  return [pair for pair in train if not seen & set(pair.values())]


def run() -> bool:
  output = runtime.open_workdir(_OUTPUT.value)
  if output is None:
    raise ValueError("--output='': name a folder")
  test = pairs(_FOLDER.value, TEST)
  parts = {TEST: test, TRAIN: apart(pairs(_FOLDER.value, TRAIN), test)}
  for name, found in parts.items():
    text = '\n'.join(json.dumps(x, ensure_ascii=False) for x in found)
    files.write(output / f'{name}.jsonl', text)
    print(f'{output / name}.jsonl: {len(found)} pairs')
  return True


if __name__ == '__main__':
  runtime.launch(run)
