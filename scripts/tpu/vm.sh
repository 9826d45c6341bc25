#!/usr/bin/env bash
# A TPU VM, from asking for one to paying for none: docs/tpu.md.
#   bash scripts/tpu/vm.sh COMMAND
#
#   create        ask for the TPU, and wait until it is there
#   setup         install this checkout's last commit and runs/ of the bucket on it
#   run COMMAND   start a command on all its hosts; it runs on without you
#   status        what there is, how far it is, and what it printed last
#   delete        give all of it back, and check that it is gone
#
# Settings are in vm.env beside this file, or in $VM_ENV: see vm.env.example.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
env=${VM_ENV:-scripts/tpu/vm.env} here=scripts/tpu/vm.sh

say() { printf 'vm: %s\n' "$*" >&2; }
die() { say "$@"; exit 2; }

prepare() {
  [[ -f $env ]] || die "no settings in $env: copy vm.env.example there, edit it"
  # shellcheck source=/dev/null
  source "$env"
  for name in PROJECT ZONE NAME ACCELERATOR RUNTIME SPOT; do
    [[ ${!name-} ]] || die "$name: set it in $env"
  done
  # The hosts of a larger slice share one folder; a copy each would differ.
  [[ ! ${BUCKET:=} || $BUCKET,$ACCELERATOR == gs://*,*-[148] ]] ||
    die "BUCKET=$BUCKET: gs://NAME, and for one host only (docs/many_hosts.md)"
  [[ $SPOT == true || $SPOT == false ]] || die "SPOT=$SPOT: true or false"
  token=${HF_TOKEN_FILE:-} kept=${BUCKET:+${BUCKET%/}/$NAME/runs}
  [[ ! $token || -f $token ]] || die "HF_TOKEN_FILE=$token: no such file"
  scratch=$(mktemp -d); trap 'rm -rf "$scratch"' EXIT
}

tpus() { gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE"; }
on_hosts() { tpus tpu-vm ssh "$NAME" --worker=all --command="$1"; }
copy() { tpus tpu-vm scp "$1" "$NAME:$2" --worker=all; }

state_of() { # GROUP FIELD: of queued-resources or tpu-vm, or NONE
  if ! tpus "$1" describe "$NAME" --format="value($2)" 2>"$scratch/err"; then
    grep -qi 'not.found' "$scratch/err" || die "$(tail -n 1 "$scratch/err")"
    echo NONE
  fi
}

look() {
  queue=$(state_of queued-resources state.state) # what was asked for
  got=$(state_of tpu-vm state)
  say "$(date +%T) request: $queue; VM: $got"
}

create() {
  local flags=(--node-id="$NAME" --accelerator-type="$ACCELERATOR")
  if [[ $SPOT == true ]]; then flags+=(--spot); fi
  look
  [[ $queue != NONE ]] || tpus queued-resources create "$NAME" "${flags[@]}" \
    --runtime-version="$RUNTIME"
  while :; do
    look
    case $queue in
      ACTIVE) break ;;
      FAILED | SUSPEND* | NONE) die 'no TPU: delete, then create again' ;;
    esac
    sleep "${POLL:-30}"
  done
  say "$NAME is there, and is paid for from now on"
}

setup() {
  git archive --format=tar.gz -o "$scratch/code.tar.gz" HEAD
  on_hosts 'mkdir -p specdec_jax .cache/huggingface'
  copy "$scratch/code.tar.gz" code.tar.gz
  if [[ $token ]]; then copy "$token" .cache/huggingface/token; fi
  on_hosts "tar xzf code.tar.gz -C specdec_jax &&
    bash specdec_jax/$here install ${kept:-none}"
}

run() {
  (($#)) || die 'run: which command? such as: run python scripts/train.py ...'
  on_hosts "bash specdec_jax/$here start ${kept:-none} $(printf '%q ' "$@")"
}

status() {
  look
  [[ $got != READY ]] || on_hosts 'cd specdec_jax && tail job.log job.status'
}

delete() {
  look
  [[ $queue == NONE ]] || tpus queued-resources delete "$NAME" --force --quiet
  look
  [[ $queue$got == NONENONE ]] || die 'still there, and may cost: delete again'
  say "nothing is left in $ZONE${kept:+; $kept is, and costs storage}"
}

# The rest runs on the TPU VM, in the copy of this checkout.

install() { # KEPT
  # Google's images of Ubuntu 22.04 have Python 3.10, which JAX has left.
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python3 -m pip install --quiet --user uv
    ~/.local/bin/uv python install --quiet 3.12
    PYTHON=$(~/.local/bin/uv python find 3.12)
    export PYTHON
  fi
  bash scripts/setup.sh
  .venv/bin/python -m pip install --quiet -e '.[tpu]'
  fetch "$1"
}

fetch() { # KEPT: runs/ of a VM before this one
  if [[ -d runs ]]; then return; fi
  mkdir -p runs.part
  if [[ $1 != none ]] && gcloud storage ls "$1" >/dev/null 2>&1; then
    gcloud storage rsync "$1" runs.part --recursive
  fi
  mv runs.part runs
}

keep() { # KEPT: nothing is ever deleted there
  [[ $1 == none ]] || gcloud storage rsync runs "$1" --recursive ||
    say "runs/ could not be copied to $1"
}

start() { # KEPT COMMAND...
  if grep -qs running job.status && kill -0 "$(<job.pid)" 2>/dev/null; then
    die 'a command is running here; status tells how far'
  fi
  echo running >job.status
  nohup bash "$here" job "$@" >job.log 2>&1 </dev/null &
  echo $! >job.pid
}

job() { # KEPT COMMAND...
  trap 'echo ended with status $? >job.status' EXIT
  while sleep 300; do keep "$1"; done &
  local keeper=$! ended=0
  trap : TERM # comes before a VM is taken away: the command saves a step
  PATH=$PWD/.venv/bin:$PATH "${@:2}" || ended=$?
  kill "$keeper"
  keep "$1"
  exit "$ended"
}

case ${1-} in
  install | fetch | start | job) ;;
  create | setup | run | status | delete) prepare ;;
  *) die "${1-no command}: one of create, setup, run, status, delete" ;;
esac
"$@"
