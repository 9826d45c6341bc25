"""Reads quantised checkpoints: finds their matrices, dequantises each as asked.
A matrix's parts tell how it is stored, since settings err; settings say what
the parts cannot."""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specdec_jax.io import names
from specdec_jax.io.arrays.stored import Stored
from specdec_jax.io.quantised import awq, bnb, compressed, form, fp8, gptq, mlx

_KEYS = ('quantization_config', 'quantization')
# quant_method -> setting -> its allowed values; an absent one is None.
_METHODS: dict[str, dict[str, tuple]] = {
  'gptq': {
    'bits': (*gptq.BITS, None),
    'checkpoint_format': ('gptq', 'gptq_v2', None),
    'is_marlin_format': (False, None),
  },
  'awq': {
    'bits': (4, None),
    'version': ('gemm', 'gemv', 'gemv_fast', 'llm-awq', None),
  },
  'compressed-tensors': {
    'format': (
      *('pack-quantized', 'int-quantized', 'float-quantized'),
      *('naive-quantized', 'mixed-precision', 'dense', None),
    ),
    # Rotations, of activations too, which are not applied.
    'transform_config': ({}, None),
  },
  'fp8': {},
  'bitsandbytes': {},
  'mlx': {'bits': mlx.BITS, 'mode': ('affine', None)},
}
# auto-round's packing_format, after 'auto_round:' -> settings that it means.
_ROUND: dict[str, dict[str, Any]] = {
  'auto_gptq': dict(quant_method='gptq', checkpoint_format='gptq'),
  'gptq': dict(quant_method='gptq', checkpoint_format='gptq'),
  'gptqmodel': dict(quant_method='gptq', checkpoint_format='gptq_v2'),
  'auto_awq': dict(quant_method='awq'),
  'fp8': dict(quant_method='fp8'),
}
_PARTS = re.compile(
  r'(.+)\.(qweight|qzeros|scales|g_idx|scaled_zeros|biases'
  r'|weight(_(packed|scale|scale_inv|zero_point|shape|g_idx))?|scale'
  r'|SCB|weight_format'
  r'|weight\.((nested_)?(absmax|quant_map)|quant_state\.bitsandbytes__\w+))'
)


