#!/usr/bin/env bash
# A TPU VM, from asking for one to paying for none: docs/tpu.md.
#   bash scripts/tpu/vm.sh [--env=FILE] [--dry-run] COMMAND
#
#   create           ask for the TPU, and wait until it is there
#   setup            copy this checkout's last commit to all its hosts; install
#   run COMMAND      start a command on all hosts; it runs on without you
#   run --resume     the last command again, on a new VM if this one is gone
#   status, logs     what there is, and how far it is; what it printed
#   delete           give all of it back, and check that it is gone
#
# FILE (vm.env beside this file) has the settings: vm.env.example.
# --dry-run prints each gcloud command and runs none.
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

env=scripts/tpu/vm.env dry=false pretend=NONE here=scripts/tpu/vm.sh

say() { $dry || printf 'vm: %s\n' "$*" >&2; }
die() { dry=false say "$@"; exit 2; }

# Reads and checks the settings, and makes `where` and a folder for scraps.
prepare() {
  [[ -f $env ]] ||
    die "no settings in $env: copy scripts/tpu/vm.env.example there, edit it"
  # shellcheck source=/dev/null
  source "$env"
  : "${PROJECT:?set it in $env}" "${ZONE:?set it in $env}"
  : "${NAME:?set it in $env}" "${ACCELERATOR:?set it in $env}"
  : "${RUNTIME:?set it in $env}" "${SPOT:?true or false, in $env}"
  case $SPOT in true | false) ;; *) die "SPOT=$SPOT: true or false" ;; esac
  # The hosts of a larger slice share one folder; a copy each would differ.
  case ${BUCKET:=},$ACCELERATOR in
    ,* | gs://*,*-[148]) ;;
    gs://*) die "BUCKET: for one host, and $ACCELERATOR has several: leave it" \
      'empty and use a folder that all hosts mount (docs/many_hosts.md)' ;;
    *) die "BUCKET=$BUCKET: gs://NAME, or nothing" ;;
  esac
  token=${HF_TOKEN_FILE:-} kept=${BUCKET:+${BUCKET%/}/$NAME/runs}
  [[ -z $token || -f $token ]] || die "HF_TOKEN_FILE=$token: no such file"
  $dry || command -v gcloud >/dev/null ||
    die 'gcloud is not installed: https://cloud.google.com/sdk/docs/install'
  where=(--project="$PROJECT" --zone="$ZONE")
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  exec 3>&1 # what --dry-run prints goes there from $(...) too
}

cloud() {
  if $dry; then
    printf '%s' gcloud >&3
    printf ' %q' "$@" >&3
    echo >&3
  else
    gcloud "$@"
  fi
}

on_hosts() { # COMMAND [FLAG...]: on all of them
  local command=$1
  shift
  cloud compute tpus tpu-vm ssh "$NAME" "${where[@]}" --worker=all \
    --command="$command" "$@"
}

copy() { # FILE PATH: to all hosts
  cloud compute tpus tpu-vm scp "$1" "$NAME:$2" "${where[@]}" --worker=all
}

# FIELD of queued-resources (the request) or tpu-vm (what it got), or NONE.
look() {
  if cloud compute tpus "$1" describe "$NAME" "${where[@]}" \
    --format="value($2)" 2>"$scratch/error"; then
    if $dry; then echo "$pretend"; fi
  elif grep -qi 'not.found' "$scratch/error"; then
    echo NONE
  else
    die "$(tail -n 1 "$scratch/error")"
  fi
}
request() { look queued-resources state.state; }
machine() { look tpu-vm state; }

ask() {
  local flags=(--accelerator-type="$ACCELERATOR" --runtime-version="$RUNTIME")
  if $SPOT; then flags+=(--spot); fi
  cloud compute tpus queued-resources create "$NAME" --node-id="$NAME" \
    "${where[@]}" "${flags[@]}"
  pretend=ACTIVE
}

give_back() {
  cloud compute tpus queued-resources delete "$NAME" "${where[@]}" \
    --force --quiet
  pretend=NONE
}

create() {
  local attempts=${ATTEMPTS:-5} attempt state before=
  say "asking for $ACCELERATOR in $ZONE; Ctrl-C leaves the request in the" \
    'queue, where create waits on and delete withdraws it'
  for ((attempt = 1; attempt <= attempts; attempt++)); do
    state=$(request)
    if [[ $state == NONE ]]; then ask; fi
    while :; do
      state=$(request)
      if [[ $state != "$before" ]]; then say "$(date +%T) $state"; fi
      before=$state
      case $state in
        ACTIVE)
          say "$NAME is there, and is paid for from now on"
          return
          ;;
        FAILED | SUSPENDED) break ;;
        NONE) die "the request is gone; was it deleted elsewhere?" ;;
      esac
      sleep "${POLL:-30}"
    done
    give_back
  done
  die "$attempts requests failed; try another ZONE, or SPOT=false"
}

setup() {
  local ready='mkdir -p specdec_jax .cache/huggingface'
  git diff --quiet HEAD -- || say 'changes that are not committed stay here'
  git archive --format=tar.gz -o "$scratch/code.tar.gz" HEAD
  on_hosts "$ready"
  copy "$scratch/code.tar.gz" code.tar.gz
  if [[ $token ]]; then copy "$token" .cache/huggingface/token; fi
  on_hosts "tar xzf code.tar.gz -C specdec_jax && bash specdec_jax/$here install"
  say 'installed on all hosts'
}

