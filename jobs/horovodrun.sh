#!/usr/bin/env bash
# Trains on several hosts by horovodrun and gloo: without a scheduler, and without MPI. Hosts are reached by
# ssh, and see the same folders.
#
#   HOSTS=node1:8,node2:8 ./jobs/horovodrun.sh RECIPE [flags of the trainer]
#
# HOSTS names each host and its number of GPUs; SSH_PORT and SSH_KEY serve where ssh's own settings do not
# say. All else is set in jobs/env.sh. SIGUSR1, SIGTERM, SIGHUP and Ctrl-C save at the next log point.
# Exit status: 0 finished; 75 stopped and saved, the same line goes on; anything else is a failure's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/over_ssh.sh

# horovodrun writes its whole environment into the commands that start ranks, where everybody can read it.
carried=()
for name in $(compgen -e | grep -E '^(HOME|PATH|LD_LIBRARY_PATH|(NCCL|HOROVOD)_.*)$'); do
    carried+=("$name=${!name}")
done
ssh=(${SSH_PORT:+-p "$SSH_PORT"} ${SSH_KEY:+-i "$SSH_KEY"})
words=(
    horovodrun --gloo -np "$ranks" -H "$HOSTS" "${ssh[@]}"
    ${NETWORK_INTERFACE:+--network-interface "$NETWORK_INTERFACE"}
    "${trainer[@]}"
)

# A horovodrun that is signalled ends its ranks before they have saved. So ranks themselves are asked: those
# here or, where there are none, those of the first host; again, as they may not have been started yet. All
# others hear of it at the next log point.
ask_to_stop() {
    trap '' USR1 TERM INT HUP
    [[ -n $child ]] || exit "$STOPPED"
    local ask=(pkill -USR1 -f "^[^ ]*python[^ ]* -X $mark ")
    while kill -0 "$child" 2>/dev/null; do
        "${ask[@]}" || ssh -o BatchMode=yes "${ssh[@]}" "${HOSTS%%:*}" "${ask[@]@Q}" || true
        sleep "$ASK_AGAIN_SECONDS"
    done &>/dev/null &
}
trap ask_to_stop USR1 TERM INT HUP

# Ends with STOPPED if rank 0 said so: horovodrun turns every status of a rank but 0 into 1.
run() {
    trap '' USR1 TERM INT HUP
    # In a session of its own, where Ctrl-C does not reach it.
    setsid env -i --default-signal "${carried[@]}" "${words[@]}" 2>&1 |
        awk -v stopped="$STOPPED" '{ print; fflush() }
            /^\[0\]<stdout>:stopped at step [0-9]+ and saved/ { status = stopped }
            END { exit status }'
}

run &
child=$!
wait_for_child
