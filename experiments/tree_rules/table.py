"""Compares what rules accept in trees: exactly, and measured on SmolLM2.

bash experiments/tree_rules/run.sh [--exact] [--questions=PATH] [--minutes=12]
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
from absl import flags

from experiments import page
from experiments.specbench import questions as questions_lib
from experiments.tree_rules import exact, render
from specdec_jax import api, build, program, types
from specdec_jax import settings as settings_lib
from specdec_jax.drafters import branch
from specdec_jax.io import files

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(ROOT / 'configs/smollm2.py'))
_EXACT = flags.DEFINE_bool('exact', False, 'enumerate; else measure')
_EACH = flags.DEFINE_integer('each', 10, 'exact problems of a family', 1)
_QUESTIONS = flags.DEFINE_string('questions', '', 'question.jsonl of MT-Bench')
_LIMIT = flags.DEFINE_integer('limit', 1, 'questions of each category', 1)
_MINUTES = flags.DEFINE_float('minutes', 12, 'after them no cell begins')
_TREES = flags.DEFINE_string('trees', '4;2,2;3,2,1;4,4,2,2', 'one level: chain')
_WARMTHS = flags.DEFINE_list('temperatures', ['0', '0.6', '1'], '')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')


def run() -> bool:
  folder = program.open_workdir(_RESULTS.value)
  path = (folder or pathlib.Path()) / f'{HERE.name}.json'
  doc = files.read_json(path, {}) if folder else {}
  about = page.made_here()
  if _EXACT.value:
    with jax.enable_x64(True):
      found = list(exact.rows(_EACH.value))
    doc['exact'] = {'machine': about, 'each': _EACH.value, 'rows': found}
    _save(folder, doc)
  else:
    for measured in _measured(about, doc.get('measured')):
      doc['measured'] = measured
      _save(folder, doc)
  print(render.markdown(page.plain(doc)))
  return True


def _save(folder: pathlib.Path | None, doc) -> None:
  page.save(folder, HERE, doc, render.markdown(page.plain(doc)))


def _measured(about, known):
  """Yields the document after each cell; keeps `known` if settings agree."""
  s = settings_lib.settings(_CONFIG.value)
  chosen = questions_lib.read(_QUESTIONS.value, _LIMIT.value)
  doc = {
    'machine': about,
    'target': s.target.source,
    'questions': questions_lib.describe(_QUESTIONS.value, chosen),
    'new': s.decode.max_new_tokens,
    'cells': [],
  }
  doc['cells'] = page.kept(known, doc)
  yield doc
  done = {(x['rule'], x['tree'], x['temperature']) for x in doc['cells']}
  target = settings_lib.load(s).target
  for cell in _cells():
    if program.elapsed() > 60 * _MINUTES.value:
      print(f'--minutes={_MINUTES.value:g}: run again for the other cells')
      return
    if (cell[0].name, *cell[1:]) not in done:
      prompts = [x.turns[0] for x in chosen]
      doc['cells'].append(_cell(target, s, prompts, *cell))
      yield doc


def _cells():
  """Yields (rule, tree, temperature); of rules that are one, the first.

  All are where rows are greedy, and on chains those that Rule.on_chains names.
  """
  rules = [x for x in build.lossless_rules().values() if x.trees]
  names = [x.name for x in rules]
  for tree in _TREES.value.split(';'):
    chain = len(branch.levels_of(tree)) == 1
    for rule in rules:
      if chain and rule.on_chains in names:
        continue
      for warmth in map(float, _WARMTHS.value):
        if warmth or rule is rules[0]:
          yield rule, tree, warmth


def _cell(target, s, prompts, rule: types.Rule, tree: str, temperature: float):
  """Counts each prompt's emitted tokens and target passes."""
  levels = branch.levels_of(tree)
  draft = {'source': s.drafters['eagle'].source}
  if len(levels) > 1:
    draft['tree'] = tree
  found = api.generate(
    target,
    prompts,
    draft='eagle',
    rule=rule,
    gamma=sum(levels),
    draft_options=draft,
    max_new_tokens=s.decode.max_new_tokens,
    temperature=temperature,
    batch_size=1,
    chat=target.tokenizer.chat_template is not None,
  )
  counts = [x.metrics for x in found]
  each = [[x['emitted_tokens'], x['target_calls']] for x in counts]
  return {
    'rule': rule.name,
    'tree': tree,
    'temperature': temperature,
    'requests': each,
  }


if __name__ == '__main__':
  program.launch(run)
