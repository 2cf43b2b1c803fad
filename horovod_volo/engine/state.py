"""The training state: everything that a step changes, and nothing that follows from the settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horovod_volo.cluster.reducer import REDUCERS, Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import micro_batches
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.engine.checkpoint.files import StateDicts
from horovod_volo.engine.task import Task
from horovod_volo.models import build
from horovod_volo.models.compiled import compile_blocks
from horovod_volo.models.precision import prepare_precision
from horovod_volo.optim.build import OPTIMIZERS, build_optimizer, parameter_groups, state_tensors
from horovod_volo.optim.ema import Average, Ema

_OPTIMIZER, _EXCHANGE = "optimizer", "exchange"  # files of a checkpoint that are not loaded like the others


@dataclass
class TrainState:
    """The model, its optimizer, its EMA, the loss scale, and the number of steps taken.

    The reducer holds the gradients and, of a sharded optimizer, the assignment of shards to ranks.
    """

    model: nn.Module
    heads: tuple[str, ...]  # prefixes of the names of the layers that give the logits
    reducer: Reducer
    optimizer: Optimizer
    optimizer_keys: tuple[str, ...]
    average: Average
    scaler: torch.amp.GradScaler
    step: int = 0

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Iterate over the live tensors that must be equal on all ranks, in the same order on each."""
        tensors_by_file = self._tensors_by_file()
        tensors_by_file[_OPTIMIZER] = self.reducer.replicated_tensors(tensors_by_file[_OPTIMIZER])
        for tensors in tensors_by_file.values():
            yield from tensors.values()

    def full_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors by checkpoint file and name, complete on rank 0. Collective."""
        tensors_by_file = self._tensors_by_file()
        tensors_by_file[_OPTIMIZER] = self.reducer.gather_optimizer_state(
            tensors_by_file[_OPTIMIZER], self.optimizer_keys
        )
        return {file: tensors for file, tensors in tensors_by_file.items() if tensors}

    @torch.no_grad()
    def load_full_state_dict(
        self, saved: StateDicts, scaler: dict[str, Any], step: int, world: World, root: int = 0
    ) -> None:
        """Load the `saved` tensors of rank `root`, and its live ones that `saved` lacks. Collective."""
        self.step = -1  # until the end: if a rank is lost meanwhile, the state is not whole
        if scaler:
            # Below 1 it would take thousands of steps to rise again.
            self.scaler.load_state_dict(scaler | {"scale": max(1.0, scaler["scale"])})
        tensors_by_file = self._tensors_by_file()
        optimizer = tensors_by_file.pop(_OPTIMIZER)
        for file, tensors in tensors_by_file.items():
            for name, tensor in saved.get(file, {}).items():
                # Maxima of other buckets do not fit; the first step then measures new ones.
                if file != _EXCHANGE or (name in tensors and tensors[name].shape == tensor.shape):
                    tensors[name].copy_(tensor)
            world.broadcast_(tensors.values(), root)
        self.reducer.scales.update_after_restore()
        self.reducer.statistics.update_after_restore()
        saved_state = saved.get(_OPTIMIZER, {})
        self.reducer.scatter_optimizer_state(optimizer, self.optimizer_keys, saved_state, root)
        self.step = step

    def _tensors_by_file(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's live tensors by checkpoint file and name; of a sharded optimizer, its shard."""
        return {
            "model": self.model.state_dict(),
            _OPTIMIZER: state_tensors(self.optimizer, self.reducer.local_parameters),
            "ema": self.average.tensors(),
            _EXCHANGE: self.reducer.scales.state_tensors(),
        }


def build_state(
    config: Config, world: World, task: Task, *, num_classes: int, device: torch.device, finetune: str
) -> tuple[TrainState, list[str]]:
    """Return the state before the first step, with the weights of `finetune` if given, and warnings."""
    torch.manual_seed(config.run.seed)
    settings, update, spec = config.model, config.update, OPTIMIZERS.find(config.update.opt)
    network = task.build(config, num_classes)
    model, heads = network.module, network.heads
    warnings: list[str] = []
    if finetune:
        warnings = [f"weights from {finetune}", *network.load_weights(finetune)]
    build.freeze(model, settings.freeze, heads)
    build.start_training(model.to(device))
    prepare_precision(model, config.model.precision, device)
    kind = "sharded" if update.shard_optimizer else "whole"
    reducer = REDUCERS.find(f"{kind} reproducible" if config.data.reproducible else kind)(
        model,
        world,
        config.exchange,
        micro_batches=len(micro_batches(config, world.rank, world.size)),
        heads=heads,
        loss_is_scaled=settings.precision == "fp16",
        of_all_ranks=len(micro_batches(config, 0, 1)) if config.data.reproducible else 0,
    )
    matrices: set[str] = set()  # which the optimizer updates otherwise than other parameters
    if spec.matrix_state_keys:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        matrices = build.hidden_matrices(model, heads) & trained
        if not matrices:
            raise UserError(
                f"{settings.model} has no hidden matrices for --opt {update.opt}. Use --opt adamw."
            )
    groups = parameter_groups(
        dict(model.named_parameters()),
        reducer.local_parameters,
        exempt=build.exempt_from_decay(model),
        weight_decay=update.weight_decay,
        layers=build.layer_numbers(model) if update.layer_decay != 1.0 else {},
        layer_decay=update.layer_decay,
        matrices=matrices,
    )
    constants: dict[str, Any] = {"momentum": update.momentum, "betas": update.opt_betas}
    optimizer = build_optimizer(update.opt, groups, **constants, eps=update.opt_eps)
    if matrices:
        optimizer.ranks = world  # type: ignore[attr-defined]  # which share the work on matrices
    scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        reducer.statistics.skip_on_device()
        if not scaler.is_enabled():
            optimizer.found_inf = reducer.statistics.found_inf  # type: ignore[attr-defined]
    average = Average()
    if update.ema_decay:
        average = Ema(model, reducer.buckets, update.ema_decay, warmup=update.ema_warmup)
    if settings.compile:
        compile_blocks(model)
    return TrainState(model, heads, reducer, optimizer, spec.state_keys, average, scaler), warnings
