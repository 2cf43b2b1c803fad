#!/usr/bin/env bash
# Trains on several hosts by Open MPI, without a scheduler. Hosts are reached by ssh, and see the same folders.
#
#   HOSTS=node1:8,node2:8 ./jobs/mpirun.sh RECIPE [flags of the trainer]
#
# HOSTS names each host and its number of GPUs; SSH_PORT and SSH_KEY serve where ssh's own settings do not
# say. All else is set in jobs/env.sh. SIGUSR1, SIGTERM, SIGHUP and Ctrl-C save at the next log point.
# Exit status: 0 finished; 75 stopped and saved, the same line goes on; anything else is a failure's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/over_ssh.sh

read -r -a transport <<<"$MPI_FLAGS"
# Other hosts get of the environment only what ranks need: the rest may hold secrets.
carried=()
for name in $(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|(NCCL|HOROVOD)_.*)$'); do
    carried+=(-x "$name")
done
words=(
    # By its full path: other hosts then look for their part of Open MPI in the same place.
    "$(command -v mpirun)" -np "$ranks" -H "$HOSTS"
    # The first host starts all others; with a tree, hosts would have to reach each other by this key too.
    -mca plm_rsh_no_tree_spawn 1
    -mca plm_rsh_args "-o BatchMode=yes${SSH_PORT:+ -p $SSH_PORT}${SSH_KEY:+ -i $SSH_KEY}"
    -bind-to none -map-by slot # ranks bind themselves: --binding
    "${transport[@]}" "${carried[@]}" "${trainer[@]}"
)

# mpirun passes SIGUSR1 on to all ranks, if it has started them; any other signal makes it end them. So this
# one is sent, and again.
ask_to_stop() {
    trap '' USR1 TERM INT HUP
    [[ -n $child ]] || exit "$STOPPED"
    while kill -USR1 "$child" 2>/dev/null; do
        sleep "$ASK_AGAIN_SECONDS"
    done &>/dev/null &
}
trap ask_to_stop USR1 TERM INT HUP

# In a session of its own, where Ctrl-C reaches it only through this script.
setsid env --ignore-signal=USR1 "${words[@]}" &
child=$!
wait_for_child
