#!/usr/bin/env bash
# Trains on several hosts with horovodrun and gloo, without a scheduler and without MPI. All hosts are
# reachable by ssh and share the same folders.
#
#   HOSTS=node1:8,node2:8 ./jobs/horovodrun.sh RECIPE [flags of the trainer]
#
# HOSTS lists each host with its number of GPUs. SSH_PORT and SSH_KEY are optional. All other settings are in
# jobs/env.sh. On SIGUSR1, SIGTERM, SIGHUP or Ctrl-C the run saves at the end of the step and exits.
# Exit status: 0 finished; 75 stopped and saved, the same command resumes; anything else: failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/over_ssh.sh

# horovodrun writes its entire environment into the commands that start ranks, which every user can read. So
# it gets only what ranks need.
exported=()
for name in $(compgen -e | grep -E '^(HOME|PATH|LD_LIBRARY_PATH|(NCCL|HOROVOD)_.*)$'); do
    exported+=("$name=${!name}")
done
ssh=(${SSH_PORT:+-p "$SSH_PORT"} ${SSH_KEY:+-i "$SSH_KEY"})
command=(
    horovodrun --gloo -np "$ranks" -H "$HOSTS" "${ssh[@]}"
    ${NETWORK_INTERFACE:+--network-interface "$NETWORK_INTERFACE"}
    "${trainer[@]}"
)

# A horovodrun that receives a signal ends its ranks before they have saved. So the ranks are signalled
# directly: those on this host or, if there are none, those of the first host; repeatedly, because they may
# not have been started yet. The other ranks learn of it at the end of the step.
request_stop() {
    trap '' USR1 TERM INT HUP
    [[ -n $child ]] || exit "$STOPPED"
    local signal_ranks=(pkill -USR1 -f "^[^ ]*python[^ ]* -X $mark ")
    while kill -0 "$child" 2>/dev/null; do
        "${signal_ranks[@]}" || ssh -o BatchMode=yes "${ssh[@]}" "${HOSTS%%:*}" "${signal_ranks[@]@Q}" || true
        sleep "$SIGNAL_INTERVAL_SECONDS"
    done &>/dev/null &
}
trap request_stop USR1 TERM INT HUP

# Exit with STOPPED if rank 0 printed that it stopped: horovodrun turns every status of a rank but 0 into 1.
run() {
    trap '' USR1 TERM INT HUP
    # In a new session, so that Ctrl-C does not reach it.
    setsid env -i --default-signal "${exported[@]}" "${command[@]}" 2>&1 |
        awk -v stopped="$STOPPED" '{ print; fflush() }
            /^\[0\]<stdout>:stopped at step [0-9]+ and saved/ { status = stopped }
            END { exit status }'
}

run &
child=$!
wait_for_child
