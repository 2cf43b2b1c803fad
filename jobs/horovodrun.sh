#!/usr/bin/env bash
# Trains on several hosts with horovodrun and gloo, without a scheduler and without MPI. All hosts are
# reachable by ssh and share the same folders.
#
#   HOSTS=node1:8,node2:8 ./jobs/horovodrun.sh RECIPE [flags of the trainer]
#   MIN_RANKS=8 HOSTS=node1:8,node2:8 ./jobs/horovodrun.sh RECIPE --global-batch 1024 [flags of the trainer]
#
# HOSTS lists each host with its number of GPUs. With MIN_RANKS the run is elastic: it goes on without hosts
# that no longer answer, as long as so many ranks are left, and takes them in again. HOSTS_FILE, with a line
# HOST:GPUS for each host, may then be changed during the run; without it these are HOSTS. A host that failed
# is not used again for COOLDOWN seconds (20). SSH_PORT and SSH_KEY are optional. All other settings are in
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
started_on=(-np "$ranks" -H "$HOSTS")
if [[ -n ${MIN_RANKS:-} ]]; then
    temporary=$(mktemp -d)
    trap 'rm -rf "$temporary"' EXIT
    tr , '\n' <<<"$HOSTS" >"$temporary/hosts"
    # horovodrun waits for a lost host until ssh ends, which without these flags takes hours.
    printf '#!/bin/sh\nexec %q -o ServerAliveInterval=5 -o ServerAliveCountMax=3 -o ConnectTimeout=10 "$@"\n' \
        "$(command -v ssh)" >"$temporary/ssh"
    chmod +x "$temporary/ssh"
    exported+=("PATH=$temporary:$PATH")
    discover="$PWD/jobs/answering_hosts.sh ${HOSTS_FILE:-$temporary/hosts} ${SSH_PORT:-22}"
    started_on=(-np "$MIN_RANKS" --min-np "$MIN_RANKS" --host-discovery-script "$discover")
    started_on+=(--blacklist-cooldown-range "${COOLDOWN:-20}" "$((3 * ${COOLDOWN:-20}))")
    trainer+=(--elastic)
fi
command=(
    horovodrun --gloo "${started_on[@]}" "${ssh[@]}"
    ${NETWORK_INTERFACE:+--network-interface "$NETWORK_INTERFACE"}
    "${trainer[@]}"
)

# A horovodrun that receives a signal ends its ranks before they have saved. So the ranks are signalled
# directly: those on this host or, if there are none, those of the first host that has some; repeatedly, because
# they may not have been started yet. The other ranks learn of it at the end of the step.
request_stop() {
    trap '' USR1 TERM INT HUP
    [[ -n $child ]] || exit "$STOPPED"
    local signal_ranks=(pkill -USR1 -f "^[^ ]*python[^ ]* -X $mark ")
    while kill -0 "$child" 2>/dev/null; do
        "${signal_ranks[@]}" || for host in $(grep -s '^[^# ]*:[1-9]' "${HOSTS_FILE:-}") ${HOSTS//,/ }; do
            ssh -o BatchMode=yes -o ConnectTimeout=5 "${ssh[@]}" "${host%:*}" "${signal_ranks[@]@Q}" && break
        done
        sleep "$SIGNAL_INTERVAL_SECONDS"
    done &>/dev/null &
}
trap request_stop USR1 TERM INT HUP

# Exit with STOPPED if rank 0 printed that it stopped: horovodrun turns every status of a rank but 0 into 1.
run() {
    trap '' USR1 TERM INT HUP
    # In a new session, so that Ctrl-C does not reach it.
    (
        trap - USR1 TERM INT HUP
        exec setsid env -i "${exported[@]}" "${command[@]}"
    ) 2>&1 | (
        trap '' PIPE # a `tee` that reads this ends by Ctrl-C
        status=0
        while IFS= read -r line; do
            printf '%s\n' "$line" 2>/dev/null || true
            [[ ! $line =~ ^\[[0-9]+\]"<stdout>:stopped at step "[0-9]+" and saved" ]] || status=$STOPPED
        done
        exit "$status"
    )
}

run &
child=$!
wait_for_child
