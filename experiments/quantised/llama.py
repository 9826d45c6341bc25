r"""Runs llama.cpp on table.py's files and prompts: plain, and with the draft.

(cd DIR; npm install --ignore-scripts node-llama-cpp)
python experiments/quantised/llama.py --node=DIR \
  --config.target.source=TARGET.gguf --config.draft.source=DRAFT.gguf
"""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from experiments.quantised import render
from specdec_jax import machine, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import plan as plan_lib
from specdec_jax.bench import prompts

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(ROOT / 'configs/pair.py'))
_NODE = flags.DEFINE_string('node', '', 'folder with node_modules')
_NEW = flags.DEFINE_integer('new', 64, 'tokens of an answer, at most')
_PROMPTS = flags.DEFINE_integer('prompts', 6, 'prompts, evenly of all')
_GAMMAS = flags.DEFINE_list('gammas', ['2', '4', '8'], 'drafted at most')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  s = settings_lib.settings(_CONFIG.value)
  if not shutil.which('node') or not _NODE.value:
    raise ValueError('node: needs node, and --node=DIR with node-llama-cpp')
  folder = program.open_workdir(_RESULTS.value)
  asked = dict(
    target=str(pathlib.Path(s.target.source).resolve()),
    draft=str(pathlib.Path(s.drafters['lm'].source).resolve()),
    threads=machine.describe()['cores'],
    new=_NEW.value,
    gammas=[int(x) for x in _GAMMAS.value],
    prompts=_prompts(s),
  )
  done = subprocess.run(
    ['node', str(HERE / 'llama.mjs')],
    input=json.dumps(asked),
    stdout=subprocess.PIPE,
    text=True,
    cwd=_NODE.value,
    check=True,
  )
  found = json.loads(done.stdout)
  about = page.made_here()
  told = {x: pathlib.Path(asked[x]).name for x in ('target', 'draft')}
  told['prompts'] = len(asked['prompts'])
  doc = {'machine': about, 'asked': asked | told}
  text = render.llama(doc | found)
  page.save(folder, HERE, doc | found, text, 'llama')
  print(text)
  return True


def _prompts(s: settings_lib.Settings) -> list[list[int]]:
  """Encodes some of table.py's test prompts; the draft's tokenizer is its."""
  target = dataclasses.replace(s.target, source=s.drafters['lm'].source)
  decode = dataclasses.replace(s.decode, methods=(), gammas=(0,))
  e = settings_lib.load(dataclasses.replace(s, target=target, decode=decode))
  test = plan_lib.make(e, prompts.chosen(s.bench.prompts)).test
  every = max(1, len(test) // _PROMPTS.value)
  return [list(map(int, x.tokens)) for x in test[::every][: _PROMPTS.value]]


if __name__ == '__main__':
  program.launch(run)