def settings(
  raw: dict[str, Any], path: pathlib.Path
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
  """Splits a config.json into (its quantisation, all other settings)."""
  inner = raw.get('text_config')
  others = lambda x: {k: y for k, y in x.items() if k not in _KEYS}
  rest, places = others(raw), [raw]
  if isinstance(inner, dict):
    rest['text_config'] = others(inner)
    places += [inner]
  found = [x[k] for x in places for k in _KEYS if x.get(k) is not None]
  return (_checked(found[0], path) if found else None), rest


def _checked(values: Any, path: pathlib.Path) -> dict[str, Any]:
  """Returns the settings under the names that are read here."""
  if not isinstance(values, dict):
    raise ValueError(f'{path}: quantization_config={values!r}: give an object')
  out: dict[str, Any] = {**values}
  method = out.setdefault('quant_method', 'mlx')
  if method == 'auto-round':
    packing = str(out.get('packing_format', 'auto_round:auto_gptq'))
    out |= _ROUND.get(packing.removeprefix('auto_round:'), {})
    method = out['quant_method']
  if isinstance(out.get('version'), str):
    out['version'] = out['version'].lower()
  if method == 'gptq':
    out.setdefault('checkpoint_format', out.get('format'))
  if not isinstance(method, str) or method not in _METHODS:
    raise ValueError(
      f'{path}: quantization_config with quant_method={method!r} and the keys '
      f'{sorted(values)} is not supported; allowed are {sorted(_METHODS)}, and '
      f'auto-round with packing_format auto_round: {sorted(_ROUND)}'
    )
  for key, allowed in _METHODS[method].items():
    found = out.get(key)
    if found not in allowed or isinstance(found, float):
      raise ValueError(
        f'{path}: {key}={found!r} of {method} is not supported; allowed: '
        f'{", ".join(map(repr, allowed))}'
      )
  return out


def plan(
  source: str, values: Mapping[str, Any], arrays: Mapping[str, Stored]
) -> tuple[dict[str, form.Plan], dict[str, Stored]]:
  """Plans the matrices, reading none; returns ({name: plan}, {name: array in
  none of them}). values: from `settings`."""
  modules: dict[str, dict[str, Stored]] = {}
  for name, x in arrays.items():
    if match := _PARTS.fullmatch(name):
      modules.setdefault(match[1], {})[match[2]] = x
  plans, plain = {}, dict(arrays)
  for name, parts in modules.items():
    try:
      m = form.Module(source, name, parts, _own(values, name))
    except (re.error, AttributeError, TypeError, ValueError) as e:
      raise ValueError(f'{source}: {name}: its own settings: {e}') from e
    if family := _family(m):
      plans[f'{name}.weight'] = found = family(m)
      for part in parts.keys() & {*found.parts}:
        del plain[f'{name}.{part}']
      if f'{name}.weight' in plain:
        m.misfit('it is stored twice, quantised and as a weight')
  return plans, plain


def _own(values: Mapping[str, Any], name: str) -> dict[str, Any]:
  """Returns one matrix's settings: its own entry, by name or by the first
  pattern that fits, wins over the others."""
  starts = '', 'model.', 'language_model.', 'model.language_model.'
  called = [start + name for start in starts]
  at = lambda key: dict(values.get(key) or {})
  match = lambda pattern: any(re.match(pattern, x) for x in called)
  rounds = at('extra_config').items()  # of auto-round
  found = [x for k, x in (*values.items(), *rounds) if k in called]
  found += [x for k, x in rounds if re.search(rf'({k})(\.|$)', name)]
  found += [x for k, x in at('dynamic').items() if match(k.removeprefix('+:'))]
  # In MLX an entry counts alone; without a group_size it has groups of 64.
  usual = dict(group_size=64) if values['quant_method'] == 'mlx' else {}
  own = next((usual | x for x in found if isinstance(x, dict)), {})
  named = lambda x: match(x[3:]) if x.startswith('re:') else x in called
  groups = at('config_groups').items()
  for means in (named, 'Linear'.__eq__):
    fit = {k: x for k, x in groups if any(map(means, x.get('targets') or ()))}
    if fit:
      own['config_groups'] = fit
      break
  return {**values, **own}


def opened(
  source: str,
  naming: names.Naming,
  plans: Mapping[str, form.Plan],
  plain: Mapping[str, Stored],
) -> names.Reader:
  """Opens what `plan` returns as if it were not quantised."""
  sizes: dict[str, int] = {}
  for x in plans.values():
    sizes[x.kind] = sizes.get(x.kind, 0) + x.shape[0] * x.shape[1]

  def get(name: str) -> np.ndarray:
    if name not in plans:
      return plain[name].read()
    x, order = form.dequantise(plans[name].form()), plans[name].order
    return x if order is None else x[:, np.argsort(order)]

  def spare(name: str) -> bool:
    """Tells the empty bias that some files give every matrix."""
    matrix = name.removesuffix('.bias') + '.weight'
    return matrix in plans and not get(name).any()

  def blocks(name: str) -> np.ndarray:
    x = plans[name]
    return form.blocks(x.form(), int(x.stored.split('_')[1]))

  return names.Reader(
    source,
    naming,
    {name: x.shape for name, x in {**plain, **plans}.items()},
    get,
    kind=max(sizes, key=lambda kind: sizes[kind], default=''),
    spare=spare,
    kinds={name: x.stored for name, x in plans.items()},
    blocks=blocks,
    orders={n: x.order for n, x in plans.items() if x.order is not None},
    narrow={x.dtype for x in plain.values() if len(x.shape) > 1} == {'BF16'},
  )


def _family(m: form.Module) -> Callable[[form.Module], form.Plan] | None:
  """Returns what plans a module; None if it is not quantised."""
  if 'qweight' in m.parts:
    if 'g_idx' in m.parts:
      return gptq.plan
    # Old files of GPTQ have none; where shapes do not tell, settings do.
    method = m.settings['quant_method']
    return awq.plan if awq.is_gemm(m) or method == 'awq' else gptq.plan
  if 'weight_packed' in m.parts:
    return compressed.plan
  if bnb.state_of(m):
    return bnb.plan4
  own = {'SCB', 'weight_format'} & m.parts.keys()
  integers = bnb.plan8 if own else compressed.plan
  dtype = m.parts['weight'].dtype if 'weight' in m.parts else ''
  return {'F8_E4M3': fp8.plan, 'I8': integers, 'U32': mlx.plan}.get(dtype)
