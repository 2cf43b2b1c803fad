# shellcheck shell=bash
# Sourced, not run: the settings of a site, the only place for them. What the environment holds already wins,
# so a setting may be given for one job:  DATA_DIR=/scratch/imagenet sbatch jobs/pretrain.sbatch volo_d1

# Images in train/CLASS/ and val/CLASS/, or shards; run folders. All hosts must see both. From the checkout.
export DATA_DIR=${DATA_DIR:-data/imagenet}
export OUTPUT_DIR=${OUTPUT_DIR:-runs}

# Label maps, packed or in a folder; empty: none, or --token-label-data on the line of the job.
export TOKEN_LABELS=${TOKEN_LABELS:-}

# A file that is sourced before python is started. tools/activate takes what ./tools/setup made; for modules or
# conda name a file of your own with the lines you would type (module load openmpi; conda activate volo).
export ACTIVATE_FILE=${ACTIVATE_FILE:-tools/activate}

# The network of launcher and rendezvous, such as ib0 or eth1; empty: each library chooses for itself.
export NETWORK_INTERFACE=${NETWORK_INTERFACE:-}

# Open MPI carries only Horovod's negotiation, for which TCP does; tensors travel by NCCL, which finds
# InfiniBand by itself. A host that is gone without a word is noticed after 30 + 3 x 5 seconds, not after minutes.
usual_flags="-mca pml ob1 -mca btl ^openib"
usual_flags+=" -mca oob_tcp_keepalive_time 30 -mca oob_tcp_keepalive_intvl 5 -mca oob_tcp_keepalive_probes 3"
MPI_FLAGS=${MPI_FLAGS:-$usual_flags}
if [[ -n $NETWORK_INTERFACE && $MPI_FLAGS != *_if_include* ]]; then
    MPI_FLAGS+=" -mca oob_tcp_if_include $NETWORK_INTERFACE -mca btl_tcp_if_include $NETWORK_INTERFACE"
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$NETWORK_INTERFACE}
fi
export MPI_FLAGS

# Slurm reads these itself, when a job is submitted: set what your site asks for, and source this file before
# sbatch. Without them a job takes the site's defaults and no GPU.
# export SBATCH_PARTITION=${SBATCH_PARTITION:-gpu}
# export SBATCH_ACCOUNT=${SBATCH_ACCOUNT:-project}
# export SBATCH_GPUS_PER_NODE=${SBATCH_GPUS_PER_NODE:-8}
