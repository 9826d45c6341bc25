#!/usr/bin/env bash
# Computes, draws, and fills README.md; a few seconds.
# bash experiments/leviathan_fig3/run.sh [--workdir=DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
PYTHONPATH="$root" exec python -m experiments.leviathan_fig3.table "$@"
