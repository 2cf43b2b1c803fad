#!/usr/bin/env bash
# Trains on several hosts with Open MPI, without a scheduler. All hosts are reachable by ssh and share the
# same folders.
#
#   HOSTS=node1:8,node2:8 ./jobs/mpirun.sh RECIPE [flags of the trainer]
#
# HOSTS lists each host with its number of GPUs. SSH_PORT and SSH_KEY are optional. All other settings are in
# jobs/env.sh. On SIGUSR1, SIGTERM, SIGHUP or Ctrl-C the run saves at the end of the step and exits.
# Exit status: 0 finished; 75 stopped and saved, the same command resumes; anything else: failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/over_ssh.sh

read -r -a transport <<<"$MPI_FLAGS"
# Other hosts get only the variables that ranks need: the others may contain secrets.
exported=()
for name in $(compgen -e | grep -E '^(PATH|LD_LIBRARY_PATH|(NCCL|HOROVOD)_.*)$'); do
    exported+=(-x "$name")
done
command=(
    # With its full path, other hosts use the Open MPI in the same folder.
    "$(command -v mpirun)" --np "$ranks" -H "$HOSTS"
    # This host starts all others. As a tree, all hosts would need this key to reach each other.
    --mca plm_rsh_no_tree_spawn 1
    --mca plm_rsh_args "-o BatchMode=yes${SSH_PORT:+ -p $SSH_PORT}${SSH_KEY:+ -i $SSH_KEY}"
    --bind-to none --map-by slot # ranks bind themselves: --binding
    "${transport[@]}" "${exported[@]}" "${trainer[@]}"
)

# mpirun passes SIGUSR1 on to all ranks once it has started them; on any other signal it ends them. So SIGUSR1
# is sent, repeatedly.
request_stop() {
    trap '' USR1 TERM INT HUP
    [[ -n $child ]] || exit "$STOPPED"
    while kill -USR1 "$child" 2>/dev/null; do
        sleep "$SIGNAL_INTERVAL_SECONDS"
    done &>/dev/null &
}
trap request_stop USR1 TERM INT HUP

# In a new session, so that Ctrl-C reaches it only through this script. mpirun begins with SIGUSR1 ignored,
# because one that arrives early would end it.
(
    trap '' USR1
    exec setsid "${command[@]}"
) &
child=$!
wait_for_child
