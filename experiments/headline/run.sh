#!/usr/bin/env bash
# Measures the README's headline figures, or those named, and fills the README.
# bash experiments/headline/run.sh [pair demo stored titles specbench kills tpu kernels]
# --show fills the README from what is stored. Quiet, 2 cores, minutes: pair 11 (it needs
# --pair_target=FILE --pair_draft=FILE), demo 7, stored and titles 5 each, specbench 10,
# kills 5, tpu 6, kernels 2.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/headline/table.py" "$@"
