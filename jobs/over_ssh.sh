# shellcheck shell=bash disable=SC2034  # who sources it reads what is set
# Sourced, not run, by horovodrun.sh and mpirun.sh with their arguments: hosts that are reached by ssh.
#
# Exit status: 0 finished; 75 stopped and saved, the same line goes on; anything else is a failure's.

MISTAKE=2
STOPPED=75
ASK_AGAIN_SECONDS=5

source jobs/env.sh
set +u # files of modules and conda read variables that are not set
# shellcheck source=/dev/null
source "$ACTIVATE_FILE"
set -u

if ! [[ ${HOSTS:-} =~ ^[^:,]+:[0-9]+(,[^:,]+:[0-9]+)*$ ]] || (($# == 0)) || [[ $1 == -* ]]; then
    echo "usage: HOSTS=node1:8,node2:8 $0 RECIPE [flags of the trainer]" >&2
    exit "$MISTAKE"
fi
ranks=0
for host in ${HOSTS//,/ }; do
    ranks=$((ranks + ${host#*:}))
done
echo "commit $(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown), $ranks ranks on $HOSTS"

mark=job=$(uname -n)-$$ # tells the ranks of this job from others; Python ignores it
trainer=(
    env --block-signal=USR1 # a rank may be asked to stop before it listens: it hears of it when it does
    python -X "$mark" -m horovod_volo.train "$DATA_DIR" --output "$OUTPUT_DIR" --resume auto
    ${TOKEN_LABELS:+--token-label-data "$TOKEN_LABELS"} --recipe "$@"
)
child=""

# Wait for the child to end and return its status: a signal ends the waiting, not the child.
wait_for_child() {
    local status=0
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do
        status=0
        wait "$child" || status=$?
    done
    return "$status"
}
