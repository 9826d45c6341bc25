#!/usr/bin/env bash
# Every experiment that needs no training. Without --all only the two that need
# no model either: under a minute. With it, methods too: half an hour on 2 cores.
# With --empirical, the papers' measured tables: those rows whose models are there
# (see train_rows.sh); --quick takes tiny random models, in a few minutes.
# bash experiments/run_all.sh [--all | --empirical [--quick]]
# Left out, each with a run.sh of its own: specbench (needs a question.jsonl),
# distillspec_grid (trains a pair first), field_criteria (what others' tests miss),
# prediction (how often predictions hold: an hour).
set -euo pipefail
names='leviathan_analytic tpu_roofline' quick=''
case "$*" in
  '') ;;
  --all) names+=' methods' ;;
  --empirical | '--empirical --quick')
    names='leviathan_table3 leviathan_table5 block_verification_table1'
    names+=' leviathan_table2' quick=${2:-} ;;
  *) echo "run_all.sh: unexpected argument '$*'; want --all, --empirical, or" \
       'nothing' >&2
     exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")"
for name in $names; do
  printf '\n%s\n' "$name"
  bash "$name/run.sh" ${quick:+"$quick"}
done
