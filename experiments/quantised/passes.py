"""Times stored models and int8 ones, by rows of 16 and of 8 bits.

How near does plain decoding come to its ceiling, and what do passes cost?

bash experiments/quantised/run.sh passes SOURCE,SOURCE
"""

import itertools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from absl import flags

from experiments import page
from specdec_jax import printing, program
from specdec_jax import settings as settings_lib
from specdec_jax.bench import benchmark, budget, prompts, timing
from specdec_jax.bench import plan as plan_lib
from specdec_jax.costs import calibration
from specdec_jax.models import work

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
_CONFIG = program.config_flag(str(ROOT / 'configs/pair.py'))
_SOURCES = flags.DEFINE_list('sources', [], 'models')
_REPEATS = flags.DEFINE_integer('repeats', 7, 'samples of each pass')
_RESULTS = flags.DEFINE_string('results', str(HERE / 'results'), 'folder')
_WIDTHS = 2, 3, 5, 8  # tokens of a pass


def run() -> bool:
  if not _SOURCES.value:
    raise ValueError('sources: give the models, such as a.gguf,b.gguf')
  folder = program.open_workdir(_RESULTS.value)
  c = _CONFIG.value.copy_and_resolve_references().unlock()
  c.decode.methods, c.decode.gammas = (
    ('lookup',),
    (0, *(n - 1 for n in _WIDTHS)),
  )
  rows: list[dict] = []
  about = page.made_here()
  ways = itertools.product(_SOURCES.value, ('stored', 'int8'), ('auto', 'int8'))
  for source, dtype, kernels in ways:
    c.target.update(source=source, dtype=dtype, kernels=kernels)
    rows.append(_row(settings_lib.settings(c)))
    printing.progress_console().print(rows[-1], soft_wrap=True)
  said = (
    f'{page.made_on(about)} A plain step and passes of n tokens, alone; '
    f'medians of {_REPEATS.value} samples.'
  )
  v = ', '.join(f'v({n})=v{n}:.2f' for n in _WIDTHS)
  columns = (
    'target, MB=mb:.0f, tok/s=tok_s:.1f, of ceiling=share:.2f, '
    f'{v}, TV=tv:.2g, KL nats=kl:.2g'
  )
  text = page.text(page.Part(said, columns, rows))
  page.save(folder, HERE, {'machine': about, 'rows': rows}, text, 'passes')
  print(text)
  return True


def _row(s: settings_lib.Settings) -> dict:
  """Times a target's passes."""
  e = settings_lib.load(s)
  arms = plan_lib.arms(e, measure=False)
  plan = plan_lib.make(e, prompts.chosen(s.bench.prompts))
  request = plan_lib.middle(arms, plan, budget.WINDOWS).full
  # Of rows of 8 bits, from the same weights in float32.
  away = None
  if s.target.kernels == 'int8':
    away = benchmark.distance(e, arms, plan, 'float32')
  ceiling, read = timing.ceiling(arms, plan)
  gb_s: list[float] = []  # memory is not as fast a minute later
  list(timing.reading(range(_REPEATS.value), read, gb_s))
  parts = calibration.calibrate(arms, request, _REPEATS.value)
  list(timing.reading(range(_REPEATS.value), read, gb_s))
  ceiling = ceiling.beside(e.target.dtype, gb_s)
  return dict(
    target=e.target.label,
    mb=work.tree_bytes(e.target.params) / 1e6,
    tok_s=1 / parts.step,
    share=1 / parts.step / ceiling.tok_s,
    **{f'v{n}': parts.verify[n] for n in _WIDTHS},
    tv=away and away.total_variation,
    kl=away and away.kl,
  )


if __name__ == '__main__':
  program.launch(run)