run() {
  local how=new last=$env.command command=
  case ${1-} in
    --resume)
      how=resume
      shift
      ;;
    --) shift ;;
    -*) die "run: unknown flag $1; there is --resume" ;;
  esac
  if (($#)); then
    command=$(printf '%q ' "$@")
  elif [[ $how == new ]]; then
    die 'run: which command? such as: run python scripts/train.py ...'
  elif [[ -f $last ]]; then
    command=$(<"$last")
  else
    die "run --resume: nothing was run with $env; give the command too"
  fi
  if [[ $how == resume ]]; then replace; fi
  $dry || printf '%s\n' "$command" >"$last"
  on_hosts "bash specdec_jax/$here start $how ${kept:-none} $command"
}

# Another VM, ready for a command, if this one was taken away.
replace() {
  local got queue
  pretend=SUSPENDED
  got=$(machine)
  case $got in
    READY) return ;;
    NONE | PREEMPTED | TERMINATED | STOPPED | SUSPENDED) ;;
    *) die "the VM is $got: try again in a minute" ;;
  esac
  say "the VM is gone ($got): asking for another"
  queue=$(request)
  case $queue in ACTIVE | FAILED | SUSPEND*) give_back ;; esac
  create
  setup
}

status() {
  local queue got
  # Two lines: an error of one must end this.
  queue=$(request)
  got=$(machine)
  say "request: $queue; VM: $got"
  if [[ $got == READY ]] || $dry; then
    on_hosts "bash specdec_jax/$here progress"
  elif [[ $queue == SUSPEND* || $got == PREEMPTED ]]; then
    say 'it was taken away (preempted); run --resume goes on with another'
  fi
}

logs() {
  local folder=results/tpu/$NAME
  mkdir -p "$folder"
  on_hosts 'cat specdec_jax/job.log' --output-directory="$folder"
  if ! $dry; then tail -n "${LINES_SHOWN:-20}" "$folder"/*.log; fi
  say "all of it: $folder/HOST.log"
}

delete() {
  local queue got
  queue=$(request)
  if [[ $queue != NONE ]] || $dry; then give_back; fi
  queue=$(request)
  got=$(machine)
  [[ $queue$got == NONENONE ]] ||
    die "still there (request: $queue, VM: $got), and may cost: delete again"
  say "nothing is left of $NAME in $ZONE${kept:+; $kept is, and costs storage}"
}

# The rest runs on the TPU VM, in the copy of this checkout.

install() {
  # Google's images of Ubuntu 22.04 have Python 3.10, which JAX has left.
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    python3 -m pip install --quiet --user uv
    ~/.local/bin/uv python install --quiet 3.12
    PYTHON=$(~/.local/bin/uv python find 3.12)
    export PYTHON
  fi
  bash scripts/setup.sh
  .venv/bin/python -m pip install --quiet -e '.[tpu]'
}

running() { # its status is its last word
  [[ -f job.pid && ! -f job.status ]] && kill -0 "$(<job.pid)" 2>/dev/null
}

start() {
  if running; then die 'a command is running here; status tells how far'; fi
  rm -f job.status
  # shellcheck disable=SC2016 # expanded by that bash
  nohup bash -c 'bash "$0" job "$@"; echo $? >job.status' "$here" "$@" \
    >>job.log 2>&1 </dev/null &
  echo $! >job.pid
  say "started on $(hostname)"
}

keep() { # KEPT: nothing is ever deleted there
  gcloud storage rsync runs "$1" --recursive >/dev/null 2>&1 ||
    say "runs/ could not be copied to $1"
}

job() { # HOW KEPT COMMAND...
  local how=$1 kept=${2#none} ended=0 keeper=
  shift 2
  printf 'vm: %s: %s\n' "$(date)" "$*"
  if [[ $kept && ! -d runs ]]; then
    if [[ $how == resume ]]; then
      mkdir -p runs.part
      gcloud storage rsync "$kept" runs.part --recursive
      mv runs.part runs
    elif gcloud storage ls "$kept" >/dev/null 2>&1; then
      die "$kept has results of another VM: run --resume, or another NAME"
    fi
  fi
  mkdir -p runs
  if [[ $kept ]]; then
    while sleep "${KEEP_EVERY:-300}"; do keep "$kept"; done &
    keeper=$!
  fi
  # A VM that is taken away gets SIGTERM: the command saves a step and ends. Only
  # now, as `kill` below must end the keeper.
  trap : TERM
  PATH=$PWD/.venv/bin:$PATH "$@" || ended=$?
  if [[ $keeper ]]; then
    kill "$keeper"
    keep "$kept"
  fi
  return "$ended"
}

progress() {
  if running; then
    say 'running'
  elif [[ -f job.status ]]; then
    say "ended with status $(<job.status)"
  else
    say 'nothing was run'
  fi
  if [[ -f job.log ]]; then tail -n 3 job.log; fi
}

while (($#)); do
  case $1 in
    --env=/*) env=${1#--env=} ;;
    --env=*) env=$from/${1#--env=} ;;
    --dry-run) dry=true ;;
    *) break ;;
  esac
  shift
done
case ${1-} in
  install | start | job | progress) ;;
  create | setup | run | status | logs | delete) prepare ;;
  *)
    die "${1:+unknown }command${1:+ $1}: one of create, setup, run, status," \
      'logs, delete'
    ;;
esac
if [[ $1 != run && $1 != start && $1 != job && $# -gt 1 ]]; then
  die "$1: unexpected argument $2"
fi
"$@"
