#!/usr/bin/env bash
# Makes .venv with exactly requirements.txt; does nothing when it is there.
#   PYTHON=python3.12 bash scripts/setup.sh   (to change it: remove .venv first)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }
fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
last() { grep '^ERROR' .venv/pip.log | tail -n 1; }
pip() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    "$@" >.venv/pip.log 2>&1
}

if cmp -s requirements.txt .venv/installed.txt && fits .venv/bin/python; then
  exit 0
fi

if ! fits .venv/bin/python; then
  # A name may be there and not work: pyenv's shims, Apple's stub.
  for python in ${PYTHON:-python3 python3.12 python3.11 python3.13 ''}; do
    if fits "$python"; then break; fi
  done
  fits "$python" || die "no Python 3.11 or newer found${PYTHON:+ as $PYTHON};" \
    "install one, or name it: PYTHON=/path/to/python3.12 bash scripts/setup.sh"
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv ||
    die "$python could not make .venv (on Debian: apt install python3-venv)"
fi

say 'installing requirements.txt into .venv (1 GB on disk; 1 to 5 minutes, once)'
pip --only-binary=:all: -r requirements.txt ||
  die "pip failed ($(last)); is there a network? The whole log: .venv/pip.log"
# compat: a path, which wins over the folder of the clone itself where a script
# lies beside it; the default finder comes after such a namespace package.
pip --no-deps --no-build-isolation --config-settings editable_mode=compat -e . ||
  die "this package could not be installed ($(last)); log: .venv/pip.log"
cp requirements.txt .venv/installed.txt
say 'done'
