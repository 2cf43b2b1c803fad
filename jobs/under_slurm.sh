# shellcheck shell=bash
# Sourced, not run, by jobs of Slurm in the folder of the checkout: how ranks start, stop and start again.
#
# A job stops where it is asked to, by SIGUSR1: Slurm sends it before the time limit (--signal), you at any time
# (scancel --full --signal=USR1 JOB). The ranks save and leave with STOPPED, and the same job queues again.
# Exit status: 0 done; STOPPED stopped, saved and queued again; anything else is a failure's.

MISTAKE=2
STOPPED=75
BY_USR1=$((128 + $(kill -l USR1))) # what `wait` returns when the signal ends the waiting
ASK_AGAIN_SECONDS=10

source jobs/env.sh
set +u # files of modules and conda read variables that are not set
# shellcheck source=/dev/null
source "$ACTIVATE_FILE"
set -u
# mpirun starts its daemons as a step of the job. It gets the whole of this environment, however the job was
# submitted, so no -x is needed; and its share of a node even where a lost node has kept an earlier step alive.
export SLURM_EXPORT_ENV=ALL SLURM_OVERLAP=1

refuse() {
    echo "error: $1" >&2
    exit "$MISTAKE"
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "commit $(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown), job $SLURM_JOB_ID, start" \
    "$((${SLURM_RESTART_COUNT:-0} + 1)), $SLURM_NTASKS ranks on ${nodes[*]}"

# Set `starter` to the words that start this many ranks. More flags of mpirun may follow.
ranks() {
    local transport
    read -r -a transport <<<"$MPI_FLAGS"
    # Ranks bind themselves (--binding), so mpirun must not. One that is asked to stop while it is starting hears
    # of it when it listens; without `env` it would die of it.
    starter=(mpirun -np "$@" -bind-to none -map-by slot "${transport[@]}" env --block-signal=USR1)
}

asked=""
child=""
trap ask_to_stop USR1

ask_to_stop() {
    trap '' USR1
    asked=yes
    [[ -z $child ]] || keep_asking "$child" >/dev/null 4>&- &
}

# Ask a process and, where it is not mpirun itself, the mpirun below it; again, as it may not have started ranks.
keep_asking() {
    while kill -USR1 "$1" 2>/dev/null; do
        pkill -USR1 -P "$1" -x mpirun || true
        sleep "$ASK_AGAIN_SECONDS"
    done
}

# Run a command that heeds SIGUSR1, as mpirun does by passing it on to all ranks; return its status.
launch() {
    local status=0
    [[ -z $asked ]] || return "$STOPPED"
    "$@" 4>&- &
    child=$!
    [[ -z $asked ]] || keep_asking "$child" >/dev/null 4>&- &
    wait "$child" || status=$?
    if [[ -n $asked ]] && ((status == BY_USR1)); then
        status=0
        wait "$child" || status=$?
    fi
    child=""
    # Who was asked to stop and did not come to the end has stopped.
    if ((status)) && [[ -n $asked ]]; then
        return "$STOPPED"
    fi
    return "$status"
}

# Train on the ranks that were set last, with these flags; return the trainer's status.
train() {
    local status=0 reader
    exec 4> >(read_to_the_end) # who else keeps this open lets the reader wait
    reader=$!
    launch "${starter[@]}" python -m horovod_volo.train "$DATA_DIR" --output "$OUTPUT_DIR" --resume auto \
        ${TOKEN_LABELS:+--token-label-data "$TOKEN_LABELS"} "$@" >&4 || status=$?
    exec 4>&-
    # Where a daemon of mpirun is ended on its node, mpirun ends all ranks and returns 0.
    if ! wait "$reader" && ((status == 0)); then
        echo "error: mpirun has ended before training has" >&2
        return 1
    fi
    return "$status"
}

# Pass on what the trainer says; return whether it says that it is done.
read_to_the_end() {
    trap '' USR1
    local line status=1
    while IFS= read -r line; do
        printf '%s\n' "$line"
        [[ $line != "done: "* ]] || status=0
    done
    return "$status"
}

# End the job; one that has stopped queues again.
finish() {
    if (($1 == STOPPED)); then
        echo "job $SLURM_JOB_ID has stopped and queues again"
        scontrol requeue "$SLURM_JOB_ID" ||
            echo "error: it cannot queue again. Submit it again: it goes on where it stopped." >&2
    fi
    exit "$1"
}
