"""What training refuses before it writes anything."""

import pytest

from configs import train_lm, train_t5
from specdec_jax.train import train_lm as train_lib
from tests import changes as changes_lib

LM = 'text.source=stdlib:prose text.vocab=300 text.length=32 text.rows=4 '
T5 = 'text.vocab=270 text.length=10 text.source_length=6 text.rows=4 '
REFUSED = [
  (LM + 'mesh.data=3', 'text.rows=4: mesh.data=3 has to'),
  (LM + 'optimiser.accumulate=3', '=4: optimiser.accumulate=3 has to'),
  (
    LM + 'mesh.data=3 mesh.fsdp=True text.rows=6',
    'mesh.fsdp=True: 3 devices .data. do not divide the width 64',
  ),
  (LM + 'model.size=gpt_6m', 'export: only models of the Llama'),
  (T5 + 'model.source=x', "model.size='t5_tiny' and source='x': give"),
  (T5 + 'model.size=', "model.size='' and source='': give one of the"),
  (
    T5 + 'text.source_field= judge.metric=',
    "text.source_field='': t5_tiny has an encoder; name",
  ),
  (
    T5 + 'model.size=tiny',
    "text.source_field='digits': tiny has no encoder; name",
  ),
  (T5 + 'text.source_field=', "judge.metric='bleu': is of answers to"),
  (
    T5 + 'model.size= model.source=random:t5_tiny text.tokenizer=x',
    "text.tokenizer='x': model.source has its own",
  ),
  (T5 + 'text.source_length=600', 'text.length=10, .*=600: .* 512 tok'),
]


@pytest.mark.parametrize('changes, why', REFUSED)
def test_what_does_not_fit(changes, why, tmp_path):
  config = train_lm if changes.startswith(LM) else train_t5
  c = config.get_config('tiny').unlock()
  changes_lib.apply(c, changes)
  with pytest.raises(ValueError, match=why) as error:
    train_lib.run(train_lib.settings(c), tmp_path / 'run')
  assert '\n' not in str(error.value)
  assert not [*(tmp_path / 'run').glob('*')]
