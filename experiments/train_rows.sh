#!/usr/bin/env bash
# Trains what the empirical tables need: a T5 that translates, one that says what
# a function does, and drafts of both, of one that writes titles and of a chat
# model; the pair of the GPT-like row. A killed run goes on by the same command.
# bash experiments/train_rows.sh [--multi30k=DIR] [--code] [--chat] [--models=DIR]
# Without --multi30k (see texts.py), --code and --chat: titles and the pair alone.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$root/.venv" ] && source "$root/.venv/bin/activate"
models="$root/results/rows" multi30k='' code='' chat=''
for arg; do
  case $arg in
    --models=*) models=${arg#*=} ;;
    --multi30k=*) multi30k=${arg#*=} ;;
    --code) code=true ;;
    --chat) chat=true ;;
    *) echo "train_rows.sh: unexpected argument '$arg'" >&2; exit 2 ;;
  esac
done

distil() {  # ROW and further settings
  local row=$1 draft steps; shift
  for draft in w128 w256 layers; do
    case $row-$draft in  # functions are long sources: fewer steps
      code-w256) steps=200 ;;
      code-*) steps=500 ;;
      *) steps='' ;;
    esac
    python "$root/scripts/distill.py" --workdir="$models/$row-$draft" \
      --config="$root/configs/distill_t5.py:${draft/layers/full}" \
      ${steps:+--config.run.steps="$steps"} "$@"
  done
}

texts() {  # FOLDER and the flag of texts.py that fills it
  [ -e "$models/$1/train.jsonl" ] ||
    python "$root/experiments/texts.py" "$2" --output="$models/$1"
}

task() {  # ROW FOLDER and further settings of its drafts: a target and drafts
  local row=$1 pairs="$models/$2/train.jsonl"; shift 2
  python "$root/scripts/train.py" --workdir="$models/$row" \
    --config="$root/configs/train_t5.py:$row" --config.text.source="$pairs"
  distil "$row" --config.teacher.source="$models/$row/model" \
    --config.data.source="$pairs" --config.data.chat=True \
    --config.data.prompts=20000 --config.batch.rows=64 "$@"
}

if [ -n "$multi30k" ]; then
  texts multi30k --multi30k="$multi30k"
  task translation multi30k --config.data.field=en --config.data.length=40 \
    --config.data.source_length=28
fi
if [ -n "$code" ]; then
  texts functions --functions
  task code functions --config.data.field=code --config.data.length=32 \
    --config.data.source_length=128
fi
if [ -n "$chat" ]; then
  python "$root/scripts/distill.py" --workdir="$models/chat-student" \
    --config="$root/configs/distill.py" --config.student.kind=lm \
    --config.student.taps='()' --config.student.layers='(0,1,2,29)' \
    --config.run.steps=500 --config.run.evaluate_every=100
fi
texts docstrings --docstrings
distil titles --config.data.source="$models/docstrings/train.jsonl" \
  --config.data.chat=True --config.data.prompts=9000 \
  --config.data.source_length=96 --config.batch.rows=16
texts library --library
language() {  # FOLDER SIZE STEPS and further settings: a GPT-like model
  python "$root/scripts/train.py" --workdir="$models/$1" \
    --config="$root/configs/train_lm.py" --config.model.size="$2" \
    --config.model.dtype=float32 --config.model.remat=False \
    --config.text.source="$models/library/train.jsonl" \
    --config.text.vocab=3072 --config.text.length=128 --config.text.rows=8 \
    --config.optimiser.learning_rate=3e-3 --config.optimiser.warmup=$(($3 / 20)) \
    --config.run.steps="$3" --config.run.evaluate_every="$3" \
    --config.run.checkpoint_every=$(($3 / 5)) "${@:4}"
}
language gpt small 3000
tokenizer=--config.text.tokenizer="$models/gpt/model"
language gpt-start mini 2000 "$tokenizer"
# As many steps in all as the draft that is distilled from there.
language gpt-mini mini 2400 "$tokenizer"
python "$root/scripts/distill.py" --workdir="$models/gpt-distilled" \
  --config="$root/configs/distill.py" --config.teacher.source="$models/gpt/model" \
  --config.student.kind=lm --config.student.source="$models/gpt-start/model" \
  --config.student.taps='()' --config.student.share=False \
  --config.student.vocabulary=0 --config.data.completions=text \
  --config.data.source="$models/library/train.jsonl" --config.data.prompts=3200 \
  --config.data.held_out=8 --config.data.prompt_tokens=32 \
  --config.data.length=128 --config.data.temperatures='(1.0,)' \
  --config.data.batch=80 --config.loss.divergence=jensen_shannon:0.5 \
  --config.optimiser.learning_rate=2e-3 --config.optimiser.warmup=20 \
  --config.optimiser.muon=0.0 --config.run.steps=400 \
  --config.run.evaluate_every=400 --config.run.checkpoint_every=400 \
  --config.judge.new_tokens=8
