# shellcheck shell=bash
# Source this file: it has all settings of a site. Environment variables override it, so a setting can be
# given for one job:  DATA_DIR=/scratch/imagenet sbatch jobs/pretrain.sbatch volo_d1

# Images in train/CLASS/ and val/CLASS/, or shards; run folders. Relative paths are relative to the checkout.
# All hosts must have access to both.
export DATA_DIR=${DATA_DIR:-data/imagenet}
export OUTPUT_DIR=${OUTPUT_DIR:-runs}

# Label maps, packed or in a folder; empty: none, or pass --token-label-data to the job.
export TOKEN_LABELS=${TOKEN_LABELS:-}

# A file of yours that activates modules and Python; empty: .venv if ./tools/setup has made it, else what is
# active when a job is started. A job has a shell without your .bashrc, so the file first defines `module` and
# `conda activate`. For example:
#   source /etc/profile.d/modules.sh                      # Lmod: /etc/profile.d/lmod.sh
#   module load gcc openmpi
#   source "$HOME/miniforge3/etc/profile.d/conda.sh"
#   conda activate horovod_volo
export ACTIVATE_FILE=${ACTIVATE_FILE:-}

# The network interface of launcher and rendezvous, such as ib0 or eth1; empty: each library chooses.
export NETWORK_INTERFACE=${NETWORK_INTERFACE:-}

# Open MPI carries only Horovod's negotiation, for which TCP is enough; NCCL sends the tensors and finds
# InfiniBand by itself. With keepalive a lost host is detected after 30 + 3 x 5 seconds instead of minutes.
usual_flags="--mca pml ob1 --mca btl ^openib"
usual_flags+=" --mca oob_tcp_keepalive_time 30 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 3"
MPI_FLAGS=${MPI_FLAGS:-$usual_flags}
if [[ -n $NETWORK_INTERFACE && $MPI_FLAGS != *_if_include* ]]; then
    MPI_FLAGS+=" --mca oob_tcp_if_include $NETWORK_INTERFACE --mca btl_tcp_if_include $NETWORK_INTERFACE"
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$NETWORK_INTERFACE}
fi
export MPI_FLAGS

# What starts the ranks of a Slurm job: mpirun, or srun if your MPI and Slurm support PMIx (srun --mpi=list).
export LAUNCHER=${LAUNCHER:-mpirun}

# Slurm reads these when a job is submitted: set what your site requires, and source this file before sbatch.
# The scripts request 8 GPUs per node and start a rank for each. On nodes with 4, set the number here and give
# --ntasks-per-node=4 to sbatch; a site that does not count GPUs wants 0.
# export SBATCH_PARTITION=${SBATCH_PARTITION:-gpu}
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-project}
# export SBATCH_GPUS_PER_NODE=${SBATCH_GPUS_PER_NODE:-a100:8}
