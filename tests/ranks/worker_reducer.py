"""Computes the gradients of one batch on any number of ranks; with --shard also with a sharded optimizer.

Batch norm is frozen, because its statistics depend on how images are distributed over ranks.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.sharding import ShardedReducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import build_model
from horovod_volo.optim.build import build_optimizer, optimizer_spec, parameter_groups, set_lr, state_tensors
from horovod_volo.optim.clip import build_clip, divide

IMAGES, SIDE, CLASSES = 8, 32, 7


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path)
    options.add_argument("--micro-batches", type=int, default=1)
    options.add_argument("--compression", default="none")
    options.add_argument("--overflow-on", type=int, default=-1)
    options.add_argument("--steps", type=int, default=1)
    options.add_argument("--shard", action="store_true")
    options.add_argument("--clip", type=float, default=0.0)
    options.add_argument("--lr", type=float, default=1e-2)
    options.add_argument("--opt", default="adamw")
    options.add_argument("--double", action="store_true")
    options.add_argument("--times", type=float, default=1.0, help="factor of the loss")
    asked = options.parse_args()

    torch.set_num_threads(1)
    world = World.connect()
    result = trained(asked, world, Reducer)
    if asked.shard:
        result["sharded"] = trained(asked, world, ShardedReducer)
    torch.save(result, asked.out / f"rank_{world.rank}.pt")


def trained(asked: argparse.Namespace, world: World, kind: type[Reducer]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_model("volo_demo", img_size=SIDE, num_classes=CLASSES, drop_path=0.0).eval()
    images, classes = torch.randn(IMAGES, 3, SIDE, SIDE), torch.randint(CLASSES, (IMAGES,))
    if asked.double:
        model, images = model.double(), images.double()
    overflows = asked.overflow_on >= 0
    settings = Exchange(compression=asked.compression, bucket_mib=0.5)
    reducer = kind(model, world, settings, micro_batches=asked.micro_batches, loss_is_scaled=overflows)
    groups = parameter_groups(
        dict(model.named_parameters()),
        reducer.local_parameters,
        exempt=model.no_weight_decay(),
        weight_decay=0.05,
        layers={},
        layer_decay=1.0,
    )
    optimizer = build_optimizer(asked.opt, groups, momentum=0.9)
    set_lr(optimizer, asked.lr)
    clip = build_clip(
        "norm",
        asked.clip,
        reducer.local_parameters,
        flat_gradients=reducer.local_gradients,
        heads=(),
        global_grad_norm=reducer.global_grad_norm,
    )
    scaler = torch.amp.GradScaler("cpu", enabled=overflows, init_scale=1024.0)
    if world.rank == asked.overflow_on:
        # With fp16 compression a value that overflows fp16 but not fp32; else one that overflows both.
        factor = 1e8 if asked.compression == "fp16" else float("inf")
        model.patch_embed.proj.weight.register_hook(lambda gradient: gradient * factor)
    before = _flat(model)
    gradients = torch.zeros_like(before)
    for _ in range(asked.steps):
        for number in range(asked.micro_batches):
            mine = slice(number * world.size + world.rank, None, world.size * asked.micro_batches)
            class_logits, token_logits = model.training_logits(images[mine], lambda tokens: tokens)
            truth = classes[mine]
            loss = F.cross_entropy(class_logits, truth) + F.cross_entropy(token_logits.mean(1), truth)
            scaler.scale(asked.times * loss / asked.micro_batches).backward()
        with reducer.synchronized_gradients():
            gradients = torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])
            scaler.unscale_(optimizer)
            divide(optimizer, clip())
            scaler.step(optimizer)
        scaler.update()
    state = state_tensors(optimizer, reducer.local_parameters)
    return {
        "gradients": gradients,
        "moved": float((_flat(model) - before).abs().max()),
        "weights": _flat(model),
        "scale": scaler.get_scale() if overflows else 1.0,
        "buckets": len(reducer.buckets),
        "state_elements": sum(tensor.numel() for tensor in state.values() if tensor.ndim),
        "state": reducer.gather_optimizer_state(state, optimizer_spec(asked.opt).state_keys),
    }


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


if __name__ == "__main__":
    main()
