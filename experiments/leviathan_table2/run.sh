#!/usr/bin/env bash
# Table 2 of Leviathan et al. with models that run here; a killed run goes on.
# bash experiments/leviathan_table2/run.sh [--rows=...] [--quick] [--render]
# [--models=DIR] [--target=SOURCE --draft=SOURCE [--prompts=FILE]]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/table.py" leviathan_table2 "$@"
