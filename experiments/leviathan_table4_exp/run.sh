#!/usr/bin/env bash
# Computes, draws, and fills README.md; a few seconds.
# bash experiments/leviathan_table4_exp/run.sh [--workdir=DIR]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -d .venv ] && source .venv/bin/activate
exec python -m experiments.leviathan_table4_exp.table "$@"
