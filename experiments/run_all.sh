#!/usr/bin/env bash
# Every experiment that needs no training. Without --all only the two that need
# no model either: under a minute. With it, methods too: half an hour on 2 cores.
# With --empirical, the papers' measured tables: those rows whose models are there
# (see train_rows.sh), then results/report.md of all.
# --quick takes tiny random models, in 20 minutes, and reports in results/quick.
# bash experiments/run_all.sh [--all | --empirical [--quick] [--models=DIR]]
# Left out, each with a run.sh of its own: specbench (needs a question.jsonl),
# prediction (how often predictions hold: an hour), headline (the README's figures),
# gpu (needs one), quantised (needs a pair), serving (clients of a server), heads
# (trains every kind of draft: six hours), tree_rules (rules of trees beside the
# best that any could be: needs a question.jsonl, 20 minutes).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
names='leviathan_analytic tpu_roofline' kind=${1:-} given=("${@:2}")
for flag in "${given[@]}"; do
  [[ $kind == --empirical && $flag =~ ^--(quick$|models=) ]] || kind=$flag
done
case $kind in
  '') ;;
  --all) names+=' methods' ;;
  --empirical)
    # Joined by +: measured together, of one set of texts.
    names='leviathan_table2+leviathan_table3+leviathan_table5'
    names+='+block_verification_table1 chen_table1 distillspec_t5' ;;
  *) echo "run_all.sh: unexpected argument '$kind'; want --all, --empirical" \
       '[--quick] [--models=DIR], or nothing' >&2
     exit 2 ;;
esac
failed=''
for name in $names; do
  printf '\n%s\n' "${name//+/ }"
  if [ "$kind" = --empirical ]; then
    python "$root/experiments/table.py" ${name//+/ } "${given[@]}"
  else
    bash "$root/experiments/$name/run.sh" "${given[@]}"
  fi || failed+=" ${name//+/ }"
done
if [ "$kind" = --empirical ]; then
  printf '\nreport\n'
  python "$root/experiments/table.py" report "${given[@]}"
fi
[ -z "$failed" ] || { echo "run_all.sh: no result of$failed, see above" >&2; exit 1; }
