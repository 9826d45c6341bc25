#!/usr/bin/env bash
# Computes, draws, and fills README.md; a few seconds.
# bash experiments/tpu_roofline/run.sh [--workdir=DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/table.py" tpu_roofline "$@"
