#!/usr/bin/env bash
# Is every answer of a server under load whole, and its client's own? How long do
# clients wait for it, with speculation and without? What does a pool of rows gain?
# bash experiments/serving/run.sh [--config=FILE] [--results=DIR] [--rows=8]
# bash experiments/serving/run.sh load|pools [flags of load.py or pools.py]
# On 2 cores: 10 minutes and 15; with --config=configs/pair.py:tiny a few.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
parts='load pools'
case ${1-} in load | pools) parts=$1 && shift ;; esac
for part in $parts; do
  python "$root/experiments/serving/$part.py" "$@"
done
