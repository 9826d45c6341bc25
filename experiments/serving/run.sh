#!/usr/bin/env bash
# Is every answer of a server under load whole, and its client's own? How long do
# clients wait for it, with speculation and without?
# bash experiments/serving/run.sh [--config=FILE] [--requests=1000] [--clients=64]
# On 2 cores: 20 minutes; with --config=configs/pair.py:tiny two.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/serving/load.py" "$@"
