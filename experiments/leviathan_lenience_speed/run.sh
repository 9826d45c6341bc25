#!/usr/bin/env bash
# Computes, draws, and fills README.md; a few seconds.
# bash experiments/leviathan_lenience_speed/run.sh [--workdir=DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -d .venv ] && source .venv/bin/activate
exec python -m experiments.leviathan_lenience_speed.table "$@"
