#!/usr/bin/env bash
# Lint, types and tests on CPU; pytest's closing line comes last.
#   bash scripts/test.sh [--quick] [--slow] [arguments of pytest]
# --quick leaves out lint and types; --slow adds the tests that take minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export JAX_PLATFORMS=cpu PYRIGHT_PYTHON_IGNORE_WARNINGS=1

checks=true marks='not slow'
for arg; do
  shift
  case $arg in
    --quick) checks=false ;;
    --slow) marks='slow or not slow' ;;
    *) set -- "$@" "$arg" ;;
  esac
done

# The TPU compiler, in a folder of its own: on the path, jax would look for a TPU.
# The version is the one that the installed jax asks for.
libtpu=$(.venv/bin/python - <<'EOF'
import importlib.metadata as metadata

needs = metadata.requires('jax')
print(next(x.split(';')[0] for x in needs if x.startswith('libtpu')))
EOF
)
if [ "$(cat .venv/libtpu/installed.txt 2>/dev/null)" != "$libtpu" ]; then
  echo "test: installing $libtpu (170 MB, for the aot_tpu tests)" >&2
  rm -rf .venv/libtpu
  if .venv/bin/python -m pip install --quiet --no-deps --only-binary=:all: \
    --target .venv/libtpu "$libtpu" >.venv/libtpu.log 2>&1; then
    echo "$libtpu" >.venv/libtpu/installed.txt
  else
    rm -rf .venv/libtpu
    echo 'test: no libtpu here, so its tests skip (log: .venv/libtpu.log)' >&2
  fi
fi

if $checks; then
  echo 'test: ruff and pyright' >&2
  .venv/bin/ruff check --quiet
  .venv/bin/ruff format --check --quiet
  .venv/bin/pyright
fi
.venv/bin/python -m pytest -n 2 -q -m "$marks" "$@"
