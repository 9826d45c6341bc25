#!/usr/bin/env bash
# A real model, speculatively: two replies in colour, then a short benchmark.
#   bash scripts/demo.sh        (NO_COLOR=1 works; a pipe gets plain marks)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PYTHONUNBUFFERED=1

.venv/bin/python scripts/demo.py

cat <<'EOF'

Now a benchmark of both drafts, and of the two in turn ("adaptive"), four
minutes: are they faster, and do they say the same? Prompts of seven kinds; some
predict the speed of the others.

EOF
if [ -t 1 ]; then export FORCE_COLOR=1; fi  # The pipe below is no terminal.
# Its last line is one JSON document, for programs.
.venv/bin/python scripts/bench.py --config=configs/smollm2.py --minutes=4 |
  sed '$d'

cat <<'EOF'

To watch a prompt of yours answered with speculation, and without:
  .venv/bin/python scripts/serve.py --config=configs/smollm2.py
and open http://127.0.0.1:8000/
EOF
