"""Our reducer against Horovod's DistributedOptimizer: whole steps of one model, on the same ranks.

Both sides run the same forward, backward and update; they differ in how gradients meet, and only
ours averages the batch-norm statistics as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.pairs import Block, alternate, repeats_for, timed
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.share import share_of_host
from horovod_volo.cluster.world import World
from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import build_model, training_forward

CLASSES = 1000
# Plain gradient descent: an adaptive optimizer would blow a gradient's rounding up to a whole step.
LEARNING_RATE = 1e-3
_COMPARED_STEPS = 3
_TOLERANCES = {"none": 1e-4, "fp16": 1e-2}  # of the way the weights have gone
_MILLISECONDS = 1e3

Compression = Literal["none", "fp16"]
Step = Callable[[], None]


def measure(*, model: str, img_size: int, batch_size: int, pairs: int) -> Result:
    """Compare both on all ranks, gradients as they are and in fp16. Collective: every rank calls this."""
    world = World.join()
    if world.size == 1:
        raise UserError(
            "There is nothing to reduce on one rank. Start several: "
            "horovodrun -np 2 python -m horovod_volo.bench reduce"
        )
    device = share_of_host(world).device
    torch.manual_seed(0)
    network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0).to(device).train()
    random = torch.Generator().manual_seed(world.rank)
    images = torch.randn(batch_size, 3, img_size, img_size, generator=random).to(device)
    classes = torch.randint(CLASSES, (batch_size,), generator=random).to(device)

    figures: list[Figure] = []
    compressions: tuple[Compression, ...] = ("none", "fp16")
    for compression in compressions:
        figures += _compare(network, lambda other: _loss(other, images, classes), world, compression, pairs)
    title = (
        f"step, {img_size} px, {world.size} x {batch_size} images ({world.controller}), against stock Horovod"
    )
    return Result(f"reduce {model}", title, figures)


def _compare(
    network: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    world: World,
    compression: Compression,
    pairs: int,
) -> list[Figure]:
    ours, stock = copy.deepcopy(network), copy.deepcopy(network)
    our_step = _our_step(ours, loss, world, compression)
    stock_step = _stock_step(stock, loss, compression)
    for _ in range(_COMPARED_STEPS):
        our_step()
        stock_step()
    start = _weights(network)
    assert_agree(
        f"weights after {_COMPARED_STEPS} steps, compression {compression}",
        _weights(ours) - start,
        _weights(stock) - start,
        _TOLERANCES[compression],
    )

    device = start.device
    # Every rank takes part in every step, so rank 0 says how many a block has.
    repeats = world.share(repeats_for(our_step, device))
    world.share(repeats_for(stock_step, device))  # warm as ours is; then all ranks begin together
    our_block = _together(timed(our_step, repeats, device), world)
    stock_block = _together(timed(stock_step, repeats, device), world)
    result = alternate(our_block, stock_block, pairs)
    wire = {"none": "fp32", "fp16": "fp16"}[compression]
    return [
        Figure.of(f"{wire} on the wire: step", [_MILLISECONDS * seconds for seconds in result.ours], "ms"),
        Figure.of_estimate(f"{wire} on the wire: faster than stock", result.times_faster, "x"),
    ]


def _our_step(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], world: World, compression: Compression
) -> Step:
    optimizer = SGD(model.parameters(), lr=LEARNING_RATE)
    reducer = Reducer(model, world, Exchange(compression=compression), passes=1)

    def step() -> None:
        loss(model).backward()  # type: ignore[no-untyped-call]
        with reducer.averaged():
            optimizer.step()

    return step


def _stock_step(model: nn.Module, loss: Callable[[nn.Module], Tensor], compression: Compression) -> Step:
    # Horovod may be missing where there is one rank only, and then nobody comes here.
    from horovod_volo.bench.peers_reduce import distributed_optimizer

    optimizer = distributed_optimizer(SGD(model.parameters(), lr=LEARNING_RATE), model, compression)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _loss(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Return a loss that every parameter takes part in."""
    class_logits, token_logits = training_forward(model)(images, lambda tokens: tokens)
    token_classes = classes.repeat_interleave(token_logits.shape[1])
    token_loss = F.cross_entropy(token_logits.flatten(0, 1), token_classes)
    return F.cross_entropy(class_logits, classes) + 0.5 * token_loss


def _weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _together(block: Block, world: World) -> Block:
    """Let a block begin when every rank has come to it."""

    def begin() -> float:
        world.share(None)
        return block()

    return begin
