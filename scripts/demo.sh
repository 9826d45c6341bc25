#!/usr/bin/env bash
# A real model, speculatively: two replies in colour, then a short benchmark.
#   bash scripts/demo.sh        (NO_COLOR=1 works; a pipe gets plain marks)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PYTHONUNBUFFERED=1

.venv/bin/python scripts/demo.py

cat <<'EOF'

Now a benchmark of both drafts, some five minutes: are they faster, and do they
say the same? Two prompts of each of seven kinds; one half predicts the speed of
the other half.

EOF
if [ -t 1 ]; then export FORCE_COLOR=1; fi  # The pipe below is no terminal.
# Its last line is one JSON document, for programs.
.venv/bin/python scripts/bench.py --config=configs/smollm2.py \
  --config.bench.prompts_per_category=2 --config.bench.repeats=2 \
  --config.bench.stream_prompts=2 --config.decode.max_new_tokens=48 |
  sed '$d'
