#!/usr/bin/env bash
# Trains every kind of draft head for the same time, then measures them all.
# bash experiments/heads/run.sh --questions=PATH [--minutes=60] [--workdir=DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
python "$root/experiments/heads/train.py" "$@"
exec python "$root/experiments/heads/table.py" "$@"
