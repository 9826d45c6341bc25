#!/usr/bin/env bash
# Stands in for gcloud, and plays a cloud in the folder $FAKE_CLOUD: calls has the
# arguments of each call; states what a request goes through, a line each, of which
# the last stays; host is the home of the one host; bucket is what gs:// is.
set -euo pipefail
cloud=$FAKE_CLOUD command=
printf '%q ' "$@" >>"$cloud/calls"
echo >>"$cloud/calls"

there() { echo "${1/#gs:\/\//$cloud/bucket/}"; }
missing() { echo 'ERROR: (gcloud) NOT_FOUND: was not found.' >&2; exit 1; }

case "$1 $2 ${3-} ${4-}" in
  'compute tpus queued-resources create') touch "$cloud/request" ;;
  'compute tpus queued-resources describe')
    [[ -f $cloud/request ]] || missing
    state=$(head -n 1 "$cloud/states")
    echo "$state"
    if (($(wc -l <"$cloud/states") > 1)); then sed -i 1d "$cloud/states"; fi
    if [[ $state == ACTIVE ]]; then mkdir -p "$cloud/host"; fi
    ;;
  'compute tpus queued-resources delete') rm -rf "$cloud/request" "$cloud/host" ;;
  'compute tpus tpu-vm describe')
    [[ -d $cloud/host ]] || missing
    echo READY
    ;;
  'compute tpus tpu-vm scp') cp "$5" "$cloud/host/${6#*:}" ;;
  'compute tpus tpu-vm ssh')
    cd "$cloud/host"
    for flag; do
      if [[ $flag == --command=* ]]; then command=${flag#--command=}; fi
    done
    if [[ $command == *'vm.sh install'* ]]; then # no downloads
      mkdir -p specdec_jax/scripts/tpu
      cp "$FAKE_SCRIPT" specdec_jax/scripts/tpu/vm.sh
      command="bash specdec_jax/scripts/tpu/vm.sh fetch${command#*vm.sh install}"
    fi
    HOME=$PWD bash -c "$command"
    ;;
  'storage rsync'*) mkdir -p "$(there "$4")" && cp -r "$(there "$3")/." "$(there "$4")" ;;
  'storage ls'*) [[ -d $(there "$3") ]] ;;
esac
