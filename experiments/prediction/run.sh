#!/usr/bin/env bash
# Are the benchmark's predictions right, and as sure as they say?
# bash experiments/prediction/run.sh [--temperatures=0,1] [--config...]
# bash experiments/prediction/run.sh --show    # the tables of what is stored
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/prediction/table.py" "$@"
