"""The peers of our reducer, as their documentation says to use them: Horovod's optimizer and torch's DDP."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from horovod_volo.cluster.world import World

Compression = Literal["none", "fp16"]
_BUCKET_MIB = 25
_TIMEOUT = timedelta(minutes=2)


def distributed_optimizer(
    optimizer: Optimizer, model: nn.Module, compression: Compression, groups: int
) -> Any:
    """Wrap an optimizer: its step waits for gradients averaged over ranks. Horovod must be running."""
    # Horovod may be missing where there is one rank only, and then nobody comes here.
    import horovod.torch as hvd

    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if compression == "fp16" else hvd.Compression.none,
        num_groups=groups,
    )


def data_parallel(model: nn.Module, compression: Compression) -> Callable[..., Tensor]:
    """Wrap a network: backward averages its gradients over ranks. The ranks of `torch_ranks` call this."""
    parallel = DistributedDataParallel(
        model,
        bucket_cap_mb=_BUCKET_MIB,
        gradient_as_bucket_view=True,
        static_graph=True,
        forward_sync_buffers=False,  # ours are averaged; here nothing at all is sent for them
    )
    if compression == "fp16":
        parallel.register_comm_hook(None, fp16_compress_hook)
    return parallel


@contextmanager
def torch_ranks(world: World, device: torch.device) -> Iterator[None]:
    """Let torch know the ranks too, inside. Collective: every rank calls this."""
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
