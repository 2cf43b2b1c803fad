# shellcheck shell=bash disable=SC2034  # the scripts that source this file use the variables
# Sourced by horovodrun.sh and mpirun.sh with their arguments: checks the hosts and sets the trainer's
# command.
#
# Exit status: 0 finished; 75 stopped and saved, the same command resumes; anything else: failed.

MISTAKE=2
STOPPED=75
SIGNAL_INTERVAL_SECONDS=5

source jobs/activate.sh

if ! [[ ${HOSTS:-} =~ ^[^:,]+:[0-9]+(,[^:,]+:[0-9]+)*$ ]] || (($# == 0)) || [[ $1 == -* ]]; then
    echo "usage: HOSTS=node1:8,node2:8 $0 RECIPE [flags of the trainer]" >&2
    exit "$MISTAKE"
fi
ranks=0
for host in ${HOSTS//,/ }; do
    ranks=$((ranks + ${host#*:}))
done
echo "commit $(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown), $ranks ranks on $HOSTS"

mark=job=$(uname -n)-$$ # identifies the ranks of this job; Python ignores it
trainer=(
    jobs/block_signals USR1 # a signal that arrives early is delivered when the rank listens for it
    python -X "$mark" -m horovod_volo.train "$DATA_DIR" --output "$OUTPUT_DIR" --resume auto
    ${TOKEN_LABELS:+--token-label-data "$TOKEN_LABELS"} --recipe "$@"
)
child=""

# Wait for the child to end and return its status. A signal ends `wait`, not the child.
wait_for_child() {
    local status=0
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do
        status=0
        wait "$child" || status=$?
    done
    return "$status"
}
