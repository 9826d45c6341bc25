#!/usr/bin/env bash
# Every method of a config on questions of Spec-Bench's format.
# bash experiments/specbench/run.sh --questions=PATH [--config=FILE] [--limit=N]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/specbench/table.py" "$@"
