#!/usr/bin/env bash
# Benchmarks a target in several weights with a draft in several.
# bash experiments/quantised/run.sh TARGET DRAFT [--targets=...] [--drafts=...]
# bash experiments/quantised/run.sh passes SOURCE,SOURCE
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
[ $# -ge 2 ] || { sed -n 2,4p "${BASH_SOURCE[0]}" >&2; exit 2; }
if [ "$1" = passes ]; then
  exec python "$root/experiments/quantised/passes.py" --sources="${@:2}"
fi
exec python "$root/experiments/quantised/table.py" \
  --config.target.source="$1" --config.draft.source="$2" "${@:3}"
