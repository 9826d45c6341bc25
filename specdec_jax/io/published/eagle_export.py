"""Writes drafts for eagle_folder and dflash_folder to read: EAGLE-3 and DFlash
as speculators does, MTP as in MiMo."""

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
  draft: eagle.EagleConfig | eagle.Blocks,
  params: types.Params,
  ids: np.ndarray,
  about: dict[str, Any],
  verifier: str,
) -> None:
  """Writes a folder; its reader's fit gives the same parameters bit for bit.

  Replaces one that is there. Without an embedding or, for an MTP, a head it
  uses the target's; unlike MiMo's, an MTP may draft some ids only.

  draft: as fit makes it from such a folder, not fused.
  params: eagle.Eagle's, nested, and perhaps 'head' [H, R] and 'embed' [V, H].
  ids: the draft's vocabulary [R], ascending.
  verifier: the target, as speculators finds it: 'org/name' or a path.
  """
  config = draft.config if isinstance(draft, eagle.Blocks) else draft
  flat, arrays = lm.flatten(params), {}
  if 'head' in flat:
    arrays[eagle_folder.HEAD] = flat.pop('head').T
  if 'embed' in flat:
    arrays[eagle_folder.EMBED] = flat.pop('embed')
  for name, (theirs, turned) in eagle_folder.named(config).items():
    arrays[theirs] = flat[name].T if turned else flat[name]
  facts = export.settings(config.block) | dict(num_nextn_predict_layers=1)
  if config.reads == 'joined':
    arrays = _as_mimo(arrays)
  else:
    facts = _settings(draft, config, len(ids), verifier)
  if eagle_folder.HEAD in arrays or len(ids) < config.block.vocab:
    arrays['d2t'] = np.asarray(ids, np.int64) - np.arange(len(ids))
    arrays['t2d'] = np.isin(np.arange(config.block.vocab), ids)
  plain = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
  export.write(folder, {'config.json': facts, export.MARK: about}, plain)


def _as_mimo(arrays: eagle_folder.Arrays) -> eagle_folder.Arrays:
  """Gives an MTP's arrays MiMo's names."""
  modules = {ours: theirs for theirs, ours in eagle_folder.MTP_MODULES.items()}
  out = {}
  for name, x in arrays.items():
    module, _, leaf = name.rpartition('.')
    if module == 'fc':  # which reads the state first
      x = np.roll(x, x.shape[-1] // 2, -1)
    theirs = modules.get(module, module.removeprefix('layers.0.'))
    out[f'{eagle_folder.MTP}{theirs}.{leaf}'] = x
  return out


def _settings(draft, config: eagle.EagleConfig, size: int, target: str) -> dict:
  """Makes config.json; its layer ids are the taps plus one."""
  kind, tokens = 'eagle3', 3
  if isinstance(draft, eagle.Blocks):
    kind, tokens = 'dflash', draft.size - draft.first
  greedy = dict(proposal_type='greedy', speculative_tokens=tokens)
  layers = [i + 1 for i in config.taps]
  facts = dict(
    speculators_model_type=kind,
    speculators_config=dict(
      algorithm=kind,
      default_proposal_method='greedy',
      proposal_methods=[greedy],
      verifier=dict(name_or_path=target, architectures=[]),
    ),
    transformer_layer_config=export.settings(config.block),
    draft_vocab_size=size,
    tie_word_embeddings=False,
    dtype=jnp.dtype(config.block.dtype).name,
  )
  if isinstance(draft, eagle.Blocks):
    return facts | dict(
      architectures=['DFlashDraftModel'],
      aux_hidden_state_layer_ids=layers,
      block_size=draft.size,
      mask_token_id=draft.mask,
      sample_from_anchor=draft.first == 0,
    )
  return facts | dict(
    architectures=['Eagle3DraftModel'],
    eagle_aux_hidden_state_layer_ids=layers,
    fc_norm=config.tap_norm == 'each',
    norm_before_fc=config.tap_norm == 'joined',
    norm_before_residual=config.normed_residual,
    norm_output=config.last_norm == 'fed',
  )
