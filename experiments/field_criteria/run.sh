#!/usr/bin/env bash
# The whole experiment: every seeded bug of the core under every criterion.
# bash experiments/field_criteria/run.sh [--only=NAME,NAME] [--jobs=N]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -d .venv ] && source .venv/bin/activate
exec python -m experiments.field_criteria.table "$@"
