"""Takes steps on any number of ranks: of a small network, of Muon, and with batch norm over ranks."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Model
from horovod_volo.config.task_settings import Segmentation
from horovod_volo.config.update_settings import Exchange
from horovod_volo.dense.upernet import UperNet
from horovod_volo.models.build import build_model, hidden_matrices, spec_of
from horovod_volo.models.sync_batch_norm import SyncBatchNorm, connect_norms, synchronize_norms
from horovod_volo.optim import muon
from horovod_volo.optim.build import OPTIMIZERS, build_optimizer, parameter_groups, set_lr, state_tensors
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.muon import Muon

IMAGES, SIDE, CLASSES, NORM_CLASSES, MUON_STEPS = 12, 32, 7, 5, 5


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
        counted = CountedCollectives(world)
        world = replace(world, collectives=counted)
        model = build_model("volo_demo", img_size=SIDE, num_classes=CLASSES, drop_path=0.0).eval()
        model = model.to(memory_format=torch.channels_last)
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
        counted.calls = 0
        saved = {name: tensor.clone() for name, tensor in reducer.gather_optimizer_state(state, keys).items()}
        messages_of_state = counted.calls
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
            "messages_of_state": messages_of_state,
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


class CountedCollectives:
    """The collectives of a world, and how many of them were called."""

    def __init__(self, world: World) -> None:
        self._collectives, self.calls = world.collectives, 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._collectives, name)


@dataclass(frozen=True)
class MuonSteps:
    """Some steps of a network; a call takes them on one of the ranks."""

    network: str
    in_bf16: bool = False  # as on a GPU: the updates are computed and exchanged in bf16

    def __call__(self, world: World) -> dict[str, Any]:
        """Take the steps; return weights and state, and which matrices the rank has."""
        arithmetic = (lambda _: torch.bfloat16) if self.in_bf16 else muon.arithmetic
        with patch.object(muon, "arithmetic", arithmetic):
            return self._stepped(world)

    def _stepped(self, world: World) -> dict[str, Any]:
        torch.manual_seed(0)
        model = self._build()
        parameters = dict(model.named_parameters())
        matrices = hidden_matrices(model, spec_of("volo_demo").heads)
        groups = parameter_groups(
            parameters,
            parameters,
            exempt=(),
            weight_decay=0.05,
            layers={},
            layer_decay=1.0,
            matrices=matrices,
        )
        optimizer = build_optimizer("muon", groups, momentum=0.9)
        counted = CountedCollectives(world)
        optimizer.ranks = replace(world, collectives=counted)
        before = _flat(model)
        random = torch.Generator().manual_seed(1)
        set_lr(optimizer, 1e-2)
        for _ in range(MUON_STEPS):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=random)
            optimizer.step()
        state = state_tensors(optimizer, parameters)
        world.assert_identical([*parameters.values(), *state.values()], "weights or state")
        return {
            "weights": _flat(model),
            "moved": float((_flat(model) - before).abs().max()),
            "state": state,
            "matrices": sorted(matrices),
            "own": len(optimizer._assignment[world.rank]),
            "exchanges": counted.calls,
        }

    def _build(self) -> nn.Module:
        if self.network == "odd shapes":
            linear = (nn.Linear(7, 19), nn.Linear(19, 7), nn.Linear(7, 7), nn.Linear(9, 4))
            return nn.Sequential(nn.Conv2d(5, 7, 3), *linear)
        if self.network == "one matrix":
            return nn.Sequential(nn.Linear(13, 6))
        return build_model("volo_demo", img_size=32, num_classes=7, drop_path=0.0)


@dataclass(frozen=True)
class NormStep:
    """One step; a call takes it on one of the ranks."""

    images: tuple[int, ...]  # of each rank
    norms: str = "heads"
    recomputed: bool = False

    def __call__(self, world: World) -> dict[str, Any]:
        """Take the step; return its numbers, and what was exchanged."""
        torch.manual_seed(0)
        model = Model(model="volo_demo", img_size=SIDE, drop_path=0.0)
        heads = Segmentation(head_width=16, auxiliary_width=16)
        network = Recomputed() if self.recomputed else UperNet(model, heads, NORM_CLASSES)
        for module in network.modules():
            if isinstance(module, nn.Dropout2d):
                module.p = 0.0  # nothing is dropped at random
        if self.norms == "all":
            synchronize_norms(network)
        counted = CountedCollectives(world)
        connected = connect_norms(network, replace(world, collectives=counted))
        network.double().train()
        images = torch.randn(sum(self.images), 3, SIDE, SIDE, dtype=torch.float64)
        labels = torch.randint(NORM_CLASSES, (len(images), SIDE // 4, SIDE // 4))
        first = sum(self.images[: world.rank])
        own = slice(first, first + self.images[world.rank])
        inputs = images[own].requires_grad_()
        logits = network(inputs) if self.recomputed else network.training_logits(inputs, 1)
        labels = [labels[own, :: 8 // each.shape[2], :: 8 // each.shape[2]] for each in logits]
        losses = map(partial(F.cross_entropy, reduction="sum"), logits, labels)
        (sum(losses) / len(images)).backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
        exchanges = counted.calls
        world.collectives.allreduce_async(gradients, "gradients", 1.0)()
        return {
            "logits": logits[0].detach(),
            "inputs": inputs.grad,
            "gradients": gradients,
            "statistics": torch.cat([buffer.flatten().double() for buffer in network.buffers()]),
            "exchanges": exchanges,
            "norms": connected,
        }


class Recomputed(nn.Module):
    """Two norms inside a block whose forward is repeated during backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.block = nn.Sequential(
            SyncBatchNorm(8), nn.ReLU(), nn.Conv2d(8, 8, 1), SyncBatchNorm(8), nn.ReLU()
        )
        self.head = nn.Conv2d(8, NORM_CLASSES, 1)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return logits at a quarter of the height and width."""
        return [self.head(checkpoint(self.block, self.stem(images), use_reentrant=False))]
