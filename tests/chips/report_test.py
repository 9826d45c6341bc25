"""The report: refusals, a GPU's, and a tiny pair compiled from end to end."""

import math

import pytest

from specdec_jax.chips import aot, hlo, report, roofline
from specdec_jax.costs import cost
from specdec_jax.models import config, lm
from tests import programs

TINY = config.sized('tiny', dtype='bfloat16').running(scan_layers=True)
GOOD = aot.Setting('v5e:2x2', 1, 2, TINY, TINY, 4, 128, 3)


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(topology='v5e:3x3'), "topology='v5e:3x3': allowed are v5e:1x1, "),
    (dict(topology='h100'), "topology='h100': allowed are .*tpu7x:2x2x1"),
    (dict(model=8), 'model=8 needs 8 devices; v5e:2x2 has 4'),
    (dict(data=3, model=1), 'batch_size=4: must be a multiple of mesh data=3'),
    (dict(draft=TINY.running(dtype='float32')), 'draft.dtype=bfloat16'),
    (dict(target=config.sized('t5_tiny', dtype='bfloat16')), 'an encoder: '),
    (dict(slots=6), 'context=6: must be in 7 to 512'),
    (dict(slots=1024), 'context=1024: must be in 7 to 512'),
    (dict(train=1), 'train=1: must be in 2 to 512'),
    (dict(train=1024), 'train=1024: must be in 2 to 512'),
    (dict(train=64, topology='h100:2'), 'train=64: .* on TPUs only'),
  ],
)
def test_refused_before_compiling(changes, words, monkeypatch):
  monkeypatch.setattr(aot, 'devices', lambda *_: pytest.fail('too late'))
  with pytest.raises(ValueError, match=words):
    report.make(GOOD._replace(**changes))


def test_without_the_compiler(monkeypatch, tmp_path):
  monkeypatch.setattr('sys.prefix', str(tmp_path))
  monkeypatch.delenv('TPU_LIBRARY_PATH', raising=False)
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"libtpu is missing: pip install 'jax"):
    report.make(GOOD)


def test_a_gpu_by_its_data_sheet(monkeypatch):
  monkeypatch.setattr(aot, 'devices', lambda *_: pytest.fail('compiled'))
  setting = GOOD._replace(topology='h100:2', weights=('int8', 'int4'))
  doc = report.make(setting)
  shares = roofline.share(TINY, 2, 'int8'), roofline.share(TINY, 2, 'int4')
  assert tuple(doc['shares'].values()) == shares and shares[0].split == 2
  assert doc['fits'] and not doc['temporaries']
  chip = roofline.CHIPS['h100']
  predicted = roofline.predict(chip, *shares, rows=4, slots=128)
  assert doc['roofline'] == predicted
  head, *rest = report.lines(doc)
  assert head == 'target + draft on h100:2: by its data sheet, not run on'
  assert any('of 80.000 GB' in line for line in rest)
  gain, nodes, levels = predicted.trees[0.7]
  told = f'{gain:.2f} ({nodes} nodes, {levels} levels)'
  told = told if gain > 1 else 'do not speculate'
  assert any(f'0.7: {told}' in line for line in rest[-8:])
  v, c = predicted.v[nodes + 1], predicted.c
  assert gain == cost.tree_tokens(0.7, nodes, levels) / (levels * c + v)
  assert any(f'v(33) {predicted.v[33]:.3f}' in line for line in rest)
  assert not any('compile' in line for line in rest)


HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(f32[] %a, f32[] %b)
}

%layer (p: (bf16[4,64])) -> (bf16[4,64]) {
  %r = bf16[4,64]{1,0:T(8,128)(2,1)} all-reduce(%x), to_apply=%add, OP/verify/o"
  %c = (bf16[2,8,128]{2,1,0:T(8)}, u32[]) copy-start(%k), OP/verify/cache"
  %s = f32[4]{0} all-reduce(%x), to_apply=%add, OP/verify/cond/branch_1_fun/s"
  %t = bf16[2,32,32]{2,1,0} transpose(%x), OP/verify/x"
}

