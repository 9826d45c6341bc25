#!/usr/bin/env bash
# Every experiment that needs no training: under a minute.
# bash experiments/run_all.sh
# Left out, each with a run.sh of its own: methods (half an hour on a real
# model), specbench (needs a question.jsonl), field_criteria (an hour).
set -euo pipefail
cd "$(dirname "$0")"
for name in \
  leviathan_table1 leviathan_fig2 leviathan_fig3 leviathan_fig4 \
  leviathan_table4_exp leviathan_lenience_speed; do
  printf '\n%s\n\n' "$name"
  bash "$name/run.sh"
done
