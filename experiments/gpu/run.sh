#!/usr/bin/env bash
# Measures decoding on one GPU; each part is stored as it ends.
# bash experiments/gpu/run.sh [--parts=bandwidth,plain,...] [--tiny] [--results=DIR]
# --tiny: every line on tiny models, on a CPU too.
# Random weights of published sizes: nothing is downloaded.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
# Of the card's memory; the rest is for CUDA graphs.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
exec python "$root/experiments/gpu/measure.py" "$@"