%layers (p: (bf16[4,64])) -> pred[] {
  %n = s32[]{:T(128)} constant(16)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%window (p: (bf16[4,64])) -> (bf16[4,64]) {
  %w = (bf16[4,64]{1,0}) while(%p), condition=%layers, body=%layer
  %g = (f32[4,8]{1,0}, f32[4,32]{1,0}) all-gather-start(%q), OP/propose/q"
}

ENTRY %main (p: bf16[4,64]) -> bf16[4,64] {
  %v = (bf16[4,64]{1,0}) while(%p), condition=%add, body=%window
  %big = f32[2048,1024]{1,0} all-gather(%h), OP/prefill/h"
  %out = token[] outfeed(%z)
}
"""
HLO = HLO.replace('OP', 'metadata={op_name="jit(generate)/while/body')


def test_collectives_count_as_often_as_layers_run():
  found = hlo.collectives(HLO, 4)
  assert found['verify'].kinds == {'all-reduce': 16}
  assert found['verify'].sent == 16 * 4 * 64 * 2 * 2 * 3 / 4
  assert found['verify, in branches'].kinds == {'all-reduce': 16}
  assert found['propose'] == ({'all-gather': 1}, 4 * 32 * 4 * 3 / 4)
  assert found['prefill'].sent == 2048 * 1024 * 4 * 3 / 4


FUSED = """
%all-reduce-scatter.1 (x: f32[64,8]) -> f32[16,8] {
  %r = f32[64,8]{1,0} all-reduce(%x), channel_id=1, {{0,2,4,6},{1,3,5,7}}
}

%async_collective_fusion (x: bf16[16,8]) -> bf16[64,8] {
  %g = bf16[64,8]{1,0} all-gather(%x), channel_id=2, [2,4]<=[4,2]T(1,0)
}

%fused_computation.2 (x: bf16[16,8]) -> bf16[64,8] {
  %h = bf16[64,8]{1,0} all-gather(%x), channel_id=2, [2,4]<=[4,2]T(1,0)
}

ENTRY %main (p: f32[64,8]) -> f32[16,8] {
  %a = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
  %b = bf16[64,8]{1,0} fusion(%w), calls=%async_collective_fusion
  %c = bf16[64,8]{1,0} fusion(%b), calls=%fused_computation.2
  %d = (f32[8]{0}, f32[8]{0}) all-reduce(%e), mesh['a'=4,'b'=2] {'b'}, x={1}
}
"""
for form in ('{{', '[2,4]', 'mesh['):
  FUSED = FUSED.replace(f', {form}', f', replica_groups={form}')


def test_collectives_of_fusions_count_once_and_between_their_group():
  ((scope, found),) = hlo.collectives(FUSED, 8).items()
  kinds = {'reduce-scatter': 1, 'all-gather': 1, 'all-reduce': 1}
  assert scope == 'other' and found.kinds == kinds
  scattered, gathered, reduced = 16 * 8 * 4 * 3, 64 * 8 * 2 * 3 / 4, 2 * 8 * 4
  assert found.sent == scattered + gathered + reduced


def test_warnings_name_what_is_copied_gathered_and_moved():
  found = hlo.warnings(HLO, [2 * 8 * 128], 128)
  assert [x.partition(':')[0] for x in found] == [
    'a whole cache is copied',
    'weights or logits are gathered',
    'the host takes part',
  ]
  assert found[0].endswith('/verify/cache')
  assert len(hlo.warnings(HLO, [], 128)) == 2
  assert len(hlo.warnings(HLO, [], 128, {2048 * 1024})) == 1


@pytest.mark.aot_tpu
@pytest.mark.slow
def test_the_program_reports_a_tiny_pair():
  try:
    aot.library()
  except ValueError as error:
    pytest.skip(str(error))
  done = programs.run(
    'scripts/tpu_report.py',
    '--config=configs/llama3.py:tiny',
    '--topology=v5e:2x2',
    '--context=128',
    '--train=64',
    '--config.mesh.data=2',
    '--config.mesh.model=2',
    '--config.bench.batch_size=2',
    '--config.target.dtype=int8',
    '--config.draft.dtype=bfloat16',
  )
  found = done.check().document
  assert found['fits'] and found['setting']['model'] == 2
  # The compiler holds what arithmetic says; it pads what is small.
  weights = {name: x['weights'] for name, x in found['shares'].items()}
  plain, both = (found['programs'][x] for x in ('plain', 'speculative'))
  assert plain['arguments'] >= weights['target']
  assert both['arguments'] >= sum(weights.values())
  for program in (plain, both):
    assert not program['warnings']
    # Two in each of two layers and one of the embedding, as arithmetic has it.
    assert program['collectives']['verify']['kinds']['all-reduce'] >= 5
  # Both moments like their parameters, split over all four devices.
  step = found['train']
  count = sum(math.prod(x.shape) for x in lm.shapes(TINY).values())
  assert step['fits'] and step['parts'] == 4
  assert count < step['parameters'] < 1.05 * count  # 4 bytes, a fourth of them
  assert step['moments'] == pytest.approx(2 * step['parameters'], rel=1e-3)
  kinds = step['program']['collectives']['other']['kinds']
  # Each matrix is gathered for the forward and for the backward pass.
  assert kinds['all-gather'] >= 2 * 14 and kinds['reduce-scatter'] > 0


def test_a_cache_that_moves_onto_the_chip_is_not_copied():
  end = 'bf16[2,8,128]{2,1,0:T(8,128)(2,1)'
  line = f'%c = ({end}}}, {end}S(1)}}, u32[]{{:S(2)}}) copy-start(%k)'
  assert not hlo.warnings(line, [2048], 8)
  assert hlo.warnings(line.replace('S(1)', ''), [2048], 8)
