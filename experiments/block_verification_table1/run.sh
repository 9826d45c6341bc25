#!/usr/bin/env bash
# Table 1 of Sun et al. (block verification) with models that run here; a killed run goes on.
# bash experiments/block_verification_table1/run.sh [--rows=...] [--quick] [--render]
# [--models=DIR] [--target=SOURCE --draft=SOURCE [--prompts=FILE]]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/table.py" block_verification_table1 "$@"
