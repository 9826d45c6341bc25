#!/usr/bin/env bash
# Trains a small pair, distils its draft in every cell, and measures all of them.
# bash experiments/distillspec_grid/run.sh [--workdir=DIR] [--pair] [--config...]
# --pair: trains a target and two drafts, a row of the papers' tables, no more.
# Without --workdir: results/distillspec_grid. A run that was ended goes on.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
workdir="$root/results/distillspec_grid"
for arg; do
  case $arg in --workdir=*) workdir=${arg#*=} ;; esac
done
# Cells have the same programs: compiled once, in this folder.
export JAX_COMPILATION_CACHE_DIR="$workdir/compiled"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
exec python "$root/experiments/distillspec_grid/table.py" \
  --workdir="$workdir" "$@"
