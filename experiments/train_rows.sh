#!/usr/bin/env bash
# Trains what the empirical tables need: a T5 that translates, one that says what
# a function does, and drafts of both and of one that writes titles. A killed run
# goes on by the same command.
# bash experiments/train_rows.sh [--multi30k=DIR] [--code] [--models=DIR]
# Without --multi30k (see texts.py) and --code: the drafts for titles alone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
models="$root/results/rows" multi30k='' code=''
for arg; do
  case $arg in
    --models=*) models=${arg#*=} ;;
    --multi30k=*) multi30k=${arg#*=} ;;
    --code) code=true ;;
    *) echo "train_rows.sh: unexpected argument '$arg'" >&2; exit 2 ;;
  esac
done

distil() {  # ROW and further settings
  local row=$1 draft; shift
  for draft in w128 w256 layers; do
    python "$root/scripts/distill.py" --workdir="$models/$row-$draft" \
      --config="$root/configs/distill_t5.py:${draft/layers/full}" "$@"
  done
}

target() {  # ROW and its pairs
  python "$root/scripts/train.py" --workdir="$models/$1" \
    --config="$root/configs/train_t5.py:$1" --config.text.source="$2"
}

if [ -n "$multi30k" ]; then
  pairs="$models/multi30k/train.jsonl"
  [ -e "$pairs" ] || python "$root/experiments/texts.py" \
    --multi30k="$multi30k" --output="$models/multi30k"
  target translation "$pairs"
  distil translation --config.teacher.source="$models/translation/model" \
    --config.data.source="$pairs" --config.data.field=en \
    --config.data.chat=True --config.data.prompts=28000 \
    --config.data.length=40 --config.data.source_length=28 \
    --config.batch.rows=64 --config.run.steps=1300
fi
if [ -n "$code" ]; then
  pairs="$models/functions/train.jsonl"
  [ -e "$pairs" ] || python "$root/experiments/texts.py" --functions \
    --output="$models/functions"
  target code "$pairs"
  distil code --config.teacher.source="$models/code/model" \
    --config.data.source="$pairs" --config.data.field=code \
    --config.data.chat=True --config.data.prompts=20000 \
    --config.data.length=32 --config.data.source_length=128 \
    --config.batch.rows=64 --config.run.steps=1300
fi
texts="$models/docstrings/train.jsonl"
[ -e "$texts" ] || python "$root/experiments/texts.py" --docstrings \
  --output="$models/docstrings"
distil titles --config.data.source="$texts" --config.data.chat=True \
  --config.data.prompts=9000 --config.data.source_length=96 \
  --config.batch.rows=16 --config.run.steps=800
