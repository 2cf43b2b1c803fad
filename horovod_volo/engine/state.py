"""What a run is at a step: everything that training changes, and nothing that can be worked out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from horovod_volo.config.schema import Config
from horovod_volo.models.build import build_model
from horovod_volo.models.volo import Volo
from horovod_volo.models.weights import load_weights, read_weights
from horovod_volo.optim.adamw import build_optimizer, state_tensors
from horovod_volo.optim.ema import Average, Ema, NoAverage


@dataclass
class TrainState:
    """The network, its optimizer, its averaged weights, the loss scale, and the number of steps taken."""

    model: Volo
    optimizer: AdamW
    average: Average
    scaler: torch.amp.GradScaler
    step: int = 0

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the live tensors by file and name; files without tensors are left out."""
        files = {
            "model": self.model.state_dict(),
            "optimizer": state_tensors(self.optimizer, self.model),
            "ema": self.average.tensors(),
        }
        return {file: tensors for file, tensors in files.items() if tensors}

    def every_tensor(self) -> Iterator[Tensor]:
        """Go through the live tensors in an order that is the same on every rank."""
        for tensors in self.tensors().values():
            yield from tensors.values()

    @torch.no_grad()
    def restore(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Copy saved tensors of the same names into the live ones."""
        for file, tensors in self.tensors().items():
            for name, tensor in tensors.items():
                tensor.copy_(saved[file][name])


def build_state(
    config: Config, *, num_classes: int, device: torch.device, finetune: str
) -> tuple[TrainState, list[str]]:
    """Build the network and its optimizer as they are before the first step; return remarks with them."""
    torch.manual_seed(config.run.seed)
    model = build_model(
        config.model.model,
        img_size=config.model.img_size,
        num_classes=num_classes,
        drop_path=config.model.drop_path,
    )
    remarks: list[str] = []
    if finetune:
        remarks = [f"weights from {finetune}", *load_weights(model, read_weights(finetune), finetune)]
    model.to(device).train()
    update = config.update
    optimizer = build_optimizer(model, exempt=model.no_weight_decay(), weight_decay=update.weight_decay)
    average = Ema(model, update.ema_decay) if update.ema_decay else NoAverage()
    scaler = torch.amp.GradScaler(device.type, enabled=config.exchange.precision == "fp16")
    return TrainState(model, optimizer, average, scaler), remarks
