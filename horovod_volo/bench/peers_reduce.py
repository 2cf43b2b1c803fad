"""Methods of exchanging gradients that are measured: ours, Horovod's optimizer and torch's DDP.

Each trains a copy of one network with the same forward, backward and update; whatever else a method costs or
saves is its own. The peers are used as their documentation recommends.
"""

import copy
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from horovod_volo.bench.comparison import Action
from horovod_volo.cluster.collectives import WaitForResult
from horovod_volo.cluster.reducer import REDUCERS, Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.models.build import training_forward

STOCK, DDP = "stock Horovod", "torch DDP"
CompressionName = Literal["none", "fp16"]
_DTYPES: dict[CompressionName, str] = {"none": "fp32", "fp16": "fp16"}
_TIMEOUT = timedelta(minutes=2)


class ModelWithLoss(nn.Module):
    """A network whose forward returns a loss that every parameter contributes to."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss of the class token and all tokens, if there are any, of a batch."""
        class_logits, token_logits = training_forward(self.network)(images, lambda tokens: tokens, 0)
        logits = torch.cat([class_logits[:, None], token_logits], dim=1)  # (batch, 1 + tokens, classes)
        return F.cross_entropy(logits.mT, classes[:, None].expand(logits.shape[:2]))


@dataclass
class Work:
    world: World
    network: nn.Module
    heads: list[str]  # modules of `model()` that compute logits
    images: Tensor
    classes: Tensor

    def model(self) -> ModelWithLoss:
        """Return a copy of the network in its initial state, with the loss."""
        return ModelWithLoss(copy.deepcopy(self.network))

    def loss(self, model: Callable[..., Tensor]) -> Tensor:
        return model(self.images, self.classes)


@dataclass
class Method:
    form: str
    compression: CompressionName
    model: ModelWithLoss
    step: Action
    reducer: Reducer | None = None  # ours


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


def our_reducer(
    work: Work, compression: CompressionName, *, overlap: bool = True, kind: str = "whole"
) -> Method:
    """Build a step with our reducer; without overlap it sends the buckets when backward has ended."""
    model, collectives = work.model(), copy.copy(work.world.collectives)
    # All-reduces need names of their own, as Horovod caches responses by name.
    prefix, allreduce = f"{kind}.{compression}.{overlap}", collectives.allreduce_async

    def named(tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
        return allreduce(tensor, f"{prefix}.{name}", scale)

    collectives.allreduce_async = named  # type: ignore[method-assign]
    # Waiting for a second micro-batch, which never comes, the reducer sends no bucket during backward.
    micro_batches, world = 1 if overlap else 2, replace(work.world, collectives=collectives)
    settings, optimizer = Exchange(compression=compression), _sgd(model)
    reducer = REDUCERS.find(kind)(
        model, world, settings, micro_batches=micro_batches, heads=work.heads, of_all_ranks=world.size
    )

    def step() -> None:
        loss = work.loss(model)
        loss.backward()  # type: ignore[no-untyped-call]
        reducer.statistics.add_micro_batch(loss)
        with reducer.synchronized_gradients():
            optimizer.step()

    return Method(_DTYPES[compression], compression, model, step, reducer)


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
    model = work.model()
    parallel = DistributedDataParallel(
        model,
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
    host = "localhost" if world.local_size == world.size else socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True) if world.is_rank_zero else None  # type: ignore[attr-defined]
    address = world.broadcast_object(None if store is None else (host, store.port))
    store = store or dist.TCPStore(*address)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()
