#!/usr/bin/env bash
# Enumerates what rules accept of trees, then measures it on SmolLM2.
# bash experiments/tree_rules/run.sh --questions=PATH [--minutes=12] [--limit=1]
# bash experiments/tree_rules/run.sh speed --questions=PATH  # trees and chains
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
if [ "${1-}" = speed ]; then
  exec python "$root/experiments/tree_rules/speed.py" "${@:2}"
fi
python "$root/experiments/tree_rules/table.py" --exact "$@" > /dev/null
exec python "$root/experiments/tree_rules/table.py" "$@"
