"""What a run is at a step: everything that training changes, and nothing that can be worked out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import trains_aux_head
from horovod_volo.engine.checkpoint.files import Files
from horovod_volo.engine.precision import mend_convolutions
from horovod_volo.models.build import build_model, exempt_from_decay, layer_numbers, our_name
from horovod_volo.models.weights import load_weights, read_weights
from horovod_volo.optim.build import build_optimizer, optimizer_spec, state_tensors
from horovod_volo.optim.ema import Average, Ema, NoAverage
from horovod_volo.optim.groups import parameter_groups


@dataclass
class TrainState:
    """The network, its optimizer, its averaged weights, the loss scale, and the number of steps taken.

    The reducer holds the gradients, and knows which rank keeps which part of the optimizer's state.
    """

    model: nn.Module
    reducer: Reducer
    optimizer: Optimizer
    optimizer_keys: tuple[str, ...]
    average: Average
    scaler: torch.amp.GradScaler
    step: int = 0

    def replicated_tensors(self) -> Iterator[Tensor]:
        """Go through the live tensors that are the same on all ranks, in the same order on each."""
        yield from self.model.state_dict().values()
        yield from self.reducer.replicated_tensors(self._optimizer_state()).values()
        yield from self.average.tensors().values()
        yield from self.reducer.factors.state().values()

    def full_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors by file, the optimizer's on rank 0 alone. Collective: every rank calls this."""
        files = {
            "model": self.model.state_dict(),
            "optimizer": self.reducer.gather_optimizer_state(self._optimizer_state(), self.optimizer_keys),
            "ema": self.average.tensors(),
            "exchange": self.reducer.factors.state(),
        }
        return {file: tensors for file, tensors in files.items() if tensors}

    @torch.no_grad()
    def restore(self, saved: Files, world: World) -> None:
        """Give all ranks what rank 0 has saved, or else what it has. Collective: every rank calls this."""
        own = {
            "model": self.model.state_dict(),
            "ema": self.average.tensors(),
            "exchange": self.reducer.factors.state(),
        }
        for file, tensors in own.items():
            for name, tensor in saved.get(file, {}).items():
                # Buckets of another size have maxima of their own, found in the first step.
                if file != "exchange" or (name in tensors and tensors[name].shape == tensor.shape):
                    tensors[name].copy_(tensor)
            world.broadcast_(tensors.values())
        self.reducer.factors.restored()
        self.reducer.scatter_optimizer_state(
            self._optimizer_state(), self.optimizer_keys, saved.get("optimizer", {})
        )

    def _optimizer_state(self) -> dict[str, Tensor]:
        return state_tensors(self.optimizer, self.reducer.local_parameters)


def build_state(
    config: Config, world: World, *, num_classes: int, device: torch.device, finetune: str
) -> tuple[TrainState, list[str]]:
    """Build the network and its optimizer as they are before the first step; return remarks with them."""
    torch.manual_seed(config.run.seed)
    settings, update = config.model, config.update
    model = build_model(
        settings.model,
        img_size=settings.img_size,
        num_classes=num_classes,
        drop_path=settings.drop_path,
        grad_checkpoint=settings.grad_checkpoint,
        aux_head=trains_aux_head(config),
    )
    remarks: list[str] = []
    if finetune:
        state, which = read_weights(finetune, use_ema=settings.use_ema)
        taken = load_weights(
            model, our_name(settings.model), state, finetune, allowed=settings.allow_mismatch
        )
        remarks = [f"weights from {finetune}", *which, *taken]
    model.to(device).train()
    remarks += mend_convolutions(model, config.model.precision, device)
    reducer = _reducer(config, world, model)
    groups = parameter_groups(
        dict(model.named_parameters()),
        reducer.local_parameters,
        exempt=exempt_from_decay(model),
        weight_decay=update.weight_decay,
        layers=layer_numbers(model) if update.layer_decay != 1.0 else {},
        layer_decay=update.layer_decay,
    )
    optimizer = build_optimizer(update.opt, groups, momentum=update.momentum)
    average = (
        Ema(model, reducer.buckets, update.ema_decay, warmup=update.ema_warmup)
        if update.ema_decay
        else NoAverage()
    )
    scaler = torch.amp.GradScaler(device.type, enabled=config.model.precision == "fp16")
    keys = optimizer_spec(update.opt).state_keys
    return TrainState(model, reducer, optimizer, keys, average, scaler), remarks


def _reducer(config: Config, world: World, model: nn.Module) -> Reducer:
    kind = ShardedReducer if config.update.shard_optimizer else Reducer
    return kind(
        model,
        world,
        config.exchange,
        passes=config.update.accumulation,
        loss_is_scaled=config.model.precision == "fp16",
    )
