"""Flags of other trainers and launchers, and what takes their place here: shown where such a flag is refused.

They are those of timm's train.py, sail-sg/volo, TokenLabeling and torchrun that this trainer does not have.
"""

from __future__ import annotations

# Flags that have one answer share a row.
_ANSWERS = {
    "--nproc-per-node --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --master-addr "
    "--master-port --local-rank --world-size --dist-url --dist-backend --standalone": (
        "The launcher says how many ranks there are and where: horovodrun -np RANKS -H HOST:GPUS,..."
    ),
    "--amp-dtype --amp-impl --model-dtype --fp16 --bf16": "Arithmetic is --precision bf16 or fp16.",
    "--split-bn --bn-momentum --bn-eps --bn-tf": "The constants of batch norm are the model's own.",
    "--opt-eps --opt-betas --opt-kwargs --opt-args --opt-foreach": (
        "The optimizers' other constants are the published ones; --plugin registers your own."
    ),
    "--channels-last --pin-mem --no-prefetcher --use-multi-epochs-loader --fuser --worker-seeding "
    "--dataloader --synchronize-step --sched-on-updates --fast-norm": "It is not needed here.",
    "--train-split --class-map --dataset --dataset-download": (
        "The data folder has train/ and val/; --val-split names another folder of held-out images."
    ),
    "--experiment --eval-metric": (
        "Results are in --output, in the folder --name; `best` is of the highest accuracy."
    ),
    "--data --data-dir --data-path": "The data folder is the first argument, without a flag.",
    "--drop --drop-block": (
        "Dropout and DropBlock are not part of these networks; stochastic depth is --drop-path."
    ),
    "--jsd --jsd-loss --aug-splits": "There is no loss between augmentations; AugMix is --aa augmix-m3.",
    "--device": "A rank takes a GPU, or the CPU where there is none; CUDA_VISIBLE_DEVICES limits the GPUs.",
    "--max-restarts": "A job started again goes on with --resume auto; an --elastic run may lose hosts.",
    "--dist-bn": (
        "Batch norm over all ranks is --sync-bn all; checkpoints hold the average of its statistics."
    ),
    "--save-images": "Pictures of training images are in TensorBoard: --images-every EPOCHS.",
    "--log-wandb": "Metrics go to Weights & Biases too with --log-to wandb.",
    "--bce-loss": "The binary cross-entropy is --loss bce.",
    "--config -c": "A file of settings is --recipe FILE.toml; a run writes its own, resolved.toml.",
    "--pretrained": "Start from the published weights with --finetune timm:NAME.",
    "--initial-checkpoint": "Start from weights with --finetune FILE.",
    "--no-resume-opt": "Start from the weights alone with --finetune FILE.",
    "--start-epoch": "A run resumes where it was, with --resume auto.",
    "--checkpoint-hist": "The number of checkpoints to keep is --keep-checkpoints.",
    "--recovery-interval": "Checkpoints inside an epoch: --checkpoint-every STEPS.",
    "--log-interval": "Steps between log lines: --log-every.",
    "--val-interval": "Epochs between evaluations: --eval-every.",
    "--validation-batch-size --validation-batch-size-multiplier": (
        "The batch size of evaluation is --eval-batch-size."
    ),
    "--grad-accum-steps --grad-accumulation": (
        "Micro-batches per step: --accumulation, or --global-batch, which sets it."
    ),
    "--grad-checkpointing": "Recompute activations with --grad-checkpoint.",
    "--torchcompile --torchscript": "Compile the blocks with --compile.",
    "--model-ema-decay": "Averaged weights: --ema-decay 0.9999.",
    "--model-ema-force-cpu": "Averaged weights are kept on the device: --ema-decay 0.9999.",
    "--input-size": "The side of images is --img-size.",
    "--drop-connect": "Stochastic depth is --drop-path.",
    "--num-workers": "Data threads per rank: --workers.",
    "--color-jitter-prob": "The strength is --color-jitter.",
    "--no-aug": "No augmentation: --aa '' --color-jitter 0 --reprob 0 --scale 1 1 --ratio 1 1 --hflip 0.",
    "--resplit": "Random erasing applies to every image: --reprob.",
    "--mixup-mode": "Mixup and CutMix mix pairs of a batch: --mixup, --cutmix, --mixup-switch-prob.",
    "--mixup-off-epoch": "Mixup applies to all epochs: --mixup, --cutmix.",
    "--cutmix-minmax": "The size of the box is drawn by --cutmix.",
    "--lr-cycle-mul --lr-cycle-limit": "The learning rate decays once, over --epochs: --sched.",
    "--lr-noise": "The learning rate is a function of the step: --sched; --plugin registers your own.",
    "--decay-epochs": "The epochs at which --sched step changes the learning rate: --decay-milestones.",
    "--patience-epochs": "The learning rate is a function of the step: --sched.",
    "--lr-base-scale": "Learning rates are proportional to the global batch: --lr-base, --lr-base-size.",
    "--gp": "The pooling is the model's own.",
    "--head-init-scale": "The head starts as published.",
    "--tta": "python -m horovod_volo.evaluate averages several crops of each image.",
    "--evaluate": "The accuracy of trained weights: python -m horovod_volo.evaluate.",
    "--token-label-score": "Label maps are --token-label-data.",
}
HINTS: dict[str, str] = {flag: hint for flags, hint in _ANSWERS.items() for flag in flags.split()}


def hint_for(flag: str) -> str:
    """Return " " and what takes the place of another trainer's flag; an empty string for other flags."""
    flag = flag.replace("_", "-")  # torchrun has both spellings
    return f" {HINTS[flag]}" if flag in HINTS else ""
