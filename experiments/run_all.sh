#!/usr/bin/env bash
# Every experiment that needs no training. Without --all only the one that needs
# no model either: under a minute. With it, methods too: half an hour on 2 cores.
# bash experiments/run_all.sh [--all]
# Left out, each with a run.sh of its own: specbench (needs a question.jsonl),
# distillspec_grid (trains a pair first), field_criteria (what others' tests miss),
# prediction (how often predictions hold: an hour).
set -euo pipefail
case "${1:-}" in
  '' | --all) ;;
  *) echo "run_all.sh: unexpected argument '$1'; want --all or nothing" >&2
     exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")"
for name in leviathan_analytic ${1:+methods}; do
  printf '\n%s\n' "$name"
  bash "$name/run.sh"
done
