"""A dry run: print the settings, the numbers that follow from them, and estimates of memory and traffic.

It needs no GPU, no data and no other rank: the model is built on the meta device.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from horovod_volo.cluster.buckets import build_gradient_buckets, message_bytes
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import ONE_RANK, Config
from horovod_volo.config.validation import config_warnings
from horovod_volo.core.errors import escape_controls
from horovod_volo.core.operators import estimated_with_kernels
from horovod_volo.engine.banner import batch_warnings, format_lines, settings_lines
from horovod_volo.engine.classification import TASKS
from horovod_volo.models.build import freeze, hidden_matrices, start_training
from horovod_volo.models.weights import TIMM
from horovod_volo.optim.build import OPTIMIZERS
from horovod_volo.plugins import check_names, load_plugins

# Name, images and classes of the data set that is assumed for a task where the data is not on this machine.
_ASSUMED = {
    "classification": ("ImageNet-1K", 1_281_167, 1_000),
    "segmentation": ("ADE20K", 20_210, 150),
    "detection": ("COCO 2017", 117_266, 80),
}
_IMAGENET_22K = ("ImageNet-22K", 14_197_122, 21_841)

_NOT_CHOSEN = "a run without --model and --recipe chooses them for its images, which are not known here"
_FP32, _BF16 = 4, 2  # bytes
_MIN_BATCH = 2  # batch norm needs more than one value per channel
_GIB, _MIB = 2**30, 2**20
# The GiB that the driver reports, by the GB in a GPU's name: RTX 3060, T4, RTX 3090, A100, H100, H200.
_GPU_GIB = {12: 11.7, 16: 14.6, 24: 23.6, 40: 39.4, 80: 79.1, 141: 139.8}
# An assumption: CUDA's context, workspaces, DALI and NCCL take 3 GiB, and fragmentation a tenth of the rest.
_RESERVED_GIB, _FRAGMENTED = 3, 0.1


class Workload(NamedTuple):
    """The data set and the model of a run, which do not depend on the number of ranks."""

    images: int
    classes: int
    parameters: Mapping[str, Parameter]  # by name, on the meta device
    activation_bytes: float  # per image
    heads: tuple[str, ...]
    matrix_elements: int  # of the parameters that --opt muon orthogonalises
    warnings: list[str]

    def scalars(self, *, trained: bool = False) -> int:
        """Return the number of scalars in all parameters, or in those that are not frozen."""
        return sum(p.numel() for p in self.parameters.values() if p.requires_grad or not trained)


def dry_run(config: Config, ranks: int) -> str:
    """Return the text of a dry run on this many ranks."""
    load_plugins(config.run.plugin)
    task = TASKS.find(config.model.task)
    config = task.complete(config)
    counted = task.count(config) if config.data.data_dir else None
    if config.chooses_model and counted is not None:
        on_gpu = torch.cuda.is_available() and config.launch.device != "cpu"
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        config = task.choose(config, counted[0], ranks, device)
    elif config.chooses_model:
        config = replace(config, warnings=(*config.warnings, _NOT_CHOSEN))
    return describe(config, ranks, measure_workload(config, counted))


def measure_workload(config: Config, counted: tuple[int, int] | None = None) -> Workload:
    """Measure the model on the meta device; `counted` are its images and classes, if they are known."""
    task = TASKS.find(config.model.task)
    check_names(config)
    images, classes, warnings = _images_and_classes(config, counted)
    with torch.device("meta"):
        network = task.build(config, config.model.num_classes or classes)
    model, heads = network.module, network.heads
    parameters = dict(model.named_parameters())
    freeze(model, config.model.freeze, heads)
    start_training(model)
    matrices = [parameters[name] for name in hidden_matrices(model, heads)]
    with estimated_with_kernels(config.model.kernels):
        activations = _activation_bytes(network.training_forward, model, config)
    elements = sum(matrix.numel() for matrix in matrices if matrix.requires_grad)
    return Workload(images, classes, parameters, activations, heads, elements, warnings)


def describe(config: Config, ranks: int, workload: Workload) -> str:
    """Return settings, derived numbers and estimates of a run on this many ranks as text."""
    config = resolve(config, ranks)
    derived = derive(config, ranks=ranks, images=workload.images)
    parameters = workload.parameters
    state = state_bytes(config, ranks, workload)
    activations = workload.activation_bytes * config.data.batch_size
    buckets = build_gradient_buckets(parameters, config.exchange, heads=workload.heads, ranks=ranks, shards=1)
    sent_bytes = sum(message_bytes(bucket, config.exchange) for bucket in buckets)
    # The second half of a ring allreduce gathers sums; a sharded optimizer gathers new parameters instead.
    sharded = config.update.shard_optimizer
    gathered_bytes = workload.scalars(trained=True) * _FP32 if sharded else sent_bytes
    if OPTIMIZERS.find(config.update.opt).matrix_state_keys:
        gathered_bytes += workload.matrix_elements * _BF16  # the updates of matrices, each of one rank
    properties = {
        "ranks": f"{ranks}",
        "images": f"{workload.images:,} of {workload.classes:,} classes",
        **settings_lines(config, derived, list(parameters.values()), buckets),
        "memory": f"about {state / _GIB:.1f} GiB of state and "
        f"{activations / _GIB:.1f} GiB of activations per rank: {_smallest_gpu(state + activations)}",
        "exchange": f"{sent_bytes / _MIB:.0f} MiB of gradients per step; "
        f"{(ranks - 1) / ranks * (sent_bytes + gathered_bytes) / _MIB:.0f} MiB through each rank's link",
    }
    warnings = [
        *config_warnings(config, [ONE_RANK] if ranks == 1 else []),
        *batch_warnings(config, derived, workload.images),
        *workload.warnings,
    ]
    return "\n".join([dump(config), *map(escape_controls, format_lines(properties, warnings))])


def _smallest_gpu(used_bytes: float) -> str:
    """Describe the smallest GPU with room for the state and the activations of a rank."""
    needed = used_bytes / _GIB / (1 - _FRAGMENTED) + _RESERVED_GIB
    fitting = (f"a GPU of {size} GB" for size, available in _GPU_GIB.items() if needed <= available)
    return next(fitting, "more than a GPU of 141 GB has; use a smaller --batch-size, or --grad-checkpoint")


def state_bytes(config: Config, ranks: int, workload: Workload) -> float:
    """Return the bytes of training state on one rank."""
    update, spec = config.update, OPTIMIZERS.find(config.update.opt)
    trained = workload.scalars(trained=True)
    matrices = workload.matrix_elements if spec.matrix_state_keys else 0
    # "step" is one scalar for a whole tensor.
    moments = (trained - matrices) * len(set(spec.state_keys) - {"step"})
    optimizer: float = _FP32 * (moments + len(spec.matrix_state_keys) * matrices)
    if update.shard_optimizer:
        optimizer = (optimizer + _FP32 * trained) / ranks  # with a copy of the gradients of this rank's shard
    copies = 2 if update.ema_decay else 1  # weights and averaged weights
    return _FP32 * (copies * workload.scalars() + trained) + optimizer


def _images_and_classes(config: Config, counted: tuple[int, int] | None) -> tuple[int, int, list[str]]:
    """Return images, classes and warnings; those of a usual data set if the data is on another machine."""
    sources = [config.data.data_dir, config.objective.token_label_data, config.model.finetune]
    paths = [source for source in sources if source and not source.startswith(TIMM)]
    warnings = [f"{path} is not on this machine" for path in paths if not Path(path).exists()]
    if counted is not None:
        return (*counted, warnings)
    is_22k = config.model.num_classes == _IMAGENET_22K[2]
    name, images, classes = _IMAGENET_22K if is_22k else _ASSUMED[config.model.task]
    return images, classes, [*warnings, f"the images and classes are assumed to be those of {name}"]


def _activation_bytes(forward: Callable[[Tensor], object], model: torch.nn.Module, config: Config) -> float:
    """Estimate the activations per image that autograd saves for backward, from a forward on the meta device.

    Each storage counts once, parameters do not. The seed of drop path is fixed, so the estimate is the same
    every time.
    """
    side, batch = config.model.img_size, max(_MIN_BATCH, config.data.batch_size)
    of_parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}  # kept alive: the address of a freed storage could be reused

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    images = torch.zeros(batch, 3, side, side, device="meta")
    with torch.random.fork_rng(devices=[]), saved_tensors_hooks(save, lambda tensor: tensor):
        forward(images)
    total = sum(storage.nbytes() for address, storage in saved.items() if address not in of_parameters)
    width = 1.0 if config.model.precision in ("fp32", "tf32") else 0.5
    return width * total / batch
