"""Writes an EAGLE-3 in the form of speculators, which eagle_folder reads."""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from specdec_jax import types
from specdec_jax.io import export
from specdec_jax.io.published import eagle_folder
from specdec_jax.models import eagle, lm


def save(
  folder: pathlib.Path,
  config: eagle.EagleConfig,
  params: types.Params,
  ids: np.ndarray,
  about: dict[str, Any],
) -> None:
  """Writes a folder; eagle_folder.fit gives the same parameters bit for bit.

  One that is there is replaced. Its embedding is the target's, and not written.

  config: as eagle_folder.fit makes it of such a folder, not fused.
  params: of eagle.Eagle, nested, and the 'head' [H, R].
  ids: the draft's vocabulary [R], ascending.
  about: how it was made, with the 'target'.
  """
  flat = lm.flatten(params)
  arrays = {eagle_folder.HEAD: flat.pop('head').T}
  for name, (theirs, turned) in eagle_folder.named(config).items():
    arrays[theirs] = flat[name].T if turned else flat[name]
  arrays['d2t'] = np.asarray(ids, np.int64) - np.arange(len(ids))
  arrays['t2d'] = np.isin(np.arange(config.block.vocab), ids)
  plain = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
  facts = _settings(config, len(ids), str(about['target']))
  export.write(folder, {'config.json': facts, export.MARK: about}, plain)


def _settings(config: eagle.EagleConfig, size: int, target: str) -> dict:
  """config.json; ids of layers are one more than those of the taps."""
  greedy = dict(proposal_type='greedy', speculative_tokens=3)
  return dict(
    architectures=['Eagle3DraftModel'],
    speculators_model_type='eagle3',
    speculators_config=dict(
      algorithm='eagle3',
      default_proposal_method='greedy',
      proposal_methods=[greedy],
      verifier=dict(name_or_path=target, architectures=[]),
    ),
    transformer_layer_config=export.settings(config.block),
    draft_vocab_size=size,
    eagle_aux_hidden_state_layer_ids=[i + 1 for i in config.taps],
    fc_norm=config.tap_norm == 'each',
    norm_before_fc=config.tap_norm == 'joined',
    norm_before_residual=config.normed_residual,
    norm_output=config.last_norm == 'fed',
    tie_word_embeddings=False,
    dtype=jnp.dtype(config.block.dtype).name,
  )
