"""Takes steps of a small network on any number of ranks, with a replicated or a sharded optimizer.

Batch norm is frozen, because its statistics depend on how images are distributed over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.models.build import build_model, hidden_matrices
from horovod_volo.optim.build import OPTIMIZERS, build_optimizer, parameter_groups, set_lr, state_tensors
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.muon import Muon

IMAGES, SIDE, CLASSES = 12, 32, 7


@dataclass(frozen=True)
class Steps:
    """Some steps on the same images; a call takes them on one of the ranks."""

    sharded: bool = False
    micro_batches: int = 1
    compression: str = "none"
    overflow_on: int = -1  # the rank whose gradients overflow
    steps: int = 1
    clip: float = 0.0
    lr: float = 1e-2
    opt: str = "adamw"
    double: bool = False
    train_only: str = ""  # the only parameter that is not frozen
    times: float = 1.0  # factor of the loss

    def __call__(self, world: World) -> dict[str, Any]:
        """Take the steps; return the last gradients, and what they led to."""
        torch.manual_seed(0)
        model = build_model("volo_demo", img_size=SIDE, num_classes=CLASSES, drop_path=0.0).eval()
        images, classes = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(CLASSES, (IMAGES,))
        if self.double:
            model, images = model.double(), images.double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.train_only in ("", name))
        trained_weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        overflows = self.overflow_on >= 0
        settings = Exchange(compression=self.compression, bucket_mib=0.5)
        reducer = (ShardedReducer if self.sharded else Reducer)(
            model, world, settings, micro_batches=self.micro_batches, loss_is_scaled=overflows
        )
        optimizer = self._new_optimizer(world, model, reducer)
        clip = build_clip(
            "norm",
            self.clip,
            reducer.local_parameters,
            flat_gradients=reducer.local_gradients,
            heads=(),
            global_grad_norm=reducer.global_grad_norm,
        )
        scaler = torch.amp.GradScaler("cpu", enabled=overflows, init_scale=1024.0)
        if world.rank == self.overflow_on:
            # With fp16 compression a value that overflows fp16 but not fp32, otherwise infinity.
            factor = 1e8 if self.compression == "fp16" else float("inf")
            trained_weights[0].register_hook(lambda gradient: gradient * factor)
        before = _flat(model)
        gradients = torch.zeros_like(before)
        for _ in range(self.steps):
            for number in range(self.micro_batches):
                own = slice(number * world.size + world.rank, None, world.size * self.micro_batches)
                class_logits, token_logits = model.training_logits(images[own], lambda tokens: tokens)
                targets = classes[own]
                loss = F.cross_entropy(class_logits, targets) + F.cross_entropy(token_logits.mean(1), targets)
                scaler.scale(self.times * loss / self.micro_batches).backward()
            with reducer.synchronized_gradients():
                gradients = torch.cat([parameter.grad.flatten().clone() for parameter in trained_weights])
                scaler.unscale_(optimizer)
                divide(optimizer, clip())
                scaler.step(optimizer)
            scaler.update()
        state, keys = state_tensors(optimizer, reducer.local_parameters), OPTIMIZERS.find(self.opt).state_keys
        saved = {name: tensor.clone() for name, tensor in reducer.gather_optimizer_state(state, keys).items()}
        restored = state_tensors(self._new_optimizer(world, model, reducer), reducer.local_parameters)
        reducer.scatter_optimizer_state(restored, keys, saved if world.rank == 0 else {})
        return {
            "gradients": gradients,
            "moved": float((_flat(model) - before).abs().max()),
            "weights": _flat(model),
            "scale": scaler.get_scale() if overflows else 1.0,
            "buckets": len(reducer.buckets),
            "state_elements": sum(tensor.numel() for tensor in state.values() if tensor.ndim),
            "state": saved,
            "restored": all(torch.equal(restored[name], tensor) for name, tensor in state.items()),
        }

    def _new_optimizer(self, world: World, model: torch.nn.Module, reducer: Reducer) -> torch.optim.Optimizer:
        groups = parameter_groups(
            dict(model.named_parameters()),
            reducer.local_parameters,
            exempt=model.no_weight_decay(),
            weight_decay=0.05,
            layers={},
            layer_decay=1.0,
            matrices=hidden_matrices(model, heads=("head", "aux_head")) if self.opt == "muon" else (),
        )
        optimizer = build_optimizer(self.opt, groups, momentum=0.9)
        if isinstance(optimizer, Muon):
            optimizer.ranks = world
        set_lr(optimizer, self.lr)
        return optimizer


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
