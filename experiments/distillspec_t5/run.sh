#!/usr/bin/env bash
# What DistillSpec gains on a T5's translation drafts; a killed run goes on.
# bash experiments/distillspec_t5/run.sh [--rows=...] [--quick] [--render]
# [--models=DIR] [--trainings=DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
exec python "$root/experiments/table.py" distillspec_t5 "$@"
