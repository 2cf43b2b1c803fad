"""Methods of exchanging gradients that are measured: ours, Horovod's optimizer and torch's DDP.

Each trains a copy of one network with the same forward, backward and update; whatever else a method costs or
saves is its own. The peers are used as their documentation recommends.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from horovod_volo.bench.comparison import Action
from horovod_volo.cluster.collectives import Collectives, WaitForResult
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.models.build import training_forward

STOCK, DDP = "stock Horovod", "torch DDP"
CompressionName = Literal["none", "fp16"]
_DTYPES: dict[CompressionName, str] = {"none": "fp32", "fp16": "fp16"}
_BUCKET_MIB = 25
_TIMEOUT = timedelta(minutes=2)


class ModelWithLoss(nn.Module):
    """A network whose forward returns a loss that every parameter contributes to."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the loss of a batch: class token and, weighted by half, all tokens, if there are any."""
        class_logits, token_logits = training_forward(self.network)(images, lambda tokens: tokens, 0)
        loss = F.cross_entropy(class_logits, classes)
        if not token_logits.shape[1]:
            return loss
        token_classes = classes.repeat_interleave(token_logits.shape[1])
        return loss + 0.5 * F.cross_entropy(token_logits.flatten(0, 1), token_classes)


@dataclass
class Work:
    """A network, and this rank's own batch."""

    world: World
    network: nn.Module
    heads: list[str]  # modules of `model()` that compute logits
    images: Tensor
    classes: Tensor

    def model(self) -> ModelWithLoss:
        """Return a copy of the network in its initial state, with the loss."""
        return ModelWithLoss(copy.deepcopy(self.network))

    def loss(self, model: Callable[..., Tensor]) -> Tensor:
        """Run forward."""
        return model(self.images, self.classes)


@dataclass
class Method:
    """One method of exchange in one of its forms."""

    form: str
    compression: CompressionName
    model: ModelWithLoss
    step: Action


def _sgd(model: nn.Module) -> SGD:
    """Return plain gradient descent: an adaptive optimizer would enlarge rounding errors to whole steps."""
    return SGD(model.parameters(), lr=1e-3)


def _plain_step(work: Work, model: nn.Module, optimizer: Any) -> Action:
    """Return torch's plain step; a method of exchange lies in the model or the optimizer."""

    def step() -> None:
        optimizer.zero_grad()
        work.loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def no_exchange(work: Work) -> Method:
    """Build a plain step without exchange: every rank trains by itself."""
    model = work.model()
    return Method("none", "none", model, _plain_step(work, model, _sgd(model)))


class ReducerMethod(Method):
    """A step with our reducer; without overlap it sends the buckets when backward has ended."""

    def __init__(self, work: Work, compression: CompressionName, *, overlap: bool) -> None:
        super().__init__(_DTYPES[compression], compression, work.model(), self._step)
        named = _NamedCollectives(work.world.collectives, f"{compression}.{overlap}")
        world = replace(work.world, collectives=cast(Collectives, named))
        # Waiting for a second micro-batch, which never comes, the reducer sends no bucket during backward.
        micro_batches, settings = 1 if overlap else 2, Exchange(compression=compression)
        self.reducer = Reducer(self.model, world, settings, micro_batches=micro_batches, heads=work.heads)
        self._work, self._optimizer = work, _sgd(self.model)

    def _step(self) -> None:
        self._work.loss(self.model).backward()  # type: ignore[no-untyped-call]
        with self.reducer.synchronized_gradients():
            self._optimizer.step()

    def exchange(self) -> None:
        """Run the exchange without forward, backward and update."""
        with self.reducer.synchronized_gradients():
            pass


@dataclass
class _NamedCollectives:
    """Gives all-reduces names of their own, as Horovod caches responses by name."""

    collectives: Collectives
    prefix: str

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
        return self.collectives.allreduce_async(tensor, f"{self.prefix}.{name}", scale)


def _stock_horovod(work: Work, compression: CompressionName, groups: int) -> Method:
    # Imported here: Horovod may be missing where there is one rank only.
    import horovod.torch as hvd

    model = work.model()
    optimizer = hvd.DistributedOptimizer(
        _sgd(model),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none,
        groups=groups or None,  # 0: no explicit groups
    )
    form = f"{_DTYPES[compression]}, {groups or 'no'} groups"
    return Method(form, compression, model, _plain_step(work, model, optimizer))


def _torch_ddp(work: Work, compression: CompressionName) -> Method:
    """Build a step with torch's DistributedDataParallel; inside `torch_ranks`."""
    model = work.model()
    parallel = DistributedDataParallel(
        model,
        bucket_cap_mb=_BUCKET_MIB,
        gradient_as_bucket_view=True,
        static_graph=True,
        forward_sync_buffers=False,  # ours are averaged; here nothing at all is sent for them
    )
    if compression == "fp16":
        parallel.register_comm_hook(None, fp16_compress_hook)
    return Method(_DTYPES[compression], compression, model, _plain_step(work, parallel, _sgd(model)))


# The forms of each peer, of which the fastest is measured.
FORMS: dict[str, list[Callable[[Work], Method]]] = {
    STOCK: [
        partial(_stock_horovod, compression=kind, groups=groups) for kind in _DTYPES for groups in (0, 4)
    ],
    DDP: [partial(_torch_ddp, compression=kind) for kind in _DTYPES],
}


@contextmanager
def torch_ranks(world: World, device: torch.device) -> Iterator[None]:
    """Initialise torch.distributed with the same ranks. Collective: every rank calls this."""
    one_host = world.local_size == world.size
    host = world.broadcast_object("localhost" if one_host else socket.gethostname())
    with socket.socket() as free:
        free.bind(("", 0))
        port = world.broadcast_object(free.getsockname()[1])
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=world.rank,
        world_size=world.size,
        timeout=_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
