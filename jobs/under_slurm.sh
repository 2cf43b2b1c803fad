# shellcheck shell=bash
# Sourced by Slurm jobs in the folder of the checkout: starts the ranks, stops them and requeues the job.
#
# A job stops on SIGUSR1. Slurm sends it before the time limit (--signal), and you can send it at any time
# (scancel --full --signal=USR1 JOB). The ranks save and exit with STOPPED, and the same job is requeued.
# A run that has reached the step of --stop-at-step is not requeued: it would stop there again.
# On SIGTERM the ranks save too. When a grace period begins, Slurm sends it to the job's steps, and the job is
# requeued as above. Otherwise (scancel, scontrol requeue, the end of a grace period) it sends it to all
# processes of the job and kills them after KillWait, by default 30 seconds; then Slurm decides about the requeue.
# Exit status: 0 finished; STOPPED stopped and saved; anything else: failed.

MISTAKE=2
STOPPED=75
DONE=0 SAVED=3 STEP_REACHED=4 # what copy_output returns
CONTACT_LOST=205 # mpirun's status if the connection to its daemon on a node breaks
SIGNAL_INTERVAL_SECONDS=10

source jobs/activate.sh
# mpirun starts its daemons as a job step. With these variables the step gets this entire environment, however
# the job was submitted, so that no -x is needed; and it may overlap with an earlier step that a lost node
# keeps alive.
export SLURM_EXPORT_ENV=ALL SLURM_OVERLAP=1

refuse() {
    echo "error: $1" >&2
    exit "$MISTAKE"
}

[[ $LAUNCHER == mpirun || $LAUNCHER == srun ]] || refuse "LAUNCHER must be mpirun or srun, not $LAUNCHER."

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
echo "commit $(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown), job $SLURM_JOB_ID, start" \
    "$((${SLURM_RESTART_COUNT:-0} + 1)), $SLURM_NTASKS ranks on ${nodes[*]}"

# Set `starter` to the command that starts this many ranks. More flags of mpirun may follow.
ranks() {
    # Ranks bind themselves (--binding), so the launcher must not.
    if [[ $LAUNCHER == srun ]]; then
        local nodes_used=$(($1 / SLURM_NTASKS_PER_NODE))
        starter=(srun --mpi=pmix --nodes="$nodes_used" --ntasks="$1" --cpu-bind=none --kill-on-bad-exit=1)
        export OMPI_MCA_pml=ob1 OMPI_MCA_btl=^openib # as in MPI_FLAGS
        [[ -z $NETWORK_INTERFACE ]] || export OMPI_MCA_btl_tcp_if_include=$NETWORK_INTERFACE
    else
        local transport
        read -r -a transport <<<"$MPI_FLAGS"
        starter=(jobs/block_signals TERM mpirun --np "$@" --bind-to none --map-by slot "${transport[@]}")
    fi
}
# On SIGTERM mpirun and its daemons would end the ranks, which receive it too and save.
export OMPI_MCA_orte_launch_agent="jobs/block_signals TERM orted" # Open MPI 4
export PRTE_MCA_prte_launch_agent="jobs/block_signals TERM prted" # Open MPI 5
# These signals would end a rank that does not listen for them yet.
trainer=(jobs/block_signals "USR1,TERM" python -m horovod_volo.train)

stop_requested=""
ended_by_slurm=""
child=""
trap request_stop USR1
trap 'ended_by_slurm=yes; request_stop' TERM

request_stop() {
    trap '' USR1
    [[ -z $stop_requested ]] || return 0
    stop_requested=yes
    [[ -z $child ]] || keep_signalling "$child" &
}

# Signal a process and, if it is not the launcher itself, the launcher below it; repeatedly, because it may
# not have started the ranks yet.
keep_signalling() {
    trap '' TERM
    exec >/dev/null 4>&- # else the reader would wait for the last `sleep`
    while kill -USR1 "$1" 2>/dev/null; do
        pkill -USR1 -P "$1" -x "$LAUNCHER" || true
        sleep "$SIGNAL_INTERVAL_SECONDS"
    done
}

# Run a command that handles SIGUSR1 (the launcher passes it on to all ranks); return its status.
launch() {
    local status=0
    [[ -z $stop_requested ]] || return "$STOPPED"
    "$@" 4>&- &
    child=$!
    [[ -z $stop_requested ]] || keep_signalling "$child" &
    while kill -0 "$child" 2>/dev/null; do
        wait "$child" || true # a signal ends `wait`, not the child
    done
    wait "$child" || status=$?
    child=""
    # A command that got the signal and did not finish has stopped.
    if ((status)) && [[ -n $stop_requested ]]; then
        return "$STOPPED"
    fi
    return "$status"
}

# Launch a command that trains, and return its status; set `outcome` to that of copy_output.
outcome=""
launch_training() {
    local status=0 reader
    exec 4> >(copy_output) # the reader waits until every process has closed this
    reader=$!
    launch "$@" >&4 || status=$?
    exec 4>&-
    outcome=0
    wait "$reader" || outcome=$?
    # srun returns the highest status, which may be that of a rank that it killed when another one had exited.
    if [[ $LAUNCHER == srun ]] && ((status && (outcome == SAVED || outcome == STEP_REACHED))); then
        return "$STOPPED"
    fi
    return "$status"
}

# Train on the ranks of `starter` with these flags; return the trainer's status.
train() {
    local status=0
    launch_training "${starter[@]}" "${trainer[@]}" "$DATA_DIR" --output "$OUTPUT_DIR" \
        --resume auto ${TOKEN_LABELS:+--token-label-data "$TOKEN_LABELS"} "$@" || status=$?
    # If a daemon of mpirun is killed on its node, mpirun ends all ranks and returns 0.
    if ((status == 0 && outcome != DONE)); then
        echo "error: mpirun ended before training was finished" >&2
        return "$CONTACT_LOST"
    fi
    return "$status"
}

# Copy the trainer's output; return DONE, SAVED or STEP_REACHED after such a last line of a run, else 1.
copy_output() {
    trap '' USR1 TERM
    local line status=1
    while IFS= read -r line; do
        printf '%s\n' "$line" || true # the disk behind it may be full
        [[ $line != "done: "* ]] || status=$DONE
        [[ $line != "stopped at step "* ]] || status=$SAVED
        [[ $line != "stopped at step "*" of --stop-at-step;"* ]] || status=$STEP_REACHED
    done
    return "$status"
}

# End the job; requeue it if it has stopped before the step of --stop-at-step.
finish() {
    if (($1 == STOPPED)) && [[ -n $ended_by_slurm ]]; then
        echo "job $SLURM_JOB_ID has stopped; Slurm ends it, and requeues it if it was preempted"
    elif (($1 == STOPPED && outcome == STEP_REACHED)); then
        echo "job $SLURM_JOB_ID has reached the step of --stop-at-step and is not requeued"
    elif (($1 == STOPPED)); then
        echo "job $SLURM_JOB_ID has stopped and is requeued"
        scontrol requeue "$SLURM_JOB_ID" ||
            echo "error: the job could not be requeued. Submit it again; it resumes from its checkpoint." >&2
    fi
    exit "$1"
}
