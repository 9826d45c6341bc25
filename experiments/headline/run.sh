#!/usr/bin/env bash
# Measures the README's headline figures, or those named, and fills the README.
# bash experiments/headline/run.sh [stored avx2 pair titles demo kernels kills tpu]
# --show fills the README from what is stored. Quiet, 2 cores, minutes: pair 11 (it needs
# --pair_target=FILE --pair_draft=FILE), demo 7, stored, avx2 (stored,
# as without AVX-512) and titles 5 each, kills 5, tpu 6, kernels 2; as long again where a
# run's parts contradict its result.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/headline/table.py" "$@"
