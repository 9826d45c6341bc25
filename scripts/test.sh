#!/usr/bin/env bash
# Lint, types and tests on CPU; pytest's closing line comes last.
#   bash scripts/test.sh [--all | --slow] [--quick | --checks] [arguments of pytest]
# Alone, in minutes: the core, the contracts, the readers, small runs of programs.
# --all: every test that sees a seeded bug, all but those that take minutes each,
# which --slow adds. --quick leaves out lint and types, --checks the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export JAX_PLATFORMS=cpu PYRIGHT_PYTHON_IGNORE_WARNINGS=1

checks=true tests=true marks='not more and not slow'
for arg; do
  shift
  case $arg in
    --quick) checks=false ;;
    --checks) tests=false ;;
    --all) marks='not slow' ;;
    --slow) marks='slow or not slow' ;;
    *) set -- "$@" "$arg" ;;
  esac
done

tpu_compiler() {
  # In a folder of its own: on the path, jax looks for a TPU. Of the version that
  # the installed jax asks for: libtpu==0.0.42.*, say.
  libtpu=$(.venv/bin/python - <<'EOF'
import importlib.metadata

needs = importlib.metadata.requires('jax')
print(next(x.split(';')[0] for x in needs if x.startswith('libtpu')))
EOF
  )
  if ! compgen -G ".venv/libtpu/libtpu-${libtpu#*==}.dist-info" >/dev/null; then
    echo "test: getting $libtpu for the aot_tpu tests (700 MB on disk)" >&2
    rm -rf .venv/libtpu .venv/libtpu.part
    if .venv/bin/python -m pip install --quiet --no-deps --only-binary=:all: \
      --target .venv/libtpu.part "$libtpu" >.venv/libtpu.log 2>&1; then
      mv .venv/libtpu.part .venv/libtpu
    else
      echo 'test: no libtpu, so those tests skip (see .venv/libtpu.log)' >&2
    fi
  fi
}

if [[ $marks != *more* ]]; then tpu_compiler & fi

failed=false
if $checks; then
  .venv/bin/ruff check --quiet --output-format=concise || failed=true
  .venv/bin/ruff format --check --quiet || failed=true
  .venv/bin/pyright || failed=true
fi
wait # for tpu_compiler
if $failed; then
  echo 'test: mend what ruff and pyright list above (--quick skips them)' >&2
  exit 1
fi
$tests || exit 0
exec .venv/bin/python -m pytest -n 2 --dist worksteal -q -m "$marks" "$@"
