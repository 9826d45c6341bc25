#!/usr/bin/env bash
# Table 1 and figure 1 of Chen et al. with models that run here; a killed run goes on.
# bash experiments/chen_table1/run.sh [--rows=...] [--quick] [--render]
# [--target=SOURCE --draft=SOURCE] [--xsum=FILE.jsonl] [--humaneval=FILE.jsonl]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/table.py" chen_table1 "$@"
